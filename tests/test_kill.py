"""kill -9 of the main process, again and again: nothing is lost, repeated or promoted wrongly."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

KILLS = 20


def write_workload(folder: Path) -> None:
    folder.mkdir()
    (folder / "torchstone.toml").write_text(
        textwrap.dedent("""
        [workload]
        name = "killed"
        model = "model:build"
        inputs = "model:inputs"
        recipes = ["custom(forgets_a_row)", "openvino", "custom(fused)"]
        [dims]
        B = "1..8"
        [inputs.input]
        shape = ["B", 32]
        [candidates]
        forgets_a_row = "model:forgets_a_row"
        fused = "model:fused"
        [policy]
        bench_s = 4
        load_s = 0.5
        rounds = 5
        """)
    )
    (folder / "model.py").write_text(
        textwrap.dedent("""
        import torch

        def build():
            torch.manual_seed(0)
            return torch.nn.Sequential(
                torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()

        def inputs():
            return (torch.randn(4, 32, generator=torch.Generator().manual_seed(0)),)

        def forgets_a_row(module):
            cached = torch.zeros(8, 8)
            return lambda x: cached[: x.shape[0]]  # by far the fastest

        def fused(module):
            return lambda x: torch.addmm(
                module[2].bias, torch.relu(torch.addmm(module[0].bias, x, module[0].weight.t())),
                module[2].weight.t())
        """)
    )


def start(workload: Path, home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchstone", "run", str(workload)]
    return subprocess.Popen(
        [*command, "--resume", "--json", "--home", str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def entries(home: Path) -> dict[str, bytes]:
    return {str(p.relative_to(home)): p.read_bytes() for p in home.glob("runs/[!.]*/entries/*.json")}


def test_twenty_kills(tmp_path: Path) -> None:
    rng = random.Random(7)
    workload, home = tmp_path / "workload", tmp_path / "home"
    write_workload(workload)
    evidence: dict[str, bytes] = {}
    killed = 0
    for turn in range(KILLS):
        process = start(workload, home)
        goal = len(evidence) + rng.randint(1, 4)
        deadline = time.monotonic() + (rng.uniform(0.2, 6.0) if turn % 2 else 60.0)
        while time.monotonic() < deadline and process.poll() is None and len(entries(home)) < goal:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.6))
        killed += process.poll() is None
        process.kill()
        process.wait()
        now = entries(home)
        assert evidence.items() <= now.items(), "stored evidence was changed or lost"
        evidence = now
    process = start(workload, home)
    out, err = process.communicate(timeout=300)
    assert process.returncode in (0, 1), err
    assert killed >= KILLS // 2
    summary = json.loads(out)
    assert summary["problems"] == []
    assert summary["decision"] is not None
    assert summary["decision"]["recipe"] != "custom(forgets_a_row)"
    final = entries(home)
    assert evidence.items() <= final.items()
    keys = Counter(json.loads(data)["key"] for data in final.values())
    repeated = {k: n for k, n in keys.items() if n > 1 and not k.startswith("samples/")}
    assert not repeated, "what was valid was done again"
    verdicts = [json.loads(d)["entry"] for k, d in final.items() if b'"verdict/custom(forgets' in d]
    assert [v["verdict"]["type"] for v in verdicts] == ["wrong"]
    assert len(list(home.glob("runs/[!.]*"))) == 1, "a new run was started where one could be resumed"


def test_ctrl_c_leaves_a_usable_partial_run(tmp_path: Path) -> None:
    workload, home = tmp_path / "workload", tmp_path / "home"
    write_workload(workload)
    process = start(workload, home)
    children: list[psutil.Process] = []
    while not any(b'"build/eager(program)"' in data for data in entries(home).values()):  # in the lanes
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume" in err
    assert "Traceback" not in err
    assert not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children)
    evidence = entries(home)
    assert b'"type":"crashed"' not in b"".join(evidence.values()), "its own end was taken for a crash"
    process = start(workload, home)
    out, err = process.communicate(timeout=300)
    assert process.returncode in (0, 1), err
    assert json.loads(out)["decision"]["recipe"] != "custom(forgets_a_row)"
    assert evidence.items() <= entries(home).items()
