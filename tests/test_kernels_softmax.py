"""Softmax and log-softmax against float64."""

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
from torchstone.kernels import choice
from torchstone.kernels.base import rows_of

KERNEL = KERNELS["softmax"]
INF, NAN = float("inf"), float("nan")


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


@outside
@pytest.mark.slow
def test_slow_ones_in_the_interpreter():
    interpret(__file__, "slow")


def any_arguments(x, dim, log):
    holds(KERNEL, (x, dim, log))
    agrees_with_fake(KERNEL, (x, dim, log))


@here
@drawn
@given(st.data())
def test_any_arguments(data):
    x = data.draw(tensors(dims=(1, 4)))
    any_arguments(x, data.draw(st.integers(-x.dim(), x.dim() - 1)), data.draw(st.booleans()))


def sizes_for_every_way():
    yield torch.randn(3, 37, device=DEVICE), 1
    yield torch.randn(2, 37, 5, device=DEVICE).half(), 1
    yield torch.randn(1, 5003, device=DEVICE), 1
    yield torch.randn(1031, 3, device=DEVICE), 0


@here
@pytest.mark.parametrize("log", [False, True])
def test_every_way(log):
    for x, dim in sizes_for_every_way():
        every_way(KERNEL, (x, dim, log), most=3)


def as_pytorch(values, way):
    """Equal to PyTorch where anything is infinite or NaN."""
    x = torch.randn(4, 300, device=DEVICE)
    for row, value in enumerate(values):
        x[row, 3 * row : 7 * row + 1] = value
    x[3] = values[-1]
    for log in (False, True):
        config = {**KERNEL.space(x, 1, log).default(), "way": way, "rows": 1, "block": 64, "warps": 1}
        torch.testing.assert_close(
            KERNEL.launch(config, x, 1, log),
            KERNEL.reference(x, 1, log),
            equal_nan=True,
            rtol=1e-4,
            atol=1e-5,
        )


SPECIAL = [
    (INF, 1.0, INF, INF),
    (-INF, -INF, INF, -INF),
    (NAN, -INF, 1.0, NAN),
    (3e38, -3e38, 0.0, -3e38),
]


@here
@pytest.mark.parametrize("way", ["chip", "stream", "split"])
@pytest.mark.parametrize("values", SPECIAL)
def test_infinities_and_nan_as_pytorch(values, way):
    as_pytorch(values, way)


@here
def test_a_scalar_and_what_is_refused():
    scalar = torch.tensor(3.0)
    assert KERNEL.op(scalar, 0, False) == 1.0
    for x, word in [
        (torch.ones(3).double(), "float64"),
        (torch.ones(0, 3), "no elements"),
        (torch.ones(3).requires_grad_(), "gradient"),
    ]:
        assert word in KERNEL.refuses(x, 0, False)
        assert torch.equal(KERNEL.op(x, 0, False), torch.softmax(x, 0))


@here
@pytest.mark.slow
def test_offsets_beyond_32_bits():
    """Two rows, 2**31 + 9 elements apart in memory that is never touched in between."""
    far = 2**31 + 9
    x = torch.empty(far + 64, dtype=torch.float16).as_strided((2, 50), (far, 1))
    x.copy_(random(2, 50))
    args = (x, 1, False)
    found = KERNEL.launch(KERNEL.space(*args).default(), *args)
    torch.testing.assert_close(found, torch.softmax(x.clone(), 1))


@here
def test_a_wrong_mask_is_caught():
    """The kernel with the mask of a wider row: it reads what lies beside its row."""
    from torchstone.kernels.device import softmax as device

    x = random(6, 40)[:, :37]
    config = KERNEL.space(x, 1, False).default()

    def wrong(x, dim, log):
        y = torch.empty(6, 40)
        device.run(config, rows_of(x, 1, 1)._replace(n=40), y, log)
        return y[:, :37].contiguous()

    assert judged(KERNEL, (x, 1, False), wrong).status == "wrong"


@here
def test_kept_configs_are_used_and_damage_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHSTONE_HOME", str(tmp_path))
    choice.forget()
    args = (torch.randn(3, 700), 1, False)
    default = choice.config(KERNEL, args)
    other = next(c for c in KERNEL.space(*args).all if c["way"] == "stream")
    path = choice.keep(KERNEL, args, other)
    assert choice.config(KERNEL, args) == other != default
    assert choice.config(KERNEL, (torch.randn(4, 800), 1, False)) == other
    assert choice.config(KERNEL, (torch.randn(3, 7), 1, False)) != other
    path.write_text(
        path.read_text().replace('"warps": 1', '"warps": 77').replace('"warps": 2', '"warps": 77')
    )
    choice.forget()
    with pytest.warns(UserWarning, match="not used"):
        assert choice.config(KERNEL, args) == default
    path.write_text("{")
    choice.forget()
    with pytest.warns(UserWarning, match="damaged"):
        assert choice.config(KERNEL, args) == default
    choice.forget()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("log", [False, True])
def test_on_a_device(log):
    for x, dim in sizes_for_every_way():
        every_way(KERNEL, (x, dim, log), most=12)
    for way in ("chip", "stream", "split"):
        for values in SPECIAL:
            as_pytorch(values, way)


@pytest.mark.gpu
@gpu
@drawn
@given(st.data())
def test_any_arguments_on_a_device(data):
    x = data.draw(tensors(longest=20_000))
    any_arguments(x, data.draw(st.integers(-x.dim(), x.dim() - 1)), data.draw(st.booleans()))
