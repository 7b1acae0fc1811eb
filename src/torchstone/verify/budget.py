"""From errors to a verdict. Pure: no torch, no clock.

What each numerics class is held to, where ``eager`` is eager's own error against float64 in the same
place and ``e`` the machine epsilon of the output's dtype:

=============  =====================================================================================
EXACT          equal to eager, element by element
REASSOCIATES   relative <= max(floor, min(16 eager, max(2 eager, 1e-2)))
LOSSY          relative <= max(the policy's budget, 2 eager)
=============  =====================================================================================

*Floor.* Another order of summation gives another rounding error of the same distribution, so eager's own
error is the yardstick and 16 the room for its luck. The floor serves where eager's error happens to be
near zero: 64 e for float32 and float64, the rounding error of some thousand independent operations (it
grows as the square root of their number), as deep models show; 4 e for the 16-bit formats, whose kernels
accumulate in float32 and so round once or twice an operation.

*Elements.* Frobenius norms hide one wrong element among millions, so the worst element is bounded too:
for REASSOCIATES by 16 times eager's own worst and a floor of 256 e (8 e); for LOSSY by 10 times the
budget (the largest of a million normal errors is 5 deviations, and per-row scales widen that). An
element 32 times further off than the rest of its output, and beyond the budget, is an outlier of
its own kind: no quantizer makes a single one.

*Closer to the truth than eager is never a failure*, whatever the bound. Where eager itself is far from
float64 (beyond the budget and what rounding explains), a candidate near float64 is right and eager the
outlier; a candidate as far as eager cannot be told right from wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from torchstone.policy import Policy
from torchstone.recipe import Numerics, Recipe
from torchstone.records import (
    Case,
    CaseErrors,
    OutputErrors,
    Record,
    ReferenceErrors,
    Unverifiable,
    Verified,
    Wrong,
)
from torchstone.verify.inputs import BEYOND

__all__ = ["Finding", "Rules", "examine", "judge", "rules"]

_EPSILON = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
_COARSEST = 2.0**-7
_LUCK = 16.0
_SANE = 1e-2
_LOSSY_ELEMENT = 10.0
_OUTLIER = 32.0
_OUTLIER_ELEMENTS = 64
_MATTERS = ("example", "traffic", "dims")


class Rules(Record, frozen=True, kw_only=True):
    """What the outputs of one recipe are held to."""

    numerics: Numerics
    """The class that the recipe declares."""
    budget: float
    """The policy's budget."""
    usual_rms: Mapping[str, float]
    """Root mean square of each output on the example: the scale that it usually has."""


class Finding(Record, frozen=True, kw_only=True):
    """What one case says of a candidate."""

    case: str
    """Its name."""
    status: Literal["right", "wrong", "unverifiable", "not judged"]
    """``not judged``: a hostile case on which eager is no guide, or a model that raises there."""
    reason: str = ""
    """Reason code, for ``wrong``."""
    text: str = ""
    """One sentence, unless right."""
    relative: float | None = 0.0
    """Largest relative error of the case's outputs."""
    eager_relative: float = 0.0
    """Eager's own largest."""
    bound: float = 0.0
    """What the output that decided was held to."""
    notes: tuple[str, ...] = ()
    """Remarks for a verdict of Verified."""


def rules(recipe: Recipe, references: Iterable[ReferenceErrors], policy: Policy) -> Rules:
    """The rules of a recipe, on a workload with these references."""
    usual = {e.output: e.rms or 0.0 for r in references if r.case.kind == "example" for e in r.errors}
    return Rules(numerics=recipe.numerics, budget=policy.max_relative_error, usual_rms=usual)


def judge(
    recipe: Recipe, cases: Sequence[CaseErrors], references: Sequence[ReferenceErrors], policy: Policy
) -> Verified | Wrong | Unverifiable:
    """The verdict on a candidate.

    :param cases: its errors. Cases may be missing once others have failed; a candidate that has failed
        nowhere but was not run everywhere is Unverifiable.
    :param references: eager's own errors, of every case.
    """
    held = rules(recipe, references, policy)
    by_name = {c.case: c for c in cases}
    findings = [
        examine(held, by_name.get(r.case.name), r)
        for r in references
        if r.case.name in by_name or r.problem
    ]
    random = [r for r in references if (r.problem or "").startswith("NOT_DETERMINISTIC")]
    if random:  # before all else: the difference that another case shows is then no fault of anyone's
        finding = examine(held, None, random[0])
        return Unverifiable(text=finding.text, case=finding.case)
    wrong = [f for f in findings if f.status == "wrong"]
    if wrong:
        return _wrong(wrong, findings)
    missing = [r.case.name for r in references if r.case.name not in by_name and not r.problem]
    if missing:
        return Unverifiable(text=f"{len(missing)} cases were not run", case=missing[0])
    unverifiable = [f for f in findings if f.status == "unverifiable"]
    if unverifiable:
        return Unverifiable(text=unverifiable[0].text, case=unverifiable[0].case)
    right = [f for f in findings if f.status == "right"]
    if not right:
        text = findings[0].text if findings else "no case was run"
        return Unverifiable(text=text, case=findings[0].case if findings else "")
    return _verified(right, findings, references)


