"""Workers that come back: what had been prepared in one that died is prepared again in the next."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.records import Crashed, TimedOut
from torchstone.worker import Limits, Worker

__all__ = ["Failed", "Process", "Room", "told"]

Failed = Crashed | TimedOut
_JOBS = "torchstone.kernelbench.jobs"
_ENLIST_S = 300.0


class Process:
    """A worker with the suite's jobs; started when it is needed, and again when it has died.

    :param name: for its log.
    :param directory: for its log.
    :param enlisting: what its first job is given.
    """

    def __init__(self, name: str, directory: Path, limits: Limits, enlisting: dict[str, object]) -> None:
        self._name, self._directory, self._limits = name, directory, limits
        self._enlisting = enlisting
        self._worker: Worker | None = None
        self._kept: dict[tuple[str, ...], tuple[str, float, dict[str, object]]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.listening: int | None = None
        """Its process id, once it heeds the gate."""

    def call(self, job: str, limit_s: float, **kwargs: object) -> Any:
        """What a job gives, or why it gives nothing."""
        worker, fresh = self._alive()
        if worker is None:
            return Crashed(stage=job, kind="exit", text="the run is over", log="")
        if fresh:
            begun = self._ask(worker, "enlist", _ENLIST_S, self._enlisting)
            if isinstance(begun, Failed):
                return begun
            self.listening = worker.pid
            for key, (kept, limit, given) in list(self._kept.items()):
                if isinstance(self._ask(worker, kept, limit, given), Failed):
                    del self._kept[key]
        return self._ask(worker, job, limit_s, kwargs)

    def keep(self, key: tuple[str, ...], job: str, limit_s: float, **kwargs: object) -> Any:
        """The same for a job that a new process would have to do again, as long as ``key`` is kept."""
        self._kept.pop(key, None)
        found = self.call(job, limit_s, **kwargs)
        if not isinstance(found, Failed):
            self._kept[key] = (job, limit_s, kwargs)
        return found

    def forget(self, *key: str) -> None:
        """Do no job again whose key begins so; all, if nothing is said."""
        for kept in [k for k in self._kept if k[: len(key)] == key]:
            del self._kept[kept]

    def stop(self, *, close: bool = False) -> None:
        """End the worker; the next call starts another, unless this closes for good."""
        with self._lock:
            self._closed |= close
            self.listening = None
            if self._worker is not None:
                self._worker.close()

    def _alive(self) -> tuple[Worker | None, bool]:
        with self._lock:
            if self._closed:
                return None, False
            if self._worker is not None and self._worker.alive:
                return self._worker, False
            self.listening = None
            self._worker = Worker(
                self._name, directory=self._directory, workload=None, limits=self._limits
            )
            return self._worker, True

    def _ask(self, worker: Worker, job: str, limit_s: float, given: dict[str, object]) -> Any:
        try:
            found = worker.call(f"{_JOBS}:{job}", stage=job, limit_s=limit_s, **given)
        except (InputError, EnvironmentLacksError) as error:  # a problem's, or a candidate's, own
            return Crashed(stage=job, kind="exception", text=str(error), log="")
        if not worker.alive:
            self.listening = None
        return found


class Room:
    """Bytes of a device that the processes which compile may share; who asks for too much waits.

    :param size: bytes; None where nothing has to be shared.
    """

    def __init__(self, size: int | None) -> None:
        self._size = self._free = size or 0
        self._unlimited = size is None
        self._changed = threading.Condition()

    def take(self, wanted: int) -> int:
        """Wait for room; all of it at most, so that whatever is asked for gets its turn.

        :returns: what was taken, to be given back.
        """
        if self._unlimited:
            return 0
        wanted = min(wanted, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        return wanted

    def give_back(self, taken: int) -> None:
        """Let others have it."""
        with self._changed:
            self._free += taken
            self._changed.notify_all()


def told(found: Failed) -> str:
    """Why there is nothing: one sentence."""
    if isinstance(found, TimedOut):
        return f"no answer within {found.limit_s:g} s ({found.stage})"
    return f"{' '.join(found.text.split())[:300]} ({found.stage})"
