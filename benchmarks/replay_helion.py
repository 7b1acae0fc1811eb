"""Helion's own search on recorded tables: what it measures, in which order, at what simulated second.

    python benchmarks/replay_helion.py TABLE.json.gz ... --seeds 20 --out found.json

Runs where Helion is installed (written against 1.5.1), on any machine: the package's own search classes
search, with the hyperparameters, stop rules and final phases of their default effort. Only the provider
of measurements is replaced, by one that answers from a table. Other environments run this file with that
interpreter, or import it for :class:`Costs` and :class:`Found`: importing it does not import Helion.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import inspect
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchstone.errors import InputError
from torchstone.records.tuning import Value
from torchstone.tuner import replay
from torchstone.tuner.replay import Row, Table


@dataclass(frozen=True)
class Costs:
    """What measuring costs, in simulated seconds; the same for every search that is compared."""

    lanes: int = 8
    """Configs that can be compiled at once."""
    flush_s: float = 1e-4
    """Emptying the device's last-level cache, before a timed call."""
    overhead_s: float = 2e-3
    """Proving and launching, a config, the first time that it is timed."""

    def calls(self, seconds: float, timed: int, untimed: int = 0) -> float:
        """Seconds that calls of ``seconds`` each take; only the timed ones follow a flush."""
        return timed * (seconds + self.flush_s) + untimed * seconds

    def makespan(self, compile_s: Sequence[float]) -> float:
        """Seconds until all are compiled, each on the lane that is free first."""
        lanes = [0.0] * self.lanes
        for seconds in compile_s:
            heapq.heapreplace(lanes, lanes[0] + seconds)
        return max(lanes)


class Step(NamedTuple):
    """One timing of one config."""

    values: tuple[Value, ...]
    """The config, in the order of the table's knobs."""
    seconds: float | None
    """What Helion was told; None where it failed."""
    at_s: float
    """Simulated seconds from the start at which it was known."""
    again: bool
    """Whether it had been timed before."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One search."""

    table: str
    """The table's name."""
    seed: int
    setup: Setup
    steps: list[Step]
    """In order of measuring."""
    chosen: tuple[Value, ...] | None
    """The config that Helion returned; None where it found none that works."""
    end_s: float
    """Simulated seconds at which it returned, its own computing left out."""
    own_s: float
    """Seconds that a core was busy with its own computing: forests, neighbours."""
    refused: int
    """Different configs that it asked for and the table does not have; they cost nothing."""
    version: str = ""
    """Helion's."""

    @property
    def asked(self) -> int:
        """Different configs measured, failed ones included."""
        return sum(not step.again for step in self.steps)

    def incumbents(self) -> Iterator[tuple[int, float, tuple[Value, ...]]]:
        """After each step: configs measured so far, simulated seconds, the best by its latest timing."""
        latest: dict[tuple[Value, ...], float] = {}
        asked = 0
        for step in self.steps:
            asked += not step.again
            if step.seconds is not None:
                latest[step.values] = step.seconds
            if latest:
                yield asked, step.at_s, min(latest, key=latest.__getitem__)


class Setup(msgspec.Struct, frozen=True):
    """Which of Helion's searches, and what it is given."""

    algorithm: str = "LFBOTreeSearch"
    """Name of its class; the default is Helion's own default."""
    ordered: bool = False
    """Whether irregular numbers are an integer knob, of their place in order, to step along; otherwise
    they are a choice without order, as its documentation has it: it then looks around more."""
    roles: bool = False
    """Whether powers of two called ``block...`` and ``num_warps`` are Helion's block sizes and warps,
    which it changes more often than other knobs; meant for kernels in Triton."""
    screened: bool = False
    """Whether Helion is told which configs are valid, through a hook that only its own backends have: it
    then draws valid ones in their stead. A user of Helion has no such predicate."""


