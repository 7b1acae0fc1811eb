"""The Python door, end to end, on real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstone
from test_verify_faults import VISIBLE, perturb
from torchstone import Policy
from torchstone.errors import BundleError
from torchstone.records import Capture, VerdictEntry, Verified, Wrong
from verify_desk import Block, block, block_inputs

pytestmark = pytest.mark.slow

QUICK = Policy(bench_s=3, load_s=0, rounds=5, call_s=10)


class TextbookAttention(nn.Module):
    """qkv product, chunk, softmax, product, output product: the textbook dynamic-shape case."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(32, 96) / 6)
        self.out = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.qkv).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 32**0.5, dim=-1)
        return (weights @ v) @ self.out


def test_one_compiled_graph_serves_every_batch_and_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TextbookAttention().eval()
    run = torchstone.optimize(
        model,
        torch.randn(2, 16, 32),
        dims={"B": "1..8", "S": "1..512"},
        shapes={"x": ("B", "S", 32)},
        recipes=["inductor", "aotinductor"],
        home=tmp_path,
        policy=QUICK,
    )
    capture = run.store.get("capture", Capture)
    assert capture is not None
    assert (capture.mode, capture.graphs, capture.narrowed) == ("export", 1, ())
    for recipe in ("inductor", "aotinductor"):
        entry = run.store.get(f"verdict/{recipe}", VerdictEntry)
        assert entry is not None
        assert isinstance(entry.verdict, Verified)
    assert run.packable is None
    served = torchstone.load(run.package(tmp_path / "bundle"))
    with torch.no_grad():
        for batch in range(1, 9):
            for length in (1, 2, 3, 7, 64, 255, 256, 511, 512):
                x = torch.randn(batch, length, 32)
                torch.testing.assert_close(served(x), model(x), rtol=1e-4, atol=1e-5)
    assert served.stats.hits == 8 * 9
    assert served.stats.fallbacks == {}


class Branches(nn.Module):
    """What export refuses: a branch on a value; with a print and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        if y.sum() > 0:
            print("positive")
            y = y * 2
        return {"y": y, "norm": y.norm(dim=-1)}


def test_what_export_refuses_still_gets_a_run_and_a_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branches().eval()
    run = torchstone.optimize(
        model,
        torch.randn(4, 8),
        dims={"B": "1..16"},
        shapes={"x": ("B", 8)},
        recipes=["inductor", "onnxruntime"],
        home=tmp_path,
        policy=QUICK,
    )
    capture = run.store.get("capture", Capture)
    assert capture is not None
    assert capture.mode == "dynamo"
    assert capture.refused
    assert run.decision is not None
    entry = run.store.get("verdict/inductor", VerdictEntry)
    assert entry is not None
    assert isinstance(entry.verdict, Verified)
    assert run.packable is not None
    assert "export" in run.packable
    with pytest.raises(BundleError, match="no bundle"):
        run.package(tmp_path / "bundle")
    x = torch.randn(3, 8)
    with torch.no_grad():
        answer, expected = run.model(x), model(x)
    assert set(answer) == {"y", "norm"}
    torch.testing.assert_close(answer["y"], expected["y"])
    page = run.report()
    assert "export refused" in page.read_text().lower() or capture.refused[:30] in page.read_text()


def test_planted_faults_are_never_promoted(tmp_path: Path) -> None:
    chosen = list(VISIBLE)[::-1][:26]  # the later ones misuse memory and state, which workers change
    candidates: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
        f"fault_{i}": VISIBLE[fault][0] for i, fault in enumerate(chosen)
    }
    assert len(candidates) >= 25
    run = torchstone.optimize(
        block(),
        block_inputs(),
        dims={"B": "1..6", "S": "1..24"},
        shapes={"x_bsd": ("B", "S", 16)},
        candidates=candidates,
        perturb=perturb,
        recipes=[f"custom({name})" for name in candidates],
        home=tmp_path,
        policy=QUICK,
    )
    for name, fault in zip(candidates, chosen, strict=True):
        entry = run.store.get(f"verdict/custom({name})", VerdictEntry)
        assert entry is not None, fault
        assert isinstance(entry.verdict, Wrong), (fault, entry.verdict)
    assert run.decision is not None
    assert "custom" not in run.decision.recipe


def test_public_names_are_found_when_used_and_a_space_needs_no_torch() -> None:
    code = (
        "import sys, torchstone\n"
        "assert 'numpy' not in sys.modules\n"
        "knobs = torchstone.Integer(1, 2), torchstone.Only(torchstone.Boolean(), 'a', (2,))\n"
        "space = torchstone.Space(dict(zip('ab', knobs)))\n"
        "torchstone.Tunable(name='n', build=lambda c: abs, space=space, inputs=lambda seed: (1,))\n"
        "assert 'torch' not in sys.modules\n"
        "names = [n for n in torchstone.__all__ if n != 'autotune']\n"
        "assert all(getattr(torchstone, n).__name__ for n in names)\n"
        "assert set(torchstone._HOMES) == set(torchstone.__all__)\n"
        "from torchstone import tuning\n"
        "assert torchstone.tune is tuning.tune\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


README = Path(__file__).parent.parent.joinpath("README.md").read_text()


@pytest.mark.parametrize("section", ["torchstone.optimize(", "torchstone.tune("])
def test_the_readme_example_runs(tmp_path: Path, section: str) -> None:
    blocks = [part.split("```")[0] for part in README.split("```python\n")[1:]]
    (code,) = [block for block in blocks if section in block]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "PROMOTE" in done.stdout or "KEEP_BASELINE" in done.stdout or "HOLD" in done.stdout


def test_a_model_in_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """Workers do not import the caller's script, so nothing runs twice."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torchstone\n"
        "print('once')\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.relu(x)\n"
        "run = torchstone.optimize(M().eval(), torch.randn(3), recipes=['eager'], home='home',\n"
        "    policy=torchstone.Policy(bench_s=2, load_s=0, rounds=5))\n"
        "print(run.decision.kind, run.model(torch.tensor([-1.0, 1.0, 2.0])).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == 1
    assert "[0.0, 1.0, 2.0]" in done.stdout


def test_the_report_of_a_run_is_json_that_reads_back(tmp_path: Path) -> None:
    run = torchstone.optimize(
        Block().eval(), block_inputs(), recipes=["eager"], home=tmp_path, policy=QUICK
    )
    page = run.report(tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts["decision"]["kind"] == run.decision.kind if run.decision else False
    assert page.read_text().startswith("<!")
