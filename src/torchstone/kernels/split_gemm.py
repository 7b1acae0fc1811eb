"""Operators ``split_parts``, ``split_linear``, ``split_matmul``: float32 on bfloat16 tensor cores.

What they compute, how exactly, and for which numbers: :mod:`torchstone.kernels.split_gemm_parts`.
Weights are split once, ahead of time; what depends on inputs is split by the kernel that multiplies it.
On a CPU without Triton's interpreter PyTorch forms such sums too, and their error can be seen there.

The split is inside operators, where no compiler looks: Inductor folds ``x.bfloat16().float()`` to
``x``, and then nothing is left for the second part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstone.errors import InputError
from torchstone.kernels import base
from torchstone.kernels.base import Kernel, power
from torchstone.kernels.split_gemm_parts import EPILOGUES, multiplied, parts_of, recombined
from torchstone.recipe import Numerics
from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, Only, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable

__all__ = [
    "LINEAR",
    "MATMUL",
    "How",
    "SplitKernel",
    "check",
    "config_of",
    "layer_wrong",
    "linear_reference",
    "numerics",
    "operations",
    "product",
    "registered",
    "space_of",
    "split_parts",
]

_LIBRARY_K = 8192
"""Longest sums for the vendor's kernels, which add towards zero inside the tensor cores: at this length
that should cost 1e-5, and it grows with the length."""
_BIG = 2**20
"""Elements of a product that keep the vendor's kernels busy."""
_SPLIT_K = 512
"""Products of a sum below which it is not worth writing it down to be summed later."""
_BUDGET = 2.0**-15
"""Relative error that two parts are allowed where they are tuned: a sixth of it is usual."""
_door: Any = torch
"""Parts of torch that have no types."""


class How(NamedTuple):
    """How to form a product."""

    config: Config | None
    """Of the device code; None has PyTorch do it."""
    parts: int
    """2 or 3."""
    epilogue: str = "none"
    """A name of :data:`~torchstone.kernels.split_gemm_parts.EPILOGUES`."""


def numerics(parts: int) -> Numerics:
    """What a product of 2 or of 3 parts promises."""
    return Numerics.REASSOCIATES if parts == 3 else Numerics.LOSSY


def _split_parts(w: Tensor, parts: int) -> Tensor:
    if base.launches(w.device.type):
        from torchstone.kernels.device import split_gemm as device

        return device.split(w, parts)
    return torch.stack(parts_of(w, parts))


def product(a: Tensor, b: Tensor, bias: Tensor | None, how: How, y: Tensor | None = None) -> Tensor:
    """``epilogue(a @ b.mT + bias)``, any strides.

    :param a: float32 (batch, m, k).
    :param b: float32 (batch, n, k), or bfloat16 parts (parts, n, k) of one for all batches.
    :param bias: float32 (n,).
    :param y: what to write it to, float32 (batch, m, n); a new, contiguous tensor if None.
    """
    config, parts, epilogue = how
    if config is not None and a.numel() and b.numel():
        from torchstone.kernels.device import split_gemm as device

        y = a.new_empty((a.shape[0], a.shape[1], b.shape[1])) if y is None else y
        bias = bias if bias is None else bias.contiguous()
        device.multiply(a, b, bias, y, device.Task(parts=parts, epilogue=epilogue, config=config))
        return y
    if a.numel() and b.numel():
        found = multiplied(a, b, bias, parts, epilogue)
    else:  # an empty sum is 0
        found = a.new_zeros((a.shape[0], a.shape[1], b.shape[1]))
        found = EPILOGUES[epilogue](found if bias is None else found + bias)
    return found if y is None else y.copy_(found)


@dataclass(frozen=True, kw_only=True)
class SplitKernel(Kernel):
    """A kernel whose inputs cannot be just any numbers, and whose class depends on the parts."""

    def tunable(self, *args: Any) -> Tunable:
        """See :meth:`~torchstone.kernels.base.Kernel.tunable`."""
        made = super().tunable(*args)
        parts = next(a for a in args if isinstance(a, int))
        budget = 0.0 if parts == 3 else _BUDGET
        inputs = _Inputs(made.inputs)
        return replace(made, inputs=inputs, numerics=numerics(parts), max_relative_error=budget)


@dataclass(frozen=True)
class _Inputs:
    """Random inputs whose bfloat16 tensors are parts of something."""

    plain: Callable[..., tuple[Any, ...]]

    def __call__(self, seed: int, **sizes: int) -> tuple[Any, ...]:
        found = self.plain(seed, **sizes)
        return tuple(
            _split_parts(t[0].float(), len(t)) if t.dtype is torch.bfloat16 else t for t in found
        )


