"""Comparing two runs: what fails, what is noise, what is refused, and the files written of it."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_fakes import PASS_S, drift, heavy_tailed, lognormal, no_drift, samples, session
from torchstone import gate
from torchstone.bench import stats
from torchstone.bench.load import Served, open_loop, summarize
from torchstone.compare import Check, Limits, RunDiff, RunView, compare_runs, junit, markdown
from torchstone.policy import Policy
from torchstone.records import (
    Arrival,
    Crashed,
    Decision,
    Environment,
    MetricResult,
    Reason,
    RunHeader,
    Samples,
    TimedOut,
    Unverifiable,
    VerdictEntry,
    Verified,
    WorkloadSpec,
    Wrong,
)

BEST = "custom(c0)"
RIGHT = Verified(cases=20, worst_case="odd", relative=1e-6, eager_relative=1e-6, bound=1e-5)
SPEC = WorkloadSpec(
    name="digits",
    inputs=(),
    dims=(),
    example_sizes={"B": 1},
    traffic=(Arrival(sizes={"B": 1}),),
    metric=None,
    digest="a" * 64,
)
WHERE = Environment(
    python="3.12.3",
    platform="linux-x86_64",
    cpu="one",
    isa=("avx2",),
    cores=2,
    threads=2,
    memory_bytes=8 * 2**30,
    packages={"torch": "2.13.0"},
)


def header(**changes):
    values = {
        "format": 1,
        "workload": SPEC,
        "policy": msgspec.to_builtins(Policy()),
        "recipes": ("eager", BEST),
        "environment": WHERE,
        "seed": 0,
        "origin": None,
        "started_at": "2026-01-01T00:00:00Z",
    }
    return RunHeader(**(values | changes))


def run(seed, gains=(0.5,), *extra, noise=lognormal, shared=no_drift, machine=1.0, **changes):
    """A finished run: samples of one session, what follows from them, and the gate's decision."""
    found = tuple(
        msgspec.structs.replace(
            s, session=f"s{seed}", rounds=tuple(tuple(t * machine for t in r) for r in s.rounds)
        )
        for s in session(np.random.default_rng(seed), gains, noise, shared)
    )
    verdicts = [VerdictEntry(recipe=f"custom(c{i})", verdict=RIGHT) for i in range(len(gains))]
    made = {e.recipe for e in extra if isinstance(e, VerdictEntry)}
    entries = (
        *found,
        *stats.compare_all(found),
        *(v for v in verdicts if v.recipe not in made),
        *extra,
    )
    head = header(**changes)
    return decided(RunView(header=head, entries=entries))


def decided(view):
    evidence = gate.evidence_of(view.header, view.entries)
    decision = gate.decide(evidence, msgspec.convert(view.header.policy, Policy))
    return RunView(header=view.header, entries=(*view.entries, decision))


def without(view, kind):
    return RunView(header=view.header, entries=tuple(e for e in view.entries if not isinstance(e, kind)))


def statuses(diff):
    return {c.name: c.status for c in diff.checks}


def test_a_run_passes_against_itself():
    view = run(0)
    diff = compare_runs(view, view)
    assert diff.passed
    assert set(statuses(diff).values()) == {"pass"}
    assert set(statuses(diff)) == {"decision", f"verdict {BEST}", f"error {BEST}", "speed"}


TRIALS = 1000
POWER_TRIALS = 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "shared", "gain"),
    [(lognormal, no_drift, 0.5), (heavy_tailed, drift, 0.5), (lognormal, drift, 0.02)],
)
def test_noise_fails_in_at_most_one_per_cent(noise, shared, gain):
    """Also where the speed-up is so small that chance alone turns PROMOTE into HOLD."""
    failed = promoted = fell = 0
    for seed in range(TRIALS):
        machine = float(np.exp(0.05 * np.random.default_rng(seed).standard_normal()))
        old = run(2 * seed, (gain,), noise=noise, shared=shared)
        new = run(2 * seed + 1, (gain,), noise=noise, shared=shared, machine=machine)
        diff = compare_runs(old, new)
        promoted += old.entries[-1].kind == "PROMOTE"
        fell += statuses(diff)["decision"] == "warn"
        failed += not diff.passed
    assert failed <= 0.01 * TRIALS, f"{failed} of {TRIALS} comparisons of equal runs failed"
    assert promoted > 0.3 * TRIALS
    assert (fell > 0) == (gain < 0.05), f"{fell} of {promoted} decisions fell by chance"


