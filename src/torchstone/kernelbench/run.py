"""A run over the suite: problems are compiled ahead by many processes, and timed by one.

On a GPU the two overlap: while one problem is proved and timed, others compile, and stand still whenever
samples are taken (:mod:`~torchstone.kernelbench.gate`). On a CPU nothing compiles while anything is
timed. A result is kept the moment that it is known, so a run that is killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec

from torchstone import compat, env
from torchstone.errors import EnvironmentLacksError, InputError, StoreError
from torchstone.kernelbench import gate, summary
from torchstone.kernelbench.columns import BASELINE, Column
from torchstone.kernelbench.jobs import Built, Described, Line
from torchstone.kernelbench.load import TOLERANCE, Setup
from torchstone.kernelbench.ours import CONTRACTS, Candidate
from torchstone.kernelbench.policy import Ahead, Policy
from torchstone.kernelbench.process import Failed, Process, Room, told
from torchstone.kernelbench.results import Asked, Machine, Results
from torchstone.kernelbench.study import EAGER, Study
from torchstone.kernelbench.suite import Problem, Selection, find
from torchstone.records import Crashed, Environment
from torchstone.records.kernelbench import BenchProblem, BenchRun
from torchstone.store import exclusive, write_durably
from torchstone.worker import Limits

__all__ = ["Request", "Watch", "execute", "gather"]

_TIMES_INPUTS = 4  # inputs, a copy of them, a CUDA graph's, and outputs of about their size
_CONTEXT_BYTES = 2**30  # of a process on a device, its libraries' workspaces included
_COMPILING_SHARE = 0.25  # of a device's memory; the rest is for what proves in float64 and times
_SPARED = 3  # cores for what is timed, and for us
_MEMORY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run."""

    path: Path
    """A checkout of the suite."""
    out: Path
    """Folder of the results; one that has some already is gone on with."""
    home: Path
    """Where the machine's lock for timing is."""
    selection: Selection = field(default_factory=Selection)
    """Which problems."""
    setup: Setup
    """Where and in what they run."""
    line: Line = field(default_factory=Line)
    """Columns and candidates."""
    columns: tuple[str, ...] = ()
    """Names of the columns to take beside eager and ``torch.compile``; all if empty, those two for
    ``("none",)``."""
    jobs: int | None = None
    """Processes that compile; by default all cores but three on a GPU, one on a CPU."""
    threads: int | None = None
    """Intra-op threads of the process that times."""
    policy: Policy = field(default_factory=Policy)
    """Limits and numbers of samples."""
    command: str = ""
    """As it was typed, for the record."""


Watch = Callable[[BenchProblem, int, int, float], None]
"""Told of each result, how many are done, of how many, and the seconds so far."""


def execute(request: Request, watch: Watch | None = None) -> BenchRun:
    """Run what is asked for and is not known yet; write ``results.json`` into the folder.

    :raises InputError: where there is no suite, or nothing is left to choose.
    :raises StoreError: where the folder belongs to another question, or is in use.
    :raises EnvironmentLacksError: where the device is not there.
    """
    problems = request.selection.of(find(request.path))
    line = _line(request)
    here = env.environment(request.threads)
    cuda = request.setup.device.startswith("cuda")
    if cuda and not here.devices:
        raise EnvironmentLacksError("there is no CUDA device", hint="--device cpu")
    results = Results(request.out, _asked(request, line, here))
    with results.writing(request.selection.shard), _Run(request, line, here) as run:
        started, moment = time.monotonic(), datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        todo = [p for p in problems if results.get(p) is None]
        described = run.describe() if todo else None
        if described is not None:
            results.keep_machine(Machine(environment=here, described=described))
        for done, result in enumerate(run.results(todo, described), 1):
            results.put(result)
            if watch is not None:
                watch(result, done, len(todo), time.monotonic() - started)
        measured = _Measured(len(todo), time.monotonic() - started, run.jobs, moment.isoformat())
        record = _record(request, results, here, measured)
        write_durably(request.out / "results.json", msgspec.json.encode(record))
    return record


