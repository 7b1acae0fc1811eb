"""Whole-model recipes, searched by the tuner's loop: their space, their order, how they are measured.

The candidates of a run are the valid configs of a :class:`~torchstone.tuner.space.Space` whose knobs are
the engine, its options and the number format. The loop is :func:`torchstone.tuner.driver.search`. What
earlier runs on this machine have found decides the order only: every run builds and judges anew.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import msgspec

from torchstone import stages
from torchstone.candidate import Candidate, Context
from torchstone.measure import device
from torchstone.recipe import ENGINES, Custom, Recipe, fallback
from torchstone.records import (
    Comparison,
    Crashed,
    NotTried,
    TensorSpec,
    TimedOut,
    Unsupported,
    Unverifiable,
    Verified,
    Wrong,
)
from torchstone.records.tuning import Config, Measurement, Status, TuningKey, Value
from torchstone.tuner.cache import Cache
from torchstone.tuner.driver import Budget, search
from torchstone.tuner.search.base import AnySearcher, History, Problem, Proposal, Seen, Stop
from torchstone.tuner.search.random import State, hearing
from torchstone.tuner.space import Boolean, Choice, Knob, Only, Space, key_of

__all__ = [
    "Memory",
    "Ordered",
    "Prior",
    "RecipeMeasurer",
    "config_of",
    "prior",
    "settle_all",
    "space_of",
]

_KERNEL = "recipes"
_MOST_LANES = 4
_CLEAR = 1.05
"""A speed-up or slow-down elsewhere that is smaller than this does not change the order."""
_AS_IS = "as is"
_JUDGED_BY = ("max_relative_error", "build_s", "call_s", "memory_bytes")
"""Fields of the policy that decide what becomes of a recipe, short of the gate."""

_STATUS: Mapping[type, Status] = {
    Verified: "timed",
    Wrong: "wrong",
    Unverifiable: "unverifiable",
    Crashed: "crashed",
    TimedOut: "timed_out",
    Unsupported: "invalid",
}


def space_of(recipes: Sequence[Recipe]) -> Space:
    """The space in which these recipes, and no others, are valid.

    An option that several engines have is one knob, so that a model can learn its effect across them.
    """
    listed = {key_of(config_of(recipe)) for recipe in recipes}
    targets = (r.engine.target for r in recipes if isinstance(r.engine, Custom))
    families = (r.rewrite.families for r in recipes if r.rewrite is not None)
    formats = (_numeric(r) for r in recipes if r.numeric is not None)

    def candidate(config: Config) -> bool:
        return key_of(config) in listed

    used = {(n, v) for r in recipes for n, v in _options(r.engine).items()}
    return Space(_knobs(tuple(targets), tuple(families), tuple(formats), used), valid=[candidate])


def config_of(recipe: Recipe) -> Config:
    """The recipe as a config: engine, rewrite, number format, engines' options; unused ones at rest."""
    given = _options(recipe.engine) | {"engine": _tag(recipe.engine)}
    if recipe.numeric is not None:
        given["numeric"] = _numeric(recipe)
    if recipe.rewrite is not None:
        given["rewrite"] = recipe.rewrite.families
    if recipe.graph is not None:
        given["graph"] = recipe.graph.mode
    return {n: given.get(n, _at_rest(knob)) for n, knob in _knobs().items()}


def _numeric(recipe: Recipe) -> str:
    assert recipe.numeric is not None
    (value,) = _options(recipe.numeric).values()
    return f"{_tag(recipe.numeric)}({value})"


