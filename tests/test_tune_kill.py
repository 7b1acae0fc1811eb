"""A search that is killed: what was measured is kept, and the same command goes on from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from torchstone.records.tuning import Tuning, key_of
from torchstone.tuner.cache import Cache

KERNEL = """
import time
import torch
import torchstone

def build(config):
    def run(x):
        time.sleep(config["ms"] / 1e3)
        return x + 1
    return run

def inputs(seed):
    return (torch.randn(8, generator=torch.Generator().manual_seed(seed)),)

sleepy = torchstone.Tunable(
    name="sleepy",
    build=build,
    space=torchstone.Space({"ms": torchstone.Integer(5, 28, default=28)}),
    inputs=inputs,
    reference=lambda x: x + 1,
)
"""


def command(kernel: Path, home: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torchstone", "tune", f"{kernel}:sleepy"),
        *("--searcher", "exhaustive", "--measurements", "24", "--home", str(home)),
    ]


def rows(home: Path) -> list[str]:
    """Configs in the cache, each once."""
    with Cache(home / "tuning") as cache:
        found = [m for shelf in cache.shelves() for m in shelf.latest]
    return [key_of(m.config) for m in found]


@pytest.mark.slow
def test_kill_9_loses_at_most_the_config_in_flight(tmp_path: Path) -> None:
    kernel, home = tmp_path / "kernel.py", tmp_path / "home"
    kernel.write_text(KERNEL)
    told = tmp_path / "told.txt"
    with told.open("w") as out:
        process = subprocess.Popen(command(kernel, home), stderr=out, stdout=out)
        deadline = time.monotonic() + 120
        while len(rows(home)) < 5 and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    kept = rows(home)
    assert 5 <= len(kept) < 24, told.read_text()
    assert not list((home / "tunings").glob("*/tuning.json"))

    done = subprocess.run(
        command(kernel, home), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (path,) = (home / "tunings").glob("*/tuning.json")
    record = msgspec.json.decode(path.read_bytes(), type=Tuning)
    assert record.known == len(kept)
    configs = [key_of(m.config) for m in record.measurements]
    assert configs[: len(kept)] == kept
    assert len(set(configs)) == len(configs) == 24  # none is measured twice, and none left out
    assert record.decision == "PROMOTE"
    assert record.config["ms"] in (5, 6)
