"""``torchstone diff`` from the command line, and what it prints."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

import report_samples as samples
from torchstone.cli import main
from torchstone.records import Divergence, OperandStats, Origin, Site
from torchstone.report import divergence, html, terminal
from torchstone.report.collect import collect, from_json, to_json

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, swapped=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.swapped = nn.Linear(8, 8), nn.LayerNorm(8), swapped

    def forward(self, x):
        y = self.norm(self.first(x))
        return (y - x if self.swapped else x - y).tanh()


def good():
    return Net()


def bad():
    return Net(swapped=True)


def fails():
    raise ValueError("no such weights")


def inputs():
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torchstone", "diff", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_two_factories_then_a_saved_trace(folder: Path) -> None:
    inputs = ("--inputs", "models.py:inputs")
    sides = ("models.py:good", "models.py:bad")
    code, out, err = run(folder, *sides, *inputs, "--save-trace", "good.trace", "--repro", "shown.py")
    assert code == 1, err
    assert out.startswith("first diverges: B swaps the operands of aten.sub")
    assert "models.py:14: return (y - x if self.swapped else x - y).tanh()" in out
    assert "python shown.py" in out
    code, out, _ = run(folder, "good.trace", "models.py:bad", *inputs, "--json")
    found = msgspec.json.decode(out, type=Divergence)
    assert (code, found.kind, found.ops[0].op) == (1, "OP", "aten.sub.Tensor")
    code, out, _ = run(folder, "good.trace", "good.trace")
    assert (code, out) == (0, "good.trace against good.trace: no divergence beyond rounding\n")
    code, out, _ = run(folder, "float64", "models.py:good", *inputs)
    assert (code, out) == (0, "models.py:good against float64: no divergence beyond rounding\n")


@pytest.mark.slow
def test_a_factory_that_fails_is_the_users_error(folder: Path) -> None:
    code, _, err = run(folder, "models.py:fails", "models.py:good", "--inputs", "models.py:inputs")
    assert code == 2
    assert re.search(r"models\.py:2\d: fails\(\) failed: ValueError: no such weights", err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eager", "inductor"], "cannot be compared without inputs"),
        (["eager", "nonsense(1"], "is not a step"),
        (["absent.trace", "eager"], "there is no such trace"),
        (["absent.py:make", "eager"], "there is no such file"),
        (["models.py:1x", "eager"], "is no function's name"),
        (["eager", "float64", "--inputs", "models.py:inputs"], "inputs are given without a factory"),
        (["models.py:good", "float64", "--inputs", "models.py"], "there is no such file"),
        (["eager", "float64", "--workload", "."], "torchstone.toml"),
        (["eager", "float64", "--workload", ".", "--inputs", "models.py:inputs"], "are both given"),
    ],
)
def test_what_cannot_be_compared_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["diff", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert folder.is_dir()


# --- in reports -----------------------------------------------------------------------------------


def found() -> Divergence:
    wrong = next(row.recipe for row in collect(*samples.full()).rows if row.status == "wrong")
    return Divergence(
        a="float64",
        b=wrong,
        kind="FUSED",
        text="an engine computes aten.to, aten.to wrongly where it compiles them together",
        ops=(
            Site(
                op="aten.to.dtype",
                code="aten.to.dtype(x0, dtype=torch.bfloat16)",
                origin=Origin(
                    file="model.py", line=12, text="high = x.bfloat16() # <b>", module="block.1"
                ),
            ),
        ),
        operands=(
            OperandStats(
                name="x0 = input[0]", shape=(2, 3), dtype="float32",
                low=-1.0, high=2.0, mean=0.25, rms=1.0, non_finite=1,
            ),
        ),
        local_error=1.7e-3,
        bound=7.6e-6,
        reproduction="shown.py",
        reproduced=True,
    )  # fmt: skip


def test_the_report_shows_where_it_diverges() -> None:
    header, entries = samples.full()
    report = collect(header, [*entries, found()])
    assert from_json(to_json(report)) == report
    page = html.render(report)
    assert "first diverges: an engine computes aten.to" in page
    assert "model.py:12: high = x.bfloat16() # &lt;b&gt; (in block.1)" in page
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=80))
    text = out.getvalue()
    assert "aten.to.dtype(x0, dtype=torch.bfloat16)" in text
    assert "x0 = input[0]: float32[2, 3], -1 to 2, mean 0.25, rms 1, 1 not finite" in text
    assert max(cell_len(line) for line in text.splitlines()) <= 80


def test_an_error_that_is_not_known_is_a_dash_and_a_failed_file_is_said() -> None:
    changed = msgspec.structs.replace(found(), reproduced=False)
    said = divergence.lines(changed)
    assert "python shown.py (it did not show it when it was run)" in said
    assert json.loads(msgspec.json.encode(changed))["type"] == "divergence"
