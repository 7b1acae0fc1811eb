"""Comparing samples: the honesty bounds of the gate, and the invariants of the interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_fakes import drift, heavy_tailed, lognormal, no_drift, samples, session, times
from torchstone import gate
from torchstone.bench import stats
from torchstone.errors import InputError
from torchstone.policy import Policy
from torchstone.records import VerdictEntry, Verified

TRIALS = 1000
POWER_TRIALS = 400
RIGHT = Verified(cases=20, worst_case="odd", relative=1e-6, eager_relative=1e-6, bound=1e-5)

noises = pytest.mark.parametrize("noise", [lognormal, heavy_tailed])


def promotes(found) -> bool:
    verdicts = tuple(VerdictEntry(recipe=c.recipe, verdict=RIGHT) for c in found)
    evidence = gate.Evidence(baseline="eager", verdicts=verdicts, comparisons=tuple(found))
    return gate.decide(evidence, Policy()).kind == "PROMOTE"


@noises
@pytest.mark.parametrize(("shared", "rounds"), [(drift, 20), (no_drift, 5)])
def test_a_a_promotes_in_at_most_one_per_cent(noise, shared, rounds):
    hits = sum(
        promotes(stats.compare_all(session(np.random.default_rng(seed), (0.0,), noise, shared, rounds)))
        for seed in range(TRIALS)
    )
    assert hits <= 0.01 * TRIALS, f"{hits} of {TRIALS} A/A sessions of {rounds} rounds promoted"


@pytest.mark.slow
@noises
def test_eight_a_a_candidates_promote_in_at_most_one_per_cent(noise):
    hits = sum(
        promotes(stats.compare_all(session(np.random.default_rng(seed), (0.0,) * 8, noise, drift)))
        for seed in range(TRIALS)
    )
    assert hits <= 0.01 * TRIALS, f"{hits} of {TRIALS} sessions with 8 A/A candidates promoted one"


def test_without_its_noise_margin_the_interval_alone_keeps_the_bound():
    """Not by luck of the margin: the lower end itself is above 1 at most about once in a hundred."""
    above = 0
    for seed in range(TRIALS):
        baseline, _, candidate = session(np.random.default_rng(seed), (0.0,), lognormal, drift)
        above += stats.compare(candidate, baseline, 0.01).low > 1
    # One per cent is expected; 18 of 1000 is its upper 99% end.
    assert above <= 18, f"the interval excluded 1 from below in {above} of {TRIALS} A/A sessions"


@noises
@pytest.mark.parametrize(("shared", "others"), [(no_drift, 0), (drift, 0), (drift, 7)])
def test_a_gain_of_five_per_cent_is_found_in_95_of_100(noise, shared, others):
    gains = (0.05, *(0.0,) * others)
    hits = sum(
        promotes(stats.compare_all(session(np.random.default_rng(seed), gains, noise, shared)))
        for seed in range(POWER_TRIALS)
    )
    assert hits >= 0.95 * POWER_TRIALS, f"found in {hits} of {POWER_TRIALS} beside {others} others"


def test_a_loss_is_called_slower_and_no_difference_is_called_the_same():
    rng = np.random.default_rng(0)
    slower, same = stats.compare_all(session(rng, (-0.05, 0.0), rounds=40))
    assert (slower.relation, same.relation) == ("SLOWER", "SAME")


def test_processes_of_the_same_code_that_differ_by_their_layout_are_not_promoted():
    hits = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        found = session(rng, tuple(0.003 * rng.standard_normal(4)), lognormal, rounds=20)
        hits += promotes(stats.compare_all(found))
    assert hits <= 3, f"{hits} of 300 promoted on a 0.3% difference between processes"


def test_what_is_usually_quick_but_stalls_is_not_faster():
    """A candidate that answers in half the time, but takes 20 times as long once in eight calls."""
    rng = np.random.default_rng(1)
    baseline, again, quick = session(rng, (1.0,))
    stalls = np.array(quick.rounds)
    stalls[np.arange(20), np.arange(20) % 8] *= 20
    stalling = samples(tuple(map(tuple, stalls.tolist())))
    assert stats.compare_all((baseline, again, quick))[0].relation == "FASTER"
    assert stats.compare_all((baseline, again, stalling))[0].relation == "UNCLEAR"


def test_requests_count_by_what_they_cost():
    """Twice as fast on the seven small requests, 40% slower on the one that takes most of the time."""
    common = np.ones((20, 1))
    base = np.array([1.0] * 7 + [20.0]) * common
    other = np.array([0.5] * 7 + [28.0]) * common
    slow = samples(tuple(map(tuple, other.tolist())))
    baseline = samples(tuple(map(tuple, base.tolist())), "baseline", "eager")
    found = stats.compare(slow, baseline, 0.01)
    assert found.ratio == pytest.approx(27 / 31.5)
    assert found.relation == "SLOWER"


def test_without_a_control_nothing_is_clear():
    baseline, _, candidate = session(np.random.default_rng(0), (1.0,))
    (found,) = stats.compare_all((baseline, candidate))
    assert found.relation == "UNCLEAR"
    assert found.ratio == pytest.approx(2, rel=0.05)
    assert stats.compare_all((candidate,)) == ()


def test_a_peer_can_be_compared_with_and_a_family_shares_the_confidence():
    found = session(np.random.default_rng(0), (0.5, 0.2))
    against_peer = stats.compare_all(found, against="custom(c1)")
    assert {c.recipe: c.relation for c in against_peer} == {"eager": "SLOWER", "custom(c0)": "FASTER"}
    narrow, wide = (stats.compare_all(found, family=n)[0] for n in (None, 20))
    assert narrow.confidence == pytest.approx(0.99)
    assert wide.confidence == pytest.approx(0.999)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_first_rounds_of_an_unsettled_baseline_do_not_flatter():
    baseline, _, candidate = session(np.random.default_rng(2), (0.0,))
    warming = np.array(baseline.rounds)
    warming[:10] *= 1.5
    rounds = tuple(map(tuple, warming.tolist()))
    ratios = [
        stats.compare(candidate, samples(rounds, "baseline", "eager", steady=steady), 0.01).ratio
        for steady in (False, True)
    ]
    assert ratios[0] == pytest.approx(1, abs=0.02)
    assert ratios[1] > 1.1


@pytest.mark.parametrize(
    "changes",
    [
        {"session": "another"},
        {"sizes": ({"B": 2},) * 8},
        {"rounds": ((0.1,) * 8,) * 19},
        {"rounds": ((0.1,) * 7 + (0.0,),) * 20},
        {"rounds": ((0.1,) * 7 + (math.nan,),) * 20},
        {"rounds": ((0.1,) * 7 + (math.inf,),) * 20},
    ],
)
def test_samples_that_cannot_be_paired_are_refused(changes):
    baseline, _, candidate = session(np.random.default_rng(0), (0.0,))
    values = {"label": "candidate", "recipe": "inductor", "rounds": candidate.rounds} | changes
    with pytest.raises(InputError):
        stats.compare(samples(**values), baseline, 0.01)


def test_too_few_rounds_are_refused():
    baseline, again, candidate = session(np.random.default_rng(0), (0.0,), rounds=4)
    with pytest.raises(InputError, match="too few"):
        stats.compare_all((baseline, again, candidate))


sides = st.builds(
    lambda seed, rounds, gain: session(
        np.random.default_rng(seed), (gain,), heavy_tailed, drift, rounds
    ),
    st.integers(0, 10**6),
    st.integers(5, 25),
    st.floats(-0.9, 20),
)


@settings(deadline=None, max_examples=60)
@given(sides, st.floats(0.5, 0.9999))
def test_the_interval_holds_the_ratio_and_widens_with_confidence(found, confidence):
    baseline, _, candidate = found
    one = stats.compare(candidate, baseline, 0.01, confidence)
    wider = stats.compare(candidate, baseline, 0.01, (1 + confidence) / 2)
    assert 0 < wider.low <= one.low <= one.ratio <= one.high <= wider.high < math.inf


@settings(deadline=None, max_examples=60)
@given(sides)
def test_swapping_sides_inverts(found):
    baseline, _, candidate = found
    there = stats.compare(candidate, baseline, 0.02)
    back = stats.compare(baseline, candidate, 0.02)
    assert back.ratio == pytest.approx(1 / there.ratio)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low))
    opposite = {"FASTER": "SLOWER", "SLOWER": "FASTER"}
    assert back.relation == opposite.get(there.relation, there.relation)


@settings(deadline=None, max_examples=60)
@given(sides, st.floats(1e-3, 1e3), st.floats(0.1, 10))
def test_units_do_not_matter_and_a_factor_on_one_side_is_a_factor_of_the_ratio(found, unit, factor):
    baseline, again, candidate = found

    def scaled(one, by):
        rounds = tuple(tuple(t * by for t in r) for r in one.rounds)
        return samples(rounds, one.label, one.recipe)

    one = stats.compare(candidate, baseline, 0.02)
    other = stats.compare(scaled(candidate, unit / factor), scaled(baseline, unit), 0.02)
    assert other.ratio == pytest.approx(one.ratio * factor)
    assert (other.low, other.high) == pytest.approx((one.low * factor, one.high * factor))
    assert stats.noise_of(scaled(baseline, unit), scaled(again, unit)) == pytest.approx(
        stats.noise_of(baseline, again)
    )


def test_the_result_is_the_same_every_time_and_whatever_else_is_compared():
    found = session(np.random.default_rng(3), (0.1, 0.2))
    assert stats.compare_all(found) == stats.compare_all(found)
    alone = stats.compare_all(found[:3], family=2)
    assert alone[0] == stats.compare_all(found)[0]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 19, 38, 499])
def test_quantiles_of_students_t(freedom):
    for level in (0.5, 0.6, 0.975, 0.995, 0.9995, 0.99995):
        expected = scipy.stats.t.ppf(level, freedom)
        assert stats.t_quantile(level, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("ends", [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_quantiles_that_do_not_exist_are_refused(ends):
    with pytest.raises(InputError):
        stats.t_quantile(*ends)


def test_an_interval_covers_the_truth_as_often_as_it_says():
    inside = 0
    for seed in range(TRIALS):
        baseline, _, candidate = session(np.random.default_rng(seed), (0.2,), heavy_tailed, drift, 10)
        found = stats.compare(candidate, baseline, 0.01, 0.95)
        inside += found.low <= 1.2 <= found.high
    # 95% is promised; 930 of 1000 is the lower 99.8% end.
    assert inside >= 930, f"covered in {inside} of {TRIALS}"


def test_the_level_of_a_label_and_its_error():
    spread = []
    for seed in range(300):
        rounds = times(np.random.default_rng(seed), lognormal, np.zeros(20))
        log_s, error = stats.level(samples(rounds))
        spread.append((log_s - math.log(0.104)) / error)
    assert abs(np.mean(spread)) < 0.5
    assert 0.8 < np.std(spread) < 1.3
