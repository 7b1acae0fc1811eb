"""Processes that compile stand still while another one times.

What they launch on a device, to tune or to try what they built, would be timed along. Stopping them by
SIGSTOP would leave them behind, stopped, if the main process were killed; so they stop by themselves: a
signal's handler waits, between two bytecodes, for a lock that the main process holds while it times, and
that the kernel lets go when that process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["closed", "heed", "wait"]


def heed(path: Path) -> None:
    """Have this process wait whenever the gate is closed. Call it from the main thread.

    :param path: the gate's file; made if need be.
    """
    signal.signal(signal.SIGUSR1, lambda *_: wait(path))
    wait(path)


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
        yield
