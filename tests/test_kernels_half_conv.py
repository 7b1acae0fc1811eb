"""Convolutions of half operands with float32 results, held to float64 ones of the same operands."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from test_kernels_support import DEVICE, INTERPRETED, here, interpret, outside
from torchstone.errors import InputError
from torchstone.kernels import KERNELS
from torchstone.kernels.implicit_gemm import KERNEL
from torchstone.kernels.split_gemm_parts import EPILOGUES

CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
HALF = torch.float16  # the interpreter multiplies bfloat16 wrongly
ROOT = Path(__file__).resolve().parents[1]


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


def last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def example(*shape, dtype=HALF):
    batch, ci, places, co, kernel = shape
    generator = torch.Generator().manual_seed(ci + co)
    x = torch.randn(batch, ci, *places, generator=generator).to(dtype)
    w = torch.randn(co, ci, *kernel, generator=generator).to(dtype)
    ends = [torch.randn(n, generator=generator) for n in (co, batch, co)]
    return [last(x).to(DEVICE), last(w).to(DEVICE), *(e.to(DEVICE) for e in ends)]


def truth_of(x, w, *rest):
    bias, rows, columns, stride, padding, dilation, activation = rest
    ones = (1,) * (x.dim() - 2)
    y = CONVOLUTIONS[x.dim()](x.double(), w.double(), None, stride, padding, dilation)
    y = y if rows is None else y * rows.double().view(-1, 1, *ones)
    y = y if columns is None else y * columns.double().view(-1, *ones)
    return EPILOGUES[activation](y if bias is None else y + bias.double().view(-1, *ones))


def holds(args, call=None):
    y = (KERNEL.op if call is None else call)(*args)
    truth = truth_of(*args)
    assert y.dtype is torch.float32
    assert y.is_contiguous()
    assert y.shape == truth.shape
    scale = max(1.0, float(truth.abs().max())) if truth.numel() else 1.0
    torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=1e-5 * scale)


CASES = {
    "1d": ((2, 16, (19,), 5, (3,)), ([2], [1], [1])),
    "2d": ((2, 32, (9, 7), 70, (3, 2)), ([1, 1], [0, 0], [1, 1])),
    "padded": ((3, 16, (6, 5), 9, (3, 3)), ([1, 2], [1, 2], [1, 1])),
    "dilated": ((1, 24, (11, 9), 3, (2, 3)), ([1, 1], [1, 1], [2, 3])),
    "3d": ((2, 8, (4, 5, 6), 7, (2, 3, 2)), ([1, 2, 1], [1, 0, 1], [1, 1, 2])),
    "few channels": ((2, 8, (17, 16), 33, (5, 5)), ([2, 2], [2, 2], [1, 1])),
    "one tap": ((2, 72, (5, 5), 65, (1, 1)), ([1, 1], [0, 0], [1, 1])),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("plain", [False, True])
def test_as_in_float64(name, plain):
    shape, how = CASES[name]
    x, w, bias, rows, columns = example(*shape)
    ends = (None, None, None) if plain else (bias, rows, columns)
    holds((x, w, *ends, *how, "none" if plain else "gelu"))


@here
@pytest.mark.parametrize("name", ["2d", "padded", "few channels", "3d"])
@pytest.mark.parametrize("flat", [0, 1])
def test_every_way(name, flat):
    shape, how = CASES[name]
    args = (*example(*shape), *how, "relu")
    assert KERNEL.refuses(*args) is None
    space = KERNEL.space(*args)
    small = {**space.default(), "BM": 64, "BN": 32, "warps": 4, "stages": 2, "flat": flat}
    for block in (16, 64):
        config = {**small, "BK": block}
        if space.why_not(config) is None:
            holds(args, lambda *given, config=config: KERNEL.launch(config, *given))


@settings(max_examples=8 if INTERPRETED else 30, deadline=None)
@given(st.data())
def test_any_convolution(data):
    dims = data.draw(st.integers(1, 3))

    def each(low, high):
        return data.draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims))

    kernel, stride, padding, dilation = each(1, 3), each(1, 3), each(0, 2), each(1, 2)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    places = [r + extra for r, extra in zip(reach, each(0, 4), strict=True)]
    channels = data.draw(st.sampled_from([8, 16, 40]))
    outputs = data.draw(st.integers(1, 70))
    args = example(data.draw(st.integers(1, 3)), channels, places, outputs, kernel)
    ends = [e if data.draw(st.booleans()) else None for e in args[2:]]
    holds((*args[:2], *ends, stride, padding, dilation, data.draw(st.sampled_from(["none", "silu"]))))


def test_what_triton_does_not_take_is_computed_otherwise():
    x, w, bias, rows, columns = example(2, 16, (6, 6), 4, (3, 3))
    how = ([1, 1], [1, 1], [1, 1], "none")
    for other in (
        (x.contiguous(), w),  # channels are not last
        (last(x[:, :5]), last(w[:, :5])),
        (x.bfloat16(), w.bfloat16()),
    ):
        args = (*other, bias, rows, columns, *how)
        if other[0].dtype is HALF:
            assert KERNEL.refuses(*args)
            holds(args)
        elif not INTERPRETED:
            holds(args)
    assert KERNEL.refuses(x.float(), w.float(), None, None, None, *how)
    assert KERNEL.op(x[:0], w, bias, None, None, *how).shape == (0, 4, 6, 6)


def test_misuse_is_named():
    x, w, *_ = example(2, 16, (6, 6), 4, (3, 3))
    with pytest.raises(InputError, match=r"one number for each dimension"):
        KERNEL.op(x, w, None, None, None, [1], [1, 1], [1, 1], "none")
    with pytest.raises(InputError, match=r"'swish' is none of"):
        KERNEL.op(x, w, None, None, None, [1, 1], [1, 1], [1, 1], "swish")
    with pytest.raises(InputError, match=r"dimensions"):
        KERNEL.op(x, w[0], None, None, None, [1, 1], [1, 1], [1, 1], "none")


def test_it_is_an_operator_and_a_kernel():
    assert KERNEL in KERNELS
    x, w, bias, rows, columns = example(2, 16, (6, 6), 4, (3, 3))
    args = (x, w, bias, rows, columns, [1, 1], [1, 1], [1, 1], "none")
    torch.library.opcheck(KERNEL.op, args, test_utils=("test_schema", "test_faketensor"))
    moved, work = KERNEL.work(*args)
    assert work == 2 * (2 * 36) * 4 * 16 * 9
    assert moved == 2 * (x.numel() + w.numel()) + 4 * 4 + 4 * 2 * 36 * 4


def compiled():
    """Facts of the default configs, compiled for Hopper without one."""
    from triton.runtime.jit import JITFunction

    import record_tables

    record_tables.become_compiler({}, arch=90)
    run, found = JITFunction.run, {}

    def keep(self, *args, **kwargs):
        found["kernel"] = run(self, *args, **kwargs)
        return found["kernel"]

    JITFunction.run = keep
    rows = {
        "padded": ((64, 64, 128, 128), (128, 64, 3, 3), [1, 1]),
        "flat": ((64, 8, 224, 224), (96, 8, 7, 7), [2, 2]),
        "3d": ((8, 32, 32, 64, 64), (64, 32, 3, 3, 3), [0, 0, 0]),
    }
    facts = {}
    for name, (x, w, padding) in rows.items():
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}[len(x)]
        given = [torch.empty(s, dtype=HALF, device="meta").to(memory_format=layout) for s in (x, w)]
        ones = [1] * len(padding)
        args = (*given, None, None, None, ones, padding, ones, "none")
        KERNEL.launch(KERNEL.space(*args).default(), *args)
        kernel = found["kernel"]
        ptx = kernel.asm["ptx"]
        facts[name] = {
            "products": ptx.count("wgmma.mma_async"),
            "copies": ptx.count("cp.async.cg.shared.global"),
            "spilled": ptx.count(".local"),
            "shared": kernel.metadata.shared,
        }
    return facts


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_for_hopper_it_copies_16_bytes_at_once_and_multiplies_in_groups_of_warps():
    code = "import json, test_kernels_half_conv as t; print(json.dumps(t.compiled()))"
    path = [str(ROOT / "tests"), str(ROOT / "benchmarks"), *sys.path]
    environment = {"PYTHONPATH": ":".join(path), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, fact in json.loads(done.stdout.splitlines()[-1]).items():
        assert fact["products"] > 0, name
        assert fact["copies"] > 0, name
        assert fact["spilled"] == 0, name
        assert fact["shared"] <= 232_448, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_device(name, dtype):
    shape, how = CASES[name]
    args = (*(t.cuda() for t in example(*shape, dtype=dtype)), *how, "silu")
    assert KERNEL.refuses(*args) is None
    holds(args)
    space = KERNEL.space(*args)
    for config in space.neighbours(space.default())[:12]:
        holds(args, lambda *given, config=config: KERNEL.launch(config, *given))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_beyond_32_bits_on_a_device():
    x = last(torch.randn(70, 64, 1, 1, dtype=HALF, device="cuda").expand(70, 64, 700, 700))
    w = last(torch.randn(8, 64, 3, 3, dtype=HALF, device="cuda"))
    assert x.numel() > 2**31
    args = (x, w, None, None, None, [1, 1], [1, 1], [1, 1], "none")
    assert KERNEL.refuses(*args) is None
    y = KERNEL.op(*args)
    for image in (0, 69):
        truth = truth_of(x[image : image + 1, :, :9, :9], w, None, None, None, *args[5:])
        torch.testing.assert_close(
            y[image : image + 1, :, :8, :8].double(), truth[..., :8, :8], rtol=1e-4, atol=1e-3
        )
