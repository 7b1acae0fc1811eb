"""The validity envelope: the calls that a bundle's code was proven on, and a fast check of each call.

Compiled code takes its inputs on trust: an AOTInductor package that was built for a (1, 2) input gives
one row back for (3, 2), and garbage for float64. So every call is checked before it reaches the code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torchstone.errors import EnvelopeError
from torchstone.records import (
    Case,
    Dim,
    InputSpec,
    Record,
    ScalarSpec,
    TensorSpec,
    WorkloadSpec,
    factor_and_dim,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Envelope", "Outcome", "compile_check", "measure"]

Outcome = Literal["hit", "size", "layout", "value"]
"""``hit``: inside. The others: why it is outside, where the exported program may still answer."""

_CACHE = 4096
"""Call signatures that a check remembers before it starts anew."""
_KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool}
_LEAST_SYMBOLIC = 2
"""torch.export traces every dynamic size (and integer) as one that is neither 0 nor 1, and does not
check that at run time, whatever range was declared; below this, only proof on the very size counts."""


class Envelope(Record, frozen=True, kw_only=True):
    """What calls the bundle's code was proven on."""

    inputs: tuple[InputSpec, ...]
    """Positional inputs: dtype, rank, fixed sizes and the names of dims."""
    dims: tuple[Dim, ...]
    """Named dims with the sizes between the least and the largest that were proven."""
    scalars: dict[str, tuple[float, float]]
    """Least and largest proven value of each scalar input."""
    layouts: tuple[Literal["contiguous", "strided", "offset"], ...]
    """How the proven inputs lay in memory. Without ``strided`` an input must be contiguous, and without
    ``offset`` start where its storage does."""
    device: Literal["cpu"] = "cpu"
    """Where the inputs must be."""
    isa: tuple[str, ...] = ()
    """Instruction sets that the code may use: those of the machine that compiled it."""


def measure(spec: WorkloadSpec, cases: Iterable[Case], isa: tuple[str, ...] = ()) -> Envelope:
    """The envelope that a set of judged cases proves.

    :param spec: the workload.
    :param cases: what was judged right.
    :param isa: instruction sets that the code may use.
    """
    judged = tuple(cases)
    dims = []
    for dim in spec.dims:
        sizes = {case.sizes[dim.name] for case in judged if dim.name in case.sizes}
        if 0 in sizes and 1 not in sizes and max(sizes) > 1:
            sizes.remove(0)  # 1 lies between, and was not proven
        if sizes:
            dims.append(Dim(name=dim.name, low=min(sizes), high=max(sizes), multiple=dim.multiple))
    scalars = {}
    for scalar in (i for i in spec.inputs if isinstance(i, ScalarSpec)):
        values = [case.scalars[scalar.name] for case in judged if scalar.name in case.scalars]
        scalars[scalar.name] = (min(values), max(values)) if values else (scalar.low, scalar.high)
    return Envelope(
        inputs=spec.inputs,
        dims=tuple(dims),
        scalars=scalars,
        layouts=tuple(sorted({case.layout for case in judged})),
        isa=isa,
    )


def compile_check(envelope: Envelope) -> Callable[[tuple[Any, ...]], Outcome]:
    """A function that tells whether a call is inside the envelope, quick on signatures seen before.

    The function takes the positional inputs, as many as the envelope names. It raises
    :class:`EnvelopeError`, naming the input, for a call that the exported program could not answer
    right either: another dtype, rank, device, fixed size or kind of object, one dim with two sizes, or
    a size below 2 that was not proven.
    """
    import torch

    if any(isinstance(i, TensorSpec) and i.dtype.startswith("complex") for i in envelope.inputs):
        return functools.partial(_classify, envelope)  # the key below does not tell x from x.conj()
    plain = (torch.Tensor, torch.nn.Parameter)
    seen: dict[tuple[object, ...], Outcome] = {}

    def check(args: tuple[Any, ...]) -> Outcome:
        try:
            # all that _classify looks at, so that equal keys have one outcome; written out for speed
            key = tuple(
                [
                    (
                        type(a),
                        a.shape,
                        a.dtype,
                        a.layout,
                        a.is_cpu,
                        a.is_neg(),
                        a.is_contiguous(),
                        not a.storage_offset(),
                    )
                    if type(a) in plain
                    else (type(a), a)
                    for a in args
                ]
            )
            known = seen.get(key)
        except (RuntimeError, TypeError):  # no strides (sparse, nested), or not hashable
            return _classify(envelope, args)
        if known is not None:
            return known
        outcome = _classify(envelope, args)
        if len(seen) >= _CACHE:
            seen.clear()
        seen[key] = outcome
        return outcome

    return check


