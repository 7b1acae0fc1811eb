"""Jobs that misbehave, for tests of the worker."""

import ctypes
import os
import time
from typing import Any

from torchstone.errors import WorkloadError


def count(state: dict[str, Any], by: int) -> int:
    state["n"] = state.get("n", 0) + by
    return int(state["n"])


def segfault(state: dict[str, Any]) -> None:
    print("about to fall", flush=True)
    ctypes.string_at(0)


def hang_in_native_code(state: dict[str, Any]) -> None:
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock


def leave(state: dict[str, Any]) -> None:
    os._exit(7)


def system_exit(state: dict[str, Any]) -> None:
    raise SystemExit("asked to leave")


def eat_memory(state: dict[str, Any]) -> None:
    hoard = []
    while True:
        hoard.append(b"x" * 30_000_000)
        time.sleep(0.01)


def bad_input(state: dict[str, Any]) -> None:
    raise WorkloadError("no such thing", where="workload.py", line=3, hint="make it")


def unpicklable(state: dict[str, Any]) -> Any:
    return lambda: None


def start_child(state: dict[str, Any]) -> int:
    import subprocess

    return subprocess.Popen(["sleep", "600"]).pid
