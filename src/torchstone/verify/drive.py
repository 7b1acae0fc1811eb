"""Runs a callable as a case says and keeps what it gave: eager, float64 and candidate alike."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from torchstone.records import Case
from torchstone.verify.compare import Leaf, differing
from torchstone.verify.tensors import copies

__all__ = [
    "Call",
    "Driven",
    "digest",
    "drive",
    "float64_call",
    "keep",
    "names_of",
    "poison",
    "same",
    "widened",
    "widened_inputs",
]

Call = Callable[..., Sequence[Any]]
"""Positional inputs to a flat sequence of outputs."""

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass
class Driven:
    """What a callable gave on one case; everything is a copy."""

    outputs: list[Leaf]
    """Results of the first call."""
    after: list[Leaf]
    """The inputs after the first call."""
    second: list[Leaf] | None = None
    """Results of the second call, where the protocol makes one."""
    moved: list[bool] | None = None
    """For each output of the first call, whether it changed by what the protocol did afterwards."""


def drive(
    call: Call,
    case: Case,
    inputs: tuple[Any, ...],
    *,
    other: tuple[Any, ...] = (),
    change: Callable[[], Call] | None = None,
) -> Driven:
    """Call as the case's protocol says, always on fresh copies of the inputs.

    :param other: different inputs of the same sizes, for ``hold``.
    :param change: for ``perturb``: changes module state and returns what to call then.
    """
    given = copies(inputs)
    live = list(call(*given))
    driven = Driven(outputs=keep(live), after=keep(given))
    match case.protocol:
        case "once":
            pass
        case "repeat":
            poison(driven.outputs)
            driven.second = keep(call(*copies(inputs)))
        case "hold":
            driven.second = keep(call(*copies(other)))
            driven.moved = [not same(*pair) for pair in zip(keep(live), driven.outputs, strict=True)]
        case "mutate":
            _overwrite(given)
            driven.moved = [not same(*pair) for pair in zip(keep(live), driven.outputs, strict=True)]
        case "perturb":
            assert change is not None
            driven.second = keep(change()(*copies(inputs)))
    return driven


def keep(leaves: Sequence[Any]) -> list[Leaf]:
    """Copies of outputs that later calls cannot change; numbers become tensors."""
    return [_keep(leaf) for leaf in leaves]


def _keep(leaf: Any) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(leaf, bool | int | float | complex):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    return None if leaf is None else leaf if isinstance(leaf, str) else f"<{type(leaf).__qualname__}>"


def same(a: Leaf, b: Leaf) -> bool:
    """Whether two kept leaves are equal to the bit, all NaNs being one."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return differing(a, b) == 0
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b


def names_of(result: Any) -> list[str]:
    """Path of each output in a model's result: ``[0]``, ``.logits``; ``output`` for a single tensor."""
    return [keystr(path) or "output" for path, _ in tree_flatten_with_path(result)[0]]


def poison(like: Sequence[Leaf]) -> None:
    """Fill and free blocks of the outputs' sizes, so that the next ``empty`` of that size holds NaN.

    An allocator hands freed blocks out again. Memory that a candidate never writes would otherwise
    often hold an earlier, right result, or zeros. This is as good as the allocator is simple-minded;
    that the protocols and sizes vary is the other half.
    """
    blocks = []
    for leaf in (*like, *like):
        if isinstance(leaf, torch.Tensor):
            floating = leaf.is_floating_point() or leaf.is_complex()
            blocks.append(torch.full_like(leaf, float("nan") if floating else 85))
    del blocks


def digest(inputs: Sequence[Any]) -> str:
    """SHA-256 of inputs' dtypes, shapes and values."""
    state = hashlib.sha256()
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            state.update(repr(value).encode())
            continue
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().cpu().resolve_conj().contiguous().flatten()
        plain = torch.view_as_real(plain).flatten() if plain.is_complex() else plain
        state.update(plain.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def widened(module: nn.Module) -> nn.Module:
    """A copy of the module with parameters and buffers in float64 (complex128)."""
    wide = copy.deepcopy(module)
    # Module.double() leaves complex parameters as they are
    wide._apply(lambda t: t.to(_WIDE.get(t.dtype, t.dtype)))  # type: ignore[no-untyped-call] # torch's
    return wide


def widened_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values in float64 (complex128); integers, booleans and numbers as they are."""
    return tuple(v.to(_WIDE.get(v.dtype, v.dtype)) if isinstance(v, torch.Tensor) else v for v in inputs)


def float64_call(module: nn.Module) -> Call:
    """Runs a :func:`widened` module; tensors that it makes without a dtype are float64 too.

    The model's own casts stay as written, for they may be what it means (a model that rounds on
    purpose). Where they then meet float64 in an operation that takes no mixture, the model runs again
    with every narrower float raised to float64.

    :raises RuntimeError: where an operation has no float64 kernel.
    """

    def call(*inputs: Any) -> Sequence[Any]:
        with _float64_by_default():
            spare = copies(inputs)
            try:
                return leaves(module(*inputs))
            except (RuntimeError, TypeError, ValueError, AssertionError) as first:
                for value, fresh in zip(inputs, spare, strict=True):
                    if isinstance(value, torch.Tensor):
                        value.copy_(fresh)
                try:
                    with _Raised():  # type: ignore[no-untyped-call] # torch's class
                        return leaves(module(*inputs))
                except (RuntimeError, TypeError, ValueError, AssertionError):
                    raise RuntimeError(f"{type(first).__name__}: {first}") from first

    return call


def leaves(result: Any) -> list[Any]:
    """Flat outputs, in pytree order."""
    return [leaf for _, leaf in tree_flatten_with_path(result)[0]]


def _overwrite(inputs: tuple[Any, ...]) -> None:
    """Give every element another value, in place, as a caller does that reuses its buffers."""
    for value in inputs:
        if isinstance(value, torch.Tensor):
            value.logical_not_() if value.dtype == torch.bool else value.add_(1)


@contextmanager
def _float64_by_default() -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Raised(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's __init_subclass__
    """Runs every operation in float64, whatever dtype it asks for or is given.

    Operations that write into an argument are left alone: they convert by themselves, and the place
    that they write to must stay the same.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_raise, (args, kwargs or {}))
        return func(*args, **kwargs)


def _raise(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value
