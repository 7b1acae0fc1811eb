"""Transposed convolutions as ordinary ones, and the layouts and products that convolutions may be given.

A transposed convolution with stride s writes ``x[i] w[k]`` to ``u = i s + k d``. The outputs with one
remainder of u by s meet only every s-th tap, so each remainder, a *phase*, is an ordinary convolution
with the flipped taps of its own, and the phases interleave. Two ways: one convolution a phase, with no
work wasted, and for undilated kernels one convolution for all, whose output channels are the phases
(sub-pixel convolution, Shi et al., CVPR 2016), with kernels padded to a common size.

What pays depends on the library's kernels, so every rule is measured where it is used. Sizes that are
symbols stay so: all paddings follow from numbers alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchstone.rewrite.families.arguments import (
    CONV,
    CONV_TRANSPOSE,
    conv_shapes,
    each,
    floating,
    is_one,
    known,
    made,
)
from torchstone.rewrite.pattern import V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES"]

_CONV: dict[int, Callable[..., Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
_MOST_PHASES = 27
"""More convolutions in place of one were never worth while: three remainders in each of three dims."""


@dataclass(frozen=True)
class _Taps:
    """One dim of one phase: which taps it meets, and what of the input."""

    first: int
    """The first tap."""
    step: int
    """From one of its taps to the next."""
    count: int
    """How many; may be none."""
    dilation: int
    """Of the ordinary convolution."""
    low: int
    """Zeros before the input; less than none where it is cropped."""
    high: int
    """Zeros after it."""


@dataclass(frozen=True)
class _Geometry:
    """A transposed convolution's numbers, one for each dim."""

    kernel: list[int]
    """Taps."""
    stride: list[int]
    """From one input's first output to the next one's."""
    padding: list[int]
    """Outputs that are cropped at each end."""
    extra: list[int]
    """Outputs that are added at the end."""
    dilation: list[int]
    """From one tap's output to the next one's."""

    @classmethod
    def of(cls, call: SimpleNamespace, extra: Any) -> _Geometry | None:
        """Of a call with a batch; None for one without, or whose numbers are not known."""
        many, kernel = call.weight.dim() - 2, list(call.weight.shape[2:])
        if call.x.dim() != many + 2 or not floating(call.x, call.weight) or not known(kernel):
            return None
        rest = [each(v, many) for v in (call.stride, call.padding, extra, call.dilation)]
        found = [r for r in rest if r is not None]
        return cls(kernel, *found) if len(found) == len(rest) else None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Of q: the first that is wanted, and how many are, beyond as many as there are inputs."""
        rows = zip(self.kernel, self.stride, self.padding, self.extra, self.dilation, strict=True)
        return [(p // s, ((k - 1) * d - p + e) // s) for k, s, p, e, d in rows]

    def lengths(self, inputs: Sequence[Any]) -> list[Any]:
        """Of the output."""
        rows = zip(
            inputs, self.kernel, self.stride, self.padding, self.extra, self.dilation, strict=True
        )
        return [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, e, d in rows]


def _taps(kernel: int, stride: int, dilation: int, rest: tuple[int, int, int]) -> _Taps:
    """Taps of phase ``r``, for outputs ``u = s q + r`` with q from ``begin`` to ``inputs + after``."""
    phase, begin, after = rest
    common = math.gcd(stride, dilation)
    step = stride // common
    first = next((k for k in range(min(step, kernel)) if (k * dilation - phase) % stride == 0), kernel)
    count = len(range(first, kernel, step))
    offset = (first * dilation - phase) // stride  # of the input that the first tap meets, behind q
    reach = offset + (count - 1) * dilation // common
    return _Taps(first, step, count, dilation // common, reach - begin, after - offset)


def _flipped(weight: Any, groups: int) -> Any:
    """A kernel (in, out / groups, *kernel) as (out, in / groups, *kernel), flipped."""
    spatial = tuple(range(2, weight.dim()))
    grouped = torch.unflatten(weight, 0, [groups, -1]).transpose(1, 2)
    return grouped.flatten(0, 1).flip(spatial)


def _padded_conv(x: Any, weight: Any, bias: Any, pads: Sequence[_Taps], groups: int) -> Any:
    """A stride-1 convolution with paddings that may differ at both ends, or crop."""
    both = [p.low if p.low == p.high and p.low >= 0 else 0 for p in pads]
    rest = [(p.low - b, p.high - b) for p, b in zip(pads, both, strict=True)]
    sizes = x.shape[2:]
    if any(
        not statically_known_true(n + min(a, 0) + min(b, 0) >= 1)
        for n, (a, b) in zip(sizes, rest, strict=True)
    ):
        return NotImplemented
    if any(a or b for a, b in rest):
        x = F.pad(x, [n for pair in reversed(rest) for n in pair])
    dilation = [p.dilation for p in pads]
    return _CONV[len(pads)](x, weight, bias, 1, both, dilation, groups)


def flipped_conv(call: SimpleNamespace) -> Any:
    """Sum over k of x[o + p - k d] w[k]: a convolution, w flipped, d (K - 1) - p zeros at each end."""
    form = _Geometry.of(call, call.output_padding)
    if form is None or set(form.stride) != {1}:
        return NotImplemented
    rows = zip(form.kernel, form.padding, form.extra, form.dilation, strict=True)
    pads = [_Taps(0, 1, k, d, d * (k - 1) - p, d * (k - 1) - p + extra) for k, p, extra, d in rows]
    return _padded_conv(call.x, _flipped(call.weight, call.groups), call.bias, pads, call.groups)


def phase_convs(call: SimpleNamespace) -> Any:
    """Y[s q + r] = sum over k, k d = r mod s, of x[q - (k d - r) / s] w[k]: a convolution for each r."""
    form = _Geometry.of(call, call.output_padding)
    if form is None or set(form.stride) == {1} or math.prod(form.stride) > _MOST_PHASES:
        return NotImplemented
    flipped, parts = _flipped(call.weight, call.groups), []
    for phase in itertools.product(*map(range, form.stride)):
        rows = zip(form.kernel, form.stride, form.dilation, phase, form.spans, strict=True)
        taps = [_taps(k, s, d, (r, *span)) for k, s, d, r, span in rows]
        if any(t.count == 0 for t in taps):
            return NotImplemented  # a stride beyond the kernel leaves holes
        part = _padded_conv(call.x, _every(flipped, taps), call.bias, taps, call.groups)
        if part is NotImplemented:
            return NotImplemented
        parts.append(part)
    stacked = torch.unflatten(torch.stack(parts, 2), 2, form.stride)
    return _interleaved(stacked, form, call.x.shape[2:])


def _every(flipped: Any, taps: Sequence[_Taps]) -> Any:
    """A phase's taps of the flipped kernel."""
    for dim, tap in enumerate(taps, 2):
        size = flipped.shape[dim]
        last = size - 1 - tap.first  # where the phase's first tap lies after the flip
        start = last - (tap.count - 1) * tap.step
        flipped = flipped[(slice(None),) * dim + (slice(start, last + 1, tap.step),)]
    return flipped