def _knobs(
    targets: tuple[str, ...] = (),
    families: tuple[str, ...] = (),
    formats: tuple[str, ...] = (),
    used: Collection[tuple[str, Value]] = (),
) -> dict[str, Knob]:
    """A recipe's knobs; of what has many values, those that some recipe has."""
    knobs: dict[str, Knob] = {
        "engine": Choice(tuple(map(_tag, ENGINES))),
        "numeric": Choice(tuple(dict.fromkeys((_AS_IS, *formats)))),
        "rewrite": Choice(tuple(dict.fromkeys((_AS_IS, "all", *families)))),
        "graph": Choice((_AS_IS, "static")),
    }
    named = {name: kind for engine in ENGINES for name, kind in _fields(engine).items()}
    for name, kind in named.items():
        knob: Boolean | Choice = Boolean()
        if get_origin(kind) is Literal:
            first, *others = get_args(kind)
            knob = Choice((first, *(v for v in others if (name, v) in used)))
        elif kind is str:  # names that the user gives
            knob = Choice(tuple(dict.fromkeys(("", *targets))))
        knobs[name] = Only(knob, "engine", tuple(_tag(e) for e in ENGINES if name in _fields(e)))
    return knobs


def _tag(step: Any) -> str:
    return str(step.__struct_config__.tag)


def _fields(step: type) -> dict[str, Any]:
    return get_type_hints(step)


def _options(step: Any) -> dict[str, Value]:
    return msgspec.structs.asdict(step)


def _at_rest(knob: Knob) -> Value:
    return knob.values[0] if knob.default is None else knob.default


