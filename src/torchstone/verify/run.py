"""Drives the two workers: the one that knows the truth, and the candidate's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchstone.policy import Policy
from torchstone.recipe import Recipe
from torchstone.records import (
    Case,
    CaseErrors,
    Crashed,
    Failure,
    NotTried,
    ReferenceErrors,
    TimedOut,
    Unsupported,
    Unverifiable,
    VerdictEntry,
)
from torchstone.verify import budget

__all__ = ["Caller", "Desk", "references", "verify"]

_ENOUGH_FAILURES = 3


class Caller(Protocol):
    """What runs jobs: :class:`~torchstone.worker.Worker`, or what restarts one."""

    def call(self, target: str, /, *, stage: str, limit_s: float, **kwargs: object) -> Any:
        """Run a job.

        :returns: its value, or a failure.
        """


@dataclass(frozen=True)
class Desk:
    """Where verification happens."""

    candidate: Caller
    """Holds the candidate in ``state["call"]``."""
    reference: Caller
    """Ran :func:`references`, or can read its files."""
    references: Path
    """Where :func:`references` kept its results."""
    results: Path
    """Folder for the candidate's results, its own; made if need be, files are removed once judged."""


def references(
    caller: Caller, cases: Sequence[Case], directory: Path, limit_s: float
) -> tuple[ReferenceErrors, ...]:
    """Run the user's model on every case, as it is and in float64.

    :param directory: where results are kept for :func:`verify`.
    :param limit_s: seconds for one case.
    :returns: one record a case; where the model fails, the record says how.
    :raises WorkloadError: where the user's functions that make inputs fail.
    """
    return tuple(_reference(caller, case, directory, limit_s) for case in cases)


def _reference(caller: Caller, case: Case, directory: Path, limit_s: float) -> ReferenceErrors:
    result = caller.call(
        "torchstone.verify.jobs:reference",
        stage=f"reference:{case.name}",
        limit_s=limit_s,
        case=case,
        directory=str(directory),
    )
    if isinstance(result, ReferenceErrors):
        return result
    if isinstance(result, Crashed) and result.kind == "exception":
        return ReferenceErrors(
            case=case, errors=(), problem=f"RAISES: the model itself raises {result.text}"
        )
    return ReferenceErrors(case=case, errors=(), problem=f"NO_REFERENCE: {_said(result)}")


def verify(recipe: Recipe, desk: Desk, known: Sequence[ReferenceErrors], policy: Policy) -> VerdictEntry:
    """Run a candidate on every case that has a reference and judge it; stops after three failures.

    :param known: what :func:`references` gave.
    :returns: the verdict with its evidence. A candidate whose process dies or hangs has that as its
        verdict; one that raises where eager answers is wrong.
    :raises WorkloadError: where inputs are not the same in both workers.
    """
    desk.results.mkdir(parents=True, exist_ok=True)
    held = budget.rules(recipe, known, policy)
    found: list[CaseErrors] = []
    failures = 0
    for reference in sorted(known, key=lambda r: r.case.protocol == "perturb"):  # it changes the module
        if reference.problem is not None:
            continue
        result = _case(desk, reference.case, policy.call_s)
        if not isinstance(result, CaseErrors):
            return VerdictEntry(recipe=str(recipe), verdict=result, cases=tuple(found))
        found.append(result)
        failures += budget.examine(held, result, reference).status == "wrong"
        if failures >= _ENOUGH_FAILURES:
            break
    return VerdictEntry(
        recipe=str(recipe), verdict=budget.judge(recipe, found, known, policy), cases=tuple(found)
    )


def _case(desk: Desk, case: Case, limit_s: float) -> CaseErrors | Failure | Unverifiable:
    path = desk.results / f"{case.name}.pt"
    ran = desk.candidate.call(
        "torchstone.verify.jobs:candidate",
        stage=f"verify:{case.name}",
        limit_s=limit_s,
        case=case,
        path=str(path),
    )
    if isinstance(ran, Crashed) and ran.kind == "exception":
        return CaseErrors(
            case=case.name, errors=(), problem=f"RAISES: eager answers, it raises {ran.text}"
        )
    if isinstance(ran, Crashed | TimedOut | Unsupported | NotTried):
        return ran
    judged = desk.reference.call(
        "torchstone.verify.jobs:judge",
        stage=f"judge:{case.name}",
        limit_s=limit_s,
        case=case,
        path=str(path),
        directory=str(desk.references),
    )
    path.unlink(missing_ok=True)
    if isinstance(judged, CaseErrors):
        return judged
    return Unverifiable(text=f"it could not be compared: {_said(judged)}", case=case.name)


def _said(failure: object) -> str:
    if isinstance(failure, TimedOut):
        return f"no answer within {failure.limit_s:g} s"
    return failure.text if isinstance(failure, Crashed | Unsupported) else repr(failure)
