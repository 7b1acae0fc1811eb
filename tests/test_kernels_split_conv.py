"""Pointwise convolutions as split products: any dimensions, layouts as PyTorch's, in graphs."""

import pytest
import torch
from torch.export import Dim

from test_kernels_support import DEVICE, INTERPRETED, here, interpret, outside
from torchstone.errors import InputError
from torchstone.kernels import KERNELS
from torchstone.kernels.split_conv import POINTWISE
from torchstone.kernels.split_gemm import LINEAR, MATMUL, numerics
from torchstone.kernels.split_gemm_parts import EPILOGUES

OPS = torch.ops.torchstone
either = pytest.mark.parametrize("parts", [2] if INTERPRETED else [2, 3])
CONVOLUTIONS = {
    3: torch.nn.functional.conv1d,
    4: torch.nn.functional.conv2d,
    5: torch.nn.functional.conv3d,
}


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


def example(shape, outputs, *, last=False):
    """Input, weights and bias; with ``last`` the channels of the input lie last in memory."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator)
    w = torch.randn(outputs, shape[1], generator=generator)
    bias = torch.randn(outputs, generator=generator)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    return x.to(DEVICE), w.to(DEVICE), bias.to(DEVICE)


def truth_of(x, w, bias, epilogue):
    convolve = CONVOLUTIONS[x.dim()]
    bias = None if bias is None else bias.double()
    places = (1,) * (x.dim() - 2)
    return EPILOGUES[epilogue](convolve(x.double(), w.double().reshape(*w.shape, *places), bias))


SHAPES = [(2, 5, 7), (3, 17, 5, 3), (1, 1, 1, 1), (2, 3, 2, 3, 4), (0, 3, 2, 2)]


@either
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_convolutions(shape, last, parts):
    x, w, bias = example(shape, 9, last=last)
    for own, epilogue in [(bias, "relu"), (None, "none")]:
        y = OPS.split_pointwise(x, OPS.split_parts(w, parts), own, parts, epilogue)
        truth = truth_of(x, w, own, epilogue)
        torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=1e-4)
        if x.numel() > 1:
            assert y.movedim(1, -1).is_contiguous() if last else y.is_contiguous()


@either
def test_other_layouts_and_what_is_not_finite(parts):
    x, w, bias = example((3, 8, 6, 5), 4)
    x[1, 2, 3, 4], x[2, 0, 0, 0], x[0, 5, 1, 1] = float("inf"), float("nan"), 2.0**120
    split = OPS.split_parts(w, parts)
    truth = truth_of(x, w, bias, "none").float()
    for given in (x, x.mT.contiguous().mT, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        y = OPS.split_pointwise(given, split, bias, parts, "none")
        torch.testing.assert_close(y, truth, rtol=1e-4, atol=1e-4, equal_nan=True)
    strided = OPS.split_pointwise(x[:, :, ::2, ::2], split, bias, parts, "none")
    torch.testing.assert_close(strided, truth[:, :, ::2, ::2], rtol=1e-4, atol=1e-4, equal_nan=True)


@here
@pytest.mark.parametrize("last", [False, True])
def test_every_way_is_right(last):
    x, w, bias = example((2, 70, 5, 9), 20, last=last)
    split = OPS.split_parts(w, 2)
    default = POINTWISE.space(x, split, bias, 2, "silu").default()
    for changes in ({"BLOCK_K": 32, "splits": 2}, {"BLOCK_M": 16, "BLOCK_N": 32}, {"method": "library"}):
        y = POINTWISE.launch({**default, **changes}, x, split, bias, 2, "silu")
        torch.testing.assert_close(y.double(), truth_of(x, w, bias, "silu"), rtol=1e-4, atol=1e-4)
        assert y.stride() == OPS.split_pointwise(x, split, bias, 2, "silu").stride()


@pytest.mark.skipif(INTERPRETED, reason="the same without the interpreter")
def test_in_graphs():
    for last in (False, True):
        x, w, bias = example((2, 5, 4, 3), 7, last=last)
        args = (x, OPS.split_parts(w, 2), bias, 2, "relu")
        torch.library.opcheck(OPS.split_pointwise.default, args)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return OPS.split_pointwise(x, args[1], args[2], 2, "gelu") * 2

    batch = Dim("batch", min=1, max=64)
    for last in (False, True):
        x, _, _ = example((4, 5, 4, 3), 7, last=last)
        program = torch.export.export(Layer(), (x,), dynamic_shapes=({0: batch},))
        for size in (1, 9):
            other, _, _ = example((size, 5, 4, 3), 7, last=last)
            assert torch.equal(program.module()(other), Layer()(other))


@pytest.mark.skipif(INTERPRETED, reason="the same without the interpreter")
def test_misuse_says_what_is_wrong():
    x, w, bias = example((2, 5, 4, 3), 7)
    split = OPS.split_parts(w, 2)
    for call, word in [
        (lambda: OPS.split_pointwise(x[0, 0], split, bias, 2, "none"), "2 dimensions"),
        (lambda: OPS.split_pointwise(x[:, 1:], split, bias, 2, "none"), "do not go together"),
        (lambda: OPS.split_pointwise(x, split, bias[1:], 2, "none"), "do not go together"),
        (lambda: OPS.split_pointwise(x.double(), split, bias, 2, "none"), "float64"),
    ]:
        with pytest.raises(InputError, match=word):
            call()
    assert "float64" in POINTWISE.refuses(x.double(), split, bias, 2, "none")
    moved, operations = POINTWISE.work(x, split, bias, 2, "none")
    assert moved == 4.0 * 120 + 2 * 70 + 4 * 7 + 4 * 2 * 12 * 7
    assert operations == 3 * 2.0 * 24 * 7 * 5


@here
@pytest.mark.skipif(POINTWISE not in KERNELS, reason="not yet among the kernels")
@pytest.mark.parametrize("parts", [2, 3])
def test_all_three_operators_can_be_tuned(parts):
    """Inputs at other sizes are parts of something, and the class is that of the parts."""
    x, w, bias = example((2, 9, 5), 7)
    split = OPS.split_parts(w, parts)
    for kernel, args in [
        (POINTWISE, (x, split, bias, parts, "silu")),
        (LINEAR, (x.mT, split, None, parts, "none")),
        (MATMUL, (w, x[0], parts)),
    ]:
        tunable = kernel.tunable(*args)
        assert tunable.numerics is numerics(parts)
        run = tunable.build(tunable.space.default())
        for sizes in (tunable.sizes, *tunable.odd):
            inputs = tunable.inputs(0, **sizes)
            truth = tunable.reference(*(t.double() for t in inputs))
            error = (run(*inputs) - truth).norm() / truth.norm()
            assert error <= max(tunable.max_relative_error, 1e-6)