def search(table: Table, seed: int, *, clock: Costs, setup: Setup) -> Found:
    """One search of a table by Helion; the same seed gives the same steps.

    :raises InputError: where the setup names no search of Helion.
    """
    from helion import exc
    from joblib import parallel_config

    answers = _Answers(table, seed, clock)
    tuner = _tuner(answers, seed, setup)
    start = time.process_time()
    try:
        # threads add a forest's votes in any order: the last bit, and with it a tie, would vary
        with parallel_config(backend="sequential"):
            chosen = answers.values(tuner.autotune())
    except exc.NoConfigFound:
        chosen = None
    return Found(
        table=table.name,
        seed=seed,
        setup=setup,
        steps=answers.steps,
        chosen=chosen,
        end_s=answers.now,
        own_s=time.process_time() - start - answers.answering_s,
        refused=len(answers.refused),
        version=metadata.version("helion"),
    )


class _Answers:
    """What a table answers, in simulated seconds."""

    def __init__(self, table: Table, seed: int, clock: Costs) -> None:
        self.table, self.clock = table, clock
        self.rows = {row.values: row for row in table.rows}
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.answering_s = 0.0
        self.steps: list[Step] = []
        self.refused: set[tuple[Value, ...]] = set()
        self.done: set[tuple[Value, ...]] = set()
        self._kinds = {name: _kind(values) for name, values in table.knobs.items()}

    def values(self, config: Any) -> tuple[Value, ...]:
        """A config of Helion's as the table has it."""
        return tuple(self._value(config, name) for name in self.table.knobs)

    def _value(self, config: Any, name: str) -> Value:
        values = self.table.knobs[name]
        match self._kinds[name]:
            case "fixed":
                return values[0]
            case "irregular" | "choice":  # Helion has their place among the values
                place: int = config[name]
                return values[place]
            case _:
                value: Value = config[name]
                return value

    def row(self, config: Any) -> Row | None:
        """Its row; None where the table has none."""
        values = self.values(config)
        if values not in self.rows:
            self.refused.add(values)
        return self.rows.get(values)

    def compile(self, rows: Sequence[Row], limit_s: float) -> None:
        """Compile a batch; Helion waits for all of it before it times any."""
        new = [min(row.compile_s, limit_s) for row in rows if row.values not in self.done]
        self.now += self.clock.makespan(new)

    def first(self, row: Row, limit_s: float) -> float | None:
        """Time a config just compiled as Helion does: 50 ms of calls, after one that proves it."""
        if not row.seconds or row.compile_s > limit_s:
            return self._told(row, None)
        self.now += self.clock.overhead_s + statistics.median(row.seconds)
        return self._told(row, self.window(row, warmup_ms=1, rep_ms=50))

    def again(self, row: Row, warmup_ms: float, rep_ms: float) -> float:
        """Time a config that works once more."""
        seconds = self.window(row, warmup_ms, rep_ms)
        if rep_ms > 1:  # the finals begin with a window of 1 ms that is all warmup: nobody sees its time
            self._told(row, seconds)
        return seconds

    def window(self, row: Row, warmup_ms: float, rep_ms: float) -> float:
        """The median of a window of calls; how many, Helion's ``do_bench`` estimates by five."""
        usual = statistics.median(row.seconds)
        estimate = usual + self.clock.flush_s
        repeat = max(1, int(rep_ms / 1e3 / estimate))
        warmup = max(1, int(warmup_ms / 1e3 / estimate))
        self.now += self.clock.calls(usual, timed=5 + repeat, untimed=1 + warmup)
        return float(np.median(self.rng.choice(row.seconds, repeat)))

    def _told(self, row: Row, seconds: float | None) -> float | None:
        self.steps.append(Step(row.values, seconds, self.now, row.values in self.done))
        self.done.add(row.values)
        return seconds

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Time spent here is not Helion's."""
        start = time.process_time()
        yield
        self.answering_s += time.process_time() - start


