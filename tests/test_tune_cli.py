"""``torchstone tune`` on kernels of plain PyTorch, whose processes, proofs and times are real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from test_cli import call, torchstone
from torchstone.records.tuning import Tuning

KERNEL = """
import torch
from helper import cumulated
from torchstone.tuner.space import Choice, Space
from torchstone.tuner.tunable import Tunable

def build(config):
    if config["way"] == "broken":
        raise ValueError("no such way")

    def run(x):
        if config["way"] == "rows":
            return torch.stack([cumulated(row, 0) for row in x])
        out = cumulated(x, 1)
        off = config["way"] == "wrong" or (config["way"] == "tiled" and x.shape[1] % 16)
        return out + 1 if off else out

    return run

def inputs(seed, rows, cols):
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)),)

def reference(x):
    return x.cumsum(1)

ways = ("rows", "whole", "wrong", "broken", "tiled")
running = Tunable(
    name="running sum",
    build=build,
    space=Space({"way": Choice(ways)}),
    inputs=inputs,
    reference=reference,
    sizes={"rows": 512, "cols": 16},
    odd=({"rows": 3, "cols": 5},),
)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def cumulated(x, dim):\n    return x.cumsum(dim)\n")
    path = tmp_path / "kernel.py"
    path.write_text(textwrap.dedent(KERNEL))
    return path


def edited(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


# --- from a kernel to a config --------------------------------------------------------------------


@pytest.mark.slow
def test_the_quick_and_right_way_wins_and_nothing_is_measured_twice(
    kernel: Path, tmp_path: Path
) -> None:
    command = ("tune", f"{kernel}:running", "--searcher", "exhaustive", "--home", tmp_path / "home")
    first = torchstone(*command, "--budget", 100, "--size", "rows=256")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("PROMOTE: ")
    assert "1 wrong" in first.stdout
    assert "1 invalid" in first.stdout
    assert "no such way" in first.stdout
    assert "a finalist is wrong: " in first.stdout  # right but at an odd size
    assert "from kernel import running\ncall = running.build({'way': 'whole'})\n" in first.stdout
    assert "best " in first.stderr
    pages = list((tmp_path / "home" / "tunings").glob("*/report.html"))
    assert f"report: {pages[0]}" in first.stdout
    assert "running sum" in pages[0].read_text()

    again = torchstone(*command, "--size", "rows=256", "--json")
    assert again.returncode == 0, again.stderr
    found = msgspec.json.decode(again.stdout, type=Tuning)
    assert (found.known, len(found.measurements), found.stop) == (5, 5, "EXHAUSTED")
    assert (found.decision, found.config) == ("PROMOTE", {"way": "whole"})
    assert [m.status for m in found.measurements if m.config == {"way": "tiled"}] == ["wrong"]
    assert found.key.sizes == {"rows": 256, "cols": 16}
    assert (found.origin, found.budget_s) == (f"{kernel}:running", 120.0)
    assert "best " not in again.stderr

    fresh = torchstone(*command, "--size", "rows=256", "--json", "--fresh", "--measurements", 2)
    found = msgspec.json.decode(fresh.stdout, type=Tuning)
    assert (found.known, len(found.measurements), found.stop) == (0, 2, "ENOUGH")
    assert (found.budget_s, found.budget_measurements) == (None, 2)


@pytest.mark.slow
def test_where_the_default_is_broken_it_is_held(kernel: Path, tmp_path: Path) -> None:
    edited(kernel, "Choice(ways)", 'Choice(("wrong", "broken"))')
    done = torchstone(
        "tune", kernel, "--searcher", "exhaustive", "--budget", 60, "--home", tmp_path / "home", "--ci"
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("HOLD: No config can be recommended")
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_an_interrupt_loses_nothing_that_was_measured(kernel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchstone", "tune", str(kernel), "--home", str(tmp_path / "home")]
    running = subprocess.Popen(
        [*command, "--searcher", "exhaustive"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    lines = [next(line for line in running.stderr if " best " in line)]
    running.send_signal(signal.SIGINT)
    out, rest = running.communicate(timeout=60)
    assert running.returncode == 130, rest
    assert "interrupted; what was measured is kept" in rest
    assert out == ""
    assert "way=rows" in lines[0]
    again = torchstone(*command[3:], "--searcher", "exhaustive", "--json")
    found = msgspec.json.decode(again.stdout, type=Tuning)
    assert found.known >= 1
    assert len(found.measurements) == 5


# --- what cannot be tuned -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "options", "said"),
    [
        (":ways", (), "ways is of type tuple"),
        (":Tunable", (), "Tunable is of type type"),
        (":nothing", (), "has no 'nothing'"),
        ("", ("--size", "width=3"), "running sum has no size 'width'"),
        ("", ("--size", "rows"), "--size rows: not NAME=N"),
        ("", ("--size", "rows=0"), "--size rows=0: not NAME=N"),
        ("", ("--searcher", "best"), "guided, lfbo, pattern, evolution, random, exhaustive, llm"),
        ("", ("--budget", "0"), "--budget"),
        ("", ("--measurements", "0"), "--measurements"),
    ],
)
def test_bad_input_is_refused_with_what_it_must_be(
    kernel: Path, capsys: pytest.CaptureFixture[str], suffix: str, options: tuple[str, ...], said: str
) -> None:
    code, out, err = call(capsys, "tune", f"{kernel}{suffix}", *options)
    assert code == 2
    assert said in err
    assert out == ""


def test_a_hint_names_the_tunables(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, "tune", f"{kernel}:nothing")
    assert "its tunables are: running" in err


def test_two_tunables_must_be_told_apart(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kernel.open("a") as file:
        file.write("\nalias = running\nimport dataclasses\nother = dataclasses.replace(running)\n")
    code, _, err = call(capsys, "tune", kernel)
    assert code == 2
    assert f"{kernel}:NAME; there are running, other" in err


def test_a_file_without_a_tunable_and_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    code, _, err = call(capsys, "tune", tmp_path / "empty.py")
    assert code == 2
    assert "none of its names is a tunable" in err
    code, _, err = call(capsys, "tune", tmp_path / "absent.py")
    assert code == 2
    assert "there is no such file" in err
    code, _, err = call(capsys, "tune", "no.such.module:x")
    assert code == 2
    assert "importing no.such.module failed" in err


def test_a_method_must_give_a_tunable(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kernel.open("a") as file:
        file.write("\nclass Maker:\n    def tunable(self):\n        return 3\n\nmaker = Maker()\n")
    code, _, err = call(capsys, "tune", f"{kernel}:maker")
    assert code == 2
    assert "maker.tunable() gave a int" in err


def test_errors_are_json_where_json_is_asked_for(
    kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "tune", f"{kernel}:nothing", "--json")
    assert code == 2
    assert json.loads(out)["hint"] == "its tunables are: running"