def gather(request: Request) -> BenchRun:
    """What the folder knows so far, with nothing run; on any machine.

    :raises StoreError: where the folder holds no results.
    """
    results = Results(request.out, None)
    machine = results.machine()
    if machine is None or not results.all():
        raise StoreError("holds no results of this command", where=request.out)
    moment = datetime.datetime.now(datetime.UTC)
    measured = _Measured(0, 0.0, 0, moment.isoformat(timespec="seconds"))
    record = _record(request, results, machine.environment, measured)
    write_durably(request.out / "results.json", msgspec.json.encode(record))
    return record


class _Measured(NamedTuple):
    """What a run did."""

    problems: int
    seconds: float
    jobs: int
    started_at: str


def _record(request: Request, results: Results, here: Environment, measured: _Measured) -> BenchRun:
    machine, asked, known = results.machine(), results.asked, results.all()
    described = None if machine is None else machine.described
    return BenchRun(
        command=request.command,
        environment=here,
        device="" if described is None else described.name,
        dtype=asked.dtype,
        inputs_on=asked.inputs_on,
        tolerance=TOLERANCE[asked.dtype],
        started_at=measured.started_at,
        seconds=measured.seconds,
        measured=measured.problems,
        jobs=measured.jobs,
        peaks=None if described is None else described.peaks,
        copy_bytes_per_s=None if described is None else described.copy_bytes_per_s,
        problems=known,
        levels=summary.levels(known, CONTRACTS),
        worst=summary.worst(known, CONTRACTS[0]),
        damaged=tuple(results.damaged),
    )