def _tuner(answers: _Answers, seed: int, setup: Setup) -> Any:
    """Helion's search, built as its own ``default_autotuner_fn`` builds it."""
    import torch
    from helion._compiler.backend import TritonBackend
    from helion.autotuner import search_algorithms
    from helion.autotuner.effort_profile import get_effort_profile
    from helion.autotuner.external import UserConfigSpec, _ExternalKernelAdapter

    class Screening(TritonBackend):
        def autotune_config_is_viable(self, config_spec: Any, config: Any) -> bool:
            return answers.row(config) is not None

    if setup.algorithm not in search_algorithms:
        raise InputError(f"Helion has no search {setup.algorithm!r}", hint=", ".join(search_algorithms))
    spec = UserConfigSpec(
        backend=Screening() if setup.screened else TritonBackend(),
        user_defined_tunables=_fragments(answers.table, setup),
    )
    kernel = _ExternalKernelAdapter(
        spec,
        answers.row,
        (),
        device=torch.device("cpu"),
        autotune_effort="full",
        autotune_random_seed=seed,
        autotune_log_level=0,
        autotune_progress_bar=False,
    )
    made = search_algorithms[setup.algorithm]
    profile = get_effort_profile(kernel.settings.autotune_effort)
    known = inspect.signature(made.__init__).parameters
    given = made.get_kwargs_from_profile(profile, kernel.settings)
    tuner = made(kernel, (), **{k: v for k, v in given.items() if k in known})
    tuner._benchmark_provider_cls = functools.partial(_provider(), answers=answers)
    return tuner


def _kind(values: Sequence[Value]) -> str:
    """Which knob of Helion's has exactly these values."""
    numbers: Any = values
    if len(values) == 1:
        return "fixed"
    if all(type(v) is bool for v in values):
        return "boolean"
    if not all(type(v) in (int, float) for v in values):
        return "choice"
    if not all(type(v) is int for v in values):
        return "irregular"
    if numbers[0] > 0 and _doubling(numbers):
        return "power"
    return "integer" if list(numbers) == list(range(numbers[0], numbers[-1] + 1)) else "irregular"


def _doubling(numbers: Sequence[int]) -> bool:
    return not numbers[0] & (numbers[0] - 1) and all(b == 2 * a for a, b in itertools.pairwise(numbers))


def _fragments(table: Table, setup: Setup) -> dict[str, Any]:
    """Helion's knobs: those of the table that have a choice, at the default, or else the first row."""
    from helion.autotuner import BooleanFragment, IntegerFragment

    default = table.default or table.config(table.rows[0])
    made: dict[str, Any] = {}
    for name, values in table.knobs.items():
        start: Any = default[name]
        ends: Any = (values[0], values[-1])
        match _kind(values):
            case "fixed":
                pass
            case "boolean":  # Helion's own starts at False
                made[name] = _choice((True, False)) if start else BooleanFragment()
            case "power":
                made[name] = _power(name, setup)(*ends, start)
            case "integer":
                made[name] = IntegerFragment(*ends, start)
            case "irregular" if setup.ordered:
                made[name] = IntegerFragment(0, len(values) - 1, values.index(start))
            case _:
                at = values.index(start)
                made[name] = _choice((at, *(p for p in range(len(values)) if p != at)))
    return made


def _power(name: str, setup: Setup) -> Any:
    from helion.autotuner.config_fragment import BlockSizeFragment, NumWarpsFragment, PowerOfTwoFragment

    if setup.roles and name == "num_warps":
        return NumWarpsFragment
    return BlockSizeFragment if setup.roles and name.lower().startswith("block") else PowerOfTwoFragment


def _choice(values: tuple[Any, ...]) -> Any:
    """A choice of Helion's, whose default is its first."""
    from helion.autotuner import EnumFragment

    return EnumFragment(values)


