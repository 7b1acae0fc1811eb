"""A tunable of a Triton kernel, for the interpreter or a GPU; imports Triton only where it is built."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from torchstone.records.tuning import Config
from torchstone.tuner.space import PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCHES = "LAUNCHES"
"""Variable that names a file to which each call of the function adds what it found in its output."""


def inputs(seed: int, n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE),)


def build(config: Config) -> Callable[..., torch.Tensor]:
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, out, n, BLOCK: tl.constexpr):  # noqa: N803  a constexpr of Triton
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, -1.0)
        double[(triton.cdiv(len(x), config["BLOCK"]),)](x, out, len(x), BLOCK=config["BLOCK"])
        if LAUNCHES in os.environ:
            with Path(os.environ[LAUNCHES]).open("a") as file:
                file.write(f"{os.getpid()} {int((out == -1).all())}\n")
        return out

    return call


def tunable() -> Tunable:
    return Tunable(
        name="double",
        build=build,
        space=Space({"BLOCK": PowerOfTwo(64, 256)}),
        inputs=inputs,
        reference=lambda x: x * 2,
        sizes={"n": 1000},
        odd=({"n": 77},),
    )
