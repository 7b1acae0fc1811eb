"""Sum over the rows of a float32 matrix: the gradient of a bias.

Columns are contiguous, so a program goes down a strip of them; where strips are too few for the device,
rows are split between programs, and their partial sums are added by atomics or by a second launch.
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913

import torch
import triton
import triton.language as tl

from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable


@triton.jit(do_not_specialize=["rows"])
def _sum(
    x,
    y,
    rows,
    cols,
    stride,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    col = tl.program_id(0) * BC + tl.arange(0, BC)
    split, splits = tl.program_id(1), tl.num_programs(1)
    fits = col < cols
    acc = tl.zeros([BR, BC], tl.float32)
    for start in tl.range(split * BR, rows, splits * BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        at = row.to(tl.int64)[:, None] * stride + col[None, :]
        acc += tl.load(x + at, (row < rows)[:, None] & fits[None, :], other=0.0)
    total = tl.sum(acc, 0)
    if ATOMIC:
        tl.atomic_add(y + col, total, fits, sem="relaxed")
    else:
        tl.store(y + split.to(tl.int64) * cols + col, total, fits)


def build(config: Config):
    """The sum for one config; rows of ``x`` are contiguous."""
    br, bc, atomic = config["BLOCK_R"], config["BLOCK_C"], config["finish"] == "atomic"

    def column_sum(x):
        rows, cols = x.shape
        strips = triton.cdiv(cols, bc)
        wanted = triton.cdiv(config["waves"] * _multiprocessors(x), strips)
        splits = max(1, min(wanted, triton.cdiv(rows, br), 65_535))
        options = {"STAGES": config["stages"], "num_warps": config["warps"]}
        if atomic:
            y = torch.zeros(cols, dtype=x.dtype, device=x.device)
            _sum[(strips, splits)](x, y, rows, cols, x.stride(0), br, bc, ATOMIC=True, **options)
            return y
        parts = torch.empty((splits, cols), dtype=x.dtype, device=x.device)
        _sum[(strips, splits)](x, parts, rows, cols, x.stride(0), br, bc, ATOMIC=False, **options)
        if splits == 1:
            return parts[0]
        y = torch.empty(cols, dtype=x.dtype, device=x.device)
        _sum[(strips, 1)](parts, y, splits, cols, cols, br, bc, ATOMIC=False, **options)
        return y

    return column_sum


def _multiprocessors(x):
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def inputs(seed: int, rows: int, cols: int):
    """A matrix of normal numbers, float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator, device=device),)


def reference(x):
    """What it must compute."""
    return x.sum(0)


def work(rows: int, cols: int):
    """Bytes, read once, and operations."""
    return 4.0 * rows * cols + 4.0 * cols, 1.0 * rows * cols


def limits(config: Config):
    """What a config takes."""
    tile, threads = config["BLOCK_R"] * config["BLOCK_C"], 32 * config["warps"]
    shared = 4 * tile * (config["stages"] - 1)
    return {"threads": threads, "shared_bytes": shared, "registers": 3 * tile / threads + 24}


def _busy(config: Config) -> bool:
    """Each thread has 4 to 32 elements of a tile."""
    return 4 <= config["BLOCK_R"] * config["BLOCK_C"] / (32 * config["warps"]) <= 32


tunable = Tunable(
    name="column_sum",
    build=build,
    space=Space(
        {
            "BLOCK_R": PowerOfTwo(4, 64, default=32),
            "BLOCK_C": PowerOfTwo(32, 512, default=128),
            "warps": PowerOfTwo(2, 8, default=4),
            "stages": Integer(1, 3, default=2),
            "waves": Choice((2, 8), default=8),
            "finish": Choice(("atomic", "again")),
        },
        valid=(_busy,),
        derived={"tile_a_thread": lambda c: c["BLOCK_R"] * c["BLOCK_C"] / (32 * c["warps"])},
    ),
    inputs=inputs,
    reference=reference,
    sizes={"rows": 8192, "cols": 8192},
    odd=({"rows": 1, "cols": 1}, {"rows": 1000, "cols": 37}, {"rows": 33, "cols": 1025}),
    work=work,
    limits=limits,
)