@functools.cache
def _provider() -> type:
    """The class in place of Helion's provider of measurements, which would use a device."""
    from helion.autotuner.benchmark_provider import BenchmarkResult, LocalBenchmarkProvider

    class Replaying(LocalBenchmarkProvider):
        """Times in a worker process as far as the search can tell, which is Helion's default."""

        def __init__(self, *, answers: _Answers, **given: Any) -> None:
            # not the parent's: it would compile and run the default config
            self.__dict__.update(given)
            self.answers = answers
            self.mutated_arg_indices = ()
            self._benchmark_worker = None
            self._effective_source_repairs: dict[Any, Any] = {}
            self._no_viable_config_error = None

        def setup(self) -> None:
            pass

        def cleanup(self) -> None:
            pass

        def benchmark(self, configs: list[Any], **_: Any) -> list[Any]:
            limit_s = float(self.settings.autotune_compile_timeout)
            with self.answers.answering():
                rows = [self.answers.row(config) for config in configs]
                self.answers.compile([row for row in rows if row is not None], limit_s)
                return [self._result(c, r, limit_s) for c, r in zip(configs, rows, strict=True)]

        def _result(self, config: Any, row: Row | None, limit_s: float) -> Any:
            seconds = None if row is None else self.answers.first(row, limit_s)
            return BenchmarkResult(
                config=config,
                fn=_Compiled(row),
                perf=float("inf") if seconds is None else seconds * 1e3,
                status="error" if seconds is None else "ok",
                compile_time=None if row is None else min(row.compile_s, limit_s),
                completed_at=time.perf_counter(),
            )

        def benchmark_isolated(self, fns: list[Any], *, warmup: int, rep: int, **_: Any) -> list[float]:
            with self.answers.answering():
                return [self.answers.again(fn.row, warmup, rep) * 1e3 for fn in fns]

    return Replaying


class _Compiled:
    """What Helion holds as a compiled config; it passes it on to be timed, and never calls it itself."""

    def __init__(self, row: Row | None) -> None:
        self.row = row

    def __call__(self, *_: Any) -> None:
        raise RuntimeError("a recorded config cannot be called")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", help="as replay.write writes them")
    parser.add_argument("--seeds", type=int, default=20, help="searches of each table, seeds from 0 on")
    parser.add_argument("--algorithm", default=Setup().algorithm)
    parser.add_argument("--ordered", action="store_true", help="irregular numbers by place in order")
    parser.add_argument("--roles", action="store_true", help="block... and num_warps as Helion's own")
    parser.add_argument("--screened", action="store_true", help="tell Helion which configs are valid")
    parser.add_argument("--lanes", type=int, default=Costs.lanes, help="compile lanes")
    parser.add_argument("--flush-s", type=float, default=Costs.flush_s)
    parser.add_argument("--overhead-s", type=float, default=Costs.overhead_s)
    parser.add_argument("--jobs", type=int, default=1, help="searches at once")
    parser.add_argument("--out", type=Path, help="write every step to this file")
    options = parser.parse_args()
    clock = Costs(options.lanes, options.flush_s, options.overhead_s)
    setup = Setup(options.algorithm, options.ordered, options.roles, options.screened)
    work = [(path, seed) for path in options.tables for seed in range(options.seeds)]
    one = functools.partial(_one, clock=clock, setup=setup)
    found: list[Found] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for made in pool.map(one, work) if options.jobs > 1 else map(one, work):
            found.append(made)
            print(_line(made, replay.read(work[len(found) - 1][0])), file=sys.stderr, flush=True)
    if options.out:
        options.out.write_bytes(msgspec.json.encode(found))


def _one(work: tuple[Path, int], *, clock: Costs, setup: Setup) -> Found:
    path, seed = work
    return search(replay.read(path), seed, clock=clock, setup=setup)


def _line(found: Found, table: Table, share: float = 0.02) -> str:
    worth = {row.values: row.time for row in table.rows}
    best = table.best.time
    assert best is not None
    near = {v for v, t in worth.items() if t is not None and t <= best * (1 + share)}
    at = next(
        (f"{asked} configs, {s:.1f} s" for asked, s, v in found.incumbents() if v in near), "never"
    )
    gap = "none" if found.chosen is None else f"{worth[found.chosen] / best - 1:+.2%}"  # type: ignore[operator]
    return (
        f"{found.table} {found.seed}: within {share:.0%} at {at}; chose {gap}; {found.asked} configs, "
        f"{found.refused} refused, {len(found.steps)} timings, {found.end_s:.1f} + {found.own_s:.1f} s"
    )


if __name__ == "__main__":
    main()