def examine(held: Rules, found: CaseErrors | None, reference: ReferenceErrors) -> Finding:
    """What one case says.

    :param found: the candidate's errors; None where it was not run, since there is no reference.
    """
    case = reference.case
    if reference.problem is not None or found is None:
        return _without_reference(case, reference.problem or "")
    if found.problem is not None:
        code, _, text = found.problem.partition(": ")
        return Finding(
            case=case.name, status="wrong", reason=code, text=f"{_place(case)}: {text}", relative=None
        )
    pairs = zip(found.errors, reference.errors, strict=True)
    return _merged(case, [_output(held, case, own, eager) for own, eager in pairs])


def _without_reference(case: Case, problem: str) -> Finding:
    code, _, text = problem.partition(": ")
    if code == "NOT_APPLICABLE":
        return Finding(case=case.name, status="not judged")
    if (
        case.kind == "example"
        or code == "NOT_DETERMINISTIC"
        or (code == "NO_REFERENCE" and case.kind in _MATTERS)
    ):
        return Finding(case=case.name, status="unverifiable", text=f"{_place(case)}: {text}")
    note = f"not judged: {_place(case)}: {text}"
    return Finding(case=case.name, status="not judged", text=text, notes=(note,))


def _merged(case: Case, findings: list[Finding]) -> Finding:
    """One finding of all the outputs': the most serious one, with the worst figures of all."""
    if not findings:
        return Finding(case=case.name, status="right")
    order = ("wrong", "unverifiable", "not judged", "right")
    leading = min(findings, key=lambda f: (order.index(f.status), -(f.relative or 0.0)))
    relatives = [f.relative for f in findings]
    return Finding(
        case=case.name,
        status=leading.status,
        reason=leading.reason,
        text=leading.text,
        relative=None if None in relatives else max(r for r in relatives if r is not None),
        eager_relative=max(f.eager_relative for f in findings),
        bound=leading.bound,
        notes=tuple(note for f in findings for note in f.notes),
    )


def _output(held: Rules, case: Case, own: OutputErrors, eager: OutputErrors) -> Finding:
    """What one output of one case says."""
    own, eager = _scaled(held, case, own), _scaled(held, case, eager)
    right = Finding(
        case=case.name,
        status="right",
        relative=own.relative,
        eager_relative=eager.relative or 0.0,
        bound=_limit(held, eager),
    )
    if own.shape_or_dtype is not None and own.shape_or_dtype != eager.shape_or_dtype:
        return _found(right, case, "SHAPE_OR_DTYPE", f"{_named(own.output)} is {own.shape_or_dtype}")
    if held.numerics is Numerics.EXACT and own.differing:
        text = f"{own.differing} of {own.elements} elements of {own.output} differ from eager's"
        text = f"{text}, and the recipe declares itself exact"
        return _found(right, case, _code(case, own, "ERROR_ABOVE_BOUND"), text)
    if _far(held, eager):
        return _beside_far_eager(held, case, (own, eager), right)
    reason, text = _failure(held, own, eager)
    if not reason:
        return right
    if held.numerics is Numerics.LOSSY and case.values in BEYOND and reason.endswith("ABOVE_BOUND"):
        note = f"not held to the budget beyond the example's magnitudes (no range is stated): {text}"
        return msgspec.structs.replace(right, status="not judged", text=text, notes=(note,))
    return _found(right, case, _code(case, own, reason), text)


def _found(right: Finding, case: Case, reason: str, text: str) -> Finding:
    return msgspec.structs.replace(right, status="wrong", reason=reason, text=f"{_place(case)}: {text}")


