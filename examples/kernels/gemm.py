"""``gelu(x @ weight.T + bias)`` in float16: a linear layer of a transformer, with its epilogue.

Tiles are read by pointers or, on a device that has it, by the tensor memory accelerator through
descriptors; programs go over tiles in groups of rows, so that those that run at once share what they
read in L2.
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


@triton.jit(do_not_specialize=["group"])
def _gemm(
    x, w, bias, y, m, n, k, stride_x, stride_w, group,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    pid = tl.program_id(0)
    first = pid // (group * tiles_n) * group
    height = tl.minimum(tiles_m - first, group)
    row = (first + pid % (group * tiles_n) % height) * BM
    col = pid % (group * tiles_n) // height * BN
    acc = tl.zeros([BM, BN], tl.float32)
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    if DESCRIPTORS:
        for start in tl.range(0, k, BK):
            acc = tl.dot(x.load([row, start]), w.load([col, start]).T, acc)
    else:
        inner = tl.arange(0, BK)
        # Rows beyond the end read others: what they give is not stored, and no mask costs anything.
        x_at = x + (rows % m).to(tl.int64)[:, None] * stride_x + inner[None, :]
        w_at = w + (cols % n).to(tl.int64)[None, :] * stride_w + inner[:, None]
        for start in tl.range(0, k, BK):
            if EVEN:
                a, b = tl.load(x_at), tl.load(w_at)
            else:
                a = tl.load(x_at, (inner < k - start)[None, :], other=0.0)
                b = tl.load(w_at, (inner < k - start)[:, None], other=0.0)
            acc = tl.dot(a, b, acc)
            x_at += BK
            w_at += BK
    acc += tl.load(bias + cols, cols < n, other=0.0).to(tl.float32)[None, :]
    acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    if DESCRIPTORS:
        y.store([row, col], acc.to(y.dtype))
    else:
        at = rows.to(tl.int64)[:, None] * n + cols[None, :]
        tl.store(y + at, acc.to(y.dtype.element_ty), (rows < m)[:, None] & (cols < n)[None, :])


def build(config: Config):
    """The layer for one config; rows of ``x`` and of the weight are contiguous."""
    bm, bn, bk = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]

    def gemm(x, weight, bias):
        (m, k), n = x.shape, weight.shape[0]
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        described = config["load"] == "descriptor" and all(_aligned(t) for t in (x, weight, y))
        tensors = (x, weight, y)
        if described:
            blocks = ([bm, bk], [bn, bk], [bm, bn])
            tensors = [TensorDescriptor.from_tensor(t, b) for t, b in zip(tensors, blocks, strict=True)]
        _gemm[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
            tensors[0], tensors[1], bias, tensors[2], m, n, k, x.stride(0), weight.stride(0),
            config["group"], bm, bn, bk, k % bk == 0, described,
            num_warps=config["warps"], num_stages=config["stages"],
        )  # fmt: skip
        return y

    return gemm


def _aligned(t):
    """Whether a descriptor can be made: rows begin at multiples of 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0


def inputs(seed: int, m: int, n: int, k: int):
    """``x`` (m, k), weight (n, k) and bias (n), float16; outputs are about 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device=device)
    weight = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    bias = torch.randn(n, generator=generator, device=device)
    return x.half(), weight.half(), bias.half()


def reference(x, weight, bias):
    """What it must compute."""
    return F.gelu(F.linear(x, weight, bias))


def work(m: int, n: int, k: int):
    """Bytes, each matrix once, and operations of the product."""
    return 2.0 * (m * k + n * k + m * n + n), 2.0 * m * n * k


def limits(config: Config):
    """What a config takes: tiles of all stages in shared memory, the accumulator in registers."""
    bm, bn, bk = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    threads = 32 * config["warps"]
    tiles = 2 * (bm + bn) * bk * config["stages"]
    return {"threads": threads, "shared_bytes": tiles, "registers": bm * bn / threads + 60}


def _busy(config: Config) -> bool:
    """The accumulator has 16 to 128 elements a thread: fewer starve the tensor cores, more spill."""
    return 16 <= config["BLOCK_M"] * config["BLOCK_N"] / (32 * config["warps"]) <= 128


def _on_chip(config: Config) -> bool:
    """The tiles fit into the 227 KiB of shared memory that a Hopper block may have."""
    return limits(config)["shared_bytes"] <= 232_448


tunable = Tunable(
    name="gemm",
    build=build,
    space=Space(
        {
            "BLOCK_M": PowerOfTwo(64, 256, default=128),
            "BLOCK_N": PowerOfTwo(64, 256, default=128),
            "BLOCK_K": PowerOfTwo(32, 128, default=64),
            "warps": PowerOfTwo(4, 8, default=8),
            "stages": Integer(2, 4, default=3),
            "group": Choice((1, 4, 16), default=4),
            "load": Choice(("pointer", "descriptor")),
        },
        valid=(_busy, _on_chip),
        derived={
            "tile": lambda c: c["BLOCK_M"] * c["BLOCK_N"],
            "shared": lambda c: limits(c)["shared_bytes"],
        },
    ),
    inputs=inputs,
    reference=reference,
    sizes={"m": 4096, "n": 4096, "k": 4096},
    odd=({"m": 1, "n": 8, "k": 16}, {"m": 77, "n": 136, "k": 200}, {"m": 129, "n": 63, "k": 65}),
    work=work,
    limits=limits,
)