def _classify(envelope: Envelope, args: tuple[Any, ...]) -> Outcome:
    """The whole check, of which :func:`compile_check` remembers the outcome."""
    sizes: dict[str, int] = {}
    layouts: set[str] = set()
    outcome: Outcome = "hit"
    for spec, value in zip(envelope.inputs, args, strict=True):
        if isinstance(spec, TensorSpec):
            _check_tensor(spec, value, envelope.device)
            _check_shape(spec, value, sizes)
            layouts.add(_layout(value))
        elif not _scalar_proven(spec, value, envelope.scalars[spec.name]):
            outcome = "value"
    proven = {dim.name: dim for dim in envelope.dims}
    for name, size in sizes.items():
        if not _size_proven(name, size, proven.get(name)):
            outcome = "size"
    if outcome != "hit":
        return outcome
    return "hit" if layouts <= {"contiguous", *envelope.layouts} else "layout"


def _check_tensor(spec: TensorSpec, value: Any, device: str) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        _outside(spec, f"a {type(value).__name__}", "pass a torch.Tensor; torch.as_tensor makes one")
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        _outside(spec, f"the subclass {type(value).__name__}", "pass x.as_subclass(torch.Tensor)")
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        _outside(spec, f"a {kind} tensor", "pass a dense tensor: x.to_dense(), or padded")
    if value.device.type != device:
        _outside(spec, f"a tensor on {value.device}", f"pass x.to({device!r})")
    if value.dtype != getattr(torch, spec.dtype):
        got = str(value.dtype).removeprefix("torch.")
        _outside(spec, f"{got} {tuple(value.shape)}", f"convert it on purpose: x.to(torch.{spec.dtype})")


def _check_shape(spec: TensorSpec, value: torch.Tensor, sizes: dict[str, int]) -> None:
    """Check rank, fixed sizes and that a dim has one size only; add what was seen to ``sizes``."""
    shape = tuple(value.shape)
    if len(shape) != len(spec.shape):
        _outside(spec, f"{spec.dtype} {shape}, of rank {len(shape)}", "unsqueeze or flatten it first")
    for axis, (expected, size) in enumerate(zip(spec.shape, shape, strict=True)):
        if isinstance(expected, int):
            if size != expected:
                _outside(spec, f"{shape}", f"size {axis} is fixed at {expected}: pad or cut the input")
            continue
        factor, name = factor_and_dim(expected)
        if size % factor:
            _outside(spec, f"{shape}", f"size {axis} is {expected}: pad it to a multiple of {factor}")
        if sizes.setdefault(name, size // factor) != size // factor:
            _outside(
                spec,
                f"{shape}, where {name} is {size // factor}",
                f"an earlier input has {name} = {sizes[name]}: all inputs must agree on it",
            )


def _size_proven(name: str, size: int, dim: Dim | None) -> bool:
    if dim is not None and dim.low <= size <= dim.high and size % dim.multiple == 0:
        return True
    if size < _LEAST_SYMBOLIC:
        proven = "no size was" if dim is None else f"{dim.low}..{dim.high} was"
        raise EnvelopeError(
            f"{name} = {size} was not proven ({proven}), and no exported program can be trusted there",
            hint=f"pad the inputs along {name}, or build the bundle with {name} declared from {size}",
        )
    return False


def _scalar_proven(spec: ScalarSpec, value: Any, proven: tuple[float, float]) -> bool:
    number: float = value
    if type(value) is not _KINDS[spec.kind]:  # True is an int, and 1 == 1.0, but they promote otherwise
        _outside(spec, f"{value!r}, a {type(value).__name__}", f"pass a Python {spec.kind}")
    if proven[0] <= number <= proven[1]:
        return True
    symbolic = spec.kind != "int" or number >= _LEAST_SYMBOLIC
    if not math.isfinite(number) or not symbolic or not spec.low <= number <= spec.high:
        _outside(spec, repr(value), f"declared were {spec.low:g} to {spec.high:g}")
    return False


def _layout(value: torch.Tensor) -> str:
    if value.is_neg() or value.is_conj():
        return "lazy"  # its memory holds other numbers than it does
    if not value.is_contiguous():
        return "strided"
    return "offset" if value.storage_offset() else "contiguous"


def _outside(spec: InputSpec, got: str, hint: str) -> NoReturn:
    if isinstance(spec, TensorSpec):
        expected = f"{spec.dtype} ({', '.join(map(str, spec.shape))}{',' * (len(spec.shape) == 1)})"
    else:
        expected = f"a Python {spec.kind}"
    raise EnvelopeError(f"input {spec.name!r}: expected {expected}, got {got}", hint=hint)
