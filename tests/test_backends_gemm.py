"""``inductor(gemm=...)``: whose matrix products are tried, and why some cannot be."""

from pathlib import Path

import pytest
import torch
from torch import nn

from torchstone import backends, recipe
from torchstone import workload as workload_module
from torchstone.backends import compiler, gemm
from torchstone.policy import Policy
from torchstone.records import Unsupported, VerdictEntry, Verified
from torchstone.report.progress import QuietProgress
from torchstone.run import Request, execute

ON_A_PROCESSOR = {
    "aten": None,
    "cpp": None,
    "triton": "NVIDIA device",
    "cutlass": "NVIDIA device",
    "cutedsl": "NVIDIA device",
    "nvgemm": "NVIDIA device",
    "flydsl": "no backend called FLYDSL",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("name", gemm.NAMES)
def test_each_backend_is_there_or_says_why_not(name: str) -> None:
    found = backends.probe(recipe.parse(f"inductor(gemm={name})"))
    wanted = ON_A_PROCESSOR[name]
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        assert found.engine == f"inductor(gemm={name})"
        assert wanted in found.why or "no backend called" in found.why


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", gemm.NAMES)
def test_on_a_device_each_answers(name: str) -> None:
    found = gemm.absent(name)
    assert found is None or found.why
    if name in ("aten", "triton"):
        assert found is None


def test_the_recipe_says_so_and_inductor_is_told() -> None:
    found = recipe.parse("inductor(gemm=cutlass)")
    assert str(found) == "inductor(gemm=cutlass)"
    told = compiler.options(found)
    assert told == {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,CUTLASS"}
    assert compiler.options(recipe.parse("inductor")) == {}
    assert compiler.options(recipe.parse("inductor(gemm=aten)"))["max_autotune_gemm_backends"] == "ATEN"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CPP is for processors")
def test_a_run_takes_what_is_there_and_leaves_what_is_not(tmp_path: Path) -> None:
    texts = ("inductor(freezing, gemm=cpp)", "inductor(gemm=cutlass)")
    workload = workload_module.from_objects(
        network, torch.randn(8, 64), dims={"B": "1..16"}, policy=Policy(), shapes={"input": ["B", 64]}
    )
    request = Request(
        workload=workload, recipes=tuple(map(recipe.parse, texts)), home=tmp_path, until="verify"
    )
    run = execute(request, QuietProgress())
    entry = run.store.get(f"verdict/{texts[0]}", VerdictEntry)
    assert entry is not None
    assert isinstance(entry.verdict, Verified), entry.verdict
    refused = run.store.get(f"verdict/{texts[1]}", VerdictEntry)
    assert refused is not None
    assert isinstance(refused.verdict, Unsupported)
    assert "NVIDIA device" in refused.verdict.text
