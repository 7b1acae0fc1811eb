"""Processes that compile stand still while another one times.

What they launch on a device, to tune or to try what they built, would be timed along. Stopping them by
SIGSTOP would leave them behind, stopped, if the main process were killed; so they stop by themselves: a
signal's handler waits, between two bytecodes, for a lock that the main process holds while it times, and
that the kernel lets go when that process ends, however it ends. What was launched before goes on, so the
handler waits for the device first; who is at work holds a lock of its own kind, and the main process
times once nobody does any more, or soon after: who compiles cannot answer at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = ["closed", "heed", "wait"]


_PATIENCE_S = 0.5
"""For those at work to come to rest."""
_LOOK_S = 0.005


def heed(path: Path, drain: Callable[[], None] = lambda: None) -> None:
    """Have this process wait whenever the gate is closed. Call it from the main thread.

    :param path: the gate's file; made if need be.
    :param drain: returns once nothing that this process launched runs any more.
    """
    busy = os.open(_busy(path), os.O_RDWR | os.O_CREAT, 0o644)  # held until the process ends

    def rest(*_: object) -> None:
        drain()
        fcntl.flock(busy, fcntl.LOCK_UN)
        wait(path)
        fcntl.flock(busy, fcntl.LOCK_SH)

    signal.signal(signal.SIGUSR1, rest)
    wait(path)
    fcntl.flock(busy, fcntl.LOCK_SH)


def _busy(path: Path) -> Path:
    return path.with_name(f"{path.name}.busy")


def wait(path: Path) -> None:
    """Return when the gate is open."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


@contextlib.contextmanager
def closed(path: Path, processes: Iterable[int]) -> Iterator[None]:
    """Hold the gate closed.

    :param processes: ids of those that :func:`heed` it and are at work; others must not be among them,
        for the signal ends who does not expect it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGUSR1)
        _settle(path)
        yield


def _settle(path: Path) -> None:
    """Return once nobody is at work, or patience is at an end."""
    ends = time.monotonic() + _PATIENCE_S
    with _busy(path).open("a") as file:
        while time.monotonic() < ends:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_S)
            else:
                return