def _wrong(x: Tensor, parts: int, least: int = 2) -> str | None:
    """What no path can take: misuse."""
    if x.dtype is not torch.float32:
        return f"the input is {x.dtype}, not float32"
    if not least <= parts <= 3:
        return f"{parts} parts, not {least} to 3"
    return None


def check(name: str, why: str | None) -> None:
    """Raise what is wrong, if anything is."""
    if why is not None:
        raise InputError(
            why, where=f"torchstone.{name}", hint="ask the kernel's `refuses` before it is used"
        )


# ---- split_linear


def layer_wrong(
    x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str
) -> str | None:
    """What speaks against a layer whatever computes it: misuse."""
    why = _wrong(x, parts)
    if why is not None:
        return why
    if w_parts.dtype is not torch.bfloat16 or w_parts.dim() != 3 or w_parts.shape[0] != parts:
        return (
            f"the weights are {w_parts.dtype} {tuple(w_parts.shape)}, not bfloat16 parts ({parts}, n, k)"
        )
    if x.dim() < 1:
        return "the input has no dimension"
    if bias is not None and (bias.dtype is not torch.float32 or bias.dim() != 1):
        return f"the bias is {bias.dtype} with {bias.dim()} dimensions, not float32 with one"
    if epilogue not in EPILOGUES:
        return f"{epilogue!r} is none of {', '.join(EPILOGUES)}"
    return None


def linear_reference(
    x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str
) -> Tensor:
    """The layer in the dtype of ``x``, with the weights that the parts stand for."""
    y = F.linear(x, recombined(w_parts, x.dtype), None if bias is None else bias.to(x.dtype))
    return EPILOGUES[epilogue](y)


def _linear_refuses(
    x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str
) -> str | None:
    return layer_wrong(x, w_parts, bias, parts, epilogue) or base.unfit(x, w_parts, bias)


def _linear_sizes(
    x: Tensor, w_parts: Tensor, _bias: Tensor | None, parts: int, *_: Any
) -> dict[str, int]:
    rows = math.prod(x.shape[:-1])
    return {"batch": 1, "m": rows, "n": w_parts.shape[1], "k": x.shape[-1], "parts": parts}


def _linear_work(
    x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, *_: Any
) -> tuple[float, float]:
    found = _linear_sizes(x, w_parts, bias, parts)
    return base.bytes_of(x, w_parts, bias) + 4.0 * found["m"] * found["n"], operations(found)


def _linear_space(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, *_: Any) -> Space:
    return space_of(_linear_sizes(x, w_parts, bias, parts), x.device, split_b=False)


