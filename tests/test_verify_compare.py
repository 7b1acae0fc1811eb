"""Invariants of the error measures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.verify.compare import differing, errors

INF, NAN = float("inf"), float("nan")
moderate = st.floats(-1e6, 1e6, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-6)
pairs = st.lists(st.tuples(moderate, moderate), min_size=1, max_size=30)


def of(output: object, reference: object, dtype: torch.dtype = torch.float64):  # type: ignore[no-untyped-def]
    out, ref = torch.as_tensor(output, dtype=dtype), torch.as_tensor(reference, dtype=torch.float64)
    return errors("y", out, ref, torch.empty_like(out))


@settings(deadline=None)
@given(pairs)
def test_agrees_with_the_definitions(values: list[tuple[float, float]]) -> None:
    out, ref = torch.tensor(values, dtype=torch.float64).T
    found = errors("y", out, ref, out)
    error, norm = (out - ref).norm().item(), ref.norm().item()
    rms = norm / math.sqrt(len(values))
    if norm:
        assert found.relative == pytest.approx(error / norm, rel=1e-9, abs=1e-15)
        worst = ((out - ref).abs() / ref.abs().clamp(min=rms)).max().item()
        assert found.worst == pytest.approx(worst, rel=1e-9, abs=1e-15)
        assert found.rms == pytest.approx(rms)
        assert found.error_rms == pytest.approx(error / math.sqrt(len(values)), rel=1e-9, abs=1e-12)
    else:
        assert found.relative == (1.0 if error else 0.0)


@settings(deadline=None)
@given(pairs, st.integers(-200, 200))
def test_does_not_depend_on_the_scale(values: list[tuple[float, float]], power: int) -> None:
    out, ref = torch.tensor(values, dtype=torch.float64).T
    plain, scaled = errors("y", out, ref, out), errors("y", out * 2.0**power, ref * 2.0**power, out)
    assert scaled.relative == pytest.approx(plain.relative, rel=1e-9)
    assert scaled.worst == pytest.approx(plain.worst, rel=1e-9)
    assert scaled.non_finite == plain.non_finite == 0


@settings(deadline=None)
@given(pairs, st.randoms())
def test_does_not_depend_on_the_order(values: list[tuple[float, float]], random: object) -> None:
    mixed = list(values)
    random.shuffle(mixed)  # type: ignore[attr-defined] # hypothesis gives a random.Random
    plain = of(*zip(*values, strict=True))
    again = of(*zip(*mixed, strict=True))
    assert again.relative == pytest.approx(plain.relative, rel=1e-9)
    assert again.worst == pytest.approx(plain.worst, rel=1e-9)


@settings(deadline=None)
@given(pairs)
def test_worst_bounds_relative_from_both_sides(values: list[tuple[float, float]]) -> None:
    """An error that is small everywhere is small in the norm, and one in the norm is somewhere."""
    found = of(*zip(*values, strict=True))
    if found.rms and found.relative is not None and found.worst is not None:
        assert found.worst <= found.relative * math.sqrt(len(values)) * (1 + 1e-9)
        assert found.relative <= found.worst * math.sqrt(2) * (1 + 1e-9)


@settings(deadline=None)
@given(
    st.lists(moderate, min_size=1, max_size=20), st.integers(0, 19), st.sampled_from([INF, -INF, NAN])
)
def test_one_element_that_is_not_finite_is_counted(values: list[float], at: int, odd: float) -> None:
    out = list(values)
    out[at % len(out)] = odd
    for first, second in ((out, values), (values, out)):
        found = of(first, second)
        assert found.non_finite == 1
        assert found.relative is None
        assert found.worst is None
        assert found.sqnr_db is None
    agreed = of(out, out)
    assert agreed.non_finite == 0
    assert agreed.relative == 0.0


def test_infinities_of_another_sign_are_not_the_same() -> None:
    assert of([INF, 1.0], [-INF, 1.0]).non_finite == 1
    assert of([INF, 1.0], [NAN, 1.0]).non_finite == 1
    assert of([NAN, INF, -INF], [NAN, INF, -INF]).non_finite == 0


def test_zero_reference() -> None:
    assert of([0.0, 0.0], [0.0, 0.0]).relative == 0.0
    assert of([0.0, 1e-30], [0.0, 0.0]).relative == 1.0
    assert of([0.0, 0.0], [1.0, 2.0]).relative == 1.0
    assert of([-0.0], [0.0]).relative == 0.0


def test_the_largest_numbers_do_not_overflow() -> None:
    largest = torch.finfo(torch.float64).max
    assert of([largest, -largest], [largest, largest]).relative == pytest.approx(math.sqrt(2))
    assert of([5e-324], [5e-324]).relative == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_of_each_dtype(dtype: torch.dtype) -> None:
    reference = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = errors("y", reference.to(dtype), reference, reference.to(dtype))
    half_unit = torch.finfo(dtype).eps / 2
    assert found.relative is not None
    assert found.worst is not None
    assert found.relative <= half_unit
    assert found.worst <= half_unit
    assert found.dtype == str(dtype).removeprefix("torch.")
    if dtype is not torch.float64:
        assert found.relative > half_unit / 10
        assert found.sqnr_db == pytest.approx(-20 * math.log10(found.relative))


def test_complex_parts_are_judged_apart() -> None:
    reference = torch.tensor([1 + 2j, complex(3, INF)], dtype=torch.complex128)
    assert (
        errors("y", reference.to(torch.complex64), reference, reference.to(torch.complex64)).relative
        == 0.0
    )
    flipped = torch.tensor([1 + 2j, complex(3, -INF)], dtype=torch.complex64)
    assert errors("y", flipped, reference, flipped).non_finite == 1


def test_where_the_worst_element_is_and_what_the_others_do() -> None:
    reference = torch.ones(10, 20, dtype=torch.float64)
    output = reference + 1e-6
    output[7, 13] += 0.5
    found = errors("y", output, reference, output)
    assert found.worst_index == (7, 13)
    assert found.worst == pytest.approx(0.500001)
    assert found.typical == pytest.approx(1e-6)


def test_integers_and_booleans_must_be_equal() -> None:
    out, ref = torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3])
    found = errors("y", out, ref, ref)
    assert (found.mismatched, found.worst_index, found.differing) == (1, (1,), 1)
    big = torch.tensor([2**53 + 1])
    assert errors("y", big, big - 1, big).mismatched == 1
    flags = torch.tensor([True, False])
    assert errors("y", flags, ~flags, flags).mismatched == 2


def test_shape_dtype_and_kind() -> None:
    y = torch.ones(2, 3)
    for other in (
        torch.ones(3, 2),
        torch.ones(1, 2, 3),
        torch.ones(2, 3, dtype=torch.float16),
        None,
        "text",
    ):
        found = errors("y", other, y.double(), y)
        assert found.shape_or_dtype is not None
        assert "float32[2, 3]" in found.shape_or_dtype
    assert errors("y", None, None, None).shape_or_dtype is None
    assert errors("y", "a", "a", "a").shape_or_dtype is None
    assert errors("y", y, torch.ones(4), y).relative is None  # the shape itself depends on rounding


def test_empty_outputs_have_no_error() -> None:
    found = of(torch.empty(0, 4), torch.empty(0, 4))
    assert (found.relative, found.worst, found.elements) == (0.0, 0.0, 0)


def test_scalars_have_an_empty_index() -> None:
    assert of(2.0, 1.0).worst_index == ()


def test_differing_counts_nans_as_equal() -> None:
    a = torch.tensor([NAN, 1.0, 2.0])
    assert differing(a, torch.tensor([NAN, 1.0, 3.0])) == 1
    assert differing(a, a.double()) == 3
