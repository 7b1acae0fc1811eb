"""From a tunable to a proven config: search, finals, decision; what ``torchstone.tune`` calls."""

from __future__ import annotations

import datetime
import hashlib
import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from torchstone import settings, store
from torchstone.bench import stats
from torchstone.errors import InputError
from torchstone.measure import device
from torchstone.records import Comparison, Samples
from torchstone.records.tuning import (
    Config,
    Final,
    Finals,
    Measurement,
    MeasurePolicy,
    Tuning,
    TuningKey,
)
from torchstone.tuner.cache import Cache
from torchstone.tuner.driver import Budget, Found, Watcher, search
from torchstone.tuner.search import searcher_of
from torchstone.tuner.search.base import AnySearcher, History, Problem
from torchstone.tuner.space import Space, key_of
from torchstone.tuner.tunable import Tunable

__all__ = ["Request", "Tuned", "execute", "tune"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """How to search."""

    budget: Budget
    searcher: AnySearcher
    policy: MeasurePolicy = MeasurePolicy()  # noqa: RUF009  frozen
    seed: int = 0
    home: Path = Path(".torchstone")
    lanes: int | None = None
    """Builds at once; from the machine's cores where not given."""
    fresh: bool = False
    """Measure anew what the cache knows of this very key."""
    siblings: bool = True
    """Learn from rows of other sizes, devices and versions."""
    origin: str = ""
    """Where the tunable comes from, as ``torchstone tune`` takes it; for the evidence."""


class Display(Protocol):
    """Shows a search while it runs."""

    def begin(self, default: Config, floor_s: float | None, known: Sequence[Measurement]) -> None:
        """The search begins: the default config, the roofline, what the cache knows of this very key."""

    def __call__(self, measurement: Measurement, seconds: float, gain_left: float | None, /) -> None:
        """A config was measured: a :data:`~torchstone.tuner.driver.Watcher`."""

    def stage(self, text: str) -> None:
        """Something other than the search begins."""


@dataclass(frozen=True)
class Tuned:
    """What tuning came to."""

    record: Tuning
    """The evidence."""
    path: Path
    """Where it is kept."""
    build: Callable[[Config], Callable[..., Any]]
    """The tunable's."""

    @property
    def config(self) -> Config:
        """What to use: proven, and faster than the default; or the default."""
        return self.record.config

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The function built from :attr:`config`, in this process."""
        return self.build(self.config)

    def __call__(self, *inputs: Any) -> Any:
        """Call it."""
        return self.call(*inputs)


def tune(  # noqa: PLR0913  the public door: its options are its parameters
    build: Callable[[Config], Callable[..., Any]] | Tunable,
    space: Space | None = None,
    inputs: Callable[..., tuple[Any, ...]] | Sequence[Any] | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    budget: float | Budget = 120.0,
    searcher: str | AnySearcher = "guided",
    seed: int = 0,
    home: Path | str | None = None,
    watch: Watcher | None = None,
    **details: Any,
) -> Tuned:
    """Find the fastest config that is proved right.

    :param build: gives a function of the inputs for a config; or a whole :class:`Tunable`.
    :param space: the configs.
    :param inputs: the arguments, or ``inputs(seed, **sizes)`` that makes them.
    :param reference: the same function in plain PyTorch; it is run in float64 too. The default config's
        own outputs where not given: then a config is held to compute what the default does, no more.
    :param budget: seconds, or a :class:`Budget`.
    :param watch: see :data:`~torchstone.tuner.driver.Watcher`.
    :param searcher: its name, see :data:`torchstone.tuner.search.SEARCHERS`, or one.
    :param details: further fields of :class:`Tunable`: ``name``, ``sizes``, ``odd``, ``work``, ...
    :returns: what to use, with the evidence. Where nothing faster is proved, that is the default config.
    :raises InputError: where the space, the inputs or the reference contradict each other.
    """
    if isinstance(build, Tunable):
        tunable = replace(build, **details)
    elif space is None or inputs is None:
        raise InputError(
            "tune needs a space and inputs", hint="tune(build, space, inputs, reference=...)"
        )
    else:
        tunable = _tunable(build, space, inputs, reference, details)
    request = Request(
        budget=budget if isinstance(budget, Budget) else Budget(seconds=budget),
        searcher=searcher_of(searcher) if isinstance(searcher, str) else searcher,
        seed=seed,
        home=Path(home) if home is not None else settings.load().home,
    )
    return execute(tunable, request, watch)


def execute(
    tunable: Tunable, request: Request, watch: Watcher | None = None, display: Display | None = None
) -> Tuned:
    """Search, prove, decide; every measurement is in the cache the moment that it is known."""
    from torchstone.measure.live import LiveMeasurer

    started = datetime.datetime.now(datetime.UTC)
    began = time.monotonic()
    name = f"{store.slug(tunable.name)}-{started:%Y%m%d-%H%M%S}-{os.urandom(3).hex()}"
    path = request.home / "tunings" / name
    with (
        Cache(request.home / "tuning") as cache,
        LiveMeasurer(tunable, request.policy, path / "work", lanes=request.lanes) as measurer,
    ):
        facts = measurer.describe()
        space = tunable.space
        if tunable.limits is not None:
            space = space.restricted(device.fitting(tunable.limits, facts.device))
        key = _key(tunable, request, facts.signature)
        siblings = _histories(tunable, cache, key, facts.floor) if request.siblings else ()
        floor_s = facts.floor(tunable, tunable.sizes)
        rows = () if request.fresh else cache.rows(key)
        known = [m for m in rows if space.why_not(m.config) is None]
        if display is not None:
            display.begin(space.default(), floor_s, known)

        def keep(measurement: Measurement, seconds: float, gain: float | None) -> None:
            cache.append(key, measurement)
            for told in (watch, display):
                if told is not None:
                    told(measurement, seconds, gain)

        features = {**{n: float(s) for n, s in tunable.sizes.items()}, **facts.device}
        problem = Problem(space, features, floor_s, siblings, max(8, measurer.lanes), tunable.name)
        found = search(
            problem,
            request.searcher,
            measurer,
            request.budget,
            seed=request.seed,
            known=known,
            watch=keep,
        )
        if display is not None:
            display.stage("proving the best on inputs held out, and timing them side by side")
        finals = _finals(measurer, space.default(), found, request, cache, key)
    record = Tuning(
        key=key,
        started_at=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
        siblings=sum(len(h.measurements) for h in siblings),
        floor_s=floor_s,
        finals=finals,
        problems=tuple(cache.problems),
        **_asked(request),
        **_came_to(found),
        **_decision(finals, space.default()),
    )
    _write(record, path)
    _keep(tunable, record, request.home)
    return Tuned(record, path, tunable.build)


def _keep(tunable: Tunable, record: Tuning, home: Path) -> None:
    """An operator of ours launches with what was promoted from now on."""
    kept = getattr(tunable.build, "keep", None)
    if kept is not None and record.decision == "PROMOTE":
        kept(record.config, home)


def _asked(request: Request) -> dict[str, Any]:
    """What the record says of the request."""
    return {
        "searcher": repr(request.searcher),
        "seed": request.seed,
        "budget_s": request.budget.seconds,
        "budget_measurements": request.budget.measurements,
        "origin": request.origin,
        "siblings_allowed": request.siblings,
    }


def _came_to(found: Found) -> dict[str, Any]:
    """What the record says of the search."""
    return {
        "measurements": found.measurements,
        "known": found.known,
        "stop": found.stop.code,
        "stop_text": found.stop.text,
        "regret": found.stop.regret,
    }


def _finals(  # noqa: PLR0913
    measurer: Any, default: Config, found: Found, request: Request, cache: Cache, key: TuningKey
) -> Finals:
    """The best few beside the default; where all of them fail on what was held out, the next few."""
    right = sorted((m for m in found.measurements if m.time is not None), key=lambda m: m.time or 0.0)
    queue = [m.config for m in right if m.config != default]
    entries: tuple[Final, ...] = ()
    while True:
        few, queue = queue[: request.policy.finalists], queue[request.policy.finalists :]
        finals: Finals = measurer.finals(few, default, request.seed)
        for entry in finals.entries:
            if entry.label == "finalist" and entry.status not in ("timed", "dropped"):
                refuted = Measurement(config=entry.config, status=entry.status, text=entry.text)
                cache.append(key, refuted)
        entries = (*(e for e in entries if e.label == "finalist"), *finals.entries)
        if not queue or any(e.label == "finalist" and e.status == "timed" for e in finals.entries):
            return Finals(entries=entries, cases=finals.cases)


def _decision(finals: Finals, default: Config) -> dict[str, Any]:
    """Which config to use, and why. Pure."""
    right = [e for e in finals.entries if e.status == "timed" and e.label != "control"]
    base = next((e for e in right if e.label == "default"), None)
    finalists = [e for e in right if e.label == "finalist"]
    if base is None:
        best = min(finalists, key=lambda e: sorted(e.seconds)[len(e.seconds) // 2], default=None)
        why = next((f"{e.status}: {e.text}" for e in finals.entries if e.label == "default"), "not run")
        text = f"the default config is {why}; "
        text += (
            "no config is proved"
            if best is None
            else "the quickest proven one has nothing to be compared with"
        )
        config = default if best is None else best.config
        return {"decision": "HOLD", "config": config, "text": text, "comparisons": ()}
    compared = _compared(finals, base, finalists)
    faster = [c for c in compared if c.relation == "FASTER"]
    if not faster:
        text = "no config is proved to be both right and faster than the default"
        return {"decision": "KEEP_BASELINE", "config": default, "text": text, "comparisons": compared}
    best_of = max(faster, key=lambda c: c.ratio)
    config = next(e.config for e in finalists if key_of(e.config) == best_of.recipe)
    text = f"{best_of.ratio:.2f}x [{best_of.low:.2f}, {best_of.high:.2f}] over the default config"
    return {"decision": "PROMOTE", "config": config, "text": text, "comparisons": compared}


def _compared(finals: Finals, base: Final, finalists: list[Final]) -> tuple[Comparison, ...]:
    control = next((e for e in finals.entries if e.label == "control" and e.status == "timed"), None)
    twin = next((e for e in finalists if control is not None and e.config == control.config), None)
    noise = (
        None if control is None or twin is None else stats.noise_of(_samples(twin), _samples(control))
    )
    confidence = 1 - (1 - stats.CONFIDENCE) / max(1, len(finalists))
    return tuple(stats.compare(_samples(e), _samples(base), noise, confidence) for e in finalists)


def _samples(entry: Final) -> Samples:
    return Samples(
        session="finals",
        recipe=key_of(entry.config),
        label={"default": "baseline", "control": "baseline-again"}.get(entry.label, "candidate"),
        rounds=tuple((s,) for s in entry.seconds),
        order=(),
        sizes=({},),
        warmup=(),
        steady=True,
    )


def _key(tunable: Tunable, request: Request, signature: tuple[str, ...]) -> TuningKey:
    name, versions = device.here()
    knobs = [[n, list(k.values)] for n, k in tunable.space.knobs.items()]
    return TuningKey(
        kernel=tunable.name,
        space=_digest(knobs),
        source=source_of(tunable.build),
        sizes=dict(tunable.sizes),
        signature=signature,
        device=name,
        versions=versions,
        policy=_digest([request.policy, tunable.numerics.value, tunable.max_relative_error]),
    )


def source_of(function: Any, depth: int = 3) -> str:
    """Digest of what a function is made of: its source, and that of what it refers to.

    A Triton kernel says so itself, its own callees included (``JITFunction.cache_key``).
    """
    known = getattr(function, "cache_key", None)
    if isinstance(known, str):
        return known
    try:
        source = inspect.getsource(function)
        inner = inspect.getclosurevars(function)
    except (OSError, TypeError):
        return _digest(repr(type(function)))
    parts = [source]
    if depth:
        for name, value in sorted({**inner.globals, **inner.nonlocals}.items()):
            if inspect.isfunction(value) or hasattr(value, "cache_key"):
                parts.append(f"{name} {source_of(value, depth - 1)}")
    return _digest(parts)


def _histories(
    tunable: Tunable, cache: Cache, key: TuningKey, floor: Callable[..., float | None]
) -> tuple[History, ...]:
    found = []
    for near, rows in cache.histories(key):
        valid = tuple(m for m in rows if tunable.space.why_not(m.config) is None)
        same = near.device == key.device
        floor_s = floor(tunable, near.sizes) if same else None
        found.append(History(valid, {n: float(s) for n, s in near.sizes.items()}, floor_s))
    return tuple(found)


def _tunable(
    build: Callable[[Config], Callable[..., Any]],
    space: Space,
    inputs: Callable[..., tuple[Any, ...]] | Sequence[Any],
    reference: Callable[..., Any] | None,
    details: dict[str, Any],
) -> Tunable:
    details.setdefault("name", getattr(build, "__name__", "kernel"))
    make = inputs if callable(inputs) else _Shuffled(tuple(inputs))
    return Tunable(build=build, space=space, inputs=make, reference=reference, **details)


@dataclass(frozen=True)
class _Shuffled:
    """Given inputs; for any seed but 0 with each tensor's elements in another order."""

    inputs: tuple[Any, ...]

    def __call__(self, seed: int) -> tuple[Any, ...]:
        import torch

        if seed == 0:
            return self.inputs
        generator = torch.Generator().manual_seed(seed)

        def shuffled(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            order = torch.randperm(value.numel(), generator=generator).to(value.device)
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
            return made.copy_(value.flatten()[order].view(value.shape))

        return tuple(shuffled(value) for value in self.inputs)


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def _write(record: Tuning, path: Path) -> None:
    from torchstone.report.html import tuning as page

    path.mkdir(parents=True, exist_ok=True)
    (path / "tuning.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    (path / "report.html").write_text(page.render(record), encoding="utf-8")