@dataclass(frozen=True)
class Prior:
    """What a recipe gave on earlier workloads of this machine; each counts once."""

    right: int = 0
    """On how many it was right, and timed."""
    failed: int = 0
    """On how many it was wrong, crashed, or could not be built."""
    speedup: float = 1.0
    """Geometric mean of its speed-ups over the baseline where it was right."""

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts: what was fast elsewhere, what nothing is known of, what was slow, what failed."""
        if self.failed > self.right:
            return 3, 0.0
        if self.speedup > _CLEAR:
            return 0, -self.speedup
        return (2, -self.speedup) if self.speedup < 1 / _CLEAR else (1, 0.0)

    def __str__(self) -> str:
        failed = self.failed > self.right
        count = self.failed if failed else self.right
        what = "failed" if failed else f"{self.speedup:.2f}x"
        return f"{what} on {count} earlier workload{'s' if count > 1 else ''}"


def prior(config: Config, histories: Sequence[History]) -> Prior:
    """What earlier workloads say of a config."""
    rows = [m for history in histories for m in history.measurements if m.config == config]
    speedups = [x for m in rows if m.status == "timed" and (x := m.facts.get("speedup", 0.0)) > 0]
    failed = sum(m.status not in ("timed", "dropped") for m in rows)
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else 1.0
    return Prior(right=len(speedups), failed=failed, speedup=mean)


@dataclass(frozen=True)
class OrderedState(State):
    """The configs in the order in which they are proposed."""

    queue: tuple[Config, ...] = ()


@dataclass(frozen=True)
class Ordered:
    """A searcher that tries what it is given, in that order, but what was fast elsewhere first, and
    what was slow or failed last.

    :param configs: what to try, the more promising first, as far as one knows without experience.
    :param lead: how many of them keep their place, whatever is known.
    """

    configs: tuple[Config, ...]
    lead: int = 0
    name: str = "ordered"

    def init(self, problem: Problem, seed: int) -> OrderedState:
        """The first state: the order is set."""
        led, others = self.configs[: self.lead], self.configs[self.lead :]
        ranked = sorted(others, key=lambda c: prior(c, problem.histories).rank)
        return OrderedState(problem, Seen(seed), queue=(*led, *ranked))

    def ask(self, state: OrderedState, count: int) -> tuple[tuple[Proposal, ...], OrderedState]:
        """The next in the order."""
        left = [c for c in state.queue if key_of(c) not in state.seen.keys]
        known = state.problem.histories
        made = tuple(
            Proposal(c, "order" if prior(c, known) == Prior() else "prior") for c in left[:count]
        )
        return made, replace(state, seen=state.seen.after(made))

    def tell(self, state: OrderedState, found: Sequence[Measurement]) -> OrderedState:
        """Only remembers."""
        return hearing(state, found)

    def done(self, state: OrderedState) -> Stop | None:
        """When all were proposed."""
        if any(key_of(c) not in state.seen.keys for c in state.queue):
            return None
        return Stop("EXHAUSTED", f"all {len(state.queue)} candidates were tried")


class Memory:
    """What runs on this machine have found of recipes: rows of the tuning cache, ``HOME/tuning``.

    :param recipes: the run's candidates.
    """

    def __init__(self, context: Context, recipes: Sequence[Recipe]) -> None:
        self.space = space_of(recipes)
        self.key = _key(context)
        self._context = context
        self._cache = Cache(context.store.path.parent.parent / "tuning")
        self._rows = {key_of(m.config): m for m in self._cache.rows(self.key)}
        near = self._cache.histories(self.key)
        own = [m for m in self._rows.values() if self.space.why_not(m.config) is None]
        # an implementation of the user's own is known by a name that means nothing in another workload
        others = [
            [m for m in rows if self.space.why_not(m.config) is None and m.config["engine"] != "custom"]
            for key, rows in near
            if (key.device, key.versions) == (self.key.device, self.key.versions)
        ]
        self.histories = tuple(History(tuple(rows)) for rows in (own, *others) if rows)
        """What earlier runs found of this run's candidates, one a workload."""
        for problem in self._cache.problems:
            context.note(f"tuning cache: {problem}")

    def keep(self, measurement: Measurement, *_: object) -> None:
        """Append a failure or a time, unless it is the last word already, as after a resume."""
        if measurement.status == "timed" and not measurement.seconds:
            return  # right, but that alone says nothing to go by
        known = self._rows.get(key_of(measurement.config))
        if known is None or msgspec.structs.replace(known, proposer=measurement.proposer) != measurement:
            self._cache.append(self.key, measurement)
            self._rows[key_of(measurement.config)] = measurement

    def screened(self, candidates: Sequence[Candidate], found: Mapping[str, Comparison]) -> None:
        """Keep the times of the screen: what the order of later runs goes by."""
        for candidate in candidates:
            screen = found.get(candidate.text)
            if screen is not None:
                facts = {"speedup": screen.ratio}
                measured = msgspec.structs.replace(
                    measurement_of(candidate), seconds=(screen.candidate_s,), text="", facts=facts
                )
                self.keep(measured)

    def explain(self, order: Sequence[Candidate]) -> None:
        """Tell the watcher what is not in its usual place, and why."""
        known = [(c.text, prior(config_of(c.recipe), self.histories)) for c in order]
        for said, rank in (("tried first", 0), ("tried late", 2), ("tried last", 3)):
            named = [(p.rank, text, p) for text, p in known if p.rank[0] == rank]
            if named:
                told = "; ".join(f"{text}, {p}" for _, text, p in sorted(named, key=lambda n: n[0]))
                self._context.note(f"{said:<12} {told}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.close()


def measurement_of(candidate: Candidate, by: str = "") -> Measurement:
    """What a settled candidate gave, as far as the search knows.

    One that is right has no seconds: nothing is timed while other candidates are built.
    """
    verdict, build = candidate.verdict, candidate.build
    text = getattr(verdict, "text", "")
    if isinstance(verdict, Verified):
        text = "right; it is timed once nothing else runs"
    elif isinstance(verdict, TimedOut):
        text = f"no answer within {verdict.limit_s:g} s ({verdict.stage})"
    return Measurement(
        config=config_of(candidate.recipe),
        status=_STATUS[type(verdict)],
        compile_s=0.0 if build is None else build.seconds + build.first_call_s,
        relative=getattr(verdict, "relative", None),
        text=text,
        proposer=by,
    )


class RecipeMeasurer:
    """Builds and judges candidates in parallel lanes; a :class:`~torchstone.tuner.driver.Measurer`.

    The next is begun only when the loop comes back for more, so that the loop's budget decides. What is
    under way when it does not, :meth:`late` waits for; after an error or Ctrl-C it is abandoned.
    """

    def __init__(
        self, context: Context, judge: stages.Judge, baseline: Candidate, others: Sequence[Candidate]
    ) -> None:
        self._context, self._judge, self._baseline = context, judge, baseline
        self._of = {key_of(config_of(c.recipe)): c for c in others}
        self._lanes = min(_MOST_LANES, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._lanes, thread_name_prefix="lane")
        self._running: dict[Future[None], Proposal] = {}
        self._started = time.monotonic()

    def now(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._started

    def candidate(self, config: Config) -> Candidate:
        """The candidate of a config."""
        return self._of[key_of(config)]

    def settle(self, candidate: Candidate) -> None:
        """Build and judge one."""
        stages.settle(self._context, self._judge, candidate, self._baseline)

    def measure(self, proposals: Sequence[Proposal], best_s: float | None) -> Iterator[Measurement]:
        """Settle them, in their order; each is given when its verdict is there."""
        del best_s  # nothing is timed here
        waiting = list(proposals)
        while waiting or self._running:
            while waiting and len(self._running) < self._lanes:
                future = self._pool.submit(self.settle, self.candidate(waiting[0].config))
                self._running[future] = waiting.pop(0)
            for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                future.result()
                proposal = self._running.pop(future)
                yield measurement_of(self.candidate(proposal.config), proposal.by)

    def late(self) -> tuple[Measurement, ...]:
        """What was under way when the loop had enough; waits for it."""
        proposals, self._running = self._running, {}
        for future in proposals:
            future.result()
        return tuple(measurement_of(self.candidate(p.config), p.by) for p in proposals.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # lanes must not go on, nor take their own end for a crash
            self._context.stopped.set()
            self._judge.close()
            for candidate in (self._baseline, *self._of.values()):
                candidate.close()
        self._pool.shutdown(cancel_futures=True)


def settle_all(
    context: Context,
    judge: stages.Judge,
    memory: Memory,
    baseline: Candidate,
    others: Sequence[Candidate],
) -> None:
    """A verdict for each: searched for until the policy's time is spent, the fallback always first."""
    context.progress.stage("build and verify", len(others), context.policy.search_s)
    settled = [c for c in others if c.known]
    memory.explain([c for c in others if c not in settled and c.recipe != fallback()])
    with RecipeMeasurer(context, judge, baseline, others) as measurer:
        for candidate in settled:  # of the run that is resumed: only what is missing is done
            measurer.settle(candidate)
        tried = [measurement_of(c) for c in settled if not isinstance(c.verdict, NotTried)]
        untried = [c for c in settled if isinstance(c.verdict, NotTried)]
        found = search(
            # asked for all at once, so that no lane waits for the slowest of a batch
            Problem(memory.space, histories=memory.histories, lanes=max(1, len(others))),
            ordered([c for c in others if c not in untried]),
            measurer,
            Budget(seconds=context.policy.search_s),
            seed=context.seed,
            known=tried,
            watch=memory.keep,
        )
        for measurement in (*found.measurements, *measurer.late()):
            memory.keep(measurement)
    spent = f"the search time of {context.policy.search_s:g} s was spent before its turn"
    for candidate in [c for c in others if c.verdict is None]:
        candidate.verdict = NotTried(text=spent)
        stages.record_verdict(context, candidate, ())


def ordered(candidates: Sequence[Candidate]) -> AnySearcher:
    """The searcher of a run: the order given, as experience corrects it; the fallback stays first."""
    configs = tuple(config_of(c.recipe) for c in candidates)
    return Ordered(configs, lead=sum(c.recipe == fallback() for c in candidates[:1]))


def _key(context: Context) -> TuningKey:
    header, spec = context.store.header, context.spec
    here, (_, versions) = header.environment, device.here()
    grammar = [[name, list(knob.values)] for name, knob in _knobs().items()]
    return TuningKey(
        kernel=_KERNEL,
        # another version of an engine may do what this one cannot: its recipes are not the same
        space=_digest([grammar, here.packages]),
        source=spec.digest,
        sizes=spec.example_sizes,
        signature=tuple(
            f"{i.dtype} {list(i.shape)}" if isinstance(i, TensorSpec) else i.kind for i in spec.inputs
        ),
        device=here.devices[0] if here.devices else f"{here.cpu} x{here.threads}",
        versions=versions,
        policy=_digest([header.policy.get(name) for name in _JUDGED_BY]),
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
