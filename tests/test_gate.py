"""The gate: what it promotes, what it keeps, what it holds, and that it says why."""

from __future__ import annotations

import math
from types import MappingProxyType

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchstone.gate import CODES, Evidence, decide, evidence_of
from torchstone.policy import Policy
from torchstone.records import (
    Build,
    Comparison,
    Crashed,
    Environment,
    LoadResult,
    MetricResult,
    NotTried,
    RunHeader,
    TimedOut,
    Unsupported,
    Unverifiable,
    VerdictEntry,
    Verified,
    WorkloadSpec,
    Wrong,
)

RIGHT = Verified(cases=20, worst_case="odd", relative=1e-6, eager_relative=1e-6, bound=1e-5)
WRONG = Wrong(
    reason="NON_FINITE", text="NaN in [0]", case="odd", failed=("odd",), relative=None, bound=1e-5
)
CRASH = Crashed(stage="build", kind="signal", text="killed by SIGSEGV", log="")


def verdict(recipe="inductor", what=RIGHT):
    return VerdictEntry(recipe=recipe, verdict=what)


def compared(recipe="inductor", ratio=1.5, relation="FASTER", **changes):
    values = {
        "session": "s",
        "recipe": recipe,
        "against": "eager",
        "ratio": ratio,
        "low": ratio * 0.98,
        "high": ratio * 1.02,
        "confidence": 0.98,
        "noise": 0.01,
        "relation": relation,
        "candidate_s": 0.1 / ratio,
        "against_s": 0.1,
    }
    return Comparison(**(values | changes))


def built(recipe="inductor", **changes):
    values = {"seconds": 30.0, "first_call_s": 10.0, "peak_memory_bytes": 10**9, "artifact": None}
    return Build(recipe=recipe, **(values | changes))


def loaded(recipe="inductor", rate=5.0, p99: float | None = 0.2, errors=0):
    return LoadResult(
        recipe=recipe,
        rate=rate,
        requests=200,
        errors=errors,
        achieved=rate,
        quantiles_s={"p50": 0.1, "p99": p99},
        slo_s=None,
        goodput=None,
        latencies_s=(),
    )


def measured(recipe="inductor", drop=0.0, high=0.005, name="accuracy"):
    return MetricResult(
        recipe=recipe,
        name=name,
        value=0.9 - drop,
        baseline=0.9,
        drop=drop,
        drop_low=drop - 0.005,
        drop_high=high,
        examples=500,
    )


def evidence(*entries, **changes):
    kinds = {
        "verdicts": VerdictEntry,
        "comparisons": Comparison,
        "loads": LoadResult,
        "builds": Build,
        "metrics": MetricResult,
    }
    found = {name: tuple(e for e in entries if isinstance(e, kind)) for name, kind in kinds.items()}
    return Evidence(baseline="eager", **(found | changes))


GOOD = (verdict("eager"), verdict(), compared())


def codes(decision, recipe="inductor"):
    return [r.code for r in decision.reasons if r.recipe == recipe]


def test_right_and_faster_is_promoted_with_its_figures():
    decision = decide(evidence(*GOOD), Policy())
    assert (decision.kind, decision.recipe) == ("PROMOTE", "inductor")
    first = decision.reasons[0]
    assert first.code == "PROMOTED"
    assert "1.500x [1.470, 1.530]" in first.text
    assert "1e-06" in first.text