@pytest.mark.parametrize(("noise", "shared"), [(lognormal, no_drift), (heavy_tailed, drift)])
def test_a_loss_of_five_per_cent_is_found_in_95_of_100(noise, shared):
    found = 0
    for seed in range(POWER_TRIALS):
        old = run(2 * seed, (0.5,), noise=noise, shared=shared)
        new = run(2 * seed + 1, (1.5 / 1.05 - 1,), noise=noise, shared=shared, machine=0.97)
        found += statuses(compare_runs(old, new))["speed"] == "fail"
    assert found >= 0.95 * POWER_TRIALS, f"found in {found} of {POWER_TRIALS}"


def test_getting_faster_passes():
    assert compare_runs(run(0, (0.3,)), run(1, (0.6,))).passed


@pytest.mark.parametrize(
    "verdict",
    [
        Wrong(reason="NON_FINITE", text="NaN", case="odd", failed=("odd",), relative=None, bound=1e-5),
        Unverifiable(text="far off", case="odd"),
        Crashed(stage="build", kind="signal", text="killed by SIGSEGV", log=""),
        TimedOut(stage="build", limit_s=60, log=""),
    ],
)
def test_a_verdict_that_got_worse_fails(verdict):
    diff = compare_runs(run(0), run(1, (0.5,), VerdictEntry(recipe=BEST, verdict=verdict)))
    assert statuses(diff)["decision"] == statuses(diff)[f"verdict {BEST}"] == "fail"


def test_a_recipe_proven_before_and_wrong_now_fails_even_if_another_is_promoted():
    wrong = Wrong(reason="RAISES", text="no", case="odd", failed=("odd",), relative=None, bound=1e-5)
    new = run(1, (0.5, 0.49), VerdictEntry(recipe=BEST, verdict=wrong))
    assert new.entries[-1].recipe == "custom(c1)"
    diff = compare_runs(run(0, (0.5, 0.3)), new)
    assert statuses(diff)[f"verdict {BEST}"] == "fail"
    assert statuses(diff)["decision"] == "pass"


@pytest.mark.parametrize(("error", "status"), [(9e-6, "pass"), (1.1e-5, "fail"), (float("nan"), "fail")])
def test_an_error_that_outgrew_its_bound_fails(error, status):
    now = msgspec.structs.replace(RIGHT, relative=error, bound=1.0)
    new = run(1, (0.5,), VerdictEntry(recipe=BEST, verdict=now))
    # Put the decision right for the NaN, which the gate itself does not promote.
    new = RunView(header=new.header, entries=(*new.entries, run(1).entries[-1]))
    assert statuses(compare_runs(run(0), new))[f"error {BEST}"] == status


LOSSY = "aotinductor + precision(bf16)"


def renamed(view, mapping):
    def rename(entry):
        recipe = getattr(entry, "recipe", None)
        return msgspec.structs.replace(entry, recipe=mapping[recipe]) if recipe in mapping else entry

    entries = tuple(rename(e) for e in view.entries if not isinstance(e, Decision))
    return decided(RunView(header=view.header, entries=entries))


def test_numbers_may_change_more_only_with_a_recipe_that_was_verified_before():
    new = renamed(run(1, (0.5, 0.8)), {"custom(c1)": LOSSY})
    assert new.entries[-1].recipe == LOSSY
    unseen = compare_runs(run(0, (0.5,)), new)
    assert statuses(unseen)["numerics"] == "fail"
    seen = compare_runs(renamed(run(0, (0.5, 0.2)), {"custom(c1)": LOSSY}), new)
    assert statuses(seen)["numerics"] == "pass"
    assert seen.passed


def measured(value, recipe=BEST):
    return MetricResult(
        recipe=recipe,
        name="accuracy",
        value=value,
        baseline=0.95,
        drop=0.95 - value,
        drop_low=0.0,
        drop_high=0.955 - value,
        examples=500,
    )


@pytest.mark.parametrize(
    ("value", "status"), [(0.95, "pass"), (0.941, "pass"), (0.93, "fail"), (None, "fail")]
)
def test_a_metric_that_dropped_fails(value, status):
    spec = msgspec.structs.replace(SPEC, metric="accuracy")
    old = run(0, (0.5,), measured(0.95), workload=spec)
    new = run(1, (0.5,), *([] if value is None else [measured(value)]), workload=spec)
    diff = compare_runs(old, new)
    assert statuses(diff)["metric"] == status
    lenient = statuses(compare_runs(old, new, Limits(max_metric_drop=0.05)))["metric"]
    assert lenient == ("fail" if value is None else "pass")


