"""Figures as text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstone.report import format as fmt

POSITIVE = st.floats(1e-9, 1e9)
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def number(text: str) -> float:
    return float(text.replace(",", ""))


@given(POSITIVE)
def test_seconds_say_the_value_to_three_digits(value: float) -> None:
    figure, unit = fmt.seconds(value).split(" ")
    assert number(figure) * UNITS[unit] == pytest.approx(value, rel=5.1e-3)
    assert unit == "s" or number(figure) < 1000
    assert unit == "ns" or number(figure) >= 1
    assert len(re.sub(r"^0\.0*|[.,]", "", figure)) >= 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (0.166, "166 ms"),
        (0.0009996, "1.00 ms"),
        (4.2e-6, "4.20 us"),
        (0.9999, "1.00 s"),
        (12345.0, "12,300 s"),
        (5e-9, "5.00 ns"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert fmt.seconds(value) == text


@given(st.integers(0, 2**45))
def test_sizes_say_the_value(value: int) -> None:
    figure, unit = fmt.size(value).split(" ")
    assert number(figure) * SIZES[unit] == pytest.approx(value, rel=5.1e-3)
    assert number(figure) < 1024 or unit == "TiB"


@given(POSITIVE)
def test_ratios_say_the_value(value: float) -> None:
    text = fmt.ratio(value)
    assert text.endswith("x")
    assert number(text[:-1]) == pytest.approx(value, rel=0.051)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.6195, "1.62x"), (0.788, "0.79x"), (12.34, "12.3x"), (1.0, "1.00x"), (0.9999, "1.00x")],
)
def test_ratio(value: float, text: str) -> None:
    assert fmt.ratio(value) == text


@given(st.floats(0.01, 100), st.floats(1, 3))
def test_an_interval_never_reads_backwards(low: float, factor: float) -> None:
    left, right = fmt.interval(low, low * factor)[1:-1].split(", ")
    assert number(left) <= number(right)


@given(st.floats(-1e6, 1e6))
def test_signed_keeps_the_sign(value: float) -> None:
    text = fmt.signed(value)
    assert text[0] == ("0" if value == 0 else "+" if value > 0 else "-")
    assert number(text) == pytest.approx(value, rel=0.51, abs=0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not finite"), (float("nan"), "not finite"), (0.0, "0"), (9.83e-7, "9.8e-07")],
)
def test_error(value: float | None, text: str) -> None:
    assert fmt.error(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (-1, "0 s")],
)
def test_duration(value: float, text: str) -> None:
    assert fmt.duration(value) == text


def test_percent_money_count_rate() -> None:
    assert fmt.percent(0.0123) == "1.2%"
    assert fmt.money(12.3) == "$12.30"
    assert fmt.money(0.01423) == "$0.0142"
    assert fmt.count(1240) == "1,240"
    assert fmt.count(1_234_567) == "1,230,000"
    assert fmt.rate(14.23) == "14.2/s"
    assert fmt.maybe(fmt.rate, None) == fmt.DASH


@given(st.text(st.characters() | st.sampled_from("\x1b[31m\u202e\ud800\0\r\n"), max_size=200))
def test_clean_text_is_safe_to_print_and_stays_as_it_is(text: str) -> None:
    cleaned = fmt.clean(text)
    cleaned.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", cleaned)
    assert fmt.clean(cleaned) == cleaned


def test_clean_drops_terminal_codes_and_keeps_words() -> None:
    assert (
        fmt.clean("\x1b[1;31merror\x1b[0m: größer → 更快\tyes\r\nnext")
        == "error: größer → 更快\tyes\nnext"
    )
