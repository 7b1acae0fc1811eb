"""Open-loop load, its summary, and cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_fakes import FakeClock
from torchstone.bench import cost
from torchstone.bench.load import QUANTILES, Served, arrivals, open_loop, summarize, tail_change
from torchstone.errors import InputError


def served(latencies, errors=0, elapsed_s=10.0):
    return Served(latencies_s=tuple(latencies), errors=errors, elapsed_s=elapsed_s)


def test_latency_runs_from_the_scheduled_arrival():
    """One slow request makes those behind it late, although each of these is served quickly."""
    clock = FakeClock()
    seconds = [1.0, 0.1, 0.1, 0.1]
    found = open_loop((0.5, 0.6, 0.7, 5.0), lambda i: clock.sleep(seconds[i]), clock, 100)
    assert found.latencies_s == pytest.approx((1.0, 1.0, 1.0, 0.1))
    assert found.errors == 0
    assert found.elapsed_s == pytest.approx(5.1)


def test_an_overloaded_run_stops_and_what_is_left_counts_as_errors():
    clock = FakeClock()
    schedule = arrivals(rate=100, seconds=10, seed=0)
    found = open_loop(schedule, lambda i: clock.sleep(0.1), clock, 20)
    assert found.elapsed_s == pytest.approx(20, abs=0.2)
    assert len(found.latencies_s) == pytest.approx(200, abs=2)
    assert len(found.latencies_s) + found.errors == len(schedule)
    result = summarize("inductor", 100, found, slo_s=0.5)
    assert result.requests == len(schedule)
    assert result.achieved == pytest.approx(10, rel=0.02)
    assert result.quantiles_s["p99"] is None
    assert result.goodput is not None
    assert result.goodput < 1


def test_arrivals_are_poisson_and_the_seeds():
    found = np.array(arrivals(rate=50, seconds=200, seed=3))
    assert found.max() < 200
    assert len(found) == pytest.approx(10_000, abs=4 * 100)
    gaps = np.diff(found)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert arrivals(50, 200, 3) == tuple(found)
    assert arrivals(50, 200, 4) != tuple(found)


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (-1, 1), (math.nan, 1), (math.inf, 1), (1, 0)])
def test_a_load_that_cannot_be_is_refused(rate, seconds):
    with pytest.raises(InputError):
        arrivals(rate, seconds, 0)


@pytest.mark.parametrize(("name", "level", "fewest"), QUANTILES)
def test_a_quantile_needs_enough_requests(name, level, fewest):
    latencies = [float(i + 1) for i in range(fewest)]
    result = summarize("eager", 1, served(latencies), None)
    value = result.quantiles_s[name]
    assert value is not None
    assert sum(x <= value for x in latencies) >= level * fewest
    assert summarize("eager", 1, served(latencies[:-1]), None).quantiles_s[name] is None


def test_unserved_requests_are_later_than_all_others():
    result = summarize("eager", 1, served([0.1] * 940, errors=60), None)
    assert result.quantiles_s == {"p50": 0.1, "p90": 0.1, "p95": None, "p99": None, "p999": None}


def test_nothing_arrived():
    result = summarize("eager", 1, served([], elapsed_s=0.0), 0.1)
    assert set(result.quantiles_s.values()) == {None}
    assert (result.requests, result.achieved, result.goodput) == (0, 0.0, 0.0)


def test_goodput_counts_what_meets_the_objective():
    result = summarize("eager", 10, served([0.1, 0.2, 0.3, 0.4]), 0.2)
    assert result.goodput == pytest.approx(0.2)
    assert result.achieved == pytest.approx(0.4)
    assert summarize("eager", 10, served([0.1]), None).goodput is None


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=1500), st.integers(0, 20))
def test_quantiles_are_ordered_observed_and_never_flattered(latencies, errors):
    result = summarize("eager", 1, served(latencies, errors), None)
    values = [result.quantiles_s[name] for name, _, _ in QUANTILES]
    stated = [v for v in values if v is not None]
    assert stated == sorted(stated)
    assert set(stated) <= set(latencies)
    for (_, level, _), value in zip(QUANTILES, values, strict=True):
        if value is not None:
            assert sum(x <= value for x in latencies) >= level * (len(latencies) + errors) - 1e-6


def test_a_longer_tail_is_seen_and_the_same_tail_is_not():
    rng = np.random.default_rng(0)
    one, two, worse = (0.01 + rng.exponential(0.01, 1000) for _ in range(3))
    low, high = tail_change(one, two, 0.99)
    assert low < 0 < high
    assert tail_change(one, 3 * worse, 0.99)[0] > math.log(1.5)


def test_dollars():
    assert cost.capacity(0.02) == pytest.approx(50)
    assert cost.dollars_per_million(3.6, 0.02) == pytest.approx(20)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_has_no_capacity(seconds):
    with pytest.raises(InputError):
        cost.capacity(seconds)


def test_break_even():
    assert cost.break_even_calls(60, 0.02) == pytest.approx(3000)
    assert cost.break_even_calls(-5, 0.02) == 0
    assert cost.break_even_calls(60, 0.0) is None
    assert cost.break_even_calls(60, -0.02) is None
