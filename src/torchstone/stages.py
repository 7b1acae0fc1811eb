"""The stages of a run. Each asks the run's store first, and appends what it finds.

:mod:`torchstone.pipeline` knows their order; nothing here does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from torchstone import diff
from torchstone.candidate import Candidate, Context, failed, slug
from torchstone.errors import TorchstoneError
from torchstone.recipe import fallback
from torchstone.records import (
    Capture,
    CaseErrors,
    Divergence,
    Failure,
    MetricResult,
    ReferenceErrors,
    VerdictEntry,
    Verified,
    WorkloadSpec,
    Wrong,
)
from torchstone.verify import inputs as verify_inputs
from torchstone.verify import run as verify_run
from torchstone.worker import Worker, workload_of

__all__ = ["Judge", "capture", "record_verdict", "settle", "spec"]


def spec(state: dict[str, Any]) -> WorkloadSpec:
    """A job: the description of the worker's workload, which runs the user's code."""
    return workload_of(state).spec()


def capture(context: Context) -> Capture:
    """Capture the model as one graph, or say why it cannot be.

    :raises WorkloadError: where the user's factory or inputs fail.
    """
    known = context.recall("capture", Capture)
    if known is not None:
        return known
    context.progress.stage("capture", 1, context.policy.build_s)
    context.progress.step("exporting the model")
    with context.start("capture") as worker:
        result = worker.call(
            "torchstone.capture.jobs:capture",
            stage="capture",
            limit_s=context.policy.build_s,
            path=str(context.program),
        )
    if not isinstance(result, Capture):  # export itself may crash; eager may still be served
        why = getattr(result, "text", None) or f"no answer within {context.policy.build_s:g} s"
        result = Capture(
            mode="dynamo", program=None, seconds=0.0, graphs=0, refused=f"export failed: {why}"
        )
    context.record("capture", result, (context.program,) if result.mode == "export" else ())
    context.progress.advance()
    context.progress.note(f"captured   {_captured(result)}")
    return result


def _captured(result: Capture) -> str:
    if result.mode == "export":
        return f"one graph of {result.nodes} operations by torch.export, {result.seconds:.1f} s"
    return f"regions only, since export refused: {result.refused}"


class Judge:
    """Owns the worker that knows the truth: the user's model in float64, and eager beside it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.references: tuple[ReferenceErrors, ...] = ()
        self._directory = context.store.files / "references"
        self._worker: Worker | None = None
        self._others: list[Worker] = []

    def measure(self) -> None:
        """Run every case through the model in float64 and as it is, unless that is known."""
        if self.references:
            return
        self._directory.mkdir(exist_ok=True)
        cases = verify_inputs.cases(self.context.spec, self.context.seed)
        self.context.progress.stage("reference", len(cases), None)
        found = []
        for case in cases:
            key = f"reference/{case.name}"
            known = self.context.recall(key, ReferenceErrors)
            if known is None:
                self.context.progress.step(f"float64 and eager on {case.name}")
                (known,) = verify_run.references(
                    self, [case], self._directory, self.context.policy.call_s
                )
                self.context.record(key, known, tuple(self._directory.glob(f"{case.name}.*")))
            found.append(known)
            self.context.progress.advance()
        self.references = tuple(found)

    def verify(self, candidate: Candidate) -> VerdictEntry:
        """Judge a candidate on every case."""
        self.measure()
        desk = verify_run.Desk(
            candidate=candidate,
            reference=self,
            references=self._directory,
            results=self.context.store.work / slug(candidate.text),
        )
        return verify_run.verify(candidate.recipe, desk, self.references, self.context.policy)

    def metric(self, candidate: Candidate, baseline: Path) -> MetricResult | Failure:
        """The user's metric on the holdout, candidate against the baseline's predictions."""
        mine = self.predictions(candidate)
        if not isinstance(mine, Path):
            return mine
        result: MetricResult | Failure = self.call(
            "torchstone.verify.jobs:metric",
            stage="metric",
            limit_s=self.context.policy.build_s,
            recipe=candidate.text,
            candidate=str(mine),
            baseline=str(baseline),
            seed=self.context.seed,
        )
        return result

    def predictions(self, candidate: Candidate) -> Path | Failure:
        """Have a candidate predict the holdout; kept in the run's scratch."""
        path = self.context.store.work / f"holdout-{slug(candidate.text)}.pt"
        if path.exists():
            return path
        result = candidate.call(
            "torchstone.verify.jobs:predict",
            stage="holdout",
            limit_s=self.context.policy.build_s,
            path=str(path),
        )
        if failed(result):
            failure: Failure = result
            return failure
        return path

    def call(self, target: str, /, *, stage: str, limit_s: float, **kwargs: object) -> Any:
        """Run a job in the reference worker, started anew if it has died."""
        if self._worker is None or not self._worker.alive:
            self._free()
            self._worker = self.context.start("reference")
        return self._worker.call(target, stage=stage, limit_s=limit_s, **kwargs)

    @contextlib.contextmanager
    def another(self, name: str) -> Iterator[Worker]:
        """A worker for one question, which :meth:`close` ends too."""
        with self.context.start(name) as worker:
            self._others.append(worker)
            try:
                yield worker
            finally:
                self._others.remove(worker)

    def close(self) -> None:
        """Free the workers, whatever they are doing."""
        self._free()
        for worker in tuple(self._others):
            worker.close()

    def _free(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def settle(context: Context, judge: Judge, candidate: Candidate, baseline: Candidate) -> None:
    """Build a candidate and judge it, then its metric; what is known already is not done again."""
    known = context.recall(f"verdict/{candidate.text}", VerdictEntry)
    if known is not None:
        candidate.verdict = known.verdict
    else:
        context.step(f"building {candidate.text}")
        candidate.verdict = candidate.prepare()
    with context.judging:
        if candidate.verdict is None:
            context.step(f"verifying {candidate.text}")
            entry = judge.verify(candidate)
            candidate.verdict = entry.verdict
            record_verdict(context, candidate, entry.cases)
        elif known is None:
            record_verdict(context, candidate, ())
        needs_metric = context.spec.metric is not None and candidate.recipe != fallback()
        if isinstance(candidate.verdict, Verified) and needs_metric:
            _metric(context, judge, candidate, baseline)
    if not isinstance(candidate.verdict, Verified) or _memory_is_short():
        candidate.close()
    if isinstance(candidate.verdict, Wrong):
        _first_divergence(judge, candidate, candidate.verdict)
    context.advance()


_LOOK_S = 30.0
"""Seconds for finding where a wrong candidate diverges: other candidates wait for their turn."""

_OF_NUMBERS = (
    "ERROR_ABOVE_BOUND",
    "ELEMENT_ABOVE_BOUND",
    "NON_FINITE",
    "INTEGER_MISMATCH",
    "SHAPE_OR_DTYPE",
)


def _first_divergence(judge: Judge, candidate: Candidate, verdict: Wrong) -> None:
    """Say where a wrong candidate first diverges; what goes wrong in looking is said, and no more."""
    context = judge.context
    key = f"divergence/{candidate.text}"
    if context.recall(key, Divergence) is not None:
        return
    path = context.store.files / "divergence" / f"{slug(candidate.text)}.py"
    if verdict.reason in _OF_NUMBERS:
        context.step(f"looking where {candidate.text} first diverges")
        found = _looked_for(judge, candidate, verdict, path)
    else:
        why = f"what failed is not the result of an operation ({verdict.reason})"
        found = _not_found(candidate, verdict, why)
    context.record(key, found, (path,) if found.reproduction is not None else ())
    context.note(f"{'':<12} {candidate.text}: {found.text}")


def _not_found(candidate: Candidate, verdict: Wrong, why: str) -> Divergence:
    return Divergence(a=diff.FLOAT64, b=candidate.text, kind="UNKNOWN", text=why, case=verdict.case)


def _looked_for(judge: Judge, candidate: Candidate, verdict: Wrong, path: Path) -> Divergence:
    context = judge.context
    question = diff.Question(
        a=diff.FLOAT64,
        b=candidate.text,
        case=verdict.case,
        seed=context.seed,
        program=str(context.program) if candidate.exported else None,
        reproduction=str(path),
        limit_s=min(context.policy.call_s, _LOOK_S),
    )
    try:
        with judge.another(f"diff-{slug(candidate.text)}") as worker:
            found = diff.ask(worker, question)
    except TorchstoneError as error:
        found = _not_found(candidate, verdict, error.what)
    if found.kind != "NONE":
        return found
    why = found.notes[0] if found.notes else "errors that each are rounding add up, or grow"
    text = f"no operation is to blame by itself: {why}"
    return msgspec.structs.replace(found, kind="UNKNOWN", text=text, notes=found.notes[1:])


def record_verdict(context: Context, candidate: Candidate, cases: tuple[CaseErrors, ...]) -> None:
    """Append a candidate's verdict and tell the watcher."""
    assert candidate.verdict is not None
    entry = VerdictEntry(recipe=candidate.text, verdict=candidate.verdict, cases=cases)
    context.record(f"verdict/{candidate.text}", entry)
    verdict = candidate.verdict
    if isinstance(verdict, Verified):
        said = f"error {verdict.relative:.1e}, allowed {verdict.bound:.1e}, {verdict.cases} cases"
    else:
        said = getattr(verdict, "text", "") or f"no answer within {getattr(verdict, 'limit_s', 0):g} s"
    kind = str(verdict.__struct_config__.tag).replace("_", " ")
    context.note(f"{kind:<12} {candidate.text}: {said}")


def _metric(context: Context, judge: Judge, candidate: Candidate, baseline: Candidate) -> None:
    key = f"metric/{candidate.text}"
    if context.recall(key, MetricResult) is not None:
        return
    context.step(f"{context.spec.metric} of {candidate.text}")
    base = judge.predictions(baseline)
    result = judge.metric(candidate, base) if isinstance(base, Path) else base
    if isinstance(result, MetricResult):
        context.record(key, result)
    else:  # no data is not a pass: the gate holds what has no metric
        context.note(f"no metric for {candidate.text}: {getattr(result, 'text', 'timed out')}")


def _memory_is_short() -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available < memory.total * 0.35)
