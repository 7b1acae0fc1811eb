"""The kernels of ``examples/kernels`` against float64, and the script that records their tables.

The interpreter runs them on a CPU. It is chosen when Triton is imported, hence processes of their own.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import record_tables  # noqa: E402  lies in benchmarks
from torchstone.tuner import replay  # noqa: E402

pytestmark = pytest.mark.slow  # workers, compilers or the interpreter in most of them

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
KERNELS = tuple(record_tables.PLANS)
H200 = {"shared_bytes": 232_448.0}


def errors_of(kernel, sizes, configs):
    """Relative errors of the default and some other configs, None where one cannot be."""
    from triton.runtime.errors import OutOfResources, PTXASError

    one = record_tables.tunable(kernel)
    rng = np.random.default_rng(0)
    chosen = [one.space.default(), *(one.space.sample(rng) for _ in range(configs))]
    found = []
    for size in sizes:
        state = {"launched": []}
        record_tables.prepare(state, kernel=kernel, sizes=size)
        args, truth = state[kernel, *size.values()]
        for config in chosen:
            try:
                with record_tables.Poisoned():
                    result = one.build(config)(*args)
            except (ValueError, OutOfResources, PTXASError):
                found.append(None)
                continue
            assert result.shape == truth.shape
            found.append(record_tables.relative_error(result, truth))
    return found


def run(*command, **changes):
    path = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, **changes}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def within(errors, bound):
    known = [error for error in errors if error is not None]
    return len(known) > len(errors) / 2 and all(error <= bound for error in known)


@needs_triton
@pytest.mark.parametrize("kernel", KERNELS)
def test_odd_sizes_are_right_in_the_interpreter(kernel):
    """The default and random configs, where nothing is a multiple of anything."""
    output = run(sys.executable, str(Path(__file__).resolve()), kernel, TRITON_INTERPRET="1")
    errors = json.loads(output.splitlines()[-1])
    assert within(errors, record_tables.PLANS[kernel].bound), errors


@needs_triton
@pytest.mark.parametrize("kernel", KERNELS)
def test_spaces_are_worth_searching(kernel):
    one = record_tables.tunable(kernel)
    configs = [c for c in one.space.all if record_tables.fits(one, c, H200)]
    assert 300 <= len(configs) <= 800
    assert one.space.why_not(one.space.default()) is None
    assert one.space.default() in configs
    for sizes in (*record_tables.PLANS[kernel].sizes, one.sizes):
        moved, operations = one.work(**sizes)
        assert max(moved / 4.8e12, operations / 989e12) > 10e-6  # long enough to be timed


def test_an_error_is_seen_wherever_it_is():
    truth = torch.tensor([1000.0, 1e-3, 0.0], dtype=torch.float64)
    assert record_tables.relative_error(truth.float(), truth) < 1e-6
    assert record_tables.relative_error(truth * 1.01, truth) == pytest.approx(1e-2, rel=0.5)
    assert not record_tables.relative_error(torch.tensor([1000.0, float("nan"), 0.0]), truth) <= 1.0
    with record_tables.Poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.zeros(3).eq(0).all()


@needs_triton
@pytest.mark.slow
def test_recording_in_small(tmp_path):
    """Compiled for a device that need not be there, timed by the interpreter."""
    script = ROOT / "benchmarks" / "record_tables.py"
    run(
        sys.executable, str(script), "--smoke", "--out", str(tmp_path), "--kernels", "column_sum", "gemm"
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["binaries"] >= 4
    assert summary["compile_s"] > 0
    with tarfile.open(tmp_path / "tables.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    for path in tmp_path.glob("*.json.gz"):
        table = replay.read(path)
        assert [row.status for row in table.rows] == ["timed"] * 4
        assert all(row.compile_s > 0 for row in table.rows)
        assert table.config(table.rows[0]) == table.default
    assert len(list(tmp_path.glob("*.json.gz"))) == 2


MISBEHAVED = """
import os, time, torch
from torchstone.tuner.space import Choice, Space
from torchstone.tuner.tunable import Tunable

def build(config):
    def column_sum(x):
        y = torch.empty(x.shape[1], dtype=x.dtype, device=x.device)
        if x.is_meta:
            return y
        if config["does"] == "dies":
            os._exit(3)
        if config["does"] == "writes nothing":
            return y
        if config["does"] == "raises":
            raise RuntimeError("an instruction was illegal")
        return y.copy_(x.sum(0))
    return column_sum

tunable = Tunable(
    name="column_sum",
    build=build,
    space=Space({"does": Choice(("right", "dies", "writes nothing", "raises"))}),
    inputs=lambda seed, rows, cols: (torch.ones(rows, cols),),
    reference=lambda x: x.sum(0),
)
"""


@needs_triton
@pytest.mark.slow
def test_what_misbehaves_is_a_row(tmp_path):
    """One kills the timer, one leaves its output as it was, one raises: each is told."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "examples" / "kernels").mkdir(parents=True)
    script = tmp_path / "benchmarks" / "record_tables.py"
    shutil.copy(ROOT / "benchmarks" / "record_tables.py", script)
    (tmp_path / "examples" / "kernels" / "column_sum.py").write_text(MISBEHAVED)
    run(sys.executable, str(script), "--smoke", "--out", str(tmp_path), "--kernels", "column_sum")
    with tarfile.open(tmp_path / "tables.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    table = replay.read(next(tmp_path.glob("*.json.gz")))
    found = {row.values[0]: row for row in table.rows}
    assert {name: row.status for name, row in found.items()} == {
        "right": "timed",
        "dies": "crashed",
        "writes nothing": "wrong",
        "raises": "crashed",
    }
    assert "code 3" in found["dies"].text
    assert "illegal" in found["raises"].text


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_sizes_are_right_on_a_device(kernel):
    one = record_tables.tunable(kernel)
    errors = errors_of(kernel, (one.sizes, *one.odd), 6)
    assert within(errors, record_tables.PLANS[kernel].bound), errors


if __name__ == "__main__":
    print(json.dumps(errors_of(sys.argv[1], record_tables.tunable(sys.argv[1]).odd, 4)))
