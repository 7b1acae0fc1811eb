"""Pooling and depthwise convolution against float64."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from test_kernels_support import (
    DEVICE,
    DTYPES,
    KERNELS,
    agrees_with_fake,
    drawn,
    every_way,
    gpu,
    here,
    holds,
    interpret,
    outside,
    random,
)

POOL, CONV = KERNELS["pool"], KERNELS["depthwise_conv"]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


@st.composite
def planes(draw):
    """Images of one to three dimensions: contiguous, channels-last, or a strided view."""
    dims = draw(st.integers(1, 3))
    longest = (30, 9, 5)[dims - 1]
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 3))]
    shape += [draw(st.integers(1, longest)) for _ in range(dims)]
    x = random(*shape[:-1], 2 * shape[-1], seed=draw(st.integers(0, 9))).to(
        draw(st.sampled_from(DTYPES))
    )
    layout = draw(st.sampled_from(["contiguous", "last", "view"]))
    if layout == "view":
        return x[..., ::2]
    x = x[..., : shape[-1]].contiguous()
    return x.to(memory_format=FORMATS[x.dim()]) if layout == "last" and x.dim() in FORMATS else x


def geometry(data, dims, most=3):
    """Kernel, stride, padding, dilation."""
    lists = [[data.draw(st.integers(1, top)) for _ in range(dims)] for top in (most, 3, 1, 2)]
    lists[2] = [data.draw(st.integers(0, k // 2)) for k in lists[0]]
    return lists


def fits(x, kernel, padding, dilation):
    sizes = zip(x.shape[2:], kernel, padding, dilation, strict=True)
    return all(s + 2 * p >= d * (k - 1) + 1 for s, k, p, d in sizes)


def any_pool(data):
    x = data.draw(planes())
    kernel, stride, padding, dilation = geometry(data, x.dim() - 2)
    kind = data.draw(st.sampled_from(["max", "avg"]))
    dilation = dilation if kind == "max" else [1] * len(dilation)
    assume(fits(x, kernel, padding, dilation))
    args = (
        x,
        kind,
        kernel,
        stride,
        padding,
        dilation,
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    holds(POOL, args)
    agrees_with_fake(POOL, args)


def any_conv(data):
    x = data.draw(planes())
    kernel, stride, padding, dilation = geometry(data, x.dim() - 2)
    assume(fits(x, kernel, padding, dilation))
    out = x.shape[1] * data.draw(st.integers(1, 2))
    weight = random(out, 1, *kernel, seed=1).to(x.dtype)
    bias = random(out, seed=2).to(x.dtype) if data.draw(st.booleans()) else None
    activation = data.draw(st.sampled_from(["none", "relu", "gelu", "silu", "sigmoid", "tanh"]))
    args = (x, weight, bias, stride, padding, dilation, activation)
    holds(CONV, args)
    agrees_with_fake(CONV, args)


@here
@pytest.mark.parametrize("anything", [any_pool, any_conv])
def test_any_arguments(anything):
    drawn(given(st.data())(anything))()


def cases():
    last = random(1, 5, 9, 11).to(memory_format=torch.channels_last)
    yield POOL, (random(1, 2, 9, 17), "max", [3, 2], [2, 1], [1, 0], [1, 2], False, True)
    yield POOL, (last, "avg", [3, 3], [2, 2], [1, 1], [1, 1], True, False)
    yield CONV, (random(1, 2, 9, 17), random(2, 1, 3, 3), random(2), [1, 1], [1, 1], [1, 1], "gelu")
    yield CONV, (last, random(5, 1, 2, 3), None, [2, 1], [1, 1], [1, 1], "none")

    yield POOL, (random(2, 1, 60), "max", [21], [2], [10], [1], False, True)  # a long line
    yield POOL, (random(1, 2, 9, 12), "avg", [3, 3], [2, 3], [0, 0], [1, 1], False, True)  # no edge


@here
@pytest.mark.parametrize("at", range(6))
def test_every_way(at):
    every_way(*list(cases())[at], most=3)


def specials():
    x = random(1, 2, 7, 9)
    x[0, 0, 2, 3], x[0, 1, 4, 4], x[0, 1, 0, 0] = float("nan"), float("inf"), -float("inf")
    for kind in ("max", "avg"):
        args = (x, kind, [3, 3], [2, 2], [1, 1], [1, 1], True, True)
        torch.testing.assert_close(POOL.op(*args), POOL.reference(*args), equal_nan=True)
    full = torch.full((1, 1, 5), -float("inf"), device=DEVICE)
    assert POOL.op(full, "max", [3], [1], [1], [1], False, True).eq(-float("inf")).all()


@here
def test_infinities_and_nan_as_pytorch():
    specials()


@here
def test_channels_last_stays_and_more_channels_than_a_tile():
    x = random(1, 150, 3, 4).to(memory_format=torch.channels_last)
    args = (x, random(150, 1, 3, 3), random(150), [1, 1], [1, 1], [1, 1], "relu")
    holds(CONV, args)
    assert CONV.op(*args).is_contiguous(memory_format=torch.channels_last)
    assert POOL.op(x, "max", [2, 2], [1, 1], [0, 0], [1, 1], False, True).stride(1) == 1


@here
def test_what_is_refused():
    x = random(1, 4, 6, 6)
    assert "dilation" in POOL.refuses(x, "avg", [2, 2], [1, 1], [0, 0], [2, 2], False, True)
    assert "half" in POOL.refuses(x, "max", [2, 2], [1, 1], [2, 2], [1, 1], False, True)
    assert "dimensions" in POOL.refuses(x[0], "max", [2, 2], [1, 1], [0, 0], [1, 1], False, True)
    assert "one channel" in CONV.refuses(x, random(4, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], "none")


@pytest.mark.gpu
@gpu
def test_every_way_on_a_device():
    specials()
    for kernel, args in cases():
        every_way(kernel, args, most=12)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("anything", [any_pool, any_conv])
def test_any_arguments_on_a_device(anything):
    drawn(given(st.data())(anything))()
