"""Two traces to a :class:`~torchstone.records.Divergence`."""

from __future__ import annotations

from pathlib import Path

import torch

from torchstone.records import Divergence
from torchstone.verify import compare
from torchstone.verify.differ import region as regions
from torchstone.verify.differ import repro
from torchstone.verify.differ.explain import Answer, explain
from torchstone.verify.differ.replay import wide
from torchstone.verify.differ.search import Failed, Search
from torchstone.verify.differ.trace import Trace

__all__ = ["NOTHING", "between"]

NOTHING = "no divergence beyond rounding"


def between(a: Trace, b: Trace, *, reproduction: Path | None = None) -> Divergence:
    """The first operation of ``b`` whose error its inputs do not explain, ``a`` being right.

    :param reproduction: where to write the file that shows a divergence on its own; None writes none.
    """
    search = Search(a, b)
    failed = search.run()
    notes = _notes(search)
    if failed is None and len(a.outputs) == len(b.outputs):
        return Divergence(
            a=a.label, b=b.label, kind="NONE", text=NOTHING, compared=search.compared, notes=notes
        )
    if failed is None:
        text = f"B gives {len(b.outputs)} results, A {len(a.outputs)}"
        return Divergence(a=a.label, b=b.label, kind="STRUCTURE", text=text, compared=search.compared)
    return _told(search, failed, notes, reproduction)


def _told(
    search: Search, failed: Failed, notes: tuple[str, ...], reproduction: Path | None
) -> Divergence:
    answer = explain(search, failed)
    region = regions.of_answer(search, answer)
    reproduced = None
    if reproduction is not None and _is_whole(region):
        reproduced = repro.write(region, reproduction, answer.text)
    return Divergence(
        a=search.a.label,
        b=search.b.label,
        kind=answer.kind,
        text=answer.text,
        ops=region.b.sites(regions.positions(answer.b_ops, answer.b_named)),
        instead_of=region.a.sites(regions.positions(answer.a_ops, answer.a_named)),
        operands=regions.statistics(region.operands, region.labels),
        local_error=failed.held.error,
        eager_error=failed.held.eager_error,
        bound=failed.held.bound,
        global_error=_global_error(search, answer),
        compared=search.compared,
        reproduction=None if reproduced is None else str(reproduction),
        reproduced=reproduced,
        notes=notes,
    )


def _notes(search: Search) -> tuple[str, ...]:
    notes = []
    if search.a.torch != search.b.torch:
        notes.append(f"A ran on torch {search.a.torch}, B on torch {search.b.torch}")
    if search.sampled:
        notes.append("values beyond the byte budget were compared by samples")
    return tuple(notes)


def _is_whole(region: regions.Region) -> bool:
    """Whether every operand was kept whole."""
    names = {n for side in (region.a, region.b) for n in side.names.values() if n.startswith("x")}
    return names <= set(region.operands)


def _global_error(search: Search, answer: Answer) -> float | None:
    """Relative error of the worst of the model's results."""
    worst = 0.0
    for (_, x), (_, y) in zip(search.a.outputs, search.b.outputs, strict=False):
        right = None if x is None else search.a.values[x].tensor
        got = None if y is None else search.b.values[y].tensor
        if not isinstance(right, torch.Tensor) or not isinstance(got, torch.Tensor):
            continue
        found = compare.errors("", got, wide(right), got).relative
        if found is None:
            return None
        worst = max(worst, found)
    return worst
