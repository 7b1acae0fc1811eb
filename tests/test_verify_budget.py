"""Errors to verdicts: the bounds of each class, and what takes precedence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.policy import Policy
from torchstone.recipe import Recipe, parse
from torchstone.records import (
    Case,
    CaseErrors,
    OutputErrors,
    ReferenceErrors,
    Unverifiable,
    Verdict,
    Verified,
    Wrong,
)
from torchstone.verify.budget import judge

EXACT, REASSOCIATES, LOSSY = parse("eager"), parse("aotinductor"), parse("aotinductor + precision(bf16)")
EXAMPLE = Case(name="example", kind="example", sizes={"B": 3}, values="example")


def output(relative: float | None, worst: float | None = None, **more: Any) -> OutputErrors:
    facts: dict[str, Any] = {"output": "[0]", "dtype": "float32", "elements": 10_000, "rms": 1.0}
    if relative is not None:
        facts |= {"error_rms": relative, "typical": relative}
    return OutputErrors(
        relative=relative, worst=4 * relative if worst is None and relative else worst, **facts | more
    )


def verdict(
    own: OutputErrors,
    eager: OutputErrors,
    recipe: Recipe = REASSOCIATES,
    case: Case = EXAMPLE,
    policy: Policy | None = None,
) -> Verdict:
    """The verdict on one output of one case, beside an example on which all is well."""
    fine = output(1e-7, 5e-7)
    references = [ReferenceErrors(case=case, errors=(eager,))]
    found = [CaseErrors(case=case.name, errors=(own,))]
    if case != EXAMPLE:
        references.insert(0, ReferenceErrors(case=EXAMPLE, errors=(fine,)))
        found.insert(0, CaseErrors(case="example", errors=(fine,)))
    return judge(recipe, found, references, policy or Policy())


def values(mode: str) -> Case:
    return Case(name=f"values-{mode}", kind="values", sizes={"B": 3}, values=mode)


@pytest.mark.parametrize(
    ("relative", "eager", "right"),
    [
        (5e-6, 0.0, True),  # within 64 epsilon though eager is exact by luck
        (1e-5, 0.0, False),
        (1e-5, 1e-6, True),  # within 16 times eager's
        (2e-5, 1e-6, False),
        (9e-3, 1e-3, True),
        (1.1e-2, 1e-3, False),  # no reassociation is worth one per cent
        (0.019, 9.9e-3, True),
        (0.021, 9.9e-3, False),
    ],
)
def test_reassociation_is_held_to_eagers_own_error(relative: float, eager: float, right: bool) -> None:
    for policy in (Policy(), Policy(max_relative_error=0.02)):
        found = verdict(output(relative), output(eager), policy=policy)
        assert isinstance(found, Verified if right else Wrong)


@pytest.mark.parametrize(
    ("dtype", "right"), [("bfloat16", True), ("float16", False), ("float32", False)]
)
def test_the_floor_is_of_the_outputs_dtype(dtype: str, right: bool) -> None:
    found = verdict(output(0.02, 0.03, dtype=dtype), output(0.0, 0.0, dtype=dtype))
    assert isinstance(found, Verified if right else Wrong)


@pytest.mark.parametrize("budget", [1e-3, 1e-2, 0.1])
def test_lossy_is_held_to_the_budget(budget: float) -> None:
    policy = Policy(max_relative_error=budget)
    assert isinstance(verdict(output(0.99 * budget), output(1e-7), LOSSY, policy=policy), Verified)
    over = verdict(output(1.01 * budget), output(1e-7), LOSSY, policy=policy)
    assert isinstance(over, Wrong)
    assert over.reason == "ERROR_ABOVE_BOUND"
    assert over.bound == budget


@pytest.mark.parametrize("recipe", [REASSOCIATES, LOSSY], ids=["reassociates", "lossy"])
@settings(deadline=None)
@given(st.floats(0, 10), st.floats(0, 1), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_closer_to_the_truth_than_eager_is_never_wrong(
    recipe: Recipe, eager: float, share: float, dtype: str
) -> None:
    own = output(eager * share, 3 * eager * share, dtype=dtype)
    found = verdict(
        own, output(eager, 3 * eager, dtype=dtype), recipe, policy=Policy(max_relative_error=0)
    )
    assert not isinstance(found, Wrong)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 100))
def test_a_larger_error_is_never_judged_better(eager: float, own: float, factor: float) -> None:
    for recipe in (REASSOCIATES, LOSSY):
        better, worse = (
            verdict(output(e), output(eager), recipe, policy=Policy(max_relative_error=0.01))
            for e in (own, own * factor)
        )
        if isinstance(worse, Verified):
            assert isinstance(better, Verified)


def test_exact_means_equal() -> None:
    assert isinstance(verdict(output(1e-7), output(1e-7), EXACT), Verified)
    found = verdict(output(1e-7, differing=1), output(1e-7), EXACT)
    assert isinstance(found, Wrong)
    assert "1 of 10000 elements" in found.text


def test_one_wrong_element_is_seen_where_the_norm_is_fine() -> None:
    found = verdict(output(1e-6, 1e-3, worst_index=(3, 7)), output(1e-7, 6e-7))
    assert isinstance(found, Wrong)
    assert found.reason == "ELEMENT_ABOVE_BOUND"
    assert "element [3, 7] of output [0] is off by 1.0e-03" in found.text
    lossy = verdict(output(5e-3, 0.2), output(1e-7), LOSSY)
    assert isinstance(lossy, Wrong)
    assert lossy.reason == "ELEMENT_ABOVE_BOUND"


def test_an_element_that_stands_alone_is_seen_within_the_element_bound() -> None:
    alone = output(1e-3, 0.05, typical=1e-4)
    assert isinstance(verdict(alone, output(1e-7), LOSSY), Wrong)
    spread = output(1e-3, 0.05, typical=4e-3)
    assert isinstance(verdict(spread, output(1e-7), LOSSY), Verified)
    few = output(1e-3, 0.05, typical=1e-4, elements=10)
    assert isinstance(verdict(few, output(1e-7), LOSSY), Verified)


def test_eager_far_and_candidate_near_names_eager_the_outlier() -> None:
    found = verdict(output(1e-6), output(0.5))
    assert isinstance(found, Verified)
    assert any("eager is the outlier" in note for note in found.notes)
    infinite = verdict(output(0.0), output(None, None, non_finite=1))
    assert isinstance(infinite, Verified)


@pytest.mark.parametrize("recipe", [EXACT, REASSOCIATES, LOSSY], ids=["exact", "reassociates", "lossy"])
def test_both_far_is_unverifiable(recipe: Recipe) -> None:
    found = verdict(output(1.1), output(1.0), recipe)
    assert isinstance(found, Unverifiable)
    assert "eager itself is 1.0e+00 from float64" in found.text
    assert isinstance(verdict(output(1.0), output(0.02), REASSOCIATES), Wrong)


@pytest.mark.parametrize("kind", ["traffic", "dims", "values", "layout"])
def test_both_far_matters_where_the_user_goes(kind: Any) -> None:
    case = Case(name="there", kind=kind, sizes={"B": 3})
    found = verdict(output(0.6), output(0.5), case=case)
    if kind in ("traffic", "dims"):
        assert isinstance(found, Unverifiable)
        assert found.case == "there"
    else:
        assert isinstance(found, Verified)
        assert found.cases == 1
        assert any(note.startswith("not judged: case there") for note in found.notes)


def test_not_finite() -> None:
    found = verdict(output(None, non_finite=3), output(1e-7))
    assert isinstance(found, Wrong)
    assert found.reason == "NON_FINITE"
    assert found.relative is None


@pytest.mark.parametrize(
    ("recipe", "own", "eager", "elements", "right"),
    [
        (REASSOCIATES, 0, 0, 1000, True),
        (REASSOCIATES, 1, 0, 1000, False),
        (REASSOCIATES, 4, 2, 1000, True),
        (LOSSY, 16, 0, 1000, True),
        (LOSSY, 18, 0, 1000, False),
        (LOSSY, 1, 0, 4, True),
        (LOSSY, 2, 0, 4, False),
    ],
)
def test_integers(recipe: Recipe, own: int, eager: int, elements: int, right: bool) -> None:
    made = [output(0.0, 0.0, dtype="int64", elements=elements, mismatched=n) for n in (own, eager)]
    found = verdict(made[0], made[1], recipe)
    assert isinstance(found, Verified if right else Wrong)
    assert right or found.reason == "INTEGER_MISMATCH"  # type: ignore[union-attr] # it is Wrong


def test_lossy_beyond_the_example_is_a_remark_and_not_finite_is_not() -> None:
    off = verdict(output(0.4), output(1e-7), LOSSY, values("large"))
    assert isinstance(off, Verified)
    assert any("no range is stated" in note for note in off.notes)
    assert isinstance(verdict(output(0.4), output(1e-7), LOSSY, values("high")), Wrong)
    assert isinstance(verdict(output(0.4), output(1e-7), REASSOCIATES, values("large")), Wrong)
    assert isinstance(verdict(output(None, non_finite=1), output(1e-7), LOSSY, values("large")), Wrong)


def test_lossy_on_small_outputs_is_held_to_the_usual_scale() -> None:
    small = output(0.5, 1.0, rms=1e-3, error_rms=5e-4)
    eager = output(1e-7, 4e-7, rms=1e-3, error_rms=1e-10)
    assert isinstance(verdict(small, eager, LOSSY, values("tiny")), Verified)
    assert isinstance(verdict(small, eager, REASSOCIATES, values("tiny")), Wrong)
    zero = output(1.0, 1.0, rms=0.0, error_rms=1e-7, typical=None)
    exact = output(0.0, 0.0, rms=0.0, error_rms=0.0)
    assert isinstance(verdict(zero, exact, REASSOCIATES, values("zeros")), Verified)
    visible = output(1.0, 1.0, rms=0.0, error_rms=0.1, typical=None)
    assert isinstance(verdict(visible, exact, LOSSY, values("zeros")), Wrong)


@pytest.mark.parametrize(
    ("protocol", "name", "reason"),
    [
        ("repeat", "second call [0]", "NOT_REPEATABLE"),
        ("perturb", "second call [0]", "STALE_STATE"),
        ("hold", "second call [0]", "ERROR_ABOVE_BOUND"),
        ("once", "input[1]", "MUTATION_DIFFERS"),
        ("perturb", "[0]", "ERROR_ABOVE_BOUND"),
    ],
)
def test_reason_follows_what_the_protocol_looks_at(protocol: Any, name: str, reason: str) -> None:
    case = Case(name="p", kind="protocol", sizes={}, protocol=protocol)
    found = verdict(output(0.5, output=name), output(1e-7, output=name), case=case)
    assert isinstance(found, Wrong)
    assert found.reason == reason


def test_problems_carry_their_code() -> None:
    references = [ReferenceErrors(case=EXAMPLE, errors=(output(1e-7),))]
    found = judge(
        REASSOCIATES,
        [CaseErrors(case="example", errors=(), problem="RAISES: eager answers, it raises KeyError: 3")],
        references,
        Policy(),
    )
    assert isinstance(found, Wrong)
    assert (found.reason, found.text) == (
        "RAISES",
        "case example (B=3): eager answers, it raises KeyError: 3",
    )


@pytest.mark.parametrize(
    ("kind", "problem", "fatal"),
    [
        ("example", "RAISES: the model itself raises ValueError: no", True),
        ("dims", "RAISES: the model itself raises ValueError: no", False),
        ("dims", "NO_REFERENCE: no float64", True),
        ("values", "NO_REFERENCE: no float64", False),
        ("protocol", "NOT_DETERMINISTIC: two calls differ", True),
        ("values", "NOT_APPLICABLE: generate", False),
    ],
)
def test_cases_without_reference(kind: Any, problem: str, fatal: bool) -> None:
    case = Case(name="c", kind=kind, sizes={})
    references = [
        ReferenceErrors(case=EXAMPLE, errors=(output(1e-7),)),
        ReferenceErrors(case=case, errors=(), problem=problem),
    ]
    found = judge(
        REASSOCIATES, [CaseErrors(case="example", errors=(output(1e-7),))], references, Policy()
    )
    assert isinstance(found, Unverifiable if fatal else Verified)
    if isinstance(found, Verified):
        assert found.cases == 1
        assert bool(found.notes) == (not problem.startswith("NOT_APPLICABLE"))


def test_wrong_comes_before_unverifiable_and_names_every_failed_case() -> None:
    cases = [Case(name=n, kind="dims", sizes={}) for n in ("a", "b", "c", "d")]
    eager = [output(1e-7), output(0.5), output(1e-7), output(1e-7)]
    own = [output(1e-7), output(0.5), output(0.3), output(0.4)]
    found = judge(
        REASSOCIATES,
        [CaseErrors(case=c.name, errors=(e,)) for c, e in zip(cases, own, strict=True)],
        [ReferenceErrors(case=c, errors=(e,)) for c, e in zip(cases, eager, strict=True)],
        Policy(),
    )
    assert isinstance(found, Wrong)
    assert found.failed == ("c", "d")
    assert found.case == "c"
    assert found.relative == 0.4


def test_a_model_that_is_not_deterministic_makes_no_candidate_wrong() -> None:
    drawn = Case(name="drawn", kind="values", sizes={})
    hold = Case(name="protocol-hold", kind="protocol", sizes={}, protocol="hold")
    found = judge(
        REASSOCIATES,
        [CaseErrors(case="drawn", errors=(output(0.5),))],
        [
            ReferenceErrors(case=drawn, errors=(output(1e-7),)),
            ReferenceErrors(case=hold, errors=(), problem="NOT_DETERMINISTIC: two calls differ"),
        ],
        Policy(),
    )
    assert isinstance(found, Unverifiable)
    assert (found.case, found.text) == ("protocol-hold", "case protocol-hold: two calls differ")


def test_weak_evidence_is_said() -> None:
    zero = output(0.0, 0.0, rms=0.0, error_rms=0.0)
    found = judge(
        REASSOCIATES,
        [CaseErrors(case="example", errors=(zero,))],
        [ReferenceErrors(case=EXAMPLE, errors=(zero,), independent=("[0]",))],
        Policy(),
    )
    assert isinstance(found, Verified)
    assert found.notes == (
        "output [0] does not depend on the input",
        "output [0] is all zeros on the example",
    )


def test_a_case_that_was_not_run_is_not_passed() -> None:
    other = Case(name="other", kind="values", sizes={})
    references = [ReferenceErrors(case=c, errors=(output(1e-7),)) for c in (EXAMPLE, other)]
    fine, off = (CaseErrors(case="example", errors=(output(e),)) for e in (1e-7, 0.5))
    found = judge(REASSOCIATES, [fine], references, Policy())
    assert isinstance(found, Unverifiable)
    assert found.case == "other"
    assert isinstance(judge(REASSOCIATES, [off], references, Policy()), Wrong)


def test_nothing_judged_is_unverifiable() -> None:
    assert isinstance(judge(REASSOCIATES, [], [], Policy()), Unverifiable)


def test_verdicts_are_plain_data() -> None:
    for found in (verdict(output(1e-7), output(1e-7)), verdict(output(0.5), output(1e-7))):
        assert msgspec.json.decode(msgspec.json.encode(found), type=Verified | Wrong) == found
