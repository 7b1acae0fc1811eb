"""Reductions, arg-reductions, scans and cross-entropy against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from test_kernels_support import (
    DEVICE,
    KERNELS,
    agrees_with_fake,
    drawn,
    every_way,
    gpu,
    here,
    holds,
    interpret,
    judged,
    outside,
    random,
    tensors,
)

REDUCE, ARG, SCAN, LOSS = (KERNELS[n] for n in ("reduce", "arg_reduce", "scan", "cross_entropy"))
INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor(
    [[1.0, NAN, INF, NAN], [-INF, -INF, -INF, -INF], [INF, 2, INF, 3], [5, 5, 5, -0.0]], device=DEVICE
)


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


def hold(kernel, args):
    holds(kernel, args)
    agrees_with_fake(kernel, args)


def any_reduction(data, **how):
    x = data.draw(tensors(dims=(1, 4), **how))
    kind = data.draw(st.sampled_from(["sum", "mean", "amax", "amin", "prod"]))
    dims = data.draw(st.lists(st.integers(-x.dim(), x.dim() - 1), unique_by=lambda d: d % x.dim()))
    x = x if kind != "prod" else (x / (1 + x.abs().max()) * 0.02 + 1).to(x.dtype)
    hold(REDUCE, (x, kind, dims, data.draw(st.booleans())))


def any_place(data, **how):
    x = data.draw(tensors(dims=(1, 4), **how))
    if data.draw(st.booleans()):
        x = x.round()  # ties
    dim = data.draw(st.one_of(st.none(), st.integers(-x.dim(), x.dim() - 1)))
    kind, keepdim = data.draw(st.sampled_from(["max", "min"])), data.draw(st.booleans())
    hold(ARG, (x, kind, dim, keepdim))
    plain = (
        getattr(torch, f"arg{kind}")(x) if dim is None else getattr(torch, f"arg{kind}")(x, dim, keepdim)
    )
    found = ARG.op(x, kind, dim, keepdim)[1]
    assert torch.equal(found.flatten(), plain.flatten()) or ties(x, dim, found, plain)


def ties(x, dim, found, plain):
    """PyTorch's own place is not always the first of equal ones on CUDA; ours is never a later one."""
    value = x.flatten() if dim is None else x
    along = 0 if dim is None else dim
    places = [p.reshape(-1) if dim is None else p for p in (found, plain)]
    if dim is not None and places[0].dim() < x.dim():
        places = [p.unsqueeze(dim) for p in places]
    a, b = (value.gather(along, p) for p in places)
    return torch.equal(a, b) and bool((places[0] <= places[1]).all())


def any_scan(data, **how):
    x = data.draw(tensors(dims=(1, 4), **how))
    kind = data.draw(st.sampled_from(["sum", "prod"]))
    x = x if kind != "prod" else (x / (1 + x.abs().max()) * 0.02 + 1).to(x.dtype)
    mask = random(*x.shape, seed=3) > 0 if data.draw(st.booleans()) else None
    dim = data.draw(st.integers(-x.dim(), x.dim() - 1))
    hold(SCAN, (x, mask, kind, dim, data.draw(st.booleans()), data.draw(st.booleans())))