def _interleaved(phases: Any, geometry: _Geometry, inputs: Sequence[Any]) -> Any:
    """(batch, channels, *stride, *q) to (batch, channels, *output), cropped."""
    dims = len(geometry.stride)
    order = [0, 1, *(i for d in range(dims) for i in (2 + dims + d, 2 + d))]
    out = phases.permute(order)
    for dim in range(dims):
        out = out.flatten(2 + dim, 3 + dim)
    rows = zip(geometry.stride, geometry.padding, geometry.lengths(inputs), strict=True)
    for dim, (stride, padding, length) in enumerate(rows, 2):
        out = out.narrow(dim, padding % stride, length)
    return out


def subpixel_conv(call: SimpleNamespace) -> Any:
    """Y[s q + r] = sum over j of x[q - j] w[s j + r]: one convolution, its channels (channel, r)."""
    form = _Geometry.of(call, call.output_padding)
    if form is None or set(form.stride) == {1} or set(form.dilation) != {1}:
        return NotImplemented
    counts = [-(-k // s) for k, s in zip(form.kernel, form.stride, strict=True)]
    rows = zip(form.stride, counts, form.spans, strict=True)
    pads = [_Taps(0, s, j, 1, j - 1 - begin, after) for s, j, (begin, after) in rows]
    weight = _phase_channels(call.weight, form, counts, call.groups)
    out = _padded_conv(call.x, weight, None, pads, call.groups)
    if out is NotImplemented:
        return NotImplemented
    if call.bias is not None:
        out = out + call.bias.repeat_interleave(math.prod(form.stride)).view(-1, *[1] * len(counts))
    return _interleaved(torch.unflatten(out, 1, [-1, *form.stride]), form, call.x.shape[2:])


def _phase_channels(weight: Any, form: _Geometry, counts: Sequence[int], groups: int) -> Any:
    """A kernel (in, out / groups, *kernel) as (out · phases, in / groups, *counts) and flipped."""
    dims = len(counts)
    missing = [j * s - k for j, s, k in zip(counts, form.stride, form.kernel, strict=True)]
    full = F.pad(weight, [n for m in reversed(missing) for n in (0, m)])
    for dim in reversed(range(dims)):
        full = torch.unflatten(full, 2 + dim, [counts[dim], form.stride[dim]])
    full = torch.unflatten(full, 0, [groups, -1])  # group, in, out, then (tap, phase) for each dim
    taps, phases = [3 + 2 * d for d in range(dims)], [4 + 2 * d for d in range(dims)]
    full = full.permute(0, 2, *phases, 1, *taps).flatten(0, 1 + dims)
    return full.flip(tuple(range(2, 2 + dims)))


def _laid_out(call: SimpleNamespace) -> tuple[Any, Any] | None:
    """Input and kernel with their channels last; None where they are so already, or nothing tells."""
    if call.x.dim() != call.weight.dim() or is_one(call.x.shape[1]):
        return None
    last = _LAST[call.weight.dim() - 2]
    if statically_known_true(call.x.stride()[1] == 1) and call.weight.is_contiguous(memory_format=last):
        return None
    return call.x.contiguous(memory_format=last), call.weight.clone(memory_format=last)


def channels_last_conv(call: SimpleNamespace) -> Any:
    """A convolution is the same in any layout: input and kernel with their channels last."""
    given = _laid_out(call)
    if given is None:
        return NotImplemented
    conv = _CONV[call.weight.dim() - 2]
    return conv(*given, call.bias, call.stride, call.padding, call.dilation, call.groups)


def channels_last_transposed(call: SimpleNamespace) -> Any:
    """A transposed convolution is the same in any layout: input and kernel with their channels last."""
    given = _laid_out(call)
    if given is None:
        return NotImplemented
    conv = F.conv_transpose2d if call.weight.dim() == 4 else F.conv_transpose3d
    rest = (call.output_padding, call.groups, call.dilation)
    return conv(*given, call.bias, call.stride, call.padding, *rest)


def pointwise_conv(call: SimpleNamespace) -> Any:
    """A kernel of one tap: Y[n, :, t] = W x[n, :, s t] + b, a matrix product."""
    form = _Geometry.of(call, [0])
    if form is None or set(form.kernel) != {1} or any(form.padding) or call.groups != 1:
        return NotImplemented
    x = call.x
    for dim, step in enumerate(form.stride, 2):
        if step != 1:
            x = x[(slice(None),) * dim + (slice(None, None, step),)]
    out = torch.matmul(call.weight.flatten(1), x.flatten(2))
    if call.bias is not None:
        out = out + call.bias[:, None]
    return torch.unflatten(out, 2, x.shape[2:])


def _of_transposed(function: Callable[[SimpleNamespace], Any], many: int, *strides: list[int]) -> Rule:
    names = ("x", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    domain: dict[str, Any] = {
        "stride": strides,
        "padding": [[0] * many, [1, 0, 2][:many], [2, 1, 1][:many]],
        "output_padding": [[0] * many, [0] * many, [1, 0, 1][:many]],
        "groups": "g",
        "dilation": [[1] * many, [1] * many, [2, 3, 1][:many]],
    }
    return made(
        f"{function.__name__}_{many}d",
        op(CONV_TRANSPOSE[many], *map(V, names)),
        family="transposed",
        shapes=conv_shapes(many, transposed=True),
        constants=domain,
        measured=True,
    )(function)


def _of_conv(function: Callable[[SimpleNamespace], Any], many: int, shapes: dict[str, str]) -> Rule:
    names = ("x", "weight", "bias", "stride", "padding", "dilation", "groups")
    domain: dict[str, Any] = {
        "stride": [[1] * many, [2, 1, 3][:many]],
        "padding": [[0] * many, [1, 2, 0][:many]],
        "dilation": [[1] * many, [2, 1, 1][:many]],
        "groups": "g",
    }
    return made(
        f"{function.__name__}_{many}d",
        op(CONV[many], *map(V, names)),
        family="transposed",
        shapes=shapes,
        constants=domain,
        measured=True,
    )(function)


def _of_one_tap(many: int) -> dict[str, str]:
    shapes = conv_shapes(many)
    ones = " ".join("1" * many)
    return {**shapes, "x": shapes["x"].replace("g<4", "g<2"), "weight": f"g*o<4 i {ones}"}


_STRIDES: dict[int, list[list[int]]] = {
    1: [[2], [3]],
    2: [[2, 2], [3, 2], [1, 2]],
    3: [[2, 1, 2], [2, 3, 2]],
}

RULES: tuple[Rule, ...] = (
    *(_of_transposed(flipped_conv, many, [1] * many) for many in (1, 2, 3)),
    *(_of_transposed(subpixel_conv, many, *_STRIDES[many]) for many in (1, 2, 3)),
    *(_of_transposed(phase_convs, many, *_STRIDES[many]) for many in (1, 2, 3)),
    *(_of_transposed(channels_last_transposed, many, [1] * many, *_STRIDES[many]) for many in (2, 3)),
    *(_of_conv(pointwise_conv, many, _of_one_tap(many)) for many in (1, 2, 3)),
    *(_of_conv(channels_last_conv, many, conv_shapes(many)) for many in (2, 3)),
)
"""Rules on transposed convolutions, and on convolutions whose layout may be chosen."""
