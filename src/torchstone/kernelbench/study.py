"""One problem, from its file to its result, in the process that times.

Every column is built, proved and timed by jobs of its own, so that what crashes or hangs is known by
name; the process comes back without it. All that is right on two trials takes part in a short race; the
fastest few of each contract are proved on all trials, and others only where these fail. The finalists,
one a contract, are then timed beside the baselines in interleaved rounds, and proved once more. So the
choice is not judged by the samples that made it.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from torchstone.kernelbench import decide
from torchstone.kernelbench.columns import BASELINE, Column
from torchstone.kernelbench.decide import CONTROL, Verdict
from torchstone.kernelbench.jobs import Built, Described, Minimum, Prepared
from torchstone.kernelbench.judge import Trial, trials
from torchstone.kernelbench.ours import CONTRACTS, Candidate
from torchstone.kernelbench.policy import Ahead, Policy
from torchstone.kernelbench.process import Failed, Process, told
from torchstone.kernelbench.suite import Problem
from torchstone.records import Comparison, Crashed, TimedOut
from torchstone.records.kernelbench import (
    BenchColumn,
    BenchProblem,
    BenchRoofline,
    ColumnStatus,
    ProblemOutcome,
)

__all__ = ["Study"]

EAGER = "eager"
_FIRST = 2
"""Trials on which everything is judged before it is timed."""
_CONTENDERS = 3
_PATIENCE_S, _LOOK_S = 4.0, 0.02  # with a device that others are at work on
_NEAR = 1.1
_DEAD = ("unfit", "invalid", "crashed", "timed_out")


class Study:
    """Studies one problem.

    :param device: the process that times; left without a problem afterwards.
    :param line: who takes part, columns first.
    :param quiet: entered while something is timed.
    """

    def __init__(
        self,
        device: Process,
        line: Sequence[Column | Candidate],
        described: Described,
        policy: Policy,
        quiet: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._device, self._line, self._policy = device, tuple(line), policy
        self._described, self._quiet = described, quiet
        self._columns: dict[str, BenchColumn] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._session: dict[str, list[float]] = {}
        self._spent: dict[str, float] = {}
        self._unverifiable = self._constant = ""
        self._eager_relative: float | None = None
        self._roofline: BenchRoofline | None = None
        self._rng = random.Random()
        self._patience = _PATIENCE_S

    def of(self, problem: Problem, ahead: Ahead, lanes: int) -> BenchProblem:
        """The problem's result.

        :param ahead: what was compiled already.
        :param lanes: how many builds the figure for a cold cache may have side by side.
        """
        started = time.monotonic()
        self._rng.seed(problem.digest)
        begun: Any = ahead.failed or self._device.keep(
            ("begin",), "begin", self._policy.begin_s, path=str(problem.path), mark=problem.digest[:16]
        )
        try:
            if isinstance(begun, Failed):
                return _result(problem, "failed", told(begun), started)
            self._build(ahead)
            if not self._runs(EAGER):
                text = f"eager: {self._columns[EAGER].text}"
                return _result(problem, "failed", text, started, columns=tuple(self._columns.values()))
            self._prove_first()
            with self._quiet():
                self._enter()
                self._race()
            self._prove_contenders()
            comparisons, noise = self._finals()
            return self._told(problem, started, comparisons, noise, lanes)
        finally:
            self._device.forget()
            left = self._device.call("end", self._policy.call_s)
            if not isinstance(left, int) or left > 2**30:
                self._device.stop()

    def _runs(self, name: str) -> bool:
        found = self._columns.get(name)
        return found is not None and found.status not in _DEAD

    @property
    def _against(self) -> str:
        return BASELINE if self._runs(BASELINE) else EAGER

    def _candidates(self, contract: float | None = None) -> list[str]:
        """Names of candidates that run, and of those, that are proved under a contract."""
        return [
            c.name
            for c in self._columns.values()
            if c.candidate and self._runs(c.name) and (contract is None or c.keeps(contract))
        ]

    def _build(self, ahead: Ahead) -> None:
        for one in self._line:
            name, early = one.name, ahead.built.get(one.name)
            self._columns[name] = BenchColumn(
                name=name, candidate=isinstance(one, Candidate), status="ran"
            )
            self._verdicts[name], self._spent[name] = Verdict(), 0.0
            found: Any = early
            if early is None or (isinstance(early, Built) and not early.unfit) or _no_room(early):
                limit_s = self._policy.build_s
                found = self._device.keep(("build", name), "build", limit_s, column=name)
            if isinstance(found, Failed):
                self._lose(name, found, building=True)
                if name == EAGER:
                    return
            elif name == EAGER:
                self._roofline = self._least()  # before others fill the device
            elif found.unfit:
                self._device.forget("build", name)
                self._set(name, status="unfit", text=found.unfit)
            else:
                cold = found if found.cold else early
                known = isinstance(cold, Built) and cold.cold
                self._set(
                    name,
                    note=found.note,
                    cold_s=cold.seconds if known and isinstance(cold, Built) else None,
                    warm_s=None if found.cold else found.seconds,
                )

    def _prove_first(self) -> None:
        """Judge all on the first trials, two of which tell whether the output depends on the input."""
        self._judge_on(trials()[:_FIRST], [n for n in self._columns if self._runs(n)])
        for name, verdict in self._verdicts.items():
            if self._runs(name):
                self._conclude(name, verdict, whole=not self._columns[name].candidate)

    def _prove_contenders(self) -> None:
        """Judge those that lead the race on all other trials, until some of them are proved."""
        if self._constant or self._unverifiable:
            return
        done: set[str] = set()
        while wanted := [n for n in self._contenders() if n not in done]:
            self._judge_on(trials()[_FIRST:], wanted)
            for name in wanted:
                if self._runs(name):
                    self._conclude(name, self._verdicts[name], whole=True)
            done.update(wanted)

    def _contenders(self) -> list[str]:
        """The fastest of each contract that nothing speaks against so far, if about as fast as the
        baseline."""
        own = self._columns[self._against].race
        limit = statistics.median(own) if own else float("inf")
        found: list[str] = []
        for contract in CONTRACTS:
            ahead = [
                (statistics.median(c.race), c.name)
                for c in self._columns.values()
                if c.candidate and c.race and self._runs(c.name)
                if contract not in self._verdicts[c.name].against
            ]
            quick = [name for seconds, name in sorted(ahead)[:_CONTENDERS] if seconds < limit]
            near = [name for seconds, name in sorted(ahead)[:1] if seconds < _NEAR * limit]
            found += quick or near
        return list(dict.fromkeys(found))

    def _judge_on(self, several: Sequence[Trial], names: Sequence[str]) -> None:
        for trial in several:
            found = self._prepare(trial)
            if found is None:
                continue
            if found.problem:
                self._unverifiable = found.problem
            if found.constant:
                self._constant = "its output does not depend on its input"
            if found.eager_relative is not None and trial.suite:
                self._eager_relative = max(self._eager_relative or 0.0, found.eager_relative)
            if self._unverifiable and trial.case.kind != "example":
                break
            self._judge_each(trial, names)
        self._device.forget("trial")

    def _prepare(self, trial: Trial) -> Prepared | None:
        """References of a trial; None where it has to be left out."""
        found = self._device.keep(("trial",), "prepare", self._policy.call_s, trial=trial)
        if not isinstance(found, Failed):
            prepared: Prepared = found
            if prepared.problem and not trial.suite:
                return None
            return prepared
        self._heal(found)
        if trial.suite:
            self._unverifiable = f"{trial.case.name}: eager or its reference fails: {told(found)}"
        return None

    def _judge_each(self, trial: Trial, names: Sequence[str]) -> None:
        first = trial.case.kind == "example"
        for name in names:
            if not first and not self._columns[name].candidate:
                continue  # baselines are timed right or wrong; one trial tells that
            if self._runs(name) and not self._verdicts[name].lost:
                self._judge(name, hold=first and self._columns[name].candidate)

    def _judge(self, name: str, *, hold: bool) -> None:
        began = time.monotonic()
        found = self._device.call("judge", self._policy.call_s, column=name, hold=hold)
        spent = self._columns[name].prove_s + time.monotonic() - began
        self._set(name, prove_s=spent)
        if isinstance(found, Failed):
            self._lose(name, found)
        else:
            self._verdicts[name].add(found)

    def _conclude(self, name: str, verdict: Verdict, *, whole: bool) -> None:
        """Write down what the trials say of a column.

        :param whole: whether it was judged on all of them, without which a candidate is not proved.
        """
        column = self._columns[name]
        status: ColumnStatus = column.status
        text = column.text
        if column.candidate and verdict.lost:
            status = "unverifiable" if verdict.unsure else "wrong"
            text = verdict.against[max(CONTRACTS)]
        elif column.candidate and self._unverifiable:
            status, text = "unverifiable", self._unverifiable
        self._set(
            name,
            status=status,
            text=text,
            suite_trials=len(verdict.suite),
            suite_passed=sum(verdict.suite),
            relative=verdict.relative,
            proofs=verdict.proofs() if whole and not self._unverifiable else (),
        )

    def _enter(self) -> None:
        for name in list(self._columns):
            column = self._columns[name]
            verdict = self._verdicts[name]
            right = not column.candidate or (bool(verdict.kept) and not verdict.lost)
            if not self._runs(name):
                continue
            if not right or (column.candidate and (self._constant or self._unverifiable)):
                self._device.forget("build", name)
                self._device.call("drop", self._policy.call_s, column=name)
                continue
            found = self._device.keep(("enter", name), "enter", self._policy.call_s, column=name)
            if isinstance(found, Failed):
                self._lose(name, found)
            else:
                self._session[name] = []

    def _race(self) -> None:
        self._rounds(list(self._session), self._policy.race, float("inf"), len(self._session))
        for name, seconds in self._session.items():
            self._set(name, race=tuple(seconds))

    def _finals(self) -> tuple[dict[str, Comparison], float | None]:
        """Finalists beside the baselines: each against the baseline, and the noise.

        Where one is found wrong after its many calls, the others are timed anew with who was behind it.
        """
        while True:
            finalists = self._finalists()
            with self._quiet():
                found = self._timed(finalists)
            if self._prove_again(finalists):
                return found

    def _timed(self, finalists: Sequence[str]) -> tuple[dict[str, Comparison], float | None]:
        baselines = (EAGER, self._against, self._strong())
        wanted = dict.fromkeys(n for n in (*baselines, *finalists) if n is not None)
        names = [name for name in wanted if self._columns[name].race]
        self._session = {name: [] for name in (*names, CONTROL)}
        policy = self._policy
        self._rounds([*names, CONTROL], policy.rounds, policy.seconds, policy.fewest)
        for name in names:
            if self._runs(name):
                self._set(name, status="timed", seconds=tuple(self._session[name]))
        if len(self._session.get(CONTROL, ())) < policy.fewest or self._against not in self._session:
            return {}, None
        return decide.compare(self._session, self._against, finalists)

    def _rounds(self, names: list[str], count: int, seconds: float, fewest: int) -> None:
        """Interleaved samples, one a round each; a round in which one is lost pairs nobody."""
        began, done, again = time.monotonic(), 0, 0
        while done < count and (done < fewest or time.monotonic() - began < seconds):
            names = [n for n in names if n in self._session]
            if not names:
                return
            self._rest()
            self._rng.shuffle(names)
            found = {}
            for name in names:
                column = self._against if name == CONTROL else name
                before = time.monotonic()
                taken = self._device.call("sample", self._policy.call_s, column=column)
                if column in self._spent:
                    self._spent[column] += time.monotonic() - before
                if isinstance(taken, Failed):
                    self._lose(column, taken)
                    break
                found[name] = taken
            else:
                if again < count and self._device.call("calm", self._policy.call_s) is False:
                    again += 1  # others were at work on the device: the round says nothing
                    continue
                done += 1
                for name, taken in found.items():
                    self._session[name].append(taken)

    def _rest(self) -> None:
        """Wait until the device is ours alone, for a while."""
        while self._patience > 0:
            before = time.monotonic()
            if self._device.call("calm", self._policy.call_s) is not False:
                return
            time.sleep(_LOOK_S)
            self._patience -= time.monotonic() - before

    def _prove_again(self, finalists: Sequence[str]) -> bool:
        """Judge the finalists once more, after many calls; whether all still keep to what they did."""
        again = next(t for t in trials() if t.wide and t.case.kind == "traffic")
        if not finalists or self._prepare(again) is None:
            return True
        for name in finalists:
            self._judge(name, hold=False)
            before, proofs = self._columns[name], self._verdicts[name].proofs()
            if not self._runs(name):
                continue
            self._set(name, proofs=proofs)
            lost = (p.text for p in proofs if not p.proved and before.keeps(p.contract))
            text = next(lost, None)
            if text is not None:
                self._set(name, status="wrong", text=f"after many calls: {text}")
        self._device.forget("trial")
        self._device.call("clear", self._policy.call_s)
        return self._finalists() == tuple(finalists)

    def _finalists(self) -> tuple[str, ...]:
        """Who won the race, one a contract."""
        if self._constant:
            return ()
        return tuple(dict.fromkeys(f for c in CONTRACTS if (f := self._fastest(c)) is not None))

    def _strong(self) -> str | None:
        strong = [c.name for c in self._line if isinstance(c, Column) and c.strong]
        return min((name for name in strong if self._runs(name)), key=self._time, default=None)

    def _fastest(self, contract: float) -> str | None:
        """The candidate that won the race among those proved under a contract."""
        raced = [n for n in self._candidates(contract) if self._columns[n].race]
        return min(raced, key=lambda n: statistics.median(self._columns[n].race), default=None)

    def _time(self, name: str) -> float:
        found = self._columns[name].time
        return float("inf") if found is None else found

    def _told(
        self,
        problem: Problem,
        started: float,
        compared: dict[str, Comparison],
        noise: float | None,
        lanes: int,
    ) -> BenchProblem:
        strong = self._strong()
        why = self._constant or self._unverifiable
        ours = []
        for contract in CONTRACTS:
            name = self._fastest(contract)
            found = compared.get(name) if name is not None else None
            one = decide.keep(contract, why) if why else decide.ours(contract, name, found)
            mine = one.choice if one.promoted else self._against
            if strong is not None and self._time(mine) < float("inf"):
                one = msgspec.structs.replace(one, strong_ratio=self._time(strong) / self._time(mine))
            ours.append(one)
        outcome: ProblemOutcome = (
            "degenerate" if self._constant else "unverifiable" if self._unverifiable else "judged"
        )
        cold, warm = self._optimizing(lanes)
        return _result(
            problem,
            outcome,
            why,
            started,
            against=self._against,
            noise=noise,
            columns=tuple(self._columns.values()),
            ours=tuple(ours),
            strong=strong,
            roofline=self._roofline,
            eager_relative=self._eager_relative,
            optimize_cold_s=cold,
            optimize_warm_s=warm,
        )

    def _least(self) -> BenchRoofline | None:
        found = self._device.call("minimum", self._policy.call_s, peaks=self._described.peaks)
        if isinstance(found, Failed):
            return None
        least: Minimum = found
        return BenchRoofline(
            bytes=least.bytes,
            flops=least.flops,
            memory_s=least.bytes / self._described.copy_bytes_per_s,
            compute_s=least.compute_s,
        )

    def _optimizing(self, lanes: int) -> tuple[float | None, float | None]:
        """Seconds that a user waits for baseline and candidates, with nothing cached and with all."""
        tried = [c for c in self._columns.values() if c.candidate and c.status not in _DEAD]
        if self._against == BASELINE:  # candidates may share its graph, and then its caches
            tried.append(self._columns[BASELINE])
        after = sum(c.prove_s + self._spent[c.name] for c in tried)
        cold = [c.cold_s for c in tried if c.cold_s is not None]
        warm = [c.warm_s for c in tried if c.warm_s is not None]
        # so many lanes cannot be quicker than the longest build, nor than an equal share of all
        making = max(max(cold, default=0.0), sum(cold) / lanes)
        return (
            making + after if len(cold) == len(tried) else None,
            sum(warm) + after if len(warm) == len(tried) else None,
        )

    def _set(self, name: str, **changes: Any) -> None:
        self._columns[name] = msgspec.structs.replace(self._columns[name], **changes)

    def _lose(self, name: str, found: Failed, *, building: bool = False) -> None:
        """A column crashed, hung or could not be built: the process goes on without it."""
        for job in ("build", "enter"):
            self._device.forget(job, name)
        lost = [name, CONTROL] if name == self._against else [name]  # whose twin the control is
        status: ColumnStatus = "timed_out" if isinstance(found, TimedOut) else "crashed"
        if building and isinstance(found, Crashed) and found.kind == "exception":
            status = "invalid"
        self._set(name, status=status, text=told(found), seconds=(), proofs=())
        for one in lost:
            self._session.pop(one, None)
        self._heal(found)
        if isinstance(found, Crashed) and found.kind == "exception":
            self._device.call("drop", self._policy.call_s, column=name)

    def _heal(self, found: Failed) -> None:
        """After an exception a device may be of no use to the process any more."""
        raised = isinstance(found, Crashed) and found.kind == "exception"
        if raised and self._device.call("healthy", self._policy.call_s) is not True:
            self._device.stop()


def _no_room(early: Built | Failed) -> bool:
    """Whether building ahead failed only since others had the device's memory."""
    return isinstance(early, Crashed) and "OutOfMemoryError" in early.text


def _result(
    problem: Problem, outcome: ProblemOutcome, text: str, started: float, **facts: Any
) -> BenchProblem:
    return BenchProblem(
        level=problem.level,
        number=problem.number,
        name=problem.name,
        digest=problem.digest,
        outcome=outcome,
        text=text,
        seconds=time.monotonic() - started,
        **facts,
    )