@pytest.mark.parametrize(
    ("found", "code", "kind"),
    [
        (WRONG, "WRONG", "KEEP_BASELINE"),
        (CRASH, "CRASHED", "KEEP_BASELINE"),
        (TimedOut(stage="build", limit_s=60, log=""), "TIMED_OUT", "KEEP_BASELINE"),
        (Unsupported(text="no operator"), "UNSUPPORTED", "KEEP_BASELINE"),
        (NotTried(text="no time"), "NOT_TRIED", "HOLD"),
        (Unverifiable(text="eager is far off", case="odd"), "UNVERIFIABLE", "HOLD"),
        (msgspec.structs.replace(RIGHT, cases=0), "NO_VERDICT", "HOLD"),
        (msgspec.structs.replace(RIGHT, relative=math.nan), "NO_VERDICT", "HOLD"),
    ],
)
def test_what_is_not_verified_is_not_promoted_however_fast(found, code, kind):
    decision = decide(evidence(verdict(what=found), compared(ratio=10.0)), Policy())
    assert (decision.kind, decision.recipe) == (kind, "eager")
    assert codes(decision) == [code]


@pytest.mark.parametrize(
    ("comparison", "code", "kind"),
    [
        (compared(ratio=0.8, relation="SLOWER"), "SLOWER", "KEEP_BASELINE"),
        (compared(ratio=1.0, relation="SAME"), "SAME_SPEED", "KEEP_BASELINE"),
        (compared(ratio=1.02, relation="UNCLEAR"), "SPEED_UNCLEAR", "HOLD"),
        (compared(ratio=0.98, relation="UNCLEAR"), "NOT_FASTER", "KEEP_BASELINE"),
        (
            compared(ratio=1.02, relation="FASTER"),
            "SPEED_UNCLEAR",
            "HOLD",
        ),  # its interval says otherwise
        (compared(ratio=math.nan), "NOT_MEASURED", "HOLD"),
        (compared(low=math.nan), "NOT_MEASURED", "HOLD"),
        (compared(noise=math.nan), "NOT_MEASURED", "HOLD"),
        (compared(against="openvino"), "NOT_MEASURED", "HOLD"),
    ],
)
def test_what_is_not_faster_is_not_promoted(comparison, code, kind):
    decision = decide(evidence(verdict(), comparison), Policy())
    assert (decision.kind, decision.recipe) == (kind, "eager")
    assert codes(decision) == [code]


def test_unmeasured_is_held():
    decision = decide(evidence(verdict()), Policy())
    assert (decision.kind, codes(decision)) == ("HOLD", ["NOT_MEASURED"])


def test_the_least_speed_up_is_held_to_the_lower_end():
    for least, kind in ((1.47, "PROMOTE"), (1.48, "HOLD"), (1.51, "KEEP_BASELINE")):
        assert decide(evidence(*GOOD), Policy(min_speedup=least)).kind == kind


CONSTRAINTS = [
    # policy, evidence that meets it, evidence that breaks it and the code, the code where there is none
    (
        Policy(p99_s=0.3),
        (loaded("eager"), loaded()),
        (loaded("eager"), loaded(p99=0.31)),
        "P99_ABOVE",
        "P99_MISSING",
    ),
    (
        Policy(max_peak_memory_bytes=10**9),
        (built(),),
        (built(peak_memory_bytes=10**9 + 1),),
        "MEMORY_ABOVE",
        "BUILD_MISSING",
    ),
    (
        Policy(max_compile_s=40),
        (built(),),
        (built(first_call_s=10.1),),
        "COMPILE_ABOVE",
        "BUILD_MISSING",
    ),
    (
        Policy(max_recompiles=3),
        (built(recompiles=3),),
        (built(recompiles=4),),
        "RECOMPILES_ABOVE",
        "BUILD_MISSING",
    ),
    (
        Policy(calls=1200),
        (built(), built("eager", seconds=1.0, first_call_s=0.1)),
        (built(seconds=31.2), built("eager", seconds=1.0, first_call_s=0.1)),
        "BREAK_EVEN_LATE",
        "BUILD_MISSING",
    ),
]


