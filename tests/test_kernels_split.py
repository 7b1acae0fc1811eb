"""Products of split float32 numbers against float64: their parts, their error, and what has no parts.

Run twice: as PyTorch computes them on a CPU, and by the Triton kernels under the interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from test_kernels_support import DEVICE, INTERPRETED, gpu, here, interpret, outside
from torchstone.errors import InputError
from torchstone.kernels import split_gemm
from torchstone.kernels.split_gemm import LINEAR, MATMUL
from torchstone.kernels.split_gemm_parts import EPILOGUES, LEFT_OUT, SCALE, recombined, split_range
from torchstone.recipe import Numerics

OPS = torch.ops.torchstone
U = 2.0**-24
INF, NAN = float("inf"), float("nan")
FEW = settings(
    max_examples=6 if INTERPRETED else 40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
both = pytest.mark.parametrize("parts", [2, 3])
either = pytest.mark.parametrize("parts", [2] if INTERPRETED else [2, 3])
elsewhere = pytest.mark.skipif(INTERPRETED, reason="the same without the interpreter")


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


def numbers(shape, seed, spread=0, exponent=0):
    """Normal numbers times ``2**exponent``, and each times a power of two up to ``2**+-spread``."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, shape, generator=generator) + exponent
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.ldexp(made, powers).float().to(DEVICE)


def excess(y, x, w, parts):
    """The largest error of ``x @ w.T``, as a share of what it may be: that of the split, and of sums."""
    k = x.shape[-1]
    truth = x.double() @ w.double().mT
    room = x.double().abs() @ w.double().abs().mT
    # of sums in float32: of k terms in any order; twice, since those of the small terms are rounded too
    allowed = room * (LEFT_OUT[parts] + 2 * (k + 8) * U) + 2.0**-149
    return float(((y.double() - truth).abs() / allowed).max())


def relative(y, truth):
    return float((y.double() - truth).norm() / truth.norm())


def linear(x, w, parts, bias=None, epilogue="none"):
    return OPS.split_linear(x, OPS.split_parts(w, parts), bias, parts, epilogue)


# ---- parts


FLOATS = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**111), max_value=2.0**111
)


@settings(FEW, max_examples=15 if INTERPRETED else 200)
@given(
    st.lists(FLOATS | st.integers(-(2**23), 2**23).map(lambda i: i * 2.0**-149), min_size=1, max_size=40)
)
def test_parts_are_as_near_as_is_said(values):
    """All of float32 up to 2**111, subnormal numbers included, without an absolute term."""
    w = torch.tensor(values, dtype=torch.float32, device=DEVICE)
    for parts, bound in [(1, 2.0**-8), (2, 2.0**-17), (3, 0.0)]:
        split = OPS.split_parts(w, parts)
        assert split.shape == (parts, len(values))
        assert split.dtype is torch.bfloat16
        summed = split.double().sum(0) / SCALE
        assert ((summed - w.double()).abs() <= bound * w.double().abs()).all()
    assert torch.equal(recombined(split), w)
    assert split_range(w).refuses is None


def test_bounds_of_parts_are_reached():
    """So no smaller one would hold; from the midpoints between bfloat16 numbers."""
    w = torch.tensor(
        [1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-17, 1 + 2.0**-8 - 2.0**-9 - 2.0**-17], device=DEVICE
    )
    one, two = ((OPS.split_parts(w, p).double().sum(0) / SCALE - w).abs() / w for p in (1, 2))
    assert one.max() > 0.99 * 2.0**-8
    assert two.max() > 0.99 * 2.0**-17


def test_parts_of_any_shape_and_of_transposed_weights():
    w = torch.randn(5, 3, 7, device=DEVICE)
    assert torch.equal(OPS.split_parts(w.mT, 3), OPS.split_parts(w, 3).mT)
    assert OPS.split_parts(torch.empty(0, 4, device=DEVICE), 2).shape == (2, 0, 4)
    assert OPS.split_parts(torch.tensor(3.0, device=DEVICE), 2).shape == (2,)


