"""Traces as files, so that runs of two versions of torch can be compared.

One safetensors file: the values as its tensors, all else as JSON in its metadata, with a SHA-256 over
both. A file that does not match it, or is not of this form to the letter, is refused.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchstone.errors import InputError
from torchstone.records import Origin, Record
from torchstone.verify.differ.trace import Op, Ref, Trace, Value, mapped, refs

__all__ = ["SUFFIX", "load", "save"]

SUFFIX = ".trace"
"""What the names of trace files end in."""

_FORMAT = "torchstone.trace/1"
_HINT = "save it again: torchstone diff A B --save-trace FILE"
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_KINDS = {kind.__name__: kind for kind in _NAMED}


class StoredOp(Record, frozen=True, kw_only=True):
    """An operation as it lies in the file."""

    target: str
    """As in ``Op``."""
    args: list[Any]
    """As in ``Op``, each leaf that JSON has no word for as ``{KIND: TEXT}``."""
    kwargs: dict[str, Any]
    """Likewise."""
    outs: tuple[int | None, ...]
    """As in ``Op``."""
    origin: Origin
    """As in ``Op``."""


class StoredValue(Record, frozen=True, kw_only=True):
    """A value without its elements."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its dtype."""
    name: str = ""
    """Its name."""


class StoredTrace(Record, frozen=True, kw_only=True):
    """A trace without its tensors, which are ``v3`` if whole and ``s3`` if a sample."""

    label: str
    """As in ``Trace``; likewise below."""
    torch: str
    """Version of torch."""
    widened: bool
    """Whether in float64."""
    values: tuple[StoredValue, ...]
    """The values."""
    ops: tuple[StoredOp, ...]
    """The operations."""
    inputs: tuple[int, ...]
    """The inputs' values."""
    parameters: dict[str, int]
    """The parameters' values."""
    outputs: tuple[tuple[str, int | None], ...]
    """The results' values."""


def save(trace: Trace, path: Path) -> None:
    """Write a trace; complex values are written as pairs."""
    from safetensors.torch import save_file

    tensors = {}
    for number, value in enumerate(trace.values):
        for letter, tensor in (("v", value.tensor), ("s", value.sample)):
            if tensor is not None:
                tensors[f"{letter}{number}"] = _dense(tensor)
    text = msgspec.json.encode(_stored(trace)).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": _FORMAT, "trace": text, "sha256": _digest(text, tensors)}
    save_file(tensors, str(path), metadata=metadata)


def load(path: Path) -> Trace:
    """Read a trace.

    :raises InputError: where the file is none, is damaged, or is of another form.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # not a dict
    except (OSError, SafetensorError) as error:
        raise InputError(f"is no trace: {error}", where=path, hint=_HINT) from None
    text = metadata.get("trace", "")
    if metadata.get("format") != _FORMAT:
        raise InputError("is no trace of this version", where=path, hint=_HINT)
    if metadata.get("sha256") != _digest(text, tensors):
        raise InputError("is damaged: its digest does not match", where=path, hint=_HINT)
    try:
        return _restored(msgspec.json.decode(text, type=StoredTrace), tensors)
    except (msgspec.DecodeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise InputError(f"is no trace of this version: {error}", where=path, hint=_HINT) from None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.clone(memory_format=torch.contiguous_format)


def _digest(text: str, tensors: dict[str, torch.Tensor]) -> str:
    state = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _stored(trace: Trace) -> StoredTrace:
    return StoredTrace(
        label=trace.label,
        torch=trace.torch,
        widened=trace.widened,
        values=tuple(StoredValue(shape=v.shape, dtype=v.dtype, name=v.name) for v in trace.values),
        ops=tuple(
            StoredOp(
                target=op.target,
                args=mapped(list(op.args), _coded),
                kwargs=mapped(op.kwargs, _coded),
                outs=op.outs,
                origin=op.origin,
            )
            for op in trace.ops
        ),
        inputs=tuple(trace.inputs),
        parameters=trace.parameters,
        outputs=tuple(trace.outputs),
    )


def _coded(leaf: Any) -> Any:
    if isinstance(leaf, Ref):
        return {"ref": leaf.value}
    if isinstance(leaf, _NAMED):
        return {type(leaf).__name__: str(leaf).removeprefix("torch.")}
    if isinstance(leaf, torch.device):
        return {"device": str(leaf)}
    if isinstance(leaf, complex):
        return {"complex": str(leaf)}
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return {"float": str(leaf)}
    return leaf


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    if kind == "ref":
        return Ref(int(text))
    if kind in _KINDS:
        found = getattr(torch, str(text))
        if not isinstance(found, _KINDS[kind]):
            raise ValueError(f"{text!r} is no {kind}")
        return found
    made = {"device": torch.device, "complex": complex, "float": float}[kind]
    return made(text)


def _restored(stored: StoredTrace, tensors: dict[str, torch.Tensor]) -> Trace:
    values = [
        Value(
            v.shape,
            v.dtype,
            v.name,
            _as_it_was(tensors.get(f"v{n}"), v),
            _as_it_was(tensors.get(f"s{n}"), v, whole=False),
        )
        for n, v in enumerate(stored.values)
    ]
    ops = [
        Op(
            o.target,
            tuple(_decoded(o.args)),
            {k: _decoded(v) for k, v in o.kwargs.items()},
            o.outs,
            o.origin,
        )
        for o in stored.ops
    ]
    trace = Trace(
        stored.label, values, ops, list(stored.inputs), stored.parameters, list(stored.outputs)
    )
    trace.widened, trace.torch = stored.widened, stored.torch
    _check_numbers(trace)
    return trace


def _as_it_was(
    tensor: torch.Tensor | None, value: StoredValue, *, whole: bool = True
) -> torch.Tensor | None:
    if tensor is None:
        return None
    if value.dtype.startswith("complex"):
        tensor = torch.view_as_complex(tensor)
    if str(tensor.dtype) != f"torch.{value.dtype}" or (whole and tuple(tensor.shape) != value.shape):
        raise ValueError(f"a value is {tensor.dtype}{list(tensor.shape)}, not {value.dtype}")
    return tensor


def _check_numbers(trace: Trace) -> None:
    named = [*trace.inputs, *trace.parameters.values(), *(n for _, n in trace.outputs if n is not None)]
    named += [n for op in trace.ops for n in (*refs(op), *(o for o in op.outs if o is not None))]
    if any(not 0 <= n < len(trace.values) for n in named):
        raise ValueError("it speaks of values that it does not hold")
