"""The timed stages: a short session for each candidate, one for the finalists together, then load.

Each asks the run's store first, and appends what it finds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from torchstone.bench import cost, sample, stats
from torchstone.bench import load as open_load
from torchstone.bench.clock import MonotonicClock
from torchstone.candidate import Candidate, Context
from torchstone.records import Arrival, Build, Comparison, Failure, LoadResult
from torchstone.verify.inputs import largest

__all__ = ["Timing", "typical"]

_REQUESTS_A_PASS = (8, 64)  # fewest and most
# A pass should take this long, so that one context switch is not all that it shows; a longer one is cut
# into parts of about this length.
_PASS_S = 0.1
_FEWEST_REQUESTS = 4  # a pass of one call has too little power to show a small gain
_SCREEN_SHARE = 0.5  # of the benchmark's time; the finalists' session has the rest
_SCREEN_ROUNDS = 8


class Timing:
    """The timed stages: a short session for each candidate, then one for all finalists, then load.

    Only one process computes at a time; the caller holds the machine's timing lock.
    """

    def __init__(self, context: Context, baseline: Candidate) -> None:
        self.context = context
        self.baseline = baseline
        self.again = Candidate(
            context, baseline.recipe, exported=baseline.exported, copy=f"-{sample.BASELINE_AGAIN}"
        )

    @cached_property
    def _requests(self) -> tuple[Arrival, ...]:
        """The requests of a pass: the quicker the calls, the more of them."""
        fewest, most = _REQUESTS_A_PASS
        traffic = self.context.spec.traffic
        seconds = _first_look(self.context, self.baseline, typical(traffic, fewest)[fewest // 2 :][:1])
        count = most if not seconds else int(min(most, max(fewest, _PASS_S / seconds)))
        return typical(traffic, count)

    @cached_property
    def _parts(self) -> int:
        """Parts of a pass, each about as long as the shortest pass should be."""
        seconds = _first_look(self.context, self.baseline, self._requests) or 0.0
        return int(min(len(self._requests), max(1.0, seconds / _PASS_S)))

    def screen(self, verified: Sequence[Candidate]) -> dict[str, Comparison]:
        """Each candidate beside the baseline, briefly, to choose the finalists."""
        budget_s = self.context.policy.bench_s * _SCREEN_SHARE / max(1, len(verified))
        self.context.progress.stage("screen", len(verified), budget_s * len(verified))
        found: dict[str, Comparison] = {}
        for candidate in verified:
            key = f"comparison/screen/{candidate.text}"
            known = self.context.recall(key, Comparison)
            if known is None:
                self.context.progress.step(f"timing {candidate.text} against {self.baseline.text}")
                rounds = min(_SCREEN_ROUNDS, self.context.policy.rounds)
                session = self._session(f"screen/{candidate.text}", [candidate], rounds, budget_s)
                known = next(iter(stats.compare_all(session, family=len(verified))), None)
                if known is not None:
                    self.context.record(key, known)
            if known is not None:
                found[candidate.text] = known
            self.context.progress.advance()
        return found

    def finalists(
        self, verified: Sequence[Candidate], screened: dict[str, Comparison]
    ) -> list[Candidate]:
        """The quickest of the screen; the others' workers are freed."""
        order = sorted(
            (c for c in verified if c.text in screened), key=lambda c: -screened[c.text].ratio
        )[: self.context.policy.finalists]
        for candidate in verified:
            if candidate not in order:
                candidate.close()
        return order

    def final(self, finalists: Sequence[Candidate]) -> tuple[Comparison, ...]:
        """All finalists and the baseline in one interleaved session: what the gate goes by."""
        keys = {c.text: f"comparison/final/{c.text}" for c in finalists}
        known = [self.context.recall(key, Comparison) for key in keys.values()]
        if finalists and not any(known):
            policy = self.context.policy
            budget_s = policy.bench_s * (1 - _SCREEN_SHARE)
            self.context.progress.stage("final", None, budget_s)
            self.context.progress.step(f"interleaving {', '.join(c.text for c in finalists)}")
            session = self._session("final", finalists, policy.rounds, budget_s, self._on_round())
            for comparison in stats.compare_all(session):
                self.context.record(keys[comparison.recipe], comparison)
                self.context.progress.note(
                    f"{comparison.relation.lower():<12} {comparison.recipe}: {comparison.ratio:.3f}x "
                    f"[{comparison.low:.3f}, {comparison.high:.3f}], noise {comparison.noise:.3f}"
                )
        return tuple(
            c for key in keys.values() if (c := self.context.recall(key, Comparison)) is not None
        )

    def load(self, finalists: Sequence[Candidate], comparisons: Sequence[Comparison]) -> None:
        """Open-loop Poisson load at the policy's rates, on the baseline and each finalist."""
        policy = self.context.policy
        if policy.load_s == 0 or not comparisons:
            return
        baseline_s = comparisons[0].against_s
        seconds_a_call = {self.baseline.text: baseline_s} | {
            c.recipe: c.candidate_s for c in comparisons
        }
        tested = [self.baseline, *(c for c in finalists if c.text in seconds_a_call)]
        steps = len(tested) * len(policy.load_rates)
        self.context.progress.stage("load", steps, steps * policy.load_s)
        for candidate in tested:
            for share in policy.load_rates:
                key = f"load/{share:g}/{candidate.text}"
                if self.context.recall(key, LoadResult) is None:
                    rate = share * cost.capacity(baseline_s)
                    self.context.progress.step(f"{candidate.text} at {rate:.3g} requests/s")
                    result = self._load(candidate, rate)
                    if result is not None:
                        self.context.record(key, self._priced(result, candidate, seconds_a_call))
                self.context.progress.advance()

    def close(self) -> None:
        """Free the control's worker."""
        self.again.close()

    def __enter__(self) -> Timing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _session(
        self,
        name: str,
        candidates: Sequence[Candidate],
        rounds: int,
        budget_s: float,
        on_round: Callable[[int, int], None] | None = None,
    ) -> tuple[Any, ...]:
        plan = sample.Plan(
            session=f"{name}/{secrets.token_hex(3)}",  # never mixed with one that was cut short
            baseline=self.baseline.text,
            sizes=tuple(r.sizes for r in self._requests),
            rounds=rounds,
            budget_s=budget_s,
            seed=self.context.seed,
            parts=self._parts,
        )
        for candidate in (self.baseline, self.again, *candidates):
            self._season(candidate)
        runners = {self.baseline.text: self._runner(self.baseline)}
        runners[sample.BASELINE_AGAIN] = self._runner(self.again)
        runners |= {c.text: self._runner(c) for c in candidates}
        session = sample.interleave(runners, plan, MonotonicClock(), on_round)
        for samples in session.samples:
            self.context.record(f"samples/{name}/{samples.label}/{samples.recipe}", samples)
        for label, failure in session.failures.items():
            self.context.note(f"not timed    {label}: {getattr(failure, 'text', 'no answer')}")
        return session.samples

    def _season(self, candidate: Candidate) -> None:
        """Give a worker that has not verified the past of those that have.

        Nothing is made of a failure: verification has told of it, or the passes will.
        """
        candidate.call(
            "torchstone.bench.jobs:season",
            stage="season",
            limit_s=self.context.policy.call_s,
            case=largest(self.context.spec),
        )

    def _runner(self, candidate: Candidate) -> sample.Runner:
        requests = [msgspec.to_builtins(r) for r in self._requests]

        def run(part: slice) -> tuple[float, ...] | Failure:
            result: tuple[float, ...] | Failure = candidate.call(
                "torchstone.bench.jobs:round",
                stage="bench",
                limit_s=self.context.policy.call_s * len(requests[part]),
                requests=requests[part],
                seed=self.context.seed,
            )
            return result

        return run

    def _load(self, candidate: Candidate, rate: float) -> LoadResult | None:
        policy = self.context.policy
        self._season(candidate)
        served = candidate.call(
            "torchstone.bench.jobs:load",
            stage="load",
            limit_s=policy.load_s * 2 + policy.call_s * 2,
            rate=rate,
            seconds=policy.load_s,
            requests=[msgspec.to_builtins(r) for r in self.context.spec.traffic],
            seed=self.context.seed,
        )
        if not isinstance(served, open_load.Served):
            self.context.note(f"no load      {candidate.text}: {getattr(served, 'text', 'no answer')}")
            return None
        return open_load.summarize(candidate.text, rate, served, policy.slo_s or policy.p99_s)

    def _priced(
        self, result: LoadResult, candidate: Candidate, seconds_a_call: dict[str, float]
    ) -> LoadResult:
        mine, base = seconds_a_call[candidate.text], seconds_a_call[self.baseline.text]
        price = self.context.policy.dollars_per_hour
        builds = [self.context.recall(f"build/{c.text}", Build) for c in (candidate, self.baseline)]
        spent = [b.seconds + b.first_call_s for b in builds if b is not None]
        extra = spent[0] - spent[1] if len(spent) == len(builds) else None
        return msgspec.structs.replace(
            result,
            cost_per_million=None if price is None else cost.dollars_per_million(price, mine),
            break_even_calls=None if extra is None else cost.break_even_calls(extra, base - mine),
        )

    def _on_round(self) -> Callable[[int, int], None]:
        return lambda done, total: self.context.progress.advance()


def typical(traffic: Sequence[Arrival], count: int) -> tuple[Arrival, ...]:
    """``count`` requests that stand for the traffic: evenly spaced by size, so its mix is kept."""

    def volume(arrival: Arrival) -> float:
        product = 1.0
        for size in arrival.sizes.values():
            product *= size
        return product

    ordered = sorted(traffic, key=volume)
    count = max(_FEWEST_REQUESTS, count)
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def _first_look(context: Context, candidate: Candidate, requests: Sequence[Arrival]) -> float | None:
    """Seconds of the quickest of three passes; None where it does not answer."""
    seconds: list[float] = []
    for _ in range(3):
        result = candidate.call(
            "torchstone.bench.jobs:round",
            stage="first look",
            limit_s=context.policy.call_s * len(requests),
            requests=[msgspec.to_builtins(r) for r in requests],
            seed=context.seed,
        )
        if not isinstance(result, tuple):
            return None
        seconds.append(sum(result))
    return min(seconds)
