"""Layer normalization of the rows of a matrix, with weight and bias.

``chip`` keeps whole rows in registers: mean first, then the variance about it. ``stream`` reads each
row twice, in blocks, with a running mean and sum of squares a lane (Welford), merged at the end (Chan
et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979): no
cancellation, whatever the mean.
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, Only, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable

EPS = 1e-5
MOST_PER_THREAD = 64


@triton.jit(do_not_specialize=["rows"])
def _chip(
    x, w, b, y, rows, cols, stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr
):
    col = tl.arange(0, BLOCK)
    fits = col < cols
    w = tl.load(w + col, fits, other=0.0).to(tl.float32)[None, :]
    b = tl.load(b + col, fits, other=0.0).to(tl.float32)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & fits[None, :]
        at = row.to(tl.int64)[:, None]
        value = tl.load(x + at * stride + col[None, :], mask, other=0.0, eviction_policy=FIRST)
        value = value.to(tl.float32)
        mean = tl.sum(value, 1)[:, None] / cols
        apart = tl.where(mask, value - mean, 0.0)
        scale = tl.rsqrt(tl.sum(apart * apart, 1)[:, None] / cols + eps)
        tl.store(y + at * cols + col[None, :], (apart * scale * w + b).to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _stream(
    x, w, b, y, rows, cols, stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    KEEP: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    lane = tl.arange(0, BLOCK)
    x += row.to(tl.int64)[:, None] * stride
    y += row.to(tl.int64)[:, None] * cols
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    count = 0.0
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        col = start + lane[None, :]
        value = tl.load(x + col, live & (col < cols), other=0.0, eviction_policy=KEEP).to(tl.float32)
        count += 1.0
        apart = tl.where(col < cols, value - mean, 0.0)
        mean += apart * (1.0 / count)
        squares += apart * tl.where(col < cols, value - mean, 0.0)
    counts = ((cols - lane + BLOCK - 1) // BLOCK).to(tl.float32)[None, :]  # values that a lane has seen
    middle = tl.sum(mean * counts, 1)[:, None] / cols
    apart = mean - middle
    scale = tl.rsqrt(tl.sum(squares + counts * apart * apart, 1)[:, None] / cols + eps)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        col = start + lane
        fits = col < cols
        mask = live & fits[None, :]
        value = tl.load(x + col[None, :], mask, other=0.0, eviction_policy=FIRST).to(tl.float32)
        weight = tl.load(w + col, fits, other=0.0).to(tl.float32)[None, :]
        bias = tl.load(b + col, fits, other=0.0).to(tl.float32)[None, :]
        value = (value - middle) * scale * weight + bias
        tl.store(y + col[None, :], value.to(y.dtype.element_ty), mask)


def build(config: Config):
    """Layer norm of a matrix whose rows are contiguous, for one config."""
    rows_each, warps = config["rows"], config["warps"]
    keep, first = ("evict_last", "evict_first") if config["hint"] == "evict" else ("", "")

    def layer_norm(x, weight, bias):
        """:raises ValueError: where a row does not fit into registers, and has to."""
        rows, cols = x.shape
        y = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        tiles = triton.cdiv(rows, rows_each)
        args = (x, weight, bias, y, rows, cols, x.stride(0), EPS, rows_each)
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

    return layer_norm


def _multiprocessors(x):
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def inputs(seed: int, rows: int, cols: int):
    """A matrix whose rows have different means and spreads, weight and bias; float16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, device=device)
    x = x * (1 + torch.rand(rows, 1, generator=generator, device=device))
    x = x + torch.randn(rows, 1, generator=generator, device=device)
    weight = 1 + 0.2 * torch.randn(cols, generator=generator, device=device)
    bias = 0.2 * torch.randn(cols, generator=generator, device=device)
    return x.half(), weight.half(), bias.half()


def reference(x, weight, bias):
    """What it must compute."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def work(rows: int, cols: int):
    """Bytes, read once and written once, and operations."""
    return 4.0 * rows * cols + 4.0 * cols, 8.0 * rows * cols


def limits(config: Config):
    """What a config takes; rows on chip are held against a row's length when it is known."""
    tile = config["rows"] * config["block"]
    stream = config["way"] == "stream"
    return {
        "threads": 32 * config["warps"],
        "shared_bytes": 2 * (tile + 2 * config["block"]) * (config["stages"] - 1) if stream else 0,
        "registers": 3 * tile / (32 * config["warps"]) + 24 if stream else 0,
    }


def _busy(config: Config) -> bool:
    """Each thread has 4 to 32 elements of a block."""
    each = config["rows"] * config["block"] / (32 * config["warps"])
    return config["way"] == "chip" or 4 <= each <= 32


tunable = Tunable(
    name="layer_norm",
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
    odd=({"rows": 1, "cols": 3}, {"rows": 37, "cols": 1023}, {"rows": 5, "cols": 4099}),
    work=work,
    limits=limits,
)
