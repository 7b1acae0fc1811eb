"""Candidates: a recipe, the worker that holds it, and what has been found out about it.

A candidate is built once. Its worker may be closed to free memory, or die with the main process; it is
then loaded again from the artifact that the build left, which is quick and is not a measurement.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torchstone import backends
from torchstone.policy import Policy
from torchstone.recipe import Recipe
from torchstone.records import (
    Build,
    Crashed,
    Entry,
    Failure,
    TimedOut,
    Unsupported,
    Verdict,
    VerdictEntry,
    WorkloadSpec,
)
from torchstone.store import RunStore
from torchstone.worker import Limits, Worker

__all__ = ["Candidate", "Context", "Progress"]

T = TypeVar("T")


class Progress(Protocol):
    """What a run tells whoever watches it."""

    def stage(self, name: str, total: int | None, limit_s: float | None) -> None:
        """A stage begins: its number of steps and an upper bound of its seconds, where known."""

    def step(self, text: str) -> None:
        """A step of the stage begins."""

    def advance(self, n: int = 1) -> None:
        """``n`` steps are done."""

    def note(self, text: str) -> None:
        """A result or a remark worth a line of its own."""

    def done(self) -> None:
        """The run is over, or was interrupted."""


@dataclass(frozen=True)
class Context:
    """What every stage of one run shares."""

    store: RunStore
    """Where entries go."""
    workload: Path
    """The workload's file, for workers."""
    spec: WorkloadSpec
    """What is known of the workload."""
    policy: Policy
    """Constraints and objective."""
    limits: Limits
    """Memory and threads of each worker."""
    seed: int
    """Seed of everything random."""
    progress: Progress
    """Who watches."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Guards the store and the progress, since candidates are built in parallel."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when the run is being abandoned: what fails from then on is no evidence."""
    judging: threading.Lock = field(default_factory=threading.Lock)
    """Held while a candidate is judged: models that run at once on the same cores wait for each other's
    threads, and small calls most of all. Builds go on meanwhile."""

    def start(self, name: str) -> Worker:
        """Start a worker that knows the workload; its log is ``work/NAME.log``."""
        self._go_on()
        return Worker(name, directory=self.store.work, workload=self.workload, limits=self.limits)

    def recall(self, key: str, kind: type[T]) -> T | None:
        """What the run already knows under ``key``."""
        with self.lock:
            return self.store.get(key, kind)

    def record(self, key: str, entry: Entry, files: tuple[Path, ...] = ()) -> None:
        """Append to the evidence."""
        self._go_on()
        with self.lock:
            self.store.put(key, entry, files)

    def _go_on(self) -> None:
        if self.stopped.is_set():
            raise RuntimeError("the run was abandoned")

    def note(self, text: str) -> None:
        """Tell the watcher, from any thread."""
        with self.lock:
            self.progress.note(text)

    def step(self, text: str) -> None:
        """Say what is being done, from any thread."""
        with self.lock:
            self.progress.step(text)

    def advance(self) -> None:
        """One step is done, from any thread."""
        with self.lock:
            self.progress.advance()

    @property
    def program(self) -> Path:
        """Where the exported program lies, if capture could export."""
        return self.store.files / "program.pt2"


class Candidate:
    """One recipe of a run.

    :param copy: tells a second instance apart, such as the baseline's control.
    """

    def __init__(self, context: Context, recipe: Recipe, *, exported: bool, copy: str = "") -> None:
        self.context = context
        self.recipe = recipe
        self.exported = exported
        self.verdict: Verdict | None = None
        self._program = str(context.program) if exported else None
        self._name = slug(str(recipe)) + copy
        self._worker: Worker | None = None

    @property
    def text(self) -> str:
        """The recipe's text form."""
        return str(self.recipe)

    @property
    def artifact(self) -> Path:
        """Folder of the engine's files."""
        return self.context.store.files / slug(self.text)

    @property
    def known(self) -> bool:
        """Whether the run has its verdict."""
        return self.context.recall(f"verdict/{self.text}", VerdictEntry) is not None

    @property
    def build(self) -> Build | None:
        """The build report, once there is one."""
        return self.context.recall(f"build/{self.text}", Build)

    def prepare(self) -> Failure | None:
        """Have a worker that holds the candidate: build it, or load what was built.

        :returns: why it cannot be had, or None.
        """
        if self._worker is not None and self._worker.alive:
            return None
        absent = backends.probe(self.recipe)
        if absent is not None:
            return Unsupported(text=absent.why, hint=absent.hint)
        known = self.build
        self._worker = self.context.start(self._name)
        result = self._worker.call(
            "torchstone.backends.jobs:build" if known is None else "torchstone.backends.jobs:load",
            stage="build" if known is None else "load",
            limit_s=self.context.policy.build_s,
            recipe=self.text,
            program=self._program,
            directory=str(self.artifact),
        )
        if not isinstance(result, Build):
            self.close()
            failure: Failure = result
            return failure
        if known is None:
            files = tuple(self.artifact / name for name in result.files)
            self.context.record(f"build/{self.text}", result, files)
        return None

    def call(self, target: str, /, *, stage: str, limit_s: float, **kwargs: object) -> Any:
        """Run a job in the candidate's worker, prepared first if need be.

        :returns: the job's value, or a failure.
        """
        failure = self.prepare()
        if failure is not None:
            return failure
        assert self._worker is not None
        return self._worker.call(target, stage=stage, limit_s=limit_s, **kwargs)

    @property
    def resident(self) -> bool:
        """Whether its worker is there."""
        return self._worker is not None and self._worker.alive

    def close(self) -> None:
        """Free its worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def slug(text: str) -> str:
    """A file name for a recipe: ``aotinductor-freezing-precision-bf16``."""
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-")


def failed(result: object) -> bool:
    """Whether a job's result is a failure rather than a value."""
    return isinstance(result, Crashed | TimedOut | Unsupported)