def _beside_far_eager(
    held: Rules, case: Case, pair: tuple[OutputErrors, OutputErrors], right: Finding
) -> Finding:
    """The candidate where eager itself is no guide: right near float64, else not to be told."""
    own, eager = pair
    if not _far(held, own):
        note = f"eager is the outlier: {_place(case)}: {_distance(eager)} in {own.output}"
        note = f"{note}; the candidate is {_distance(own)}"
        return msgspec.structs.replace(right, bound=_far_limit(held, eager), notes=(note,))
    if own.non_finite > _LUCK * eager.non_finite:
        return _found(right, case, _code(case, own, "NON_FINITE"), _non_finite_text(own))
    if own.relative is not None and eager.relative is not None and own.relative > _LUCK * eager.relative:
        text = f"{_named(own.output)} is {_distance(own)}, and eager {_distance(eager)}"
        return _found(right, case, _code(case, own, "ERROR_ABOVE_BOUND"), text)
    text = f"{_place(case)}: eager itself is {_distance(eager)} in {own.output}"
    text = f"{text}, the candidate {_distance(own)}"
    if case.kind in _MATTERS:
        return msgspec.structs.replace(right, status="unverifiable", text=text)
    return msgspec.structs.replace(right, status="not judged", text=text, notes=(f"not judged: {text}",))


def _failure(held: Rules, own: OutputErrors, eager: OutputErrors) -> tuple[str, str]:
    """Reason code and sentence, or two empty strings."""
    if held.numerics is Numerics.EXACT:
        return "", ""  # equal to eager, which is not far
    if own.non_finite:
        return "NON_FINITE", _non_finite_text(own)
    allowed = _mismatches(held, eager)
    if own.mismatched > allowed:
        text = f"{own.mismatched} of {own.elements} elements of {own.output} differ from the reference"
        return "INTEGER_MISMATCH", f"{text}, the first at {list(own.worst_index)}; {allowed} may"
    limit = _limit(held, eager)
    if own.relative is None or own.relative > limit:
        text = f"{_named(own.output)} is {_distance(own)}, eager {_distance(eager)}"
        text = f"{text}; the bound is {limit:.1e}"
        zeros = own.relative is not None and abs(own.relative - 1) < 1e-12
        return "ERROR_ABOVE_BOUND", f"{text} (an output of zeros has this error)" if zeros else text
    worst, eager_worst = own.worst or 0.0, eager.worst or 0.0
    at = f"element {list(own.worst_index)} of {_named(own.output)} is off by {worst:.1e} of its scale"
    if worst > _element_limit(held, eager):
        text = (
            f"{at}, eager's worst by {eager_worst:.1e}; the bound is {_element_limit(held, eager):.1e}"
        )
        return "ELEMENT_ABOVE_BOUND", text
    typical = own.typical or 0.0
    if own.elements >= _OUTLIER_ELEMENTS and worst > max(limit, _OUTLIER * typical, _LUCK * eager_worst):
        return "ELEMENT_ABOVE_BOUND", f"{at}, the others by {typical:.1e}: it stands alone"
    return "", ""


def _limit(held: Rules, eager: OutputErrors) -> float:
    """Bound of the relative error."""
    error = eager.relative or 0.0
    if held.numerics is Numerics.EXACT:
        return 0.0
    if held.numerics is Numerics.LOSSY:
        return max(held.budget, 2 * error)
    return max(_floors(eager)[0], min(_LUCK * error, max(2 * error, _SANE)))


def _element_limit(held: Rules, eager: OutputErrors) -> float:
    """Bound of the worst element."""
    worst = eager.worst or 0.0
    if held.numerics is Numerics.LOSSY:
        return max(_LOSSY_ELEMENT * _limit(held, eager), 2 * worst)
    return max(_floors(eager)[1], min(_LUCK * worst, max(2 * worst, _LOSSY_ELEMENT * _SANE)))


def _floors(eager: OutputErrors) -> tuple[float, float]:
    """What rounding alone explains in this dtype: of the relative error, and of one element."""
    epsilon = _EPSILON.get(eager.dtype, _COARSEST)
    relative, element = (64, 256) if epsilon < 1e-6 else (4, 8)
    return relative * epsilon, element * epsilon


def _far_limit(held: Rules, eager: OutputErrors) -> float:
    return max(held.budget, 4 * _floors(eager)[0])


def _far(held: Rules, errors: OutputErrors) -> bool:
    """Whether an output is further from float64 than rounding and the budget explain."""
    if errors.shape_or_dtype is not None or errors.non_finite or errors.relative is None:
        return True
    if errors.mismatched > held.budget * errors.elements:
        return True
    return errors.relative > _far_limit(held, errors)


