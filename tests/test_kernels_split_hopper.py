"""What Triton makes of split products for a Hopper GPU; it compiles without one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
HOPPER = 90


def compiled():
    """Counts of instructions in each kernel launched, by case."""
    import torch
    from triton.runtime.jit import JITFunction

    import record_tables  # lies in benchmarks
    from torchstone.kernels.device import split_gemm as device
    from torchstone.kernels.split_gemm import LINEAR, MATMUL

    record_tables.become_compiler({}, arch=HOPPER)
    run, kernels = JITFunction.run, []

    def keep(self, *args, **kwargs):
        kernels.append(run(self, *args, **kwargs))
        return kernels[-1]

    JITFunction.run = keep
    x, bias = torch.empty(640, 2048, device="meta"), torch.empty(768, device="meta")
    found = {}
    for parts in (2, 3):
        w = torch.empty(parts, 768, 2048, device="meta", dtype=torch.bfloat16)
        calls = {
            "linear": (LINEAR, (x, w, bias, parts, "gelu")),
            "matmul": (MATMUL, (x, x.T, parts)),
            "transposed": (MATMUL, (x.T, x, parts)),
        }
        for name, (kernel, args) in calls.items():
            kernels.clear()
            config = {**kernel.space(*args).default(), "method": "fused"}
            kernel.launch(config, *args)
            found[f"{name} {parts}"] = [config["BLOCK_K"], [counts(k.asm["ptx"]) for k in kernels]]
        kernels.clear()
        device.split(x, parts)
        found[f"split {parts}"] = [0, [counts(k.asm["ptx"]) for k in kernels]]
    return found


def counts(ptx):
    words = ("wgmma.mma_async", ".f32.bf16.bf16", "cvt.rn.bf16", "sub.f32", "fma.rn.f32")
    return {word: ptx.count(word) for word in words}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_parts_are_split_and_multiplied_as_written():
    """Three or six bfloat16 products a step and no other; the remainders are not folded away."""
    path = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for case, (block_k, kernels) in found.items():
        name, parts = case.split()
        main, *rest = kernels
        assert main["cvt.rn.bf16"] > 0
        if name == "split":  # a remainder before each part but the first, perhaps merged with the scale
            remainders = main["sub.f32"] + main["fma.rn.f32"]
            assert remainders * int(parts) == main["cvt.rn.bf16"] * (int(parts) - 1)
            assert not rest
            continue
        products = {"2": 3, "3": 6}[parts]
        # a warp group multiplies 64 rows and 16 columns of k at a time, by all of BLOCK_N
        assert main["wgmma.mma_async"] == products * block_k // 16
        assert main[".f32.bf16.bf16"] == main["wgmma.mma_async"]
        assert all(other["wgmma.mma_async"] == 0 for other in rest)  # the repair is in plain float32


if __name__ == "__main__":
    print(json.dumps(compiled()))