@pytest.mark.parametrize(("policy", "good", "bad", "broken", "missing"), CONSTRAINTS)
def test_every_stated_constraint_counts_and_missing_evidence_is_held(policy, good, bad, broken, missing):
    assert decide(evidence(*GOOD, *good), policy).kind == "PROMOTE"
    decision = decide(evidence(*GOOD, *bad), policy)
    assert (decision.kind, codes(decision)) == ("KEEP_BASELINE", [broken])
    decision = decide(evidence(*GOOD), policy)
    assert (decision.kind, codes(decision)) == ("HOLD", [missing])
    assert decide(evidence(*GOOD, *bad), Policy()).kind == "PROMOTE"  # not stated, not held to


@pytest.mark.parametrize(
    ("entries", "policy", "code"),
    [
        ((loaded("eager"), loaded(p99=None)), Policy(p99_s=0.3), "P99_MISSING"),
        ((loaded("eager"), loaded(p99=math.nan)), Policy(p99_s=0.3), "P99_MISSING"),
        ((loaded("eager", errors=1), loaded()), Policy(p99_s=0.3), "P99_MISSING"),
        ((built(seconds=math.nan),), Policy(max_compile_s=40), "BUILD_MISSING"),
        ((built(peak_memory_bytes=0),), Policy(max_peak_memory_bytes=10**9), "BUILD_MISSING"),
        ((built(),), Policy(max_recompiles=3), "RECOMPILES_MISSING"),
        ((built(), built("eager", seconds=math.nan)), Policy(calls=10**9), "BUILD_MISSING"),
    ],
)
def test_figures_that_are_none_or_not_finite_are_no_evidence(entries, policy, code):
    decision = decide(evidence(*GOOD, *entries), policy)
    assert (decision.kind, codes(decision)) == ("HOLD", [code])


def test_an_engine_that_compiles_ahead_has_no_recompiles_to_count():
    entries = (verdict("openvino"), compared("openvino"), built("openvino"))
    assert decide(evidence(*entries), Policy(max_recompiles=0)).kind == "PROMOTE"


@pytest.mark.parametrize(
    ("found", "kind", "reasons"),
    [
        ((measured(),), "PROMOTE", ["PROMOTED"]),
        ((measured(high=0.02),), "HOLD", ["METRIC_UNCLEAR"]),
        ((measured(drop=0.02, high=0.03),), "KEEP_BASELINE", ["METRIC_DROP"]),
        ((measured(high=math.nan),), "HOLD", ["METRIC_MISSING"]),
        ((measured(drop=math.nan),), "HOLD", ["METRIC_MISSING"]),
        ((measured(name="another"),), "HOLD", ["METRIC_MISSING"]),
        ((), "HOLD", ["METRIC_MISSING"]),
    ],
)
def test_a_metric_is_always_a_constraint(found, kind, reasons):
    decision = decide(evidence(*GOOD, *found, metric="accuracy"), Policy())
    assert (decision.kind, codes(decision)) == (kind, reasons)


def test_p99_counts_at_the_highest_rate_that_the_baseline_sustains():
    entries = (
        loaded("eager", 3.0),
        loaded("eager", 6.0, p99=0.5),
        loaded("eager", 9.0, errors=5),
        loaded(rate=3.0, p99=0.1),
        loaded(rate=6.0, p99=0.4),
        loaded(rate=9.0, p99=0.9, errors=3),
    )
    assert decide(evidence(*GOOD, *entries), Policy(p99_s=0.4)).kind == "PROMOTE"
    assert decide(evidence(*GOOD, *entries), Policy(p99_s=0.39)).kind == "KEEP_BASELINE"


def test_leaving_requests_unserved_that_the_baseline_serves_is_no_improvement():
    decision = decide(evidence(*GOOD, loaded("eager"), loaded(errors=1)), Policy())
    assert (decision.kind, codes(decision)) == ("KEEP_BASELINE", ["LOAD_ERRORS"])


def test_eager_that_is_not_right_holds_everything():
    unsure = Unverifiable(text="far from float64", case="odd")
    for what in (unsure, WRONG):
        decision = decide(evidence(verdict("eager", what), verdict(), compared()), Policy())
        assert (decision.kind, decision.recipe) == ("HOLD", "eager")
        assert decision.reasons[0].code == "BASELINE_UNVERIFIED"


