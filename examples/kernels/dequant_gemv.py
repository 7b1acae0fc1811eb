"""An int8 matrix with a scale a row times a float16 vector: one token through a quantized linear layer.

Bound by reading the matrix. A program has a few rows; where rows are few, columns are split between
programs, and a second launch adds up their partial sums.
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913

import torch
import triton
import triton.language as tl

from torchstone.records.tuning import Config
from torchstone.tuner.space import Integer, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable


@triton.jit(do_not_specialize=["rows", "splits"])
def _gemv(
    w, scale, x, y, parts, rows, cols, stride, splits,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    live = row < rows
    w += row.to(tl.int64)[:, None] * stride
    acc = tl.zeros([BN, BK], tl.float32)
    for start in tl.range(split * BK, cols, splits * BK, num_stages=STAGES):
        col = start + tl.arange(0, BK)
        mask = live[:, None] & (col < cols)[None, :]
        tile = tl.load(w + col[None, :], mask, other=0, eviction_policy="evict_first").to(tl.float32)
        acc += tile * tl.load(x + col, col < cols, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if splits == 1:
        total *= tl.load(scale + row, live, other=0.0).to(tl.float32)
        tl.store(y + row, total.to(y.dtype.element_ty), live)
    else:
        tl.store(parts + split * rows + row, total, live)


@triton.jit(do_not_specialize=["rows", "splits"])
def _finish(parts, scale, y, rows, splits, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(splits):
        total += tl.load(parts + split * rows + row, live, other=0.0)
    total *= tl.load(scale + row, live, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), live)


def build(config: Config):
    """The product for one config; rows of ``w`` are contiguous."""
    bn, splits = config["BLOCK_N"], config["splits"]

    def gemv(w, scale, x):
        rows, cols = w.shape
        y = torch.empty(rows, dtype=x.dtype, device=x.device)
        parts = torch.empty((splits, rows), dtype=torch.float32, device=x.device)
        _gemv[(triton.cdiv(rows, bn), splits)](
            w, scale, x, y, parts, rows, cols, w.stride(0), splits,
            bn, config["BLOCK_K"], config["stages"], num_warps=config["warps"],
        )  # fmt: skip
        if splits > 1:
            _finish[(triton.cdiv(rows, 256),)](parts, scale, y, rows, splits, 256)
        return y

    return gemv


def inputs(seed: int, rows: int, cols: int):
    """The matrix (rows, cols) int8, its scales (rows) float16, the vector (cols) float16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    w = torch.randint(-127, 128, (rows, cols), generator=generator, device=device, dtype=torch.int8)
    scale = (0.5 + torch.rand(rows, generator=generator, device=device)) / (73 * cols**0.5)
    x = torch.randn(cols, generator=generator, device=device)
    return w, scale.half(), x.half()


def reference(w, scale, x):
    """What it must compute: summed in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return ((w.to(wide) @ x.to(wide)) * scale.to(wide)).to(x.dtype)


def work(rows: int, cols: int):
    """Bytes, the matrix once, and operations."""
    return 1.0 * rows * cols + 2.0 * cols + 4.0 * rows, 2.0 * rows * cols


def limits(config: Config):
    """What a config takes."""
    tile, threads = config["BLOCK_N"] * config["BLOCK_K"], 32 * config["warps"]
    shared = (tile + 2 * config["BLOCK_K"]) * (config["stages"] - 1)
    return {"threads": threads, "shared_bytes": shared, "registers": 2 * tile / threads + 24}


def _busy(config: Config) -> bool:
    """Each thread has 16 to 64 elements of a tile."""
    return 16 <= config["BLOCK_N"] * config["BLOCK_K"] / (32 * config["warps"]) <= 64


tunable = Tunable(
    name="dequant_gemv",
    build=build,
    space=Space(
        {
            "BLOCK_N": PowerOfTwo(1, 32, default=8),
            "BLOCK_K": PowerOfTwo(256, 2048, default=512),
            "warps": PowerOfTwo(2, 8, default=4),
            "stages": Integer(1, 3, default=2),
            "splits": PowerOfTwo(1, 4, default=1),
        },
        valid=(_busy,),
        derived={"tile_a_thread": lambda c: c["BLOCK_N"] * c["BLOCK_K"] / (32 * c["warps"])},
    ),
    inputs=inputs,
    reference=reference,
    sizes={"rows": 8192, "cols": 28672},
    odd=({"rows": 1, "cols": 1}, {"rows": 37, "cols": 1001}, {"rows": 100, "cols": 5000}),
    work=work,
    limits=limits,
)
