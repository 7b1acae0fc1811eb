"""Cross-entropy of rows of float16 logits with their target classes, in float32: a large vocabulary.

One pass with a running maximum and sum, a lane or a block at a time; where rows are few, the vocabulary
is split between programs, and a second launch merges what they found. Every target is a class: none is
ignored.
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable


@triton.jit(do_not_specialize=["splits"])
def _rows(
    logits, targets, loss, parts, cols, stride, splits,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    top = tl.full([BLOCK if LANES else 1], -1e38, tl.float32)  # finite: -inf minus -inf is no number
    total = tl.zeros([BLOCK if LANES else 1], tl.float32)
    for start in tl.range(split * BLOCK, cols, splits * BLOCK, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(logits + col, col < cols, other=-float("inf"), eviction_policy="evict_first")
        value = value.to(tl.float32) * 1.4426950408889634  # log2(e): exp2 is one instruction
        if LANES:
            higher = tl.maximum(top, value)
            total = total * tl.exp2(top - higher) + tl.exp2(value - higher)
        else:
            higher = tl.maximum(top, tl.max(value, 0))
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(value - higher), 0)
        top = higher
    most = tl.max(top, 0)
    total = tl.sum(total * tl.exp2(top - most), 0)
    if splits == 1:
        chosen = tl.load(logits + tl.load(targets + row)).to(tl.float32)
        tl.store(loss + row, (most + tl.log2(total)) * 0.6931471805599453 - chosen)
    else:
        at = parts + (row * splits + split) * 2
        tl.store(at, most)
        tl.store(at + 1, total)


@triton.jit(do_not_specialize=["splits"])
def _merge(logits, targets, loss, parts, stride, splits, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    at = parts + (row * splits + split) * 2
    top = tl.load(at, split < splits, other=-1e38)
    total = tl.load(at + 1, split < splits, other=0.0)
    most = tl.max(top, 0)
    total = tl.sum(total * tl.exp2(top - most), 0)
    chosen = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32)
    tl.store(loss + row, (most + tl.log2(total)) * 0.6931471805599453 - chosen)


def build(config: Config):
    """The losses of all rows for one config; rows of ``logits`` are contiguous."""
    splits, lanes = config["splits"], config["carry"] == "lane"

    def cross_entropy(logits, targets):
        rows, cols = logits.shape
        loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
        parts = torch.empty(
            rows * splits * 2 if splits > 1 else 0, dtype=torch.float32, device=logits.device
        )
        _rows[(rows, splits)](
            logits, targets, loss, parts, cols, logits.stride(0), splits,
            config["block"], config["stages"], lanes, num_warps=config["warps"],
        )  # fmt: skip
        if splits > 1:
            args = (logits, targets, loss, parts, logits.stride(0), splits)
            _merge[(rows,)](*args, triton.next_power_of_2(splits), num_warps=1)
        return loss

    return cross_entropy


def inputs(seed: int, rows: int, classes: int):
    """Logits, float16, and the target class of each row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator, device=device) * 3
    targets = torch.randint(0, classes, (rows,), generator=generator, device=device)
    return logits.half(), targets


def reference(logits, targets):
    """What it must compute: float32 from float16, float64 from float64."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, reduction="none")


def work(rows: int, classes: int):
    """Bytes, logits once, and operations."""
    return 2.0 * rows * classes + 12.0 * rows, 4.0 * rows * classes


def limits(config: Config):
    """What a config takes."""
    each = config["block"] / (32 * config["warps"])
    return {
        "threads": 32 * config["warps"],
        "shared_bytes": 2 * config["block"] * (config["stages"] - 1),
        "registers": (3 if config["carry"] == "lane" else 1) * each + 24,
    }


def _busy(config: Config) -> bool:
    """Each thread has 8 to 64 elements of a block."""
    return 8 <= config["block"] / (32 * config["warps"]) <= 64


tunable = Tunable(
    name="cross_entropy",
    build=build,
    space=Space(
        {
            "block": PowerOfTwo(512, 16384, default=4096),
            "warps": PowerOfTwo(1, 16, default=8),
            "stages": Integer(1, 3, default=2),
            "carry": Choice(("lane", "block")),
            "splits": PowerOfTwo(1, 8, default=1),
        },
        valid=(_busy,),
        derived={"block_a_thread": lambda c: c["block"] / (32 * c["warps"])},
    ),
    inputs=inputs,
    reference=reference,
    sizes={"rows": 8192, "classes": 32768},
    odd=({"rows": 1, "classes": 2}, {"rows": 19, "classes": 1001}, {"rows": 3, "classes": 20011}),
    work=work,
    limits=limits,
)
