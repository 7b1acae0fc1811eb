"""Static CUDA graphs: one for each signature of inputs that comes, and a limit to their number.

A graph reads and writes fixed memory. So inputs are copied to where it reads (``copied_bytes``), and
results are cloned from where it writes: a result that is held is never overwritten by the next call, and
may be its input. Signatures beyond the limit, inputs that are not on the device, and calls that cannot
be captured run as they did without.

"CUDA Graphs", CUDA C++ Programming Guide; :class:`torch.cuda.CUDAGraph`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["Graphed", "Recorded"]

_WARM_CALLS = 3
"""Calls before the one that is recorded: compilation, workspaces and autotuning are then behind."""
_MOST = 8


@dataclass(frozen=True)
class Recorded:
    """One recorded call."""

    graph: torch.cuda.CUDAGraph
    """Its launches."""
    places: tuple[Any, ...]
    """Where it reads its inputs."""
    result: Any
    """What it writes, in the form that the call returns."""
    copied_bytes: int
    """Of inputs, at each replay."""
    held_bytes: int
    """Device memory that it keeps: places, results and what lies between."""

    def __call__(self, inputs: tuple[Any, ...]) -> Any:
        """Replay it on other inputs of the same signature."""
        for place, value in zip(self.places, inputs, strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(value)
        self.graph.replay()
        return _pytree.tree_map(_own, self.result)


class Graphed:
    """A function of positional inputs, replayed where it was recorded.

    :param call: the function. It must not look at values on the host, and must not change its inputs.
    :param most: signatures that are recorded; others run ``call``.
    """

    def __init__(self, call: Callable[..., Any], most: int = _MOST) -> None:
        self.call = call
        self.most = most
        self.recorded: dict[tuple[Any, ...], Recorded] = {}
        """By signature."""
        self.refused: list[str] = []
        """Why a signature could not be recorded, one line each."""
        self._plain: set[tuple[Any, ...]] = set()

    @property
    def held_bytes(self) -> int:
        """Device memory of all graphs."""
        return sum(one.held_bytes for one in self.recorded.values())

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        """Replay, record and replay, or call."""
        key = _signature(inputs)
        if key is None or key in self._plain:
            return self.call(*inputs)
        if key not in self.recorded:
            if len(self.recorded) >= self.most:
                return self.call(*inputs)
            generators = _generators()
            try:
                self.recorded[key] = record(self.call, inputs)
            except RuntimeError as error:  # torch says so of what cannot be captured
                torch.cuda.synchronize()
                for generator, state in generators:  # else they stay as if the capture went on
                    generator.graphsafe_set_state(state)
                self._plain.add(key)
                self.refused.append(" ".join(str(error).split())[:300])
                return self.call(*inputs)
        return self.recorded[key](inputs)


def record(call: Callable[..., Any], inputs: tuple[Any, ...]) -> Recorded:
    """Record one call.

    :raises RuntimeError: torch's, where the call does what cannot be recorded, such as synchronize.
    """
    before = torch.cuda.memory_allocated()
    places = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in inputs)
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_CALLS):
            call(*places)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*places)
    tensors = [p for p in places if isinstance(p, torch.Tensor)]
    return Recorded(
        graph=graph,
        places=places,
        result=result,
        copied_bytes=sum(t.numel() * t.element_size() for t in tensors),
        held_bytes=max(0, torch.cuda.memory_allocated() - before),
    )


def _generators() -> list[tuple[Any, Any]]:
    """Each device's generator of random numbers, with its state in memory of its own."""
    found: Any = torch.cuda.default_generators
    return [(generator, generator.clone_state()) for generator in found]


def _signature(inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What two calls must have in common to be one graph; None where there is no graph for them."""
    found: list[Any] = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            if not value.is_cuda or value.layout is not torch.strided:
                return None
            found.append((value.shape, value.stride(), value.dtype, value.device))
        elif isinstance(value, bool | int | float | str | None):
            found.append((type(value), value))
        else:
            return None
    return tuple(found) if any(isinstance(v, torch.Tensor) for v in inputs) else None


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