def test_environments_that_differ_hold_everything():
    decision = decide(evidence(*GOOD, mismatch="cores: 2 against 4"), Policy())
    assert (decision.kind, decision.reasons[0].code) == ("HOLD", "ENVIRONMENT_MISMATCH")


def test_nothing_beside_the_baseline():
    decision = decide(evidence(verdict("eager")), Policy())
    assert (decision.kind, decision.reasons[0].code) == ("KEEP_BASELINE", "NO_CANDIDATES")


def test_an_asked_candidate_without_any_evidence_is_held():
    decision = decide(evidence(recipes=("inductor",)), Policy())
    assert (decision.kind, codes(decision)) == ("HOLD", ["NO_VERDICT"])


def test_one_found_wrong_stays_wrong_whatever_comes_later():
    decision = decide(evidence(verdict(what=WRONG), *GOOD), Policy())
    assert (decision.kind, codes(decision)) == ("KEEP_BASELINE", ["WRONG"])


def test_everyone_not_promoted_is_told_why_and_an_unclear_one_does_not_hold_back_a_clear_one():
    entries = (
        *GOOD,
        verdict("openvino", WRONG),
        verdict("onnxruntime"),
        compared("onnxruntime", 1.02, "UNCLEAR"),
        verdict("aotinductor"),
        compared("aotinductor", 1.2),
        verdict("inductor(freezing)", CRASH),
    )
    decision = decide(evidence(*entries), Policy())
    assert (decision.kind, decision.recipe) == ("PROMOTE", "inductor")
    why = {r.recipe: r.code for r in decision.reasons}
    assert why == {
        "inductor": "PROMOTED",
        "openvino": "WRONG",
        "onnxruntime": "SPEED_UNCLEAR",
        "aotinductor": "BETTER_EXISTS",
        "inductor(freezing)": "CRASHED",
    }


LOSSY = "aotinductor + precision(bf16)"


def rivals(exact_ratio, lossy_ratio, *entries):
    return evidence(
        verdict(),
        compared(ratio=exact_ratio),
        verdict(LOSSY, msgspec.structs.replace(RIGHT, relative=5e-3, bound=1e-2)),
        compared(LOSSY, lossy_ratio),
        *entries,
    )


def test_a_tie_goes_to_the_one_that_changes_the_numbers_less():
    tied = decide(rivals(1.5, 1.51), Policy())
    assert (tied.recipe, codes(tied, LOSSY)) == ("inductor", ["TIE_LOST"])
    clear = decide(rivals(1.5, 1.6), Policy())
    assert (clear.recipe, codes(clear)) == (LOSSY, ["BETTER_EXISTS"])


def test_a_tie_among_the_equally_right_goes_to_the_quicker_build():
    entries = (verdict(), compared(), verdict("openvino"), compared("openvino", 1.495))
    builds = (built(), built("openvino", seconds=2.0))
    assert decide(evidence(*entries, *builds), Policy()).recipe == "openvino"


def test_p99_as_objective():
    entries = (loaded("eager", p99=0.3), loaded(p99=0.1), loaded(LOSSY, p99=0.2))
    policy = Policy(objective="p99")
    assert decide(rivals(1.5, 3.0, *entries), policy).recipe == "inductor"
    assert decide(rivals(1.5, 3.0, *entries[:2]), policy).recipe == "inductor"
    worse = decide(evidence(*GOOD, loaded("eager", p99=0.3), loaded(p99=0.3)), policy)
    assert (worse.kind, codes(worse)) == ("KEEP_BASELINE", ["P99_NOT_BETTER"])
    assert decide(evidence(*GOOD), policy).kind == "HOLD"


