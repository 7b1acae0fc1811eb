"""Triton kernels that are wrong as compilers have made kernels wrong, each in one of its configs.

Where the fault is the compiler's own (``transposed_result``), the device decides whether a config shows
it; elsewhere it is planted in the source, so that Triton's interpreter shows it too.
"""

# Constants of compilation are in capitals.
# ruff: noqa: N803, PLR0913
# mypy: ignore-errors

import functools

import torch
import triton
import triton.language as tl

from torchstone.tuner.space import Choice, Space
from torchstone.tuner.tunable import Tunable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEPT: dict[str, torch.Tensor] = {}


@triton.jit
def _gram(x, y, n, BLOCK: tl.constexpr, WRONG: tl.constexpr):
    """``x.T @ x`` of (BLOCK, BLOCK) tiles; at one block size the transposition is lost."""
    at = tl.arange(0, BLOCK)
    tile = tl.program_id(0) * BLOCK * BLOCK + at[:, None] * BLOCK + at[None, :]
    value = tl.load(x + tile)
    left = value if BLOCK == WRONG else tl.trans(value)
    tl.store(y + tile, tl.dot(left, value, input_precision="ieee"))


@triton.jit
def _twice(x, y, z, BLOCK: tl.constexpr):
    """``(x @ y).T @ y``: the operand of a product is the transposed result of another (fla#640)."""
    at = tl.arange(0, BLOCK)
    tile = at[:, None] * BLOCK + at[None, :]
    right = tl.load(y + tile)
    first = tl.dot(tl.load(x + tile), right, input_precision="tf32")
    tl.store(z + tile, tl.dot(tl.trans(first), right, input_precision="tf32"))


@triton.jit
def _double(x, y, n, BLOCK: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    """``2 x + 1``, from the FIRST of each STEP blocks on, with offsets of 16, 32 or 64 bits."""
    block = tl.program_id(0) * STEP + FIRST
    at = block * BLOCK + tl.arange(0, BLOCK)
    if BITS == 16:
        at = at.to(tl.uint16).to(tl.int32)
    if BITS == 64:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, at < n, other=0.0) + 1, at < n)


@triton.jit
def _running(x, y, n, EARLY: tl.constexpr):
    """Sums of all before, through memory: each step reads what the last one wrote; EARLY, too soon."""
    tl.store(y, tl.load(x))
    stale = tl.load(y)
    for i in range(1, n):
        before = stale if EARLY else tl.load(y + i - 1)
        stale = tl.load(y + i - 1)
        tl.store(y + i, before + tl.load(x + i))


@triton.jit
def _add_one(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < n) + 1, at < n)


def doubled(x, y, block, first=0, step=1, bits=32):
    blocks = triton.cdiv(x.numel(), block * step)
    _double[(blocks,)](x, y, x.numel(), block, first, step, bits)
    return y


def plain(x):
    return doubled(x, torch.empty_like(x), 256)


def kept_buffer(x):
    """Right, into a buffer that other configs see."""
    if KEPT.get("y") is None or KEPT["y"].shape != x.shape:
        KEPT["y"] = torch.empty_like(x)
    return doubled(x, KEPT["y"], 256).clone()


def writes_half(x):
    """Every other block, into that buffer: the rest is what a right config left there."""
    if KEPT.get("y") is None or KEPT["y"].shape != x.shape:
        KEPT["y"] = torch.empty_like(x)
    return doubled(x, KEPT["y"], 256, 0, 2)


def narrow_offsets(x):
    return doubled(x, torch.zeros_like(x), 256, bits=16)


def one_block(block, x):
    """Right but at one block size, where every other block is lost."""
    return doubled(x, torch.zeros_like(x), block, 0, 2 if block == 128 else 1)


def after_the_first(known, x):
    """As a kernel that a cache gives with constants of another: wrong from the second call on."""
    known.append(1)
    return plain(x) if len(known) == 1 else doubled(x, torch.zeros_like(x), 128, 0, 2)


def gram(block, wrong, x):
    y = torch.empty_like(x)
    _gram[(x.numel() // block**2,)](x, y, x.numel(), block, wrong)
    return y


def running(early, x):
    y = torch.empty_like(x)
    _running[(1,)](x, y, x.numel(), early)
    return y


def in_place(times, x):
    """Adds one to its input; ``times`` is how often a config that forgets to wait does it."""
    for _ in range(times):
        _add_one[(triton.cdiv(x.numel(), 64),)](x, x.numel(), 64)
    return x


BUILDS = {
    "doubled": {
        "right": plain,
        "kept_buffer": kept_buffer,
        "writes_half": writes_half,
        "narrow_offsets": narrow_offsets,
        **{str(block): functools.partial(one_block, block) for block in (64, 128, 256)},
        "after_the_first": lambda: functools.partial(after_the_first, []),
    },
    "in_place": {"right": functools.partial(in_place, 1), "again": functools.partial(in_place, 2)},
    "running": {"right": functools.partial(running, 0), "pipelined": functools.partial(running, 1)},
    "gram": {str(b): functools.partial(gram, b, 32) for b in (16, 32, 64)},
}
REFERENCES = {
    "doubled": lambda x: 2 * x + 1,
    "in_place": lambda x: x.add_(1),
    "running": lambda x: x.cumsum(0),
    "gram": None,
}


def build(family, config):
    made = BUILDS[family][config["how"]]
    return made() if config["how"] == "after_the_first" else made


def inputs(shape, seed, **sizes):
    made = torch.randn(shape or (sizes["n"],), generator=torch.Generator().manual_seed(seed))
    return (made.to(DEVICE),)


def gram_of(block, x):
    tiles = x.view(-1, block, block)
    return (tiles.mT @ tiles).view(x.shape)


def tunable(family, *hows, size=70_000):
    """A tunable of some of a family's configs; the first is the default."""
    return Tunable(
        name=f"miscompiled-{family}",
        build=functools.partial(build, family),
        space=Space({"how": Choice(hows)}),
        inputs=functools.partial(inputs, None),
        reference=REFERENCES[family],
        sizes={"n": size},
        odd=(),
    )


def products(block):
    """``(x @ y).T @ y`` at one block size, as the device's compiler makes it."""

    def call(x, y):
        z = torch.empty_like(x)
        _twice[(1,)](x, y, z, block)
        return z

    return call
