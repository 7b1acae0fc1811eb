"""torch's names of sizes (``L['x'].size()[0]``, ``s27``), and the workload's names for the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torchstone.records import Axis, Dim, ScalarSpec, TensorSpec, WorkloadSpec

__all__ = ["PLACE", "Names", "Place", "place"]

# L['x'].size()[0]; L['args'][1].size()[0], a position of *args; x.size()[0] in messages
PLACE = re.compile(
    r"(?:L\['(?P<quoted>\w+)'\]|(?P<plain>\b[A-Za-z_]\w*))(?:\[(?P<index>\d+)\])?\.size\(\)\[(?P<axis>\d+)\]"
)
_RELATION = re.compile(r"^(?P<kind>Eq|Ne)\((?P<left>.+), (?P<right>[^,]+)\)$")
_SYMBOL = re.compile(r"\b(?:[suz]|zu)f?\d+\b")
_FUNCTION = re.compile(r"\b(?P<name>Mod|PythonMod|FloorDiv)\((?P<left>\w+), (?P<right>\w+)\)")
_OPERATORS = {"Mod": "%", "PythonMod": "%", "FloorDiv": "//"}
_SIGNS = {"Eq": "==", "Ne": "!="}


class Place(NamedTuple):
    """Where a size comes from."""

    root: str
    """Name of forward's parameter."""
    position: int | None
    """Position in it, for ``*args``."""
    axis: int
    """Position in the shape."""


def place(source: str) -> Place | None:
    """Read torch's name of a size, such as ``L['x'].size()[0]``; None for names of other things."""
    match = PLACE.fullmatch(source.strip())
    if match is None:
        return None
    index = match["index"]
    root = match["quoted"] or match["plain"]
    return Place(root, None if index is None else int(index), int(match["axis"]))


def _replaced(text: str, name: Callable[[Place], str]) -> str:
    """``text`` with every size in it renamed."""

    def renamed(match: re.Match[str]) -> str:
        found = place(match[0])
        return match[0] if found is None else name(found)

    return PLACE.sub(renamed, text)


@dataclass(frozen=True)
class Names:
    """Translates torch's names of sizes into the workload's."""

    spec: WorkloadSpec | None
    """The workload; without one, axes are named as torch names them."""

    def axis(self, source: str) -> Axis | None:
        """The input's dimension behind ``L['x'].size()[0]``; None for what is no size of an input."""
        found = place(source)
        return None if found is None else self.at(found)

    def at(self, found: Place) -> Axis:
        """The input's dimension at a place."""
        tensor = self._tensor(found)
        if tensor is None or found.axis >= len(tensor.shape):
            label = found.root if found.position is None else f"{found.root}[{found.position}]"
            return Axis(input=label, axis=found.axis)
        size = tensor.shape[found.axis]
        return Axis(input=tensor.name, axis=found.axis, dim=size if isinstance(size, str) else None)

    def called(self, axis: Axis) -> str:
        """How a condition calls it: the dim, else ``x.shape[0]``."""
        return axis.dim or f"{axis.input}.shape[{axis.axis}]"

    def plain(self, expression: str, sources: dict[str, str]) -> tuple[str, tuple[Axis, ...]]:
        """A condition in terms of dims, and the axes that it speaks of.

        :param sources: symbols to torch's names of sizes; those not in it stay as they are.
        """
        axes: list[Axis] = []

        def named(place: Place) -> str:
            axis = self.at(place)
            axes.append(axis)
            called = self.called(axis)
            return f"({called})" if "*" in called else called

        def replaced(match: re.Match[str]) -> str:
            return sources.get(match[0]) or match[0]

        text = _replaced(_SYMBOL.sub(replaced, expression), named)
        relation = _RELATION.match(text)
        if relation:
            text = f"{relation['left']} {_SIGNS[relation['kind']]} {relation['right']}"
        text = _FUNCTION.sub(lambda m: f"{m['left']} {_OPERATORS[m['name']]} {m['right']}", text)
        return text, tuple(dict.fromkeys(axes))

    def dim(self, name: str) -> Dim | None:
        """The declared dim of that name."""
        return next((d for d in self.spec.dims if d.name == name), None) if self.spec else None

    def _tensor(self, found: Place) -> TensorSpec | None:
        inputs = () if self.spec is None else self.spec.inputs
        by_name = {given.name: given for given in inputs}
        # a placeholder of a program is called a_0 where forward takes *a
        root, _, number = found.root.rpartition("_")
        index = found.position
        if index is None and root and number.isdigit() and found.root not in by_name:
            index = int(number)
        given = by_name.get(found.root if found.position is None else f"{found.root}_{index}")
        if given is None and index is not None and index < len(inputs):
            given = inputs[index]
        return None if given is None or isinstance(given, ScalarSpec) else given