def test_a_decision_that_fell_fails_unless_chance_explains_it():
    old, new = run(0), run(1)
    held = Decision(
        kind="HOLD", recipe="eager", reasons=(Reason(code="BUILD_MISSING", text="x", recipe=BEST),)
    )
    assert statuses(compare_runs(old, RunView(header=new.header, entries=(*new.entries, held))))[
        "decision"
    ] == ("fail")
    chance = Decision(
        kind="HOLD", recipe="eager", reasons=(Reason(code="SPEED_UNCLEAR", text="x", recipe=BEST),)
    )
    diff = compare_runs(old, RunView(header=new.header, entries=(*new.entries, chance)))
    assert (statuses(diff)["decision"], diff.passed) == ("warn", True)
    slower = compare_runs(old, run(1, (0.0,)))
    assert statuses(slower)["decision"] == statuses(slower)["speed"] == "fail"


@pytest.mark.parametrize(
    ("lost", "check"),
    [(Decision, "decision"), (VerdictEntry, f"verdict {BEST}"), (Samples, "speed")],
)
def test_evidence_that_is_gone_fails(lost, check):
    diff = compare_runs(run(0), without(run(1), lost))
    assert statuses(diff)[check] == "fail"


def test_a_control_that_is_gone_fails():
    new = run(1)
    kept = tuple(e for e in new.entries if getattr(e, "label", "") != "baseline-again")
    diff = compare_runs(run(0), RunView(header=new.header, entries=kept))
    assert statuses(diff)["speed"] == "fail"


def changed(**changes):
    return header(workload=msgspec.structs.replace(SPEC, **changes)).workload


def test_a_slower_machine_is_not_a_slower_model_and_a_slower_model_is():
    old = run(0)
    slow_machine = run(1, (0.5,), machine=1.3)
    assert compare_runs(old, slow_machine).passed
    slow_model = run(1, (0.5,), machine=1.3, workload=changed(digest="b" * 64))
    assert statuses(compare_runs(old, slow_model))["speed"] == "fail"
    within = run(1, (0.5,), machine=1.05, workload=changed(digest="b" * 64))
    assert compare_runs(old, within).passed


def test_a_faster_baseline_alone_is_no_regression_of_changed_code():
    """Eager became 10% faster and the promoted recipe's time stayed: its speed-up fell, no time rose."""
    new = run(1, (1.5 / 1.1 - 1,), machine=1 / 1.12, workload=changed(digest="b" * 64))
    diff = compare_runs(run(0), new)
    assert (statuses(diff)["speed"], diff.passed) == ("warn", True)


def test_kept_baselines_compare():
    old, new = run(0, (0.0,)), run(1, (0.0,))
    assert old.entries[-1].kind == "KEEP_BASELINE"
    assert compare_runs(old, new).passed
    slow = run(1, (0.0,), machine=1.3, workload=changed(digest="b" * 64))
    assert not compare_runs(old, slow).passed


@pytest.mark.parametrize(
    "other",
    [
        {"workload": changed(name="another")},
        {"workload": changed(traffic=(Arrival(sizes={"B": 2}),))},
        {"workload": changed(metric="accuracy")},
        {"environment": msgspec.structs.replace(WHERE, cores=4)},
        {"environment": msgspec.structs.replace(WHERE, cpu="two")},
        {"environment": msgspec.structs.replace(WHERE, packages={"torch": "2.14.0"})},
    ],
)
def test_runs_that_cannot_be_compared_are_refused(other):
    diff = compare_runs(run(0), run(0, **other))
    assert diff.refused is not None
    assert (diff.passed, diff.checks) == (False, ())
    allowed = compare_runs(run(0), run(0, **other), allow_environment=True)
    assert (allowed.refused is None) == ("environment" in other)


def test_an_unfinished_old_run_is_refused():
    assert compare_runs(without(run(0), Decision), run(1)).refused is not None


# --- tails ----------------------------------------------------------------------------------------


class Timer:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += max(0.0, seconds)


def loads(seed, slower=1.0, count=300, rate=30.0):
    """Baseline and candidate under load: service times as in a pass, the candidate's half as long."""
    results = []
    for recipe, factor in (("eager", 1.0), (BEST, slower / 1.5)):
        rng = np.random.default_rng([seed, len(recipe)])
        clock = Timer()
        at = np.cumsum(rng.exponential(1 / rate, count)).tolist()
        service = (
            rng.choice(PASS_S, count) * factor * np.exp(0.02 * rng.standard_normal(count))
        ).tolist()
        served = open_loop(at, lambda i, s=service, c=clock: c.sleep(s[i]), clock, 2 * at[-1])
        results.append(summarize(recipe, rate, served, None))
    return results


