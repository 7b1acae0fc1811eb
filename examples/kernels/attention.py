"""Scaled dot-product attention, forward, causal or not, in float16 (FlashAttention-2, arXiv:2307.08691).

A program has a block of queries of one head and goes over the keys: first those that every query may
see, without a mask, then those at the diagonal and at the end, with one. Whether it is causal is known
at run time.
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable

ORDERS = ("along", "reversed", "across")
"""Blocks of a head one after the other; from its last, with most work where causal; or heads first."""


@triton.jit
def _tile(
    src, head, start, length,
    ROWS: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows ``start`` and on of a head; unless ``WHOLE``, those beyond its end are zero."""
    if DESCRIPTORS:
        tile = src.load([head, start, 0]).reshape(ROWS, D)
    else:
        row = start + tl.arange(0, ROWS)
        at = (head.to(tl.int64) * length + row)[:, None] * D + tl.arange(0, D)[None, :]
        tile = tl.load(src + at) if WHOLE else tl.load(src + at, (row < length)[:, None], other=0.0)
    return tile


@triton.jit
def _keys(
    acc, top, total, q, k, v, head, row, begin, end, length, causal, scale,
    BN: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Take keys ``begin`` to ``end`` into the accumulator."""
    for start in tl.range(begin, end, BN):
        score = tl.dot(q, _tile(k, head, start, length, BN, D, DESCRIPTORS, not MASKED).T)
        if MASKED:
            col = (start + tl.arange(0, BN))[None, :]
            seen = (col < length) & ((col <= row[:, None]) | (causal == 0))
            score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        value = _tile(v, head, start, length, BN, D, DESCRIPTORS, not MASKED)
        acc = tl.dot(p.to(value.dtype), value, acc)
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["heads", "length", "causal", "order"])
def _attention(
    q, k, v, o, heads, length, causal, order, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    blocks = tl.cdiv(length, BM)
    head, block = pid // blocks, pid % blocks
    if order == 2:
        head, block = pid % heads, pid // heads
    if order > 0:
        block = blocks - 1 - block
    first = block * BM
    row = first + tl.arange(0, BM)
    queries = _tile(q, head, first, length, BM, D, DESCRIPTORS, False)
    acc = tl.zeros([BM, D], tl.float32)
    top = tl.full([BM], -1e38, tl.float32)  # finite: -inf minus -inf is no number
    total = tl.zeros([BM], tl.float32)
    end = length
    whole = length // BN * BN
    if causal != 0:
        end = tl.minimum(first + BM, length)
        whole = first // BN * BN
    acc, top, total = _keys(
        acc,
        top,
        total,
        queries,
        k,
        v,
        head,
        row,
        0,
        whole,
        length,
        causal,
        scale,
        BN,
        D,
        False,
        DESCRIPTORS,
    )
    acc, top, total = _keys(
        acc,
        top,
        total,
        queries,
        k,
        v,
        head,
        row,
        whole,
        end,
        length,
        causal,
        scale,
        BN,
        D,
        True,
        DESCRIPTORS,
    )
    acc = acc / total[:, None]
    if DESCRIPTORS:
        o.store([head, first, 0], acc.to(o.dtype).reshape(1, BM, D))
    else:
        at = (head.to(tl.int64) * length + row)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(o + at, acc.to(o.dtype.element_ty), (row < length)[:, None])


def build(config: Config):
    """Attention for one config."""
    bm, bn = config["BLOCK_M"], config["BLOCK_N"]

    def attention(q, k, v, causal):
        """``q``, ``k``, ``v``: (batch, heads, length, dim), dim a power of two from 16."""
        batch, heads, length, dim = q.shape
        o = torch.empty((batch, heads, length, dim), dtype=q.dtype, device=q.device)
        tensors = [t.contiguous().view(batch * heads, length, dim) for t in (q, k, v, o)]
        described = config["load"] == "descriptor"
        if described:
            blocks = (bm, bn, bn, bm)
            tensors = [
                TensorDescriptor.from_tensor(t, [1, b, dim])
                for t, b in zip(tensors, blocks, strict=True)
            ]
        scale = 1.4426950408889634 * dim**-0.5  # log2(e): exp2 is one instruction
        order = ORDERS.index(config["order"])
        _attention[(triton.cdiv(length, bm) * batch * heads,)](
            *tensors, batch * heads, length, int(causal), order, scale, bm, bn, dim, described,
            num_warps=config["warps"], num_stages=config["stages"],
        )  # fmt: skip
        return o

    return attention


def inputs(seed: int, batch: int, heads: int, length: int, dim: int, causal: int):
    """Queries, keys and values, float16, and whether it is causal."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, heads, length, dim)
    q, k, v = (torch.randn(shape, generator=generator, device=device).half() for _ in range(3))
    return q, k, v, bool(causal)


def reference(q, k, v, causal):
    """What it must compute."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def work(batch: int, heads: int, length: int, dim: int, causal: int):
    """Bytes, each tensor once, and operations of the two products."""
    pairs = length * (length + 1) / 2 if causal else length * length
    return 8.0 * batch * heads * length * dim, 4.0 * batch * heads * pairs * dim


def limits(config: Config):
    """What a config takes where heads have 128: accumulator and scores, and tiles in shared memory."""
    bm, bn, threads = config["BLOCK_M"], config["BLOCK_N"], 32 * config["warps"]
    return {
        "threads": threads,
        "shared_bytes": 256 * (bm + 2 * bn * config["stages"]),
        "registers": bm * (128 + bn) / threads + 40,
    }


def _busy(config: Config) -> bool:
    """The accumulator and the scores leave registers to calculate with, and are worth the threads."""
    return 32 <= config["BLOCK_M"] * (128 + config["BLOCK_N"]) / (32 * config["warps"]) <= 192


def _on_chip(config: Config) -> bool:
    """Tiles of all stages fit into the 227 KiB of shared memory that a Hopper block may have."""
    return limits(config)["shared_bytes"] <= 232_448


tunable = Tunable(
    name="attention",
    build=build,
    space=Space(
        {
            "BLOCK_M": PowerOfTwo(64, 256, default=128),
            "BLOCK_N": PowerOfTwo(32, 256, default=64),
            "warps": PowerOfTwo(4, 16, default=8),
            "stages": Integer(1, 4, default=3),
            "order": Choice(ORDERS),
            "load": Choice(("pointer", "descriptor")),
        },
        valid=(_busy, _on_chip),
        derived={
            "tile": lambda c: c["BLOCK_M"] * c["BLOCK_N"],
            "registers": lambda c: limits(c)["registers"],
            "shared": lambda c: limits(c)["shared_bytes"],
        },
    ),
    inputs=inputs,
    reference=reference,
    sizes={"batch": 2, "heads": 16, "length": 4096, "dim": 128, "causal": 1},
    odd=(
        {"batch": 1, "heads": 1, "length": 1, "dim": 128, "causal": 1},
        {"batch": 1, "heads": 2, "length": 203, "dim": 64, "causal": 1},
        {"batch": 2, "heads": 1, "length": 300, "dim": 128, "causal": 0},
    ),
    work=work,
    limits=limits,
)
