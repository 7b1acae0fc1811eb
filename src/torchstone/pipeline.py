"""The one way through: ``capture -> reference -> build and verify -> screen -> final -> load -> gate``.

The only place that knows the order. Each stage first asks the run whether it already knows the answer,
so a resumed run repeats nothing that is still valid.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

from torchstone import gate, recipe_search, stages, store
from torchstone.candidate import Candidate, Context
from torchstone.errors import WorkloadError
from torchstone.recipe import Recipe, fallback
from torchstone.records import Crashed, Decision, TimedOut, Verified
from torchstone.timing import Timing

__all__ = ["Stage", "run"]

Stage = Literal["verify", "bench", "decide"]
"""Where a run may stop: after the verdicts, after the interleaved times, after the decision."""


def run(context: Context, recipes: tuple[Recipe, ...], until: Stage) -> Decision | None:
    """Take a workload through every stage up to ``until``.

    :param recipes: candidates, baseline first.
    :returns: the decision, or None where the run stops before it.
    :raises WorkloadError: where the user's model or inputs fail before there is anything to judge.
    """
    known = context.recall("decision", Decision)
    if known is not None:
        return known
    with ExitStack() as stack:
        exported = stages.capture(context).mode == "export"
        candidates = [Candidate(context, recipe, exported=exported) for recipe in recipes]
        for candidate in candidates:
            stack.callback(candidate.close)
        baseline, *others = candidates
        memory = stack.enter_context(recipe_search.Memory(context, recipes[1:]))
        _judge_all(context, memory, baseline, others)
        if until == "verify":
            return None
        verified = [c for c in others if isinstance(c.verdict, Verified)]
        with store.exclusive(context.store.path.parent.parent / "timing.lock"):
            timing = stack.enter_context(Timing(context, baseline))
            screened = timing.screen(verified)  # the fallback too: it is what ships where eager is kept
            memory.screened(verified, screened)
            finalists = timing.finalists([c for c in verified if c.recipe != fallback()], screened)
            comparisons = timing.final(finalists)
            if until == "bench":
                return None
            timing.load(finalists, comparisons)
        decision = gate.decide(
            gate.evidence_of(context.store.header, context.store.entries), context.policy
        )
        context.record("decision", decision)
        return decision


def _judge_all(
    context: Context,
    memory: recipe_search.Memory,
    baseline: Candidate,
    others: list[Candidate],
) -> None:
    """Verdicts for all, the baseline first; the others in parallel lanes, as nothing here is timed."""
    with stages.Judge(context) as judge:
        stages.settle(context, judge, baseline, baseline)
        if isinstance(baseline.verdict, Crashed | TimedOut):
            raise WorkloadError(
                f"the model itself fails: {getattr(baseline.verdict, 'text', 'no answer')}",
                where=context.store.header.origin,
                hint=f"its log is in {context.store.work}",
            )
        recipe_search.settle_all(context, judge, memory, baseline, others)