def test_tails_of_equal_runs_fail_in_at_most_one_per_cent():
    base, failed = run(0), 0
    for seed in range(200):
        views = [
            RunView(header=base.header, entries=(*base.entries, *loads(2 * seed + i))) for i in (0, 1)
        ]
        diff = compare_runs(*views)
        failed += statuses(diff)["p99"] == "fail"
        assert statuses(diff)["p99"] != "warn"
    assert failed <= 2, f"{failed} of 200 comparisons of equal tails failed"


def test_a_tail_three_times_as_long_fails():
    base, failed = run(0), 0
    for seed in range(50):
        old, new = (
            RunView(header=base.header, entries=(*base.entries, *loads(2 * seed + i, slower)))
            for i, slower in enumerate((1.0, 2.4))
        )
        failed += statuses(compare_runs(old, new))["p99"] == "fail"
    assert failed >= 48, f"found in {failed} of 50"


def with_loads(*results):
    base = run(0)
    return RunView(header=base.header, entries=(*base.entries, *results))


def test_a_load_test_that_is_gone_fails_and_too_few_requests_warn():
    old = with_loads(*loads(0))
    assert statuses(compare_runs(old, run(0)))["p99"] == "fail"
    assert statuses(compare_runs(old, with_loads(*loads(1, count=60))))["p99"] == "warn"
    assert statuses(compare_runs(old, with_loads(*loads(1, rate=5.0))))["p99"] == "warn"
    assert "p99" not in statuses(compare_runs(run(0), run(1)))


def test_requests_left_unserved_fail():
    eager, best = loads(1)
    broken = summarize(
        BEST, 30.0, Served(latencies_s=best.latencies_s[:-5], errors=5, elapsed_s=20.0), None
    )
    diff = compare_runs(with_loads(*loads(0)), with_loads(eager, broken))
    assert statuses(diff)["p99"] == "fail"


# --- files ----------------------------------------------------------------------------------------

texts = st.text(max_size=60)
diffs = st.one_of(
    st.builds(RunDiff, old=texts, new=texts, refused=texts),
    st.builds(
        RunDiff,
        old=texts,
        new=texts,
        checks=st.lists(
            st.builds(Check, name=texts, status=st.sampled_from(["pass", "warn", "fail"]), text=texts),
            max_size=5,
        ).map(tuple),
    ),
)


@given(diffs)
def test_junit_parses_and_counts(diff):
    root = ElementTree.fromstring(junit(diff).encode())
    (suite,) = root
    failures = [c for c in suite if c.find("failure") is not None]
    errors = [c for c in suite if c.find("error") is not None]
    assert int(suite.attrib["failures"]) == len(failures) == sum(c.status == "fail" for c in diff.checks)
    assert int(suite.attrib["errors"]) == len(errors) == (diff.refused is not None)
    assert (not failures and not errors) == diff.passed
    if diff.checks:
        assert int(suite.attrib["tests"]) == len(suite) == len(diff.checks)


@given(diffs)
def test_markdown_has_a_row_a_check(diff):
    text = markdown(diff)
    rows = [line for line in text.split("\n") if line.startswith("| ")]
    assert len(rows) == (len(diff.checks) + 1 if diff.refused is None else 0)
    assert text.split("\n")[0].startswith("## torchstone compare: ")


def test_what_is_written_says_what_happened():
    slower = compare_runs(run(0), run(1, (0.3,)))
    assert not slower.passed
    assert "**failed**" in markdown(slower)
    assert f"run of {slower.new} against run of {slower.old}" in markdown(slower)
    case = ElementTree.fromstring(junit(slower).encode()).find(".//testcase[@name='speed']/failure")
    assert case is not None
    assert "1.5" in case.attrib["message"]
    refused = compare_runs(run(0), run(0, environment=msgspec.structs.replace(WHERE, cores=4)))
    assert "cores: 2 against 4" in markdown(refused)
    assert "cores: 2 against 4" in junit(refused)


def test_samples_of_other_sessions_do_not_disturb():
    old, new = run(0), run(1)
    stray = samples(((0.001,) * 8,) * 20, "candidate", "openvino", session="stray")
    assert compare_runs(old, RunView(header=new.header, entries=(*new.entries, stray))).passed
