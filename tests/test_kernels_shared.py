"""What Triton asks of a Hopper block's shared memory for the largest configs that spaces offer."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRIED = 3
NAMES = ("softmax", "layer", "group", "channels", "reduce", "arg", "scan", "cross-entropy")


def compiled(name):
    """Shared bytes of each of the largest configs, compiled for Hopper without one."""
    import numpy as np
    import torch
    from triton.runtime.jit import JITFunction

    import record_tables  # lies in benchmarks
    from torchstone.kernels import KERNELS

    record_tables.become_compiler({}, arch=90)
    run, kernels = JITFunction.run, []

    def keep(self, *args, **kwargs):
        kernels.append(run(self, *args, **kwargs))
        return kernels[-1]

    JITFunction.run = keep
    named = {kernel.name: kernel for kernel in KERNELS}

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    kernel, args = {
        "softmax": (named["softmax"], (empty(2000, 30000), 1, False)),
        "layer": (named["layer_norm"], (empty(300, 70000), [1], empty(70000), empty(70000), 1e-5)),
        "group": (named["group_norm"], (empty(16, 64, 300, 300), 8, empty(64), empty(64), 1e-5, "none")),
        "channels": (named["batch_norm"], (empty(64, 64, 100, 100), empty(64), empty(64), 1e-5, "none")),
        "reduce": (named["reduce"], (empty(64, 3000, 4095), "sum", [1], False)),
        "arg": (named["arg_reduce"], (empty(64, 3000, 4095), "max", 1, False)),
        "scan": (named["scan"], (empty(300, 30000), None, "sum", 1, False, False)),
        "cross-entropy": (
            named["cross_entropy"],
            (empty(3000, 40000), empty(3000, dtype=torch.int64), "mean", -100),
        ),
    }[name]
    space, rng = kernel.space(*args), np.random.default_rng(0)
    drawn = [space.default(), *(space.sample(rng) for _ in range(300))]
    size = {
        json.dumps(c): c.get("rows", 1) * c.get("block", 0) * (c.get("stages", 1) - 1) for c in drawn
    }
    found = []
    for text in sorted(size, key=size.get, reverse=True)[:TRIED]:
        kernels.clear()
        kernel.launch(json.loads(text), *args)
        found.append([max(k.metadata.shared for k in kernels), text])
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_configs_fit(name):
    from torchstone.kernels.base import SHARED_BYTES

    code = f"import json, test_kernels_shared as t; print(json.dumps(t.compiled({name!r})))"
    path = [str(ROOT / "tests"), str(ROOT / "benchmarks"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for shared, text in json.loads(done.stdout.splitlines()[-1]):
        assert shared <= SHARED_BYTES, text