def test_what_has_no_parts_is_told_ahead_of_time():
    edge = 2.0**112
    fits = torch.tensor([edge * (1 - 2.0**-8), -1.0, 2.0**-149, 0.0], device=DEVICE)
    assert split_range(fits).refuses is None
    assert split_range(fits).smallest == 2.0**-149
    assert "no bfloat16 parts" in split_range(torch.tensor([edge], device=DEVICE)).refuses
    for value in (INF, -INF, NAN):
        found = split_range(torch.tensor([1.0, value], device=DEVICE))
        assert "infinite" in found.refuses
        first, *rest = OPS.split_parts(torch.tensor([value], device=DEVICE), 3)
        assert torch.equal(first, torch.tensor([value], device=DEVICE).bfloat16()) or first.isnan().all()
        assert not any(part.any() for part in rest)
    assert split_range(torch.tensor([edge], device=DEVICE)).largest == edge
    assert split_range(torch.zeros(0)).refuses is None
    assert split_range(torch.tensor([NAN])).largest == 0.0


# ---- error


SIZES = st.sampled_from([1, 2, 3, 5, 16, 17, 31, 33, 64, 67, 130])


@both
@FEW
@given(data=st.data())
def test_error_is_within_its_bound(parts, data):
    """Odd sizes, magnitudes from subnormal to huge, and rows of 2**+-40, each element by itself."""
    m, n, k = (data.draw(SIZES) for _ in range(3))
    spread, exponent = data.draw(st.sampled_from([(0, 0), (8, -130), (40, 0), (0, -100), (3, 60)]))
    seed = data.draw(st.integers(0, 2**30))
    x, w = numbers((m, k), seed, spread, exponent), numbers((n, k), seed + 1, spread)
    assert excess(linear(x, w, parts), x, w, parts) <= 1
    assert excess(OPS.split_matmul(x, w.T, parts), x, w, parts) <= 1


@both
def test_error_is_within_its_bound_where_sums_cancel(parts):
    for seed in range(1 if INTERPRETED else 3):
        x, half = numbers((33, 129), seed), numbers((20, 129), seed + 9)
        x = torch.cat([x, x], 1)
        w = torch.cat([half, -half * (1 + 2.0**-12)], 1)
        assert excess(linear(x, w, parts), x, w, parts) <= 1


