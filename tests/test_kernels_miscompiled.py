"""Miscompiled kernels are caught: each fault that users reported, planted beside configs that are right.

1 wrong at one block size (fla#640); 2 an output buffer that configs share (triton#9230); 3 a kernel that
changes its input, tuned by calling it again and again (triton#6547); 5 right when it was compiled, wrong
when it comes from a cache (triton-dejavu#1); 6 offsets too narrow (Liger#1246); 12 a store that a
pipelined load does not see (helion#655).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from test_kernels_support import here, interpret, outside
from torchstone.measure.live import LiveMeasurer
from torchstone.recipe import Numerics
from torchstone.records.tuning import MeasurePolicy
from torchstone.tuner.driver import Budget, search
from torchstone.tuner.search.base import Problem
from torchstone.tuner.search.exhaustive import Exhaustive
from torchstone.tuner.tunable import Tunable
from torchstone.worker import Limits

POLICY = MeasurePolicy(samples=3, race=2, race_factor=1e6, build_s=60, call_s=60)
LIMITS = Limits(memory_bytes=4 << 30, threads=1)
GPU = torch.cuda.is_available()
FAULTS = {
    "1 one block size": ("gram", ("16", "32", "64"), {"32"}),
    "1 one of several": ("doubled", ("64", "128", "256"), {"128"}),
    "2 a shared buffer": ("doubled", ("right", "kept_buffer", "writes_half"), {"writes_half"}),
    "3 in place": ("in_place", ("right", "again"), {"again"}),
    "5 from a cache": ("doubled", ("right", "after_the_first"), {"after_the_first"}),
    "6 narrow offsets": ("doubled", ("right", "narrow_offsets"), {"narrow_offsets"}),
    "12 a store that is not seen": ("running", ("right", "pipelined"), {"pipelined"}),
}


@outside
@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="the device itself shows it")
def test_in_the_interpreter() -> None:
    interpret(__file__, "not gpu")


def statuses(tunable: Tunable, folder: Path) -> dict[Any, str]:
    with LiveMeasurer(tunable, POLICY, folder, 0, LIMITS) as measurer:
        found = search(Problem(tunable.space), Exhaustive(), measurer, Budget(measurements=99))
    assert found.best is not None
    assert found.best.status == "timed"
    return {m.config["how"]: m.status for m in found.measurements}


def caught(name: str, folder: Path) -> None:
    import miscompiled

    family, hows, wrong = FAULTS[name]
    size = 64 * 64 * 4 if family == "gram" else 300 if family == "running" else 70_000
    if family == "gram":  # each block size has a reference of its own
        for how in hows:
            made = miscompiled.tunable(family, how, size=size)
            object.__setattr__(made, "reference", lambda x, b=int(how): miscompiled.gram_of(b, x))
            with LiveMeasurer(made, POLICY, folder / how, 0, LIMITS) as measurer:
                found = search(Problem(made.space), Exhaustive(), measurer, Budget(measurements=9))
            (one,) = found.measurements
            assert one.status == ("wrong" if how in wrong else "timed"), one.text
        return
    told = statuses(miscompiled.tunable(family, *hows, size=size), folder)
    assert {how for how, status in told.items() if status == "wrong"} == wrong, told
    assert {status for how, status in told.items() if how not in wrong} == {"timed"}


@here
@pytest.mark.parametrize("name", FAULTS)
def test_it_is_caught(name: str, tmp_path: Path) -> None:
    caught(name, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", FAULTS)
def test_it_is_caught_on_a_device(name: str, tmp_path: Path) -> None:
    caught(name, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_transposed_result_is_right_or_caught_at_every_block_size(block: int, tmp_path: Path) -> None:
    import miscompiled
    from torchstone.tuner.space import Boolean, Space

    call = miscompiled.products(block)

    def inputs(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        return tuple(torch.randn(block, block, generator=generator, device="cuda") for _ in range(2))

    made = Tunable(
        name="transposed-result",
        build=lambda config: call,
        space=Space({"one": Boolean()}),
        inputs=inputs,
        reference=lambda x, y: (x @ y).mT @ y,
        numerics=Numerics.LOSSY,  # the device multiplies in TF32
        max_relative_error=5e-3,
    )
    x, y = inputs(7)
    exact = (x.double() @ y.double()).mT @ y.double()
    right = float((call(x, y).double() - exact).norm() / exact.norm()) < 5e-3
    with LiveMeasurer(made, POLICY, tmp_path, 0, LIMITS) as measurer:
        found = search(Problem(made.space), Exhaustive(), measurer, Budget(measurements=2))
    assert {m.status == "timed" for m in found.measurements} == {right}


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_offsets_of_64_bits_reach_what_those_of_32_do_not() -> None:
    import miscompiled

    size = 2**31 + 2**20
    x = torch.ones(size, dtype=torch.int8, device="cuda")
    y = torch.zeros_like(x)
    miscompiled.doubled(x, y, 4096, bits=64)
    assert bool((y[-4096:] == 3).all())
    assert bool((y[2**31 : 2**31 + 4096] == 3).all())
