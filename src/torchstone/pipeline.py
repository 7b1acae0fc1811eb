"""The one way through: ``capture -> reference -> build and verify -> screen -> final -> load -> gate``.

The only place that knows the order. Each stage first asks the run whether it already knows the answer,
so a resumed run repeats nothing that is still valid.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Literal

from torchstone import gate, stages, store
from torchstone.candidate import Candidate, Context
from torchstone.errors import WorkloadError
from torchstone.recipe import Recipe, fallback
from torchstone.records import Crashed, Decision, NotTried, TimedOut, Verified
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
        with stages.Judge(context) as judge:
            _build_and_verify(context, judge, baseline, others)
        if until == "verify":
            return None
        verified = [c for c in others if isinstance(c.verdict, Verified)]
        with store.exclusive(context.store.path.parent.parent / "timing.lock"):
            timing = stack.enter_context(Timing(context, baseline))
            screened = timing.screen(verified)  # the fallback too: it is what ships where eager is kept
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


def _build_and_verify(
    context: Context, judge: stages.Judge, baseline: Candidate, others: list[Candidate]
) -> None:
    """Verdicts for all, the baseline first; the others in parallel lanes, as nothing here is timed."""
    stages.settle(context, judge, baseline, baseline)
    if isinstance(baseline.verdict, Crashed | TimedOut):
        raise WorkloadError(
            f"the model itself fails: {getattr(baseline.verdict, 'text', 'no answer')}",
            where=context.store.header.origin,
            hint=f"its log is in {context.store.work}",
        )
    context.progress.stage("build and verify", len(others), context.policy.search_s)
    deadline = time.monotonic() + context.policy.search_s

    def settle(candidate: Candidate) -> None:
        if time.monotonic() > deadline and not candidate.known:
            spent = f"the search time of {context.policy.search_s:g} s was spent before its turn"
            candidate.verdict = NotTried(text=spent)
            stages.record_verdict(context, candidate, ())
        else:
            stages.settle(context, judge, candidate, baseline)

    pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))))
    try:
        for future in [pool.submit(settle, candidate) for candidate in others]:
            future.result()
    except BaseException:  # Ctrl-C too: lanes must not go on, nor take their own end for a crash
        context.stopped.set()
        judge.close()
        for candidate in (baseline, *others):
            candidate.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