def _mismatches(held: Rules, eager: OutputErrors) -> int:
    """How many integers may differ from float64's.

    Twice as many as eager's do by rounding; for LOSSY the budget's share of them too, with two standard
    deviations of such a count: a class label flips where two scores are close.
    """
    share = held.budget * eager.elements if held.numerics is Numerics.LOSSY else 0.0
    return max(2 * eager.mismatched, math.ceil(share + 2 * math.sqrt(share)))


def _scaled(held: Rules, case: Case, errors: OutputErrors) -> OutputErrors:
    """Errors relative to the output's usual scale, on inputs that make the output unusually small.

    A lossy format's step is set by the usual magnitudes, and constant inputs leave differences of equal
    numbers, whose rounding error has nothing left to be relative to.
    """
    if case.kind != "values" or (
        held.numerics is not Numerics.LOSSY and case.values not in ("zeros", "ties")
    ):
        return errors
    usual = held.usual_rms.get(errors.output, 0.0)
    if errors.error_rms is None or errors.rms is None or errors.relative is None or errors.rms >= usual:
        return errors
    factor, relative = errors.rms / usual, errors.error_rms / usual
    return msgspec.structs.replace(
        errors,
        relative=relative,
        worst=relative if factor == 0.0 else (errors.worst or 0.0) * factor,
        typical=None if errors.typical is None else errors.typical * factor,
    )


def _code(case: Case, own: OutputErrors, reason: str) -> str:
    """The reason code: what the protocol was after, where the failure is in what it looks at."""
    if own.output.startswith("input["):
        return "MUTATION_DIFFERS"
    if own.output.startswith("second call"):
        return {"perturb": "STALE_STATE", "repeat": "NOT_REPEATABLE"}.get(case.protocol, reason)
    return reason


def _distance(errors: OutputErrors) -> str:
    if errors.shape_or_dtype is not None:
        return f"of another shape ({errors.shape_or_dtype})"
    if errors.non_finite:
        return f"non-finite otherwise than float64 in {errors.non_finite} of {errors.elements} elements"
    if errors.mismatched:
        return f"different from float64 in {errors.mismatched} of {errors.elements} elements"
    return (
        "too far from float64 to state"
        if errors.relative is None
        else f"{errors.relative:.1e} from float64"
    )


def _non_finite_text(own: OutputErrors) -> str:
    text = f"{own.non_finite} of {own.elements} elements of {own.output} are infinite or NaN"
    return f"{text} where float64 is not, or the other way round"


def _place(case: Case) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in case.sizes.items())
    return f"case {case.name} ({sizes})" if sizes else f"case {case.name}"


def _wrong(wrong: list[Finding], findings: list[Finding]) -> Wrong:
    relatives = [f.relative for f in findings if f.status in ("right", "wrong")]
    return msgspec.convert(
        {
            "type": "wrong",
            "reason": wrong[0].reason,
            "text": wrong[0].text,
            "case": wrong[0].case,
            "failed": tuple(f.case for f in wrong),
            "relative": None if None in relatives else max(r for r in relatives if r is not None),
            "bound": wrong[0].bound,
        },
        Wrong,
    )


def _verified(
    right: list[Finding], findings: list[Finding], references: Sequence[ReferenceErrors]
) -> Verified:
    worst = max(right, key=lambda f: f.relative or 0.0)
    eager_relative = max(f.eager_relative for f in right)
    notes = [note for f in findings for note in f.notes]
    if (worst.relative or 0.0) < eager_relative:
        notes.insert(0, "closer to float64 than eager")
    notes += _weak_evidence(references)
    return Verified(
        cases=len(right),
        worst_case=worst.case,
        relative=worst.relative or 0.0,
        eager_relative=eager_relative,
        bound=worst.bound,
        notes=tuple(dict.fromkeys(notes)),
    )


def _weak_evidence(references: Sequence[ReferenceErrors]) -> list[str]:
    """Outputs that cannot tell much: constants, and zeros."""
    constant = [
        f"{_named(name)} does not depend on the input" for r in references for name in r.independent
    ]
    zero = [
        f"{_named(e.output)} is all zeros on the example"
        for r in references
        for e in r.errors
        if r.case.kind == "example" and e.rms == 0.0 and e.elements
    ]
    return constant + zero


def _named(output: str) -> str:
    return "the output" if output == "output" else f"output {output}"