def kinds(k, seed):
    """Factors (48, k) and (40, k): normal, positive, and such that the products cancel."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (48, 40))
    yield "normal", x.to(DEVICE), w.to(DEVICE)
    yield "uniform", torch.rand(x.shape, generator=generator).to(DEVICE), w.abs().to(DEVICE)
    half = k // 2
    w[:, half : 2 * half] = -w[:, :half] * (1 + 2.0**-10)
    x[:, half : 2 * half] = x[:, :half]
    yield "cancelling", x.to(DEVICE), w.to(DEVICE)


def errors_of(k, seed=0):
    """Relative errors of float32, x3 and x6, by kind."""
    found = {}
    for kind, x, w in kinds(k, seed):
        truth = x.double() @ w.double().T
        products = (x @ w.T, linear(x, w, 2), linear(x, w, 3))
        found[kind] = [relative(y, truth) for y in products]
    return found


@pytest.mark.parametrize("k", [200] if INTERPRETED else [64, 200, 513])
def test_six_products_are_no_worse_than_float32(k):
    for kind, (plain, _, six) in errors_of(k).items():
        assert six <= plain, kind


@pytest.mark.parametrize("spread", [0, 20])
@pytest.mark.parametrize("k", [16] if INTERPRETED else [1, 3, 16, 64])
def test_six_products_are_no_worse_than_float32_element_by_element(k, spread):
    """Also for short sums, and such as few products dominate: there it is the same within 6%."""
    x, w = numbers((128, k), 0, spread), numbers((100, k), 1)
    truth, room = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    six, plain = (((y - truth) / room).norm() for y in (OPS.split_matmul(x, w.T, 3), x @ w.T))
    assert six <= 1.1 * plain


@pytest.mark.parametrize("k", [64] if INTERPRETED else [64, 513])
def test_three_products_have_the_error_that_is_said(k):
    error = errors_of(k)["normal"][1]
    assert 3e-6 < error < 6e-6  # 4.4e-6 for any k


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="minutes")
@pytest.mark.parametrize("k", [2048, 4097, 8192])
def test_errors_of_long_sums(k):
    for kind, (plain, three, six) in errors_of(k).items():
        assert six <= plain, kind
        if kind != "cancelling":
            assert three < 6e-6


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_in_float32(epilogue):
    """Also far from zero, where exponentials overflow, and near it, where differences cancel."""
    x, w = torch.eye(16, device=DEVICE), torch.eye(64, 16, device=DEVICE)
    steps = torch.linspace(-1, 1, 64, device=DEVICE)
    for reach in (1e-3, 0.6, 3.0, 100.0):
        bias = steps * reach
        y = linear(x, w, 3, bias, epilogue)
        truth = EPILOGUES[epilogue]((w.T + bias).double())
        torch.testing.assert_close(y.double(), truth, rtol=2e-6, atol=1e-6)
        if epilogue == "tanh":  # relative, near zero
            torch.testing.assert_close(y.double(), truth, rtol=1e-6, atol=0)


@elsewhere
def test_it_is_told_apart_from_a_product_that_lost_the_small_parts():
    """What a compiler that folds the split away would leave is far outside the bound."""
    x, w = numbers((33, 130), 0), numbers((20, 130), 1)
    lost = x.bfloat16().float() @ w.bfloat16().float().T
    assert excess(lost, x, w, 2) > 10
    half_lost = linear(x, w.bfloat16().float(), 2)
    assert excess(half_lost, x, w, 2) > 10


# ---- range


def as_float32(x, w, parts):
    """Infinite and NaN exactly where float32 is, and else within the bound."""
    y, plain = linear(x, w, parts), x @ w.T
    finite = plain.isfinite()
    torch.testing.assert_close(y[~finite], plain[~finite], equal_nan=True)
    assert y[finite].isfinite().all()
    truth, room = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    allowed = room * (LEFT_OUT[parts] + 2 * (x.shape[1] + 8) * U) + x.shape[1] * 2.0**-149
    error = (y.double() - truth).abs()
    assert (error[finite] <= allowed[finite]).all()
    torch.testing.assert_close(OPS.split_matmul(x, w.T, parts)[~finite], plain[~finite], equal_nan=True)


VALUES = {
    "inf": [(0, INF)],
    "minus inf": [(7, -INF)],
    "both": [(0, INF), (1, -INF)],
    "nan": [(3, NAN)],
    "largest": [(5, 3.4028234e38)],
    "beyond bfloat16": [(5, -3.3961e38)],
    "beyond the scale": [(2, 2.0**112), (3, -(2.0**113))],
    "sums beyond the scale": [(4, 2.0**100), (6, 2.0**99)],
    "subnormal": [(i, 1e-41 * (i + 1)) for i in range(12)],
    "smallest": [(i, 2.0**-149) for i in range(12)],
    "mixed": [(0, 2.0**100), (1, 2.0**-100), (2, -(2.0**-60)), (3, 1.7 * 2.0**-120), (4, 2.0**50)],
}


@either
@pytest.mark.parametrize("kind", VALUES)
def test_what_parts_cannot_hold_is_as_float32(kind, parts):
    x, w = numbers((50, 12), 0), numbers((37, 12), 1) * 0.2
    w[3, 5], w[4] = 0.0, 0.0  # an infinity times 0 is NaN
    clean = linear(x, w, parts)
    x[41] = 0.25 if kind in ("inf", "both") else 0.0
    for at, value in VALUES[kind]:
        x[41, at] = value
    as_float32(x, w, parts)
    others = [i for i in range(50) if i != 41]
    assert torch.equal(linear(x, w, parts)[others], clean[others])


@either
def test_a_whole_product_of_tiny_or_huge_numbers(parts):
    for exponent in (-148, -126, 126) if INTERPRETED else (-148, -140, -126, -117, 90, 118, 126):
        x, w = numbers((9, 20), 2, exponent=exponent), numbers((11, 20), 3, exponent=-2)
        as_float32(x.clamp(-3.4e38, 3.4e38) * 0.1, w * 0.1, parts)


@either
def test_tiny_weights_and_small_products(parts):
    """Weights below what bfloat16 parts hold at their own scale, times large inputs."""
    x, w = numbers((9, 20), 4, exponent=60), numbers((11, 20), 5, exponent=-140)
    assert excess(linear(x, w, parts), x, w, parts) <= 1
    x, w = numbers((9, 20), 4, exponent=-70), numbers((11, 20), 5, exponent=-70)
    as_float32(x, w, parts)


@either
def test_zeros(parts):
    x = torch.zeros(5, 8, device=DEVICE)
    x[2] = -0.0
    assert torch.equal(
        linear(x, torch.ones(3, 8, device=DEVICE), parts), torch.zeros(5, 3, device=DEVICE)
    )


@either
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues_of_what_is_not_finite(epilogue, parts):
    x = torch.zeros(6, 3, device=DEVICE)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = INF, -INF, NAN, 2.0**120
    w, bias = torch.ones(2, 3, device=DEVICE), torch.tensor([0.5, INF], device=DEVICE)
    y = linear(x, w, parts, bias, epilogue)
    truth = EPILOGUES[epilogue](F.linear(x, w, bias))
    if epilogue == "gelu":  # of infinity it is NaN in PyTorch on some processors, and infinity on others
        y, truth = y[2:, :1], truth[2:, :1]
    torch.testing.assert_close(y, truth, equal_nan=True, rtol=1e-6, atol=1e-6)


# ---- shapes, layouts, misuse


SHAPES = [
    ((5, 7), (7, 3)),
    ((4, 5, 7), (7, 3)),
    ((4, 5, 7), (4, 7, 3)),
    ((2, 1, 5, 7), (3, 7, 4)),
    ((7, 3), (2, 3, 5)),
    ((0, 7), (7, 3)),
    ((5, 0), (0, 3)),
    ((2, 3, 0), (2, 0, 4)),
]


@either
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul_has_the_shapes_of_torch(left, right, parts):
    a, b = numbers(left, 0), numbers(right, 1)
    y = OPS.split_matmul(a, b, parts)
    assert y.is_contiguous()
    torch.testing.assert_close(y, a @ b, rtol=1e-4, atol=1e-4)


def near(y, other):
    """The same sums, perhaps in another order."""
    torch.testing.assert_close(y, other, rtol=1e-5, atol=1e-6)


@either
def test_matmul_of_views(parts):
    a = numbers((6, 4, 9), 0)
    b = numbers((6, 9, 10), 1)
    truth = OPS.split_matmul(a, b, parts)
    turned = OPS.split_matmul(
        a.mT.contiguous().mT, b.permute(1, 2, 0).contiguous().permute(2, 0, 1), parts
    )
    near(turned, truth)
    near(OPS.split_matmul(a, b[:, :, ::2], parts), truth[:, :, ::2])
    near(OPS.split_matmul(a[0].expand(6, 4, 9), b, parts)[0], truth[0])
    w = OPS.split_parts(b[0].mT, parts)
    near(OPS.split_linear(a[0], w, None, parts, "none"), truth[0])


@either
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0, 7), (2, 0)])
def test_linear_has_the_shapes_of_torch(shape, parts):
    x, w, bias = numbers(shape, 0), numbers((5, shape[-1]), 1), numbers((5,), 2)
    y = linear(x, w, parts, bias, "relu")
    torch.testing.assert_close(y, F.relu(F.linear(x, w, bias)), rtol=1e-4, atol=1e-4)


@elsewhere
def test_misuse_says_what_is_wrong():
    x, w = torch.ones(2, 3, device=DEVICE), torch.ones(4, 3, device=DEVICE)
    halves = OPS.split_parts(w, 2)
    for call, word in [
        (lambda: OPS.split_parts(w.double(), 2), "float64"),
        (lambda: OPS.split_parts(w, 4), "4 parts"),
        (lambda: OPS.split_linear(x, halves, None, 3, "none"), "bfloat16 parts"),
        (lambda: OPS.split_linear(x, w, None, 2, "none"), "bfloat16 parts"),
        (lambda: OPS.split_linear(x, halves, None, 2, "elu"), "'elu' is none of"),
        (lambda: OPS.split_linear(x, halves, x, 2, "none"), "bias"),
        (lambda: OPS.split_linear(x[:, :2], halves, None, 2, "none"), "do not go together"),
        (lambda: OPS.split_matmul(x, w, 2), "do not go together"),
        (lambda: OPS.split_matmul(x, w[0], 2), "two dimensions"),
        (lambda: OPS.split_matmul(x, w.T.half(), 2), "float16"),
    ]:
        with pytest.raises(InputError, match=word):
            call()


@elsewhere
def test_what_the_kernels_say_of_themselves():
    x, w = torch.ones(6, 4, device=DEVICE), OPS.split_parts(torch.ones(5, 4, device=DEVICE), 3)
    args = (x, w, None, 3, "relu")
    assert LINEAR.refuses(*args) is None
    assert "float64" in LINEAR.refuses(x.double(), *args[1:])
    assert "gradient" in LINEAR.refuses(x.clone().requires_grad_(), *args[1:])
    assert LINEAR.work(*args) == (4.0 * 24 + 2 * 60 + 4 * 30, 6 * 2.0 * 6 * 5 * 4)
    assert MATMUL.work(x, x.T, 2) == (4.0 * 24 * 2 + 4 * 36, 3 * 2.0 * 6 * 6 * 4)
    assert (split_gemm.numerics(2), split_gemm.numerics(3)) == (Numerics.LOSSY, Numerics.REASSOCIATES)


@elsewhere
def test_the_vendors_kernels_are_offered_only_where_their_error_is_small_enough():
    def methods(k, parts):
        x = torch.empty(4096, k, device="meta")
        w = torch.empty(parts, 4096, k, device="meta", dtype=torch.bfloat16)
        space = LINEAR.space(x, w, None, parts, "none")
        return {c["method"] for c in space.all}, space.default()["method"]

    assert methods(4096, 2) == ({"fused", "library"}, "library")
    assert methods(16384, 2) == ({"fused"}, "fused")
    assert methods(4096, 3) == ({"fused"}, "fused")
    for m, n, k in [(1, 1, 1), (64, 8, 4096), (4096, 4096, 4096), (100, 10_000, 77)]:
        for parts in (2, 3):
            x, y = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
            assert len(MATMUL.space(x, y, parts).all) > 20  # the default is one of them
            w = torch.empty(parts, n, k, device="meta", dtype=torch.bfloat16)
            assert len(LINEAR.space(x, w, None, parts, "none").all) > 20


# ---- the device code


def fused(m, n, k, splits, group):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return {"method": "fused", **blocks, "splits": splits, "warps": 4, "stages": 2, "group": group}


CONFIGS = [
    fused(16, 64, 32, 1, 1),
    fused(64, 32, 64, 1, 4),
    fused(32, 32, 32, 4, 8),
    {"method": "library"},
]


@here
@both
@pytest.mark.parametrize("config", CONFIGS)
def test_every_way_is_right(config, parts):
    if config["method"] == "library" and parts == 3:
        pytest.skip("two parts only")
    every_way(config, parts)


def every_way(config, parts):
    for m, n, k in [(1, 1, 1), (33, 20, 40)] if INTERPRETED else [(70, 65, 33), (200, 300, 96)]:
        x, w, bias = numbers((m, k), 0), numbers((n, k), 1), numbers((n,), 2)
        y = LINEAR.launch(config, x, OPS.split_parts(w, parts), None, parts, "none")
        assert excess(y, x, w, parts) <= 1
        done = LINEAR.launch(config, x, OPS.split_parts(w, parts), bias, parts, "relu")
        assert torch.equal(done, F.relu(y + bias))
        a, b = torch.stack([x, 2 * x]), torch.stack([w, w + 1])
        y = MATMUL.launch(config, a, b.mT, parts)
        assert excess(y[0], a[0], b[0], parts) <= 1
        assert excess(y[1], a[1], b[1], parts) <= 1
        y = MATMUL.launch(config, x.T.contiguous().T, w.T.contiguous(), parts)
        assert excess(y, x, w, parts) <= 1
        x[m // 2, 0] = 2.0**127
        y = LINEAR.launch(config, x, OPS.split_parts(w, parts), None, parts, "none")
        torch.testing.assert_close(y[m // 2], (x @ w.T)[m // 2], rtol=1e-4, atol=0, equal_nan=True)
        torch.testing.assert_close(y, x @ w.T, rtol=1e-4, atol=1e-3, equal_nan=True)


@gpu
@both
@pytest.mark.parametrize("config", [*CONFIGS, None])
def test_every_way_is_right_on_a_gpu(config, parts):
    if config is not None and config["method"] == "library" and parts == 3:
        pytest.skip("two parts only")
    x = torch.empty(70, 33, device=DEVICE)
    default = LINEAR.space(x, OPS.split_parts(x, parts), None, parts, "none").default()
    every_way(config or default, parts)


@gpu
def test_parts_on_a_gpu_are_those_of_a_cpu():
    w = torch.cat([numbers((4096,), 0, spread=120), torch.arange(-999, 999, device=DEVICE) * 2.0**-149])
    for parts in (1, 2, 3):
        assert torch.equal(OPS.split_parts(w, parts).cpu(), OPS.split_parts(w.cpu(), parts))


@gpu
@pytest.mark.parametrize("k", [1024, 8192])
def test_six_products_are_no_worse_than_float32_on_a_gpu(k):
    torch.backends.cuda.matmul.allow_tf32 = False
    for kind, (plain, three, six) in errors_of(k).items():
        assert six <= plain, kind
        if kind == "normal":
            assert three < 6e-6
