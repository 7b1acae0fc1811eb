"""Faults in a worker, by causing them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from torchstone.errors import WorkloadError
from torchstone.records import Crashed, TimedOut
from torchstone.worker import Limits, Worker

pytestmark = pytest.mark.slow  # workers, compilers or the interpreter in most of them

LIMITS = Limits(memory_bytes=1 << 30, threads=1)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker("w", directory=tmp_path, workload=None, limits=LIMITS) as one:
        yield one


def ask(worker: Worker, job: str, limit_s: float = 60, **kwargs: object) -> object:
    return worker.call(f"worker_jobs:{job}", stage="build", limit_s=limit_s, **kwargs)


def test_state_lives_between_jobs(worker: Worker) -> None:
    assert [ask(worker, "count", by=2), ask(worker, "count", by=3)] == [2, 5]


def test_exceptions_are_values_and_the_worker_lives_on(worker: Worker) -> None:
    for job, text in (("system_exit", "SystemExit: asked to leave"), ("unpicklable", "pickle")):
        result = ask(worker, job)
        assert isinstance(result, Crashed)
        assert result.kind == "exception"
        assert text in result.text
        assert "Traceback" in result.log
    assert ask(worker, "count", by=1) == 1


def test_bad_input_is_raised_as_it_was(worker: Worker) -> None:
    with pytest.raises(WorkloadError, match="no such thing") as caught:
        ask(worker, "bad_input")
    assert (caught.value.where, caught.value.line, caught.value.hint) == ("workload.py", 3, "make it")


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [("segfault", "signal", "SIGSEGV"), ("leave", "exit", "code 7"), ("eat_memory", "memory", "limit")],
)
def test_death_is_a_value(worker: Worker, job: str, kind: str, text: str) -> None:
    result = ask(worker, job)
    assert isinstance(result, Crashed)
    assert (result.kind, result.stage) == (kind, "build")
    assert text in result.text
    assert not worker.alive
    assert ask(worker, "count", by=1) == result  # a dead worker says how it died


def test_the_log_is_kept(worker: Worker) -> None:
    result = ask(worker, "segfault")
    assert isinstance(result, Crashed)
    assert "about to fall" in result.log


def test_a_hang_is_ended(worker: Worker) -> None:
    ask(worker, "count", by=1)
    started = time.monotonic()
    result = ask(worker, "hang_in_native_code", limit_s=0.5)
    assert isinstance(result, TimedOut)
    assert time.monotonic() - started < 30
    assert not worker.alive


def test_closing_ends_what_the_worker_started(worker: Worker) -> None:
    child = ask(worker, "start_child")
    assert isinstance(child, int)
    worker.close()
    assert gone(child)


def test_workers_die_with_the_main_process(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys; sys.path[:] = {sys.path!r}
        from pathlib import Path
        from torchstone.worker import Limits, Worker
        w = Worker("w", directory=Path({str(tmp_path)!r}), workload=None,
                   limits=Limits(memory_bytes=1 << 30, threads=1))
        print(w.call("worker_jobs:start_child", stage="x", limit_s=60), w.pid, flush=True)
        w.call("worker_jobs:hang_in_native_code", stage="x", limit_s=600)
    """)
    main = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert main.stdout is not None
    child, worker = (int(p) for p in main.stdout.readline().split())
    os.kill(main.pid, signal.SIGKILL)
    main.wait()
    assert gone(worker)
    assert gone(child)


def gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