def _linear(config: Config | None, x: Tensor, w_parts: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    parts, epilogue = how
    flat = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
    y = product(flat, w_parts, bias, How(config, parts, epilogue))
    return y.reshape(*x.shape[:-1], w_parts.shape[1])


def _linear_follow(shape: Sequence[int], _x: Any, w_parts: Any, bias: Any, *_: Any) -> tuple[Any, ...]:
    parts, n, _k = w_parts.shape
    return ((parts, n, shape[-1]), (n,)) if bias is not None else ((parts, n, shape[-1]),)


def _linear_fake(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> Tensor:
    check("split_linear", layer_wrong(x, w_parts, bias, parts, epilogue))
    _door._check(x.shape[-1] == w_parts.shape[2], lambda: "the input's last size is not the weights'")
    return x.new_empty((*x.shape[:-1], w_parts.shape[1]))


def _linear_run(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> Tensor:
    check("split_linear", layer_wrong(x, w_parts, bias, parts, epilogue))
    if x.shape[-1] != w_parts.shape[2] or (bias is not None and len(bias) != w_parts.shape[1]):
        check("split_linear", f"sizes {tuple(x.shape)} and {tuple(w_parts.shape)} do not go together")
    args = (x, w_parts, bias, parts, epilogue)
    return _linear(config_of(LINEAR, args), *args)


# ---- split_matmul


def _matmul_wrong(a: Tensor, b: Tensor, parts: int) -> str | None:
    why = _wrong(a, parts) or _wrong(b, parts)
    if why is None and (a.dim() < 2 or b.dim() < 2):
        return "a factor has fewer than two dimensions"
    return why


def matmul_reference(a: Tensor, b: Tensor, parts: int) -> Tensor:
    """``torch.matmul``."""
    return torch.matmul(a, b)


def _matmul_refuses(a: Tensor, b: Tensor, parts: int) -> str | None:
    return _matmul_wrong(a, b, parts) or base.unfit(a, b)


def _matmul_sizes(a: Tensor, b: Tensor, parts: int) -> dict[str, int]:
    if b.dim() == 2:
        return {
            "batch": 1,
            "m": math.prod(a.shape[:-1]),
            "n": b.shape[-1],
            "k": a.shape[-1],
            "parts": parts,
        }
    batch = math.prod(_door.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    return {"batch": batch, "m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1], "parts": parts}


def _matmul_work(a: Tensor, b: Tensor, parts: int) -> tuple[float, float]:
    found = _matmul_sizes(a, b, parts)
    return base.bytes_of(a, b) + 4.0 * found["batch"] * found["m"] * found["n"], operations(found)


def _matmul_space(a: Tensor, b: Tensor, parts: int) -> Space:
    return space_of(_matmul_sizes(a, b, parts), a.device, split_b=True)


def _matmul(config: Config | None, a: Tensor, b: Tensor, parts: int) -> Tensor:
    (m, k), n = a.shape[-2:], b.shape[-1]
    outer = _door.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    found = _matmul_sizes(a, b, parts)
    if b.dim() == 2:  # the batch's rows are rows of one product
        a_flat, b_flat = a.reshape(1, found["m"], k), b[None]
    else:
        a_flat = a.expand(*outer, m, k).reshape(found["batch"], m, k)
        b_flat = b.expand(*outer, k, n).reshape(found["batch"], k, n)
    return product(a_flat, b_flat.mT, None, How(config, parts)).reshape(*outer, m, n)


def _matmul_follow(shape: Sequence[int], _a: Any, b: Any, *_: Any) -> tuple[Any, ...]:
    return (
        (*shape[:-2][-(len(b.shape) - 2) :], shape[-1], b.shape[-1])
        if len(b.shape) > 2
        else (shape[-1], b.shape[-1]),
    )


def _matmul_fake(a: Tensor, b: Tensor, parts: int) -> Tensor:
    check("split_matmul", _matmul_wrong(a, b, parts))
    _door._check(a.shape[-1] == b.shape[-2], lambda: "the inner sizes differ")
    outer = _door.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*outer, a.shape[-2], b.shape[-1]))


def _matmul_run(a: Tensor, b: Tensor, parts: int) -> Tensor:
    check("split_matmul", _matmul_wrong(a, b, parts))
    if a.shape[-1] != b.shape[-2]:
        check("split_matmul", f"sizes {tuple(a.shape)} and {tuple(b.shape)} do not go together")
    return _matmul(config_of(MATMUL, (a, b, parts)), a, b, parts)


# ---- split_parts


def _parts_run(w: Tensor, parts: int) -> Tensor:
    check("split_parts", _wrong(w, parts, least=1))
    return _split_parts(w, parts)


def _parts_fake(w: Tensor, parts: int) -> Tensor:
    check("split_parts", _wrong(w, parts, least=1))
    return w.new_empty((parts, *w.shape), dtype=torch.bfloat16)


# ---- what they share


def config_of(kernel: Kernel, args: tuple[Any, ...]) -> Config | None:
    """The config to launch with; None where Triton does not run, or not on these arguments."""
    from torchstone.kernels import choice

    if not base.launches(args[0].device.type) or kernel.refuses(*args) is not None:
        return None
    return choice.config(kernel, args)


def operations(found: dict[str, int]) -> float:
    """Of the bfloat16 tensor cores: 3 or 6 products for each of the float32 product."""
    products = {2: 3, 3: 6}[found["parts"]]
    return 2.0 * products * found["batch"] * found["m"] * found["n"] * found["k"]


def space_of(found: dict[str, int], device: torch.device, *, split_b: bool) -> Space:
    """The configs for sizes ``batch``, ``m``, ``n``, ``k`` and ``parts``.

    The default takes the vendor's kernels for large products of two parts: on one H200 three of them in
    one took 0.625 ms at (1024, 8192, 8192), 4.2 times as fast as float32; ``fused`` is what they may
    not do.
    """
    parts, chosen = found["parts"], _heuristic(found, base.multiprocessors(device), split_b=split_b)

    def fits(config: Config) -> str | None:
        if config["method"] == "library":
            return None
        bm, bn, bk = (_number(config, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        stage = 4 * bm * bk + (4 if split_b else 2 * parts) * bn * bk
        shared = stage * _number(config, "stages") + (2 * parts * bn * bk if split_b else 0)
        each = bm * bn / (32 * _number(config, "warps"))
        splits = _number(config, "splits")
        if splits > max(1, found["k"] // _SPLIT_K):
            return f"{splits} sums of fewer than {_SPLIT_K} products each"
        if shared > base.SHARED_BYTES:
            return f"{shared} bytes of shared memory, of {base.SHARED_BYTES}"
        if not 8 <= each <= 64:  # twice: the total, and the sum of one step
            return f"{each:.0f} elements of each sum a thread: fewer starve it, more spill"
        return None

    fused = ("method", ("fused",))
    methods = ("fused", "library") if _library_may(found) else ("fused",)
    return Space(
        {
            "method": Choice(methods, default=chosen["method"]),
            "BLOCK_M": Only(PowerOfTwo(16, 128, default=int(chosen["BLOCK_M"])), *fused),
            "BLOCK_N": Only(PowerOfTwo(32, 256, default=int(chosen["BLOCK_N"])), *fused),
            "BLOCK_K": Only(PowerOfTwo(32, 128, default=int(chosen["BLOCK_K"])), *fused),
            "splits": Only(PowerOfTwo(1, 64, default=int(chosen["splits"])), *fused),
            "warps": Only(PowerOfTwo(4, 8, default=int(chosen["warps"])), *fused),
            "stages": Only(Integer(2, 4, default=int(chosen["stages"])), *fused),
            "group": Only(Choice((1, 4, 8, 16), default=8), *fused),
        },
        valid=(fits,),
        derived={"tile": lambda c: _number(c, "BLOCK_M") * _number(c, "BLOCK_N")},
    )


def _number(config: Config, name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value


def _library_may(found: dict[str, int]) -> bool:
    """Whether the vendor's kernels keep the error of two parts; that of three they never do."""
    return found["parts"] == 2 and found["k"] <= _LIBRARY_K


def _heuristic(found: dict[str, int], processors: int, *, split_b: bool) -> dict[str, Any]:
    """One choice by shape: tiles no taller or wider than the product, narrower where there are too few
    to go round, and then several for one sum; the vendor's kernels where it is large."""
    batch, m, n, k = (found[name] for name in ("batch", "m", "n", "k"))
    bm, bn = min(128, max(16, power(m))), min(128, max(32, power(n)))
    if batch * -(-m // bm) * -(-n // bn) < processors:
        bn = min(bn, 64)
    tiles = max(1, batch * -(-m // bm) * -(-n // bn))
    splits = power(max(1, min(64, processors // tiles, k // _SPLIT_K)) + 1) // 2  # a power of two
    warps = 8 if bm * bn >= 128 * 64 else 4  # with 4 the two sums and the parts would not fit
    large = batch * m * n >= _BIG and k >= 1024
    return {
        "method": "library" if large and _library_may(found) else "fused",
        "BLOCK_M": bm,
        "BLOCK_N": max(bn, 8 * 32 * warps // bm),
        "BLOCK_K": 32 if split_b else 64,
        "splits": splits,
        "warps": warps,
        "stages": 2 if found["parts"] == 3 and not split_b else 3,
    }


def registered(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator of a schema, on CPU and CUDA."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"torchstone::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.torchstone, name)


_LIBRARY: Any = _door.library.Library("torchstone", "FRAGMENT")

split_parts = registered("split_parts(Tensor w, int parts) -> Tensor", _parts_run, _parts_fake)
"""``split_parts(w, parts)``: float32 of any shape to the 1 to 3 bfloat16 parts of ``2**16 w``, (parts,
*shape); all beyond one that is not finite are 0. Weights should be asked by :func:`split_range`
first."""

LINEAR = SplitKernel(
    name="split_linear",
    op=registered(
        "split_linear(Tensor x, Tensor w_parts, Tensor? bias, int parts, str epilogue) -> Tensor",
        _linear_run,
        _linear_fake,
    ),
    reference=linear_reference,
    refuses=_linear_refuses,
    sizes=_linear_sizes,
    work=_linear_work,
    space=_linear_space,
    launch=_linear,
    device="split_gemm",
    follow=_linear_follow,
    numerics=Numerics.LOSSY,
)
"""``epilogue(x @ w.T + bias)``: float32 (..., k), parts (parts, n, k), float32 (n,) to float32 (...,
n)."""

MATMUL = SplitKernel(
    name="split_matmul",
    op=registered("split_matmul(Tensor a, Tensor b, int parts) -> Tensor", _matmul_run, _matmul_fake),
    reference=matmul_reference,
    refuses=_matmul_refuses,
    sizes=_matmul_sizes,
    work=_matmul_work,
    space=_matmul_space,
    launch=_matmul,
    device="split_gemm",
    follow=_matmul_follow,
    numerics=Numerics.LOSSY,
)
"""``a @ b``, both split on the fly: float32 (..., m, k) and (..., k, n), batches broadcast, any
strides."""
