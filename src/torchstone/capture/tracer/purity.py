"""Whether a recorded run only computed: no randomness, no writes to what lives on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from torchstone.capture.tracer.recorder import Constant, Entry, Recording, Value
from torchstone.capture.tracer.sizes import Site
from torchstone.compat import tracing

__all__ = ["Refused", "impure", "values", "written"]


class Refused(NamedTuple):
    """Why there is no graph."""

    reason: str
    site: Site | None
    by_chance: bool = False
    """Whether other sizes may tell more."""


def impure(recording: Recording, names: tuple[str, ...]) -> Refused | None:
    """The first operation that draws random numbers, or writes to what lives on."""
    for entry in recording.entries:
        if tracing.draws_random_numbers(entry.target) and not _inert(entry):
            return Refused(f"{entry.target} draws random numbers", entry.site)
        if _trains(entry):
            return Refused("batch norm in training mode changes its statistics", entry.site)
        for number in written(entry):
            if number < recording.inputs:
                return Refused(f"it writes to {names[number]}", entry.site)
    return None


def _arguments(entry: Entry) -> Iterator[tuple[Any, Any]]:
    """Schema argument and value, of those that were given."""
    schema = entry.target._schema.arguments
    positional = zip(schema, entry.args, strict=False)
    yield from positional
    yield from ((a, entry.kwargs[a.name]) for a in schema if a.name in entry.kwargs)


def _inert(entry: Entry) -> bool:
    """Whether an operation that may draw does not: dropout of an evaluated model."""
    given = {argument.name: value for argument, value in _arguments(entry)}
    if any(given.get(name) is False for name in ("train", "training")):
        return True
    return (
        given.get("dropout_p", given.get("dropout", 0.0 if "dropout_p" in _parameters(entry) else None))
        == 0.0
    )


def _parameters(entry: Entry) -> set[str]:
    return {argument.name for argument in entry.target._schema.arguments}


def _trains(entry: Entry) -> bool:
    given = {argument.name: value for argument, value in _arguments(entry)}
    return (
        "running_mean" in given and given["running_mean"] is not None and given.get("training") is True
    )


def written(entry: Entry) -> Iterator[int]:
    """Numbers of the tensors that an operation writes to."""
    for argument, value in _arguments(entry):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf.number for leaf in values(value))


def values(tree: Any) -> list[Value]:
    """The recording\'s tensors among arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=_is_reference) if isinstance(leaf, Value)]


def _is_reference(leaf: Any) -> bool:
    return isinstance(leaf, Value | Constant)