def any_loss(data, **how):
    x = data.draw(tensors(dims=(1, 4), **how))
    shape = x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()
    classes = x.shape[min(1, x.dim() - 1)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    targets = torch.randint(0, classes, shape, generator=generator).to(DEVICE)
    ignored = data.draw(st.sampled_from([-100, 0]))
    hold(LOSS, (x, targets, data.draw(st.sampled_from(["none", "mean", "sum"])), ignored))


ANY = [any_reduction, any_place, any_scan, any_loss]


@here
@pytest.mark.parametrize("anything", ANY)
def test_any_arguments(anything):
    drawn(given(st.data())(lambda data: anything(data, longest=300)))()


def cases():
    for kind in ("sum", "amax", "prod"):
        yield REDUCE, (random(1, 900) * 0.01 + 1, kind, [1], False)
        yield REDUCE, (random(3, 40, 6) * 0.01 + 1, kind, [1], True)
    yield REDUCE, (random(3, 4, 5, 7).half(), "mean", [0, 2, 3], False)
    yield REDUCE, (random(600, 3), "sum", [0], False)
    yield ARG, (random(2, 700).round(), "max", None, False)
    yield ARG, (random(3, 40, 6).round().half(), "min", 1, True)
    yield SCAN, (random(1, 700), None, "sum", 1, False, False)
    yield SCAN, (random(2, 300, 3), random(2, 300, 3) > 0, "sum", 1, True, True)
    yield SCAN, (random(1, 500) * 0.01 + 1, None, "prod", 1, False, True)
    targets = torch.arange(6, device=DEVICE).view(2, 3)
    yield LOSS, (random(2, 40, 3), targets, "mean", 2)
    yield LOSS, (random(1, 900) * 30, torch.tensor([7], device=DEVICE), "none", -100)


COUNT = len(list(cases()))


@here
@pytest.mark.parametrize("at", range(COUNT))
def test_every_way(at):
    every_way(*list(cases())[at], most=2)


def as_pytorch(way):
    """Equal to PyTorch where anything is infinite or NaN, and the first of equal values."""
    for x in (SPECIAL, SPECIAL.repeat(1, 40), torch.full((2, 70), NAN, device=DEVICE)):
        for kind in ("sum", "mean", "amax", "amin", "prod"):
            if kind == "prod" and x.shape[1] > 4:
                continue  # in another order it overflows before it meets a zero
            args = (x, kind, [1], False)
            found = REDUCE.launch({**REDUCE.space(*args).default(), "way": way}, *args)
            torch.testing.assert_close(found, REDUCE.reference(*args), equal_nan=True)
        for kind in ("max", "min"):
            args = (x, kind, 1, False)
            found = ARG.launch({**ARG.space(*args).default(), "way": way}, *args)
            torch.testing.assert_close(found, ARG.reference(*args), equal_nan=True, rtol=0, atol=0)
        args = (x, None, "sum", 1, False, False)
        found = SCAN.launch({**SCAN.space(*args).default(), "way": way}, *args)
        torch.testing.assert_close(found, torch.cumsum(x, 1), equal_nan=True)


@here
@pytest.mark.parametrize("way", ["stream", "split"])
def test_infinities_nan_and_ties_as_pytorch(way):
    as_pytorch(way)


@here
def test_scans_by_hand():
    x, mask = torch.tensor([1.0, 2, 3, 4]), torch.tensor([True, False, True, True])
    assert SCAN.op(x, None, "sum", 0, True, False).tolist() == [10, 9, 7, 4]
    assert SCAN.op(x, None, "sum", 0, False, True).tolist() == [0, 1, 3, 6]
    assert SCAN.op(x, None, "prod", 0, True, True).tolist() == [24, 12, 4, 1]
    assert SCAN.op(x, mask, "sum", 0, False, False).tolist() == [1, 1, 4, 8]
    x[1] = NAN
    assert SCAN.op(x, mask, "sum", 0, False, False).tolist() == [1, 1, 4, 8]


@here
def test_losses_at_the_edges():
    x, ignored = random(3, 5), torch.full((3,), -100)
    assert LOSS.op(x, ignored, "mean", -100).isnan()
    assert LOSS.op(x, ignored, "sum", -100) == 0
    assert LOSS.op(x, torch.tensor([0, 5, 1]), "none", -100).isnan().tolist() == [False, True, False]
    x[0] = -INF
    assert LOSS.op(x, torch.tensor([0, 1, 2]), "none", -100).isnan().tolist() == [True, False, False]
    assert "int64" in LOSS.refuses(x, torch.ones(3, 5), "mean", -100)


@here
def test_scalars():
    x = torch.tensor(3.0)
    assert REDUCE.op(x, "sum", [], False) == 3
    assert [t.item() for t in ARG.op(x, "max", 0, False)] == [3, 0]
    assert SCAN.op(x, None, "sum", 0, False, False) == 3
    assert REDUCE.op(x, "prod", [], False) == 3


@here
def test_a_sum_that_skips_the_last_block_is_caught():
    """As a kernel does whose loop ends at the last whole block."""
    args = (random(4, 130), "sum", [1], False)
    assert judged(REDUCE, args, lambda x, *rest: x[:, :128].sum(1)).status == "wrong"


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("at", range(COUNT))
def test_every_way_on_a_device(at):
    every_way(*list(cases())[at], most=12)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("way", ["stream", "split"])
def test_infinities_nan_and_ties_on_a_device(way):
    as_pytorch(way)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("anything", ANY)
def test_any_arguments_on_a_device(anything):
    drawn(given(st.data())(lambda data: anything(data, longest=6000)))()
