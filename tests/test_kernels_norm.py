"""Layer, RMS, group and batch norm against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from test_kernels_support import (
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
    tensors,
)

LAYER, RMS, GROUP, BATCH = (KERNELS[n] for n in ("layer_norm", "rms_norm", "group_norm", "batch_norm"))
ACTIVATIONS = ["none", "relu", "gelu", "silu", "sigmoid", "tanh"]


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


def some(draw, *sizes):
    """Weight or bias, or none."""
    return random(*sizes, seed=draw(st.integers(0, 9))) if draw(st.booleans()) else None


@st.composite
def row_arguments(draw):
    x = draw(tensors(dims=(1, 4)))
    first = draw(st.integers(0, x.dim() - 1))
    dims = list(range(first, draw(st.integers(first, x.dim() - 1)) + 1))
    sizes = [x.shape[d] for d in dims]
    dims = [d - x.dim() if draw(st.booleans()) else d for d in dims]
    return x, dims, some(draw, *sizes), some(draw, *sizes), draw(st.sampled_from([1e-5, 1e-2]))


@st.composite
def channel_arguments(draw):
    x = draw(tensors(dims=(2, 4)))
    channels = x.shape[1]
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    rest = (some(draw, channels), some(draw, channels), 1e-3, draw(st.sampled_from(ACTIVATIONS)))
    return x, groups, rest


def hold_rows(args):
    for kernel in (LAYER, RMS):
        holds(kernel, args)
        agrees_with_fake(kernel, args)


def hold_channels(found):
    x, groups, rest = found
    for kernel, args in ((GROUP, (x, groups, *rest)), (BATCH, (x, *rest))):
        holds(kernel, args)
        agrees_with_fake(kernel, args)


@here
@drawn
@given(row_arguments())
def test_any_rows(args):
    hold_rows(args)


@here
@drawn
@given(channel_arguments())
def test_any_channels(found):
    hold_channels(found)


def cases():
    w, b = random(37), random(37, seed=1)
    yield LAYER, (random(5, 37) + 9, [1], w, b, 1e-5)
    yield LAYER, (random(5, 37, 3) + 9, [1], w, None, 1e-5)
    yield LAYER, ((random(2, 7, 150) * 5 + 100).half(), [1, 2], None, random(7, 150), 1e-5)
    yield RMS, (random(1, 2000) * 5, [1], random(2000), None, 1e-5)
    yield GROUP, (random(3, 6, 5, 7) + 9, 2, random(6), random(6), 1e-5, "gelu")
    yield GROUP, (random(1, 2, 900).half() + 9, 2, None, random(2), 1e-5, "none")
    yield GROUP, (random(2, 4, 128) + 9, 2, random(4), random(4), 1e-5, "none")  # one channel a block
    yield BATCH, (random(3, 6, 5, 7) + 9, random(6), random(6), 1e-5, "silu")
    yield BATCH, (random(2, 3, 256) + 9, random(3), random(3), 1e-5, "none")  # planes of whole blocks
    yield BATCH, (random(700, 6) + 9, random(6), None, 1e-5, "none")
    yield BATCH, (random(9, 2, 33) + 9, None, None, 1e-5, "tanh")


@here
@pytest.mark.parametrize("at", range(11))
def test_every_way(at):
    every_way(*list(cases())[at], most=2)


def forced(kernel, args, way):
    space = kernel.space(*args)
    config = {**space.default(), "way": way, "rows": 1, "block": 64, "warps": 1}
    return lambda *given: kernel.launch(config, *given)


def far_means(way):
    """Rows whose mean is 10000 times their spread: where E[x^2] - E[x]^2 has no correct digit."""
    x = 1e4 + random(3, 500)
    holds(LAYER, (x, [1], None, None, 1e-5), forced(LAYER, (x, [1], None, None, 1e-5), way))
    args = (x.view(3, 2, 250), None, None, 1e-5, "none")
    holds(BATCH, args, forced(BATCH, args, way))


@here
@pytest.mark.parametrize("way", ["chip", "stream", "split"])
def test_no_cancellation_where_the_mean_is_large(way):
    far_means(way)


@here
def test_infinities_and_nan_spoil_their_row_only():
    x = random(4, 90)
    x[1, 7], x[2, 9] = float("inf"), float("nan")
    for way in ("chip", "stream", "split"):
        y = forced(LAYER, (x, [1], None, None, 1e-5), way)(x, [1], None, None, 1e-5)
        assert y[1:3].isnan().all()
        assert y[[0, 3]].isfinite().all()


@here
def test_layouts_of_batch_norm_are_kept():
    x = random(3, 6, 5, 7).to(memory_format=torch.channels_last)
    args = (x, random(6), None, 1e-5, "relu")
    assert BATCH.op(*args)[0].stride() == x.stride()
    every_way(BATCH, args, most=2)
    odd = random(4, 6, 5, 9)[..., ::2].transpose(2, 3)
    holds(BATCH, (odd, None, None, 1e-5, "none"))
    agrees_with_fake(BATCH, (odd, None, None, 1e-5, "none"))


@here
def test_the_same_as_pytorch_has():
    x, w, b = random(4, 6, 8), random(6), random(6)
    torch.testing.assert_close(GROUP.op(x, 3, w, b, 1e-5, "none"), torch.group_norm(x, 3, w, b, 1e-5))
    y, mean, variance = BATCH.op(x, w, b, 1e-5, "none")
    torch.testing.assert_close(y, torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False))
    torch.testing.assert_close(mean, x.mean((0, 2)))
    torch.testing.assert_close(variance, x.var((0, 2), correction=0))
    found = LAYER.op(x, [1, 2], random(6, 8), None, 1e-5)
    torch.testing.assert_close(found, torch.layer_norm(x, (6, 8), random(6, 8), None, 1e-5))
    torch.testing.assert_close(
        RMS.op(x, [-1], None, None, 1e-5), torch.rms_norm(x, (8,), eps=1e-5), rtol=1e-5, atol=1e-6
    )


@here
def test_what_is_refused():
    x = random(3, 4, 5)
    assert "neighbours" in LAYER.refuses(x, [0, 2], None, None, 1e-5)
    assert "activation" in GROUP.refuses(x, 2, None, None, 1e-5, "elu")
    assert BATCH.refuses(x.double(), None, None, 1e-5, "none")
    whole = LAYER.op(x, [0, 2], None, None, 1e-5)
    torch.testing.assert_close(whole.mean((0, 2)), torch.zeros(4), rtol=0, atol=1e-6)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("at", range(11))
def test_every_way_on_a_device(at):
    every_way(*list(cases())[at], most=12)


@pytest.mark.gpu
@gpu
def test_large_means_on_a_device():
    for way in ("chip", "stream", "split"):
        far_means(way)


@pytest.mark.gpu
@gpu
@drawn
@given(st.data())
def test_any_arguments_on_a_device(data):
    hold_rows(data.draw(row_arguments()))
    hold_channels(data.draw(channel_arguments()))
