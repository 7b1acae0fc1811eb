"""Softmax over the last dimension of a matrix, by two algorithms that the tuner chooses between.

``chip`` keeps whole rows in registers and reads them once; ``stream`` reads each row twice, in blocks,
and keeps a running maximum and sum a lane ("Online normalizer calculation for softmax",
arXiv:1805.02867).
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913

import torch
import triton
import triton.language as tl

from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, Only, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable

MOST_PER_THREAD = 64


@triton.jit(do_not_specialize=["rows"])
def _chip(x, y, rows, cols, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    col = tl.arange(0, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        at = row.to(tl.int64)[:, None]
        value = tl.load(x + at * stride + col[None, :], mask, other=-float("inf"), eviction_policy=FIRST)
        value = value.to(tl.float32) * 1.4426950408889634  # log2(e): exp2 is one instruction
        value = tl.exp2(value - tl.max(value, 1)[:, None])
        value = value / tl.sum(value, 1)[:, None]
        tl.store(y + at * cols + col[None, :], value.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _stream(
    x, y, rows, cols, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    KEEP: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    x += row.to(tl.int64)[:, None] * stride
    y += row.to(tl.int64)[:, None] * cols
    top = tl.full([ROWS, BLOCK], -1e38, tl.float32)  # finite: -inf minus -inf is no number
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        mask = live & (start + col < cols)
        value = tl.load(x + start + col, mask, other=-float("inf"), eviction_policy=KEEP)
        value = value.to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, value)
        total = total * tl.exp2(top - higher) + tl.exp2(value - higher)
        top = higher
    most = tl.max(top, 1)[:, None]
    scale = 1.0 / tl.sum(total * tl.exp2(top - most), 1)[:, None]
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        mask = live & (start + col < cols)
        value = tl.load(x + start + col, mask, eviction_policy=FIRST)
        value = tl.exp2(value.to(tl.float32) * 1.4426950408889634 - most) * scale
        tl.store(y + start + col, value.to(y.dtype.element_ty), mask)


def build(config: Config):
    """Softmax of a matrix whose rows are contiguous, for one config."""
    rows_each, warps = config["rows"], config["warps"]
    hint = config["hint"] == "evict"
    keep, first = ("evict_last", "evict_first") if hint else ("", "")

    def softmax(x):
        """:raises ValueError: where a row does not fit into registers, and has to."""
        rows, cols = x.shape
        y = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        tiles = triton.cdiv(rows, rows_each)
        args = (x, y, rows, cols, x.stride(0), rows_each)
        if config["way"] == "stream":
            _stream[(tiles,)](*args, config["block"], config["stages"], keep, first, num_warps=warps)
            return y
        block = triton.next_power_of_2(cols)
        if rows_each * block > MOST_PER_THREAD * 32 * warps:
            raise ValueError(
                f"{rows_each} rows of {cols} do not fit into the registers of {warps} warps"
            )
        waves = config["waves"]
        programs = min(tiles, waves * _multiprocessors(x)) if waves else tiles
        _chip[(programs,)](*args, block, first, num_warps=warps)
        return y

    return softmax


def _multiprocessors(x):
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def inputs(seed: int, rows: int, cols: int):
    """A matrix of normal numbers, float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator, device=device) * 3,)


def reference(x):
    """What it must compute."""
    return torch.softmax(x, -1)


def work(rows: int, cols: int):
    """Bytes, read once and written once, and operations."""
    return 8.0 * rows * cols, 5.0 * rows * cols


def limits(config: Config):
    """What a config takes; rows on chip are held against a row's length when it is known."""
    tile = config["rows"] * config["block"]
    stream = config["way"] == "stream"
    return {
        "threads": 32 * config["warps"],
        "shared_bytes": 4 * tile * (config["stages"] - 1) if stream else 0,
        "registers": 3 * tile / (32 * config["warps"]) + 24 if stream else 0,
    }


def _busy(config: Config) -> bool:
    """Each thread has 4 to 32 elements of a block."""
    each = config["rows"] * config["block"] / (32 * config["warps"])
    return config["way"] == "chip" or 4 <= each <= 32


tunable = Tunable(
    name="softmax",
    build=build,
    space=Space(
        {
            "way": Choice(("chip", "stream"), default="chip"),
            "rows": PowerOfTwo(1, 8, default=1),
            "warps": PowerOfTwo(1, 32, default=8),
            "hint": Choice(("none", "evict")),
            "waves": Only(Choice((0, 1, 2, 4, 8), default=0), "way", ("chip",)),
            "block": Only(PowerOfTwo(512, 8192, default=2048), "way", ("stream",)),
            "stages": Only(Integer(1, 3, default=2), "way", ("stream",)),
        },
        valid=(_busy,),
        derived={"tile_a_thread": lambda c: c["rows"] * c["block"] / (32 * c["warps"])},
    ),
    inputs=inputs,
    reference=reference,
    sizes={"rows": 8192, "cols": 8192},
    odd=({"rows": 1, "cols": 1}, {"rows": 37, "cols": 1023}, {"rows": 5, "cols": 4099}),
    work=work,
    limits=limits,
)