def test_cost_counts_the_build_over_the_expected_calls():
    builds = (
        built("eager", seconds=0.0, first_call_s=0.1),
        built(seconds=1.0),
        built(LOSSY, seconds=300.0),
    )
    for calls, best in ((1e4, "inductor"), (1e7, LOSSY)):
        policy = Policy(objective="cost", calls=calls)
        assert decide(rivals(1.5, 2.0, *builds), policy).recipe == best


def test_the_evidence_of_a_run():
    spec = WorkloadSpec(
        name="w", inputs=(), dims=(), example_sizes={}, traffic=(), metric="accuracy", digest="0"
    )
    where = Environment(
        python="3.12",
        platform="linux-x86_64",
        cpu="x",
        isa=(),
        cores=2,
        threads=2,
        memory_bytes=1,
        packages={},
    )
    header = RunHeader(
        format=1,
        workload=spec,
        policy={},
        recipes=("eager", "inductor", "openvino"),
        environment=where,
        seed=0,
        origin=None,
        started_at="2026-01-01T00:00:00Z",
    )
    entries = (*GOOD, loaded("eager"), loaded(), built(), measured())
    found = evidence_of(header, entries)
    expected = evidence(*entries, metric="accuracy", recipes=("inductor", "openvino"))
    assert found == expected
    assert decide(found, Policy()).recipe == "inductor"


# --- whatever the evidence ------------------------------------------------------------------------

RECIPES = ("eager", "inductor", "openvino", LOSSY, "custom(mine)")
numbers = st.one_of(
    st.floats(0.001, 100), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1.0, 1.5])
)
names = st.sampled_from(RECIPES)
relations = st.sampled_from(["FASTER", "SLOWER", "SAME", "UNCLEAR"])
verdicts = st.builds(
    VerdictEntry,
    recipe=names,
    verdict=st.one_of(
        st.just(RIGHT),
        st.builds(
            Verified,
            cases=st.integers(0, 2),
            worst_case=st.just("c"),
            relative=numbers,
            eager_relative=numbers,
            bound=numbers,
        ),
        st.sampled_from([WRONG, CRASH, Unsupported(text="no"), NotTried(text="late")]),
        st.just(TimedOut(stage="build", limit_s=1, log="")),
        st.just(Unverifiable(text="far off", case="c")),
    ),
)
comparisons = st.one_of(
    st.builds(compared, names, st.floats(0.5, 3), relations),
    st.builds(
        Comparison,
        session=st.just("s"),
        recipe=names,
        against=names,
        ratio=numbers,
        low=numbers,
        high=numbers,
        confidence=numbers,
        noise=numbers,
        relation=relations,
        candidate_s=numbers,
        against_s=numbers,
    ),
)
loads = st.builds(
    loaded,
    names,
    st.sampled_from([3.0, 6.0]),
    st.one_of(st.none(), numbers),
    st.sampled_from([0, 0, 0, 1]),
)
builds = st.builds(
    built,
    names,
    seconds=numbers,
    first_call_s=numbers,
    peak_memory_bytes=st.sampled_from([0, 10**6, 10**10]),
    recompiles=st.one_of(st.none(), st.integers(0, 5)),
)
metrics = st.builds(measured, names, numbers, numbers, st.sampled_from(["accuracy", "other"]))
COMPLETE = (
    *GOOD,
    verdict(LOSSY, msgspec.structs.replace(RIGHT, relative=5e-3, bound=1e-2)),
    compared(LOSSY, 2.0),
    *(
        loaded(r, rate, p99=0.3 if r == "eager" else 0.2)
        for r in ("eager", "inductor", LOSSY)
        for rate in (3.0, 6.0)
    ),
    *(built(r, recompiles=1) for r in ("inductor", LOSSY)),
    built("eager", seconds=1.0, first_call_s=0.1),
    *(measured(r) for r in ("inductor", LOSSY)),
)
"""Two candidates that can be promoted; what follows takes some of it away and adds what may spoil it."""


