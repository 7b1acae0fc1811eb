"""torchstone inspect: a useful page of any model, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import torchstone
from torchstone.compat import shapes
from torchstone.errors import WorkloadError
from torchstone.records import Inspection

CAPTURABLE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())

def build():
    return Net().eval()

def inputs():
    return torch.randn(3, 8)
"""

HOSTILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        print("call", self.calls)
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = x * float(x.max())
        return {"kept": x[x > 0].sum(), "all": (v for v in [x])}

def build():
    return Net().eval()

def inputs():
    return torch.randn(3, 8)
"""

TOML = """
[workload]
name = "net"
model = "model:build"
inputs = "model:inputs"
{extra}
[dims]
B = "1..8"
[inputs.x]
shape = ["B", 8]
[policy]
build_s = 90
bench_s = 2
{policy}
"""


def folder(path: Path, python: str, extra: str = "", policy: str = "") -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.py").write_text(textwrap.dedent(python))
    (path / "torchstone.toml").write_text(TOML.format(extra=extra, policy=policy))
    return path


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchstone", "inspect", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_whole_inspection_of_a_model_that_is_one_graph(tmp_path: Path) -> None:
    traffic, policy = 'traffic = "traffic.jsonl"', "max_recompiles = 1"
    where = folder(tmp_path / "w", CAPTURABLE, extra=traffic, policy=policy)
    (where / "traffic.jsonl").write_text('{"B": 3}\n{"B": 1}\n{"B": 8}\n')
    done = command(where, "--html", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # more graphs than the policy allows
    assert "Traceback" not in done.stdout + done.stderr
    found = msgspec.json.decode((tmp_path / "page.json").read_bytes(), type=Inspection)
    assert [part.failed for part in found.parts] == [None] * 6
    assert found.capture is not None
    assert found.capture.traced
    assert found.inventory is not None
    assert found.inventory.weights.parameters == 8 * 32 + 32 + 32 * 4 + 4
    assert found.breaks is not None
    assert found.breaks.breaks == ()
    assert found.contract is not None
    assert found.contract.sound
    assert found.ladder is not None
    assert found.ladder.chosen == {"B": "unbacked" if shapes.bounds_unavailable() is None else "backed"}
    assert found.recompiles is not None
    assert found.recompiles.exceeds
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_model_that_cannot_be_captured_gets_a_useful_page(tmp_path: Path) -> None:
    parts = ("--part", "capture", "--part", "inventory", "--part", "breaks", "--part", "contract")
    where = folder(tmp_path / "w", HOSTILE)
    done = command(where, *parts, "--html", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    found = msgspec.json.decode((tmp_path / "page.json").read_bytes(), type=Inspection)
    assert found.capture is not None
    assert found.capture.mode == "dynamo"
    assert "model.py:" in (found.capture.trace_refused or "")
    assert found.inventory is not None
    assert found.inventory.example.median_s > 0
    assert found.breaks is not None
    assert found.breaks.breaks
    source = (tmp_path / "w" / "model.py").read_text().splitlines()
    lines = {b.line for b in found.breaks.breaks}
    assert any("if x.sum() > 0" in source[n - 1] or "float(x.max())" in source[n - 1] for n in lines)
    assert "x.sum()" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others_standing() -> None:
    class Dies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import os

            if type(x) is not torch.Tensor:
                os._exit(3)  # as a tracer does that crashes
            return self.linear(x)

    policy = torchstone.Policy(bench_s=1)
    parts = ("capture", "inventory")
    found = torchstone.inspect(Dies(), torch.randn(3, 4), policy=policy, parts=parts)
    capture, inventory = found.parts
    assert capture.failed is not None
    assert "exited with code 3" in capture.failed
    assert inventory.failed is None
    assert found.inventory is not None
    assert found.inventory.weights.parameters == 10


@pytest.mark.slow
def test_a_model_that_fails_on_its_own_example_says_where(tmp_path: Path) -> None:
    broken = CAPTURABLE.replace("nn.Linear(32, 4)", "nn.Linear(31, 4)")
    found = command(folder(tmp_path / "w", broken), "--part", "inventory", "--json", cwd=tmp_path)
    assert found.returncode == 0
    (part,) = msgspec.json.decode(found.stdout, type=Inspection).parts
    assert part.failed is not None
    assert "model.py:11" in part.failed


def test_bad_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = command(tmp_path / "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    with pytest.raises(WorkloadError, match="not declared"):
        torchstone.inspect(nn.Linear(2, 2), torch.randn(2, 2), shapes={"input": ("B", 2)})
