"""What a kernel is to the rest of the project, and how it becomes an operator of PyTorch.

An operator ``torch.ops.torchstone.<name>`` allocates its outputs and writes to nothing else. On CUDA,
and on a CPU under Triton's interpreter, it launches Triton where :attr:`Kernel.refuses` has nothing
against the arguments; anywhere else it runs :attr:`Kernel.reference`, so that a program with it is right
on any machine. It has no derivative: it is for graphs that are run, not trained.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchstone.compat import triton as compat
from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.recipe import Numerics
from torchstone.records.tuning import Config
from torchstone.tuner.space import Space
from torchstone.tuner.tunable import Tunable

__all__ = [
    "SHARED_BYTES",
    "Kernel",
    "Rows",
    "buffered",
    "bytes_of",
    "kernel",
    "launches",
    "multiprocessors",
    "power",
    "rows_of",
    "unfit",
]

SHARED_BYTES = 232_448
"""Of a block on Hopper; a smaller device refuses the configs that do not fit, which the tuner sees."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LIBRARY: Any = torch.library.Library("torchstone", "FRAGMENT")  # type: ignore[no-untyped-call]
_ODD = ((1, 1), (2, 3), (7, 5), (3, 13))
"""Numerator over 8 and remainder: sizes around those of the example, and none a multiple of anything."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel family behind one operator; every function takes the operator's arguments, in order.

    Arguments may be fake tensors and sizes symbolic in ``refuses``, ``sizes`` and ``work``.
    """

    name: str
    """The operator's name, for reports and for the kept configs."""
    op: Callable[..., Any]
    """``torch.ops.torchstone.<name>``."""
    reference: Callable[..., Any]
    """The same in plain PyTorch, for any float dtype: what it is held to."""
    refuses: Callable[..., str | None]
    """Why Triton cannot be used for these arguments; None if it can."""
    sizes: Callable[..., dict[str, int]]
    """The sizes that matter to it, as the kernel sees them; ``outer``, ``n`` and ``inner`` for rows."""
    work: Callable[..., tuple[float, float]]
    """Bytes that must move (a copy of what is not laid out as the kernel needs counted), and
    operations.
    """
    space: Callable[..., Space]
    """The configs that make sense for these arguments; the default is the heuristic's choice."""
    launch: Callable[..., Any]
    """``launch(config, *arguments)``: run Triton with one config."""
    device: str
    """Name of the module of device code below :mod:`torchstone.kernels.device`."""
    follow: Callable[..., tuple[Any, ...]]
    """``follow(shape, *arguments)``: shapes of the other tensors when the first has another shape."""
    numerics: Numerics = Numerics.REASSOCIATES
    """What it promises about its numbers, whatever the config."""

    def tunable(self, *args: Any) -> Tunable:
        """What ``torchstone.tune`` takes, for arguments like these.

        :raises InputError: where Triton cannot be used for them.
        :raises EnvironmentLacksError: where Triton cannot run here at all.
        """
        why = self.refuses(*args)
        if why is not None:
            raise InputError(f"{self.name} cannot be tuned for these arguments: {why}")
        first = next(a for a in args if isinstance(a, torch.Tensor))
        if not compat.serves(first.device.type):
            raise EnvironmentLacksError(
                f"Triton does not run on {first.device.type} here",
                hint="pip install triton and use a CUDA device, or set TRITON_INTERPRET=1",
            )
        template = tuple(_Spec.of(a) if isinstance(a, torch.Tensor) else a for a in args)
        shape = {f"d{i}": int(size) for i, size in enumerate(first.shape)}
        return Tunable(
            name=f"torchstone-{self.name}",
            build=_Build(self.name, template),
            space=self.space(*args),
            inputs=_Inputs(self.name, template),
            reference=_Bound(self.name, template),
            sizes=shape,
            odd=tuple(
                {n: max(1, s * part // 8 | 1) + rest - 1 for n, s in shape.items()}
                for part, rest in _ODD
            )
            if self.follow is not fixed
            else (),
            work=_Work(self.name, template),
            numerics=self.numerics,
        )


def fixed(shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
    """For kernels whose sizes depend on each other in ways that no other shape may keep."""
    raise InputError("this kernel is tuned at its example's sizes only")


def alone(shape: Sequence[int], *args: Any) -> tuple[Any, ...]:
    """For kernels of one tensor: there is no other."""
    return ()


def kernel(schema: str, fake: Callable[..., Any], made: Kernel) -> Kernel:
    """Register an operator, and give the kernel with it.

    :param schema: as ``torch.library`` takes it, with the name.
    :param fake: the outputs for fake tensors, symbolic sizes included.
    :param made: the kernel; its ``op`` is replaced.
    """
    from torchstone.kernels import choice

    def run(*args: Any) -> Any:
        first = next(a for a in args if isinstance(a, torch.Tensor))
        if launches(first.device.type) and made.refuses(*args) is None:
            # Triton launches on the current device; on a CPU this does nothing
            with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
                return made.launch(choice.config(made, args), *args)
        found, out = made.reference(*args), fake(*args)
        if isinstance(found, tuple):
            return tuple(laid(*pair) for pair in zip(found, out, strict=True))
        return laid(found, out)

    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _LIBRARY.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(made.name, run, key)
    torch.library.register_fake(f"torchstone::{made.name}", fake, lib=_LIBRARY)
    return replace(made, op=getattr(torch.ops.torchstone, made.name))


def laid(found: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``found`` with the strides of ``out``, which may be written to; never a view of an argument."""
    if found.stride() == out.stride() and found._base is None:
        return found
    return out.copy_(found)


@cache
def launches(device: str) -> bool:
    """Whether Triton runs on a kind of device in this process."""
    return device in ("cuda", "cpu") and compat.serves(device)


def unfit(x: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """What speaks against Triton for any kernel: dtype, layout, device, emptiness, a wanted gradient."""
    for tensor in (x, *others):
        if tensor is None:
            continue
        if tensor.layout != torch.strided:
            return f"a tensor is {tensor.layout}, not strided"
        if tensor.device != x.device:
            return f"tensors are on {x.device} and on {tensor.device}"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "a gradient is wanted, and the kernel has none"
    if x.dtype not in FLOATS:
        return f"{x.dtype} is none of float32, float16, bfloat16"
    if x.numel() == 0:
        return "there are no elements"
    return None


class Rows(NamedTuple):
    """A tensor as ``outer`` x ``n`` x ``inner``: rows of ``n`` elements lie along the middle."""

    x: torch.Tensor
    """The tensor whose strides these are: the given one, or a contiguous copy."""
    outer: int
    """Product of the sizes before the row's dimensions."""
    n: int
    """Elements of a row."""
    inner: int
    """Product of the sizes after them."""
    strides: tuple[int, int, int]
    """In elements, of the three; 1 for a size of 1."""


def rows_of(x: torch.Tensor, first: int, last: int) -> Rows:
    """``x`` by rows along the dimensions ``first`` to ``last``, both included; copied where strides
    must be.
    """
    spans = ((0, first), (first, last + 1), (last + 1, x.dim()))
    found = [_merged(x.shape[a:b], x.stride()[a:b]) for a, b in spans]
    if None in found:
        return rows_of(x.contiguous(), first, last)
    (outer, so), (n, sn), (inner, si) = (pair or (1, 1) for pair in found)
    return Rows(x, outer, n, inner, (so, sn, si))


def copied(x: torch.Tensor, first: int, last: int) -> bool:
    """Whether :func:`rows_of` copies ``x``."""
    spans = ((0, first), (first, last + 1), (last + 1, x.dim()))
    return any(_merged(x.shape[a:b], x.stride()[a:b]) is None for a, b in spans)


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Size and stride of some neighbouring dimensions as one; None where no one stride reaches all."""
    size, stride = 1, 1
    for one, step in zip(reversed(sizes), reversed(strides), strict=True):
        if one == 1:
            continue
        if size == 1:
            stride = step
        elif step != stride * size:
            return None
        size *= one
    return size, stride


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: torch.Tensor) -> bool:
    """Whether the channels of (batch, channels, ...) are next to each other in memory."""
    return x.dim() in _FORMATS and x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()


def like(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An empty tensor, channels-last where ``x`` is, else contiguous."""
    if channels_last(x):
        made: torch.Tensor = torch.empty(
            shape, dtype=x.dtype, device=x.device, memory_format=_FORMATS[x.dim()]
        )
        return made
    return x.new_empty(shape)


def span(x: torch.Tensor, dims: Sequence[int]) -> tuple[int, int] | None:
    """First and last of some dimensions, none given meaning all; None where they are not neighbours."""
    if not x.dim():
        return 0, -1
    found = sorted({d % x.dim() for d in dims}) if dims else list(range(x.dim()))
    return (found[0], found[-1]) if found == list(range(found[0], found[-1] + 1)) else None


def bytes_of(*tensors: torch.Tensor | None) -> float:
    """Bytes of the elements of some tensors."""
    return float(sum(t.numel() * t.element_size() for t in tensors if t is not None))


def power(value: int) -> int:
    """The next power of two, 1 for 0."""
    return 1 << max(0, int(value) - 1).bit_length()


def number(config: Config, name: str) -> int:
    """A knob that is a whole number."""
    value = config[name]
    if not isinstance(value, int):
        raise InputError(f"knob {name} is {value!r}, not a whole number")
    return value


def numbers(config: Config, *names: str) -> tuple[int, ...]:
    """Several of them."""
    return tuple(number(config, name) for name in names)


def buffered(config: Config, loads: int = 1) -> str | None:
    """What speaks against a config whose loop over blocks of a row is pipelined; None if nothing does.

    Triton keeps ``stages - 1`` tiles of 4 bytes an element in shared memory for each load of the loop.

    :param config: with ``rows``, ``block`` and ``stages``.
    :param loads: of whole tiles; two more of single rows are allowed for.
    """
    rows, block, stages = numbers(config, "rows", "block", "stages")
    shared = 4 * (stages - 1) * block * (rows * loads + 2)
    return f"{shared} bytes of shared memory, of {SHARED_BYTES}" if shared > SHARED_BYTES else None


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the device; 2 for the interpreter."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class _Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: torch.Tensor) -> _Spec:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, str(x.device))

    def shaped(self, shape: Sequence[int]) -> _Spec:
        """The same with another shape, dimensions in the same order in memory."""
        order = sorted(range(len(shape)), key=lambda i: (self.strides[i], -i))
        strides, step = [0] * len(shape), 1
        for i in order:
            strides[i], step = step, step * shape[i]
        return self._replace(shape=tuple(shape), strides=tuple(strides))

    def on(self, device: str) -> torch.Tensor:
        """A tensor like it, with nothing in it."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def random(self, generator: torch.Generator) -> torch.Tensor:
        """Normal numbers with means apart from 0 (booleans: half of them true; integers: 0, a valid
        class).
        """
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if self.dtype == torch.bool:
            return made.copy_(torch.rand(self.shape, generator=generator, device=self.device) < 0.5)
        if not self.dtype.is_floating_point:
            return made.zero_()
        return made.copy_(torch.randn(self.shape, generator=generator, device=self.device) + 0.25)


def _known(name: str) -> Kernel:
    from torchstone.kernels.registry import KERNELS

    return next(k for k in KERNELS if k.name == name)


@dataclass(frozen=True)
class _OfTemplate:
    """A function of the tensors among the arguments only: what the tuner varies."""

    kernel: str
    template: tuple[Any, ...]

    def filled(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        given = iter(tensors)
        return tuple(next(given) if isinstance(a, _Spec) else a for a in self.template)

    def resized(self, sizes: dict[str, int]) -> list[_Spec]:
        """The tensors' specs where the first has these sizes."""
        specs = [a for a in self.template if isinstance(a, _Spec)]
        shape = tuple(sizes.values())
        if not sizes or shape == specs[0].shape:
            return specs
        others = _known(self.kernel).follow(shape, *self.template)
        return [s.shaped(o) for s, o in zip(specs, (shape, *others), strict=True)]


@dataclass(frozen=True)
class _Build(_OfTemplate):
    def __call__(self, config: Config) -> Callable[..., Any]:
        launch = _known(self.kernel).launch
        return lambda *tensors: launch(config, *self.filled(tensors))

    def keep(self, config: Config, home: Path) -> None:
        """Have the operator launch with a config that was proved and found faster."""
        from torchstone.kernels import choice

        specs = [a for a in self.template if isinstance(a, _Spec)]
        args = self.filled([s.on("meta") for s in specs])
        device = torch.device(specs[0].device)
        choice.keep(_known(self.kernel), args, config, home, device)

    @cached_property
    def cache_key(self) -> str:
        """What a timing depends on: the source of the kernel's files, and the arguments that are no
        tensors.
        """
        own = _known(self.kernel)
        names = (
            own.launch.__module__,
            f"{__package__}.device.{own.device}",
            f"{__package__}.device.common",
        )
        source = "".join(inspect.getsource(importlib.import_module(name)) for name in names)
        fixed_ones = repr([a for a in self.template if not isinstance(a, _Spec)])
        return hashlib.sha256((source + fixed_ones).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Inputs(_OfTemplate):
    def __call__(self, seed: int, **sizes: int) -> tuple[Any, ...]:
        specs = self.resized(sizes)
        generator = torch.Generator(specs[0].device).manual_seed(seed)
        return tuple(spec.random(generator) for spec in specs)


@dataclass(frozen=True)
class _Bound(_OfTemplate):
    def __call__(self, *tensors: Any) -> Any:
        return _known(self.kernel).reference(*self.filled(tensors))


@dataclass(frozen=True)
class _Work(_OfTemplate):
    def __call__(self, **sizes: int) -> tuple[float, float]:
        made = [s.on("meta") for s in self.resized(sizes)]
        return _known(self.kernel).work(*self.filled(made))