@st.composite
def evidences(draw):
    lost = draw(st.sets(st.integers(0, len(COMPLETE) - 1), max_size=3))
    found = [e for i, e in enumerate(COMPLETE) if i not in lost]
    more = draw(st.lists(st.one_of(verdicts, comparisons, loads, builds, metrics), max_size=4))
    found = [*more, *found] if draw(st.booleans()) else [*found, *more]
    return evidence(
        *found,
        recipes=RECIPES[1:],
        metric=draw(st.sampled_from([None, "accuracy"])),
        mismatch=draw(st.sampled_from([None] * 9 + ["cores: 2 against 4"])),
    )


policies = st.builds(
    Policy,
    objective=st.sampled_from(["latency", "p99", "throughput", "cost"]),
    min_speedup=st.sampled_from([0.5, 1.0, 1.2, 1.48, 1.8]),
    max_metric_drop=st.sampled_from([0.0, 0.005, 0.01, 1.0]),
    p99_s=st.sampled_from([None, 0.1, 0.2, 1.0]),
    max_peak_memory_bytes=st.sampled_from([None, 10**6, 10**9]),
    max_compile_s=st.sampled_from([None, 1.0, 40.0]),
    max_recompiles=st.sampled_from([None, 0, 2]),
    calls=st.sampled_from([None, 10.0, 1e6]),
)


@settings(max_examples=400, deadline=None)
@given(evidences(), policies)
def test_whatever_the_evidence_only_the_proven_is_promoted(found, policy):
    decision = decide(found, policy)
    assert decision.reasons
    assert all(r.code in CODES and r.text for r in decision.reasons)
    if decision.kind != "PROMOTE":
        assert decision.recipe == "eager"
        return
    recipe = decision.recipe
    assert recipe != "eager"
    assert found.mismatch is None
    mine = [v.verdict for v in found.verdicts if v.recipe == recipe]
    assert mine
    assert all(isinstance(v, Verified) for v in mine)
    assert mine[-1].cases > 0
    assert math.isfinite(mine[-1].relative)
    c = [c for c in found.comparisons if c.recipe == recipe and c.against == "eager"][-1]
    assert c.relation == "FASTER"
    assert c.low > 1 + c.noise
    assert c.low >= policy.min_speedup
    reports = [b for b in found.builds if b.recipe == recipe]
    if policy.max_compile_s is not None:
        assert reports[-1].seconds + reports[-1].first_call_s <= policy.max_compile_s
    if policy.max_peak_memory_bytes is not None:
        assert 0 < reports[-1].peak_memory_bytes <= policy.max_peak_memory_bytes
    if found.metric is not None:
        own = [m for m in found.metrics if m.recipe == recipe and m.name == found.metric]
        assert own[-1].drop_high <= policy.max_metric_drop
    if policy.p99_s is not None:
        rate = max(x.rate for x in found.loads if x.recipe == "eager" and x.errors == 0)
        own = [x for x in found.loads if x.recipe == recipe and x.rate == rate]
        assert own[-1].quantiles_s["p99"] <= policy.p99_s
        assert own[-1].errors == 0


@settings(max_examples=200, deadline=None)
@given(evidences(), policies)
def test_every_candidate_has_a_reason(found, policy):
    assume(found.mismatch is None)
    decision = decide(found, policy)
    assume(decision.reasons[0].code != "BASELINE_UNVERIFIED")
    assert {r.recipe for r in decision.reasons} >= set(RECIPES[1:])


@settings(max_examples=100, deadline=None)
@given(evidences(), policies)
def test_a_decision_survives_json(found, policy):
    decision = decide(found, policy)
    assert msgspec.json.decode(msgspec.json.encode(decision), type=type(decision)) == decision


def test_codes_cannot_be_changed_and_read_as_sentences():
    assert isinstance(CODES, MappingProxyType)
    assert all(code.isupper() and text.endswith(".") for code, text in CODES.items())
