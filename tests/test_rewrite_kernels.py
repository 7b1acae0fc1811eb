"""Kernels of ours in a rewritten graph: only where Triton runs, and right there, by the interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchstone.recipe import Rewrite
from torchstone.records import Unsupported
from torchstone.rewrite.program import rewrite_module

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = """
import torch
from torch import nn
from torchstone.recipe import Rewrite
from torchstone.rewrite.program import rewrite_module

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm, self.group = nn.LayerNorm(7), nn.GroupNorm(3, 6)

    def forward(self, x, targets):
        h = torch.relu(self.group(self.conv(x)))
        h = nn.functional.max_pool2d(self.norm(h), 2, 1)
        rows = torch.flip(torch.cumsum(torch.flip(h, [1]), 1), [1]).mean((2, 3))
        return torch.softmax(h, 1), nn.functional.cross_entropy(rows, targets), h.amax(-1)

torch.manual_seed(0)
module, x, targets = Net().eval(), torch.randn(5, 6, 7, 7), torch.tensor([0, 5, 2, 3, 1])
exact = [t.detach().clone() for t in module.double()(x.double(), targets)]
module.float()
found = rewrite_module(module, (x, targets), Rewrite("kernels"))
rewritten, log = found
print(sorted({f.rule for f in log.fired}))
for a, b in zip(rewritten(x, targets), exact):
    assert a.dtype == torch.float32
    torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
print("right")
"""


@pytest.mark.slow
def test_kernels_take_the_place_of_operations_and_give_what_those_gave() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    fired, right = done.stdout.splitlines()[-2:]
    assert right == "right"
    for name in (
        "cross_entropy",
        "depthwise_conv2d",
        "group_norm_relu",
        "layer_norm",
        "max_pool2d",
        "reduce_amax",
        "reduce_mean",
        "reverse_scan_sum",
        "softmax",
    ):
        assert f"'{name}'" in fired, (name, fired)


def test_where_triton_does_not_run_nothing_is_changed() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter runs Triton on the processor")
    found = rewrite_module(nn.Softmax(-1), (torch.randn(4, 8),), Rewrite("kernels"))
    assert isinstance(found, Unsupported)