class _Run:
    """The processes of a run."""

    def __init__(self, request: Request, line: Sequence[Column | Candidate], here: Environment) -> None:
        self._request, self._line = request, line
        self._cuda = request.setup.device.startswith("cuda")
        usual = max(1, here.cores - _SPARED) if self._cuda else 1
        self.jobs = usual if request.jobs is None else request.jobs
        self._lanes = max(1, here.cores)
        shard = "-of-".join(map(str, request.selection.shard))
        work, cache = request.out / "work" / shard, request.out / "cache"
        work.mkdir(parents=True, exist_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        self._gate = work / "gate"
        self._caching = compat.cache_in(cache)  # all processes inherit it
        enlisting: dict[str, object] = {
            "setup": request.setup,
            "line": request.line,
            "cache": str(cache.resolve()),
        }
        memory = int(_MEMORY_SHARE * here.memory_bytes)
        limits = Limits(memory_bytes=memory, threads=here.threads)
        self._device = Process("device", work, limits, {**enlisting, "closing": None})
        narrow = Limits(memory_bytes=memory // 4, threads=1)
        closing = str(self._gate) if self._cuda else None
        self._pool = [
            Process(
                f"compile-{i}", work, narrow if self._cuda else limits, {**enlisting, "closing": closing}
            )
            for i in range(self.jobs)
        ]
        self._idle: SimpleQueue[Process] = SimpleQueue()
        for process in self._pool:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(self.jobs, thread_name_prefix="compile")
        self._over = threading.Event()
        self._tuning = threading.Lock()
        self._room = Room(None)

    def __enter__(self) -> _Run:
        self._caching.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in (self._device, *self._pool):
            process.stop(close=True)
        self._room.give_back(2**62)  # whoever waits finds its process closed
        self._threads.shutdown()
        self._caching.__exit__(None, None, None)

    def describe(self) -> Described:
        """Measure the device, before anything else runs on it.

        :raises InputError: where that fails.
        """
        found = self._device.call("describe", self._request.policy.begin_s)
        if isinstance(found, Failed):
            raise InputError(f"the device cannot be used: {told(found)}", hint=found.log[-1500:])
        described: Described = found
        if self._cuda:
            self._room = Room(int(_COMPILING_SHARE * described.memory_bytes))
        return described

    def results(
        self, problems: Sequence[Problem], described: Described | None
    ) -> Iterator[BenchProblem]:
        """Each problem's result, in the order in which they were compiled."""
        if described is None:
            return
        for problem, ahead in self._compiled(problems):
            study = Study(self._device, self._line, described, self._request.policy, self._quiet)
            yield study.of(problem, ahead, self._lanes)

    def _compiled(self, problems: Sequence[Problem]) -> Iterator[tuple[Problem, Ahead]]:
        if not self._cuda:  # one after the other: nothing compiles while the caller times
            for problem in problems:
                yield problem, self._threads.submit(self._compile, problem).result()
            return
        futures: dict[Future[Ahead], Problem] = {
            self._threads.submit(self._compile, problem): problem for problem in problems
        }
        for future in as_completed(futures):
            yield futures.pop(future), future.result()

    def _compile(self, problem: Problem) -> Ahead:
        """Build every column once, so that the caches hold what was compiled."""
        policy, process = self._request.policy, self._idle.get()
        path, taken = str(problem.path), 0
        try:
            if self._cuda:
                size = process.call("size", policy.begin_s, path=path)
                wanted = _TIMES_INPUTS * size if isinstance(size, int) else _CONTEXT_BYTES
                taken = self._room.take(wanted + _CONTEXT_BYTES)
            begun = process.keep(
                ("begin",), "begin", policy.begin_s, path=path, mark=problem.digest[:16]
            )
            if isinstance(begun, Failed):
                return Ahead() if _memory(begun) else Ahead(failed=begun)
            built: dict[str, Built | Failed] = {}
            for one in self._line:
                if isinstance(one, Candidate) and one.of is not None:
                    continue  # it compiles nothing
                if not self._over.is_set() and not isinstance(built.get(EAGER), Failed):
                    # the gate's pauses count, so a limit is twice what the work itself may take
                    limit_s = policy.build_s * (2 if self._cuda else 1)
                    with self._tuning if one.tunes else contextlib.nullcontext():
                        built[one.name] = process.call("build", limit_s, column=one.name)
                    process.call("drop", policy.call_s, column=one.name, whole=True)
            return Ahead(built)
        finally:
            process.forget()
            process.call("end", policy.call_s)
            self._room.give_back(taken)
            self._idle.put(process)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Nothing else runs on the device, as far as it is ours."""
        name = self._request.setup.device.replace(":", "-")
        lock = "timing.lock" if name == "cpu" else f"timing-{name}.lock"
        listening = [p.listening for p in self._pool if p.listening is not None] if self._cuda else []
        with exclusive(self._request.home / lock), gate.closed(self._gate, listening):
            yield


def _line(request: Request) -> tuple[Column | Candidate, ...]:
    """Who takes part: eager, the baseline, the columns asked for, all candidates.

    :raises InputError: for a column that is not there, or a name that is taken twice.
    """
    everyone = request.line.all()
    names = [one.name for one in everyone]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"more than one column is called {twice[0]!r}")
    columns = [one.name for one in everyone if isinstance(one, Column)]
    absent = [n for n in (EAGER, BASELINE) if n not in columns]
    absent += [n for n in request.columns if n not in (*columns, "none")]
    if absent:
        raise InputError(f"there is no column {absent[0]!r}", hint=f"there are {', '.join(columns)}")
    wanted = {EAGER, BASELINE, *(request.columns or columns)}
    return tuple(one for one in everyone if isinstance(one, Candidate) or one.name in wanted)


def _asked(request: Request, line: Sequence[Column | Candidate], here: Environment) -> Asked:
    versions = {"python": here.python, "processor": here.cpu, "devices": ", ".join(here.devices)}
    versions |= {n: here.packages[n] for n in ("torch", "triton") if n in here.packages}
    return Asked(
        device=request.setup.device.partition(":")[0],
        dtype=request.setup.dtype,
        inputs_on=request.setup.inputs_on.partition(":")[0],
        columns=tuple(one.name for one in line),
        versions=versions,
        threads=here.threads,
    )


def _memory(found: Any) -> bool:
    return isinstance(found, Crashed) and "OutOfMemoryError" in found.text
