"""Finds what an engine does wrong where its intermediate values cannot be seen.

The captured graph is compiled in parts. A part is judged like an operation: what the engine gives
against the same operations in float64 on the same inputs, next to eager's own error. First the shortest
prefix that is wrong, by bisection: the empty one is right and the whole is wrong, so somewhere a right
one and a wrong one are neighbours, and halving finds such a place whether or not right and wrong
alternate elsewhere. Then the operations before it are taken away, their values coming from eager, until
the fault is gone. That takes about 2 log2(N) compilations, each of at most N operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchstone.verify import budget
from torchstone.verify.differ.measure import Held, held
from torchstone.verify.differ.parts import Graph, Part
from torchstone.verify.drive import float64_call, leaves, widened, widened_inputs
from torchstone.verify.tensors import copies

__all__ = ["CompilePart", "Found", "bisect"]

CompilePart = Callable[[fx.GraphModule, tuple[torch.Tensor, ...]], Callable[..., Sequence[Any]] | None]
"""Compiles a part for these inputs; None where the engine refuses it."""


@dataclass(frozen=True)
class Found:
    """What is left of the graph."""

    part: Part | None
    """The smallest part that was seen to be wrong; None where the whole graph is right."""
    held: Held
    """How its worst output compares."""
    output: int
    """Which of the part's outputs that is."""
    whole: Held
    """How the worst output of the whole graph compares."""
    compiled: int
    """Parts compiled."""
    cut_short: str = ""
    """Why the part may not be the smallest, if so."""


class _Bisection:
    def __init__(
        self, graph: Graph, compile_part: CompilePart, limit_s: float, rules: budget.Rules | None
    ) -> None:
        self.graph = graph
        self.compiled = 0
        self.cut_short = ""
        self._compile = compile_part
        self._rules = rules
        self._deadline = time.monotonic() + limit_s

    def wrong(self, part: Part) -> list[tuple[int, Held]]:
        """The outputs of a part that are wrong when the engine computes it."""
        return [(k, h) for k, h in enumerate(self.judged(part)) if not h.right]

    def judged(self, part: Part) -> list[Held]:
        """How each output compares. One that the engine refuses is not held against it."""
        self.compiled += 1
        call = self._compile(part.module, copies(part.inputs))
        if call is None:
            self.cut_short = "the engine refuses some of the parts"
            return []
        with torch.no_grad():
            got = list(call(*copies(part.inputs)))
            plain = leaves(part.module(*copies(part.inputs)))
            truth = _in_float64(part, plain)
        triples = zip(got, truth, plain, strict=True)
        return [held(g.detach(), t, p, self._rules) for g, t, p in triples]

    @property
    def late(self) -> bool:
        """Whether the time is spent."""
        if time.monotonic() > self._deadline:
            self.cut_short = "the time was spent"
        return bool(self.cut_short == "the time was spent")

    def shortest_prefix(self, wrong: list[tuple[int, Held]]) -> tuple[Part, list[tuple[int, Held]]]:
        """A prefix that is wrong, one operation longer than one that is right."""
        low, high = 0, len(self.graph.nodes)
        part = self.graph.prefix(high)
        while high - low > 1 and not self.late:
            middle = (low + high) // 2
            shorter = self.graph.prefix(middle)
            found = self.wrong(shorter)
            if found:
                high, part, wrong = middle, shorter, found
            else:
                low = middle
        return part, wrong

    def latest_start(
        self, part: Part, wrong: list[tuple[int, Held]]
    ) -> tuple[Part, list[tuple[int, Held]]]:
        """The same fault from as few operations as will do."""
        outputs = [part.outputs[k] for k, _ in wrong]
        nodes = part.nodes
        best, kept = part, wrong
        low, high = -1, len(nodes)
        while high - low > 1 and not self.late:
            middle = (low + high) // 2 if low >= 0 else 0
            shorter = self.graph.suffix_of(nodes, middle, [n for n in outputs if n in nodes[middle:]])
            found = self.wrong(shorter) if shorter.outputs else []
            if found:
                low, best, kept = middle, shorter, found
            elif low < 0:
                break  # it needs the other outputs too: the engine fuses them together
            else:
                high = middle
        return best, kept


def bisect(
    graph: Graph,
    compile_part: CompilePart,
    *,
    limit_s: float,
    rules: budget.Rules | None = None,
) -> Found:
    """Find the smallest part of a graph that an engine computes wrongly.

    :param compile_part: the engine.
    :param limit_s: seconds after which the part found so far is given.
    :param rules: what outputs are held to; by default the bound of REASSOCIATES.
    """
    run = _Bisection(graph, compile_part, limit_s, rules)
    whole = graph.prefix(len(graph.nodes))
    judged = run.judged(whole)
    wrong = [(k, h) for k, h in enumerate(judged) if not h.right]
    if not wrong:
        worst = max(judged, key=lambda h: h.error or 0.0, default=Held(True))
        return Found(None, worst, 0, worst, run.compiled, run.cut_short)
    part, found = run.latest_start(*run.shortest_prefix(wrong))
    return Found(part, found[0][1], found[0][0], wrong[0][1], run.compiled, run.cut_short)


def _in_float64(part: Part, plain: list[Any]) -> list[torch.Tensor]:
    """The part's outputs in float64, or as they are where an operation has no float64 kernel."""
    try:
        return list(float64_call(widened(part.module))(*widened_inputs(copies(part.inputs))))
    except RuntimeError:
        return plain
