"""The inventory of a workload: its weights, work, time, memory, coverage and cost, in eager.

Runs in a worker that has run nothing else, since the first call and the memory of a process are part of
what is measured. What cannot be had of a model is None and a note says why; only a model that does not
run on its own example is an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram

from torchstone import compat
from torchstone.bench import cost, roofline
from torchstone.bench.clock import MonotonicClock
from torchstone.capture import export
from torchstone.capture import program as programs
from torchstone.errors import InputError
from torchstone.inspection import latency, mix, tables, weights, work
from torchstone.inspection import profile as profiles
from torchstone.inspection.coverage import coverage
from torchstone.inspection.notes import notes
from torchstone.inspection.trace import Trace, trace
from torchstone.inspection.work import Weighted
from torchstone.ops.calls import tensors
from torchstone.records import Arrival, Case, Record
from torchstone.records.inventory import (
    CallTimes,
    Inventory,
    MemoryUse,
    Peaks,
    Roofline,
    SizeFigures,
)
from torchstone.verify.inputs import materialize
from torchstone.workload import Workload
from torchstone.workload.keyword import unwrap
from torchstone.workload.usercode import call as call_user

__all__ = ["Plan", "inventory"]

T = TypeVar("T")
_EXAMPLE_SHARE = 0.25  # of the time
_PROFILE_SHARE = 0.15
_CALLS_A_SIZE = 6  # at least: warming up, timing and tracing
_FEWEST_SIZES = 3


class Plan(Record, frozen=True, kw_only=True):
    """How much to find out."""

    budget_s: float = 12.0
    """Time for timed calls, seconds; everything else comes on top, about as much for small models."""
    sizes: int = 12
    """Most distinct requests of the traffic that are run."""
    seed: int = 0
    """Of their values."""
    program: str | None = None
    """File of the captured program, for the engines' coverage."""
    refused: str | None = None
    """Why there is none. Where both are None, the model is exported here."""


_USUAL = Plan()


@torch.no_grad()
def inventory(workload: Workload, module: nn.Module | None = None, plan: Plan = _USUAL) -> Inventory:
    """Find out what a workload is before anything is optimized.

    Methods: FLOPs by torch's formulas (:mod:`torchstone.ops.flops`), bytes by what each operation
    touches (:mod:`torchstone.ops.moved`), times by wall clock and torch.profiler, bounds by the
    roofline (:mod:`torchstone.bench.roofline`).

    :param module: the workload's module, not called before; made here if None. It runs as it is, in its
        own mode and on its own device.
    :raises WorkloadError: where the model or its inputs cannot be made, or the model fails on its
        example, at the user's line.
    """
    module = workload.module() if module is None else module
    subject = _Subject(workload, module, workload.example(), plan)
    first_call_s = subject.first_call()
    memory = subject.memory()
    example = latency.times(subject.run, MonotonicClock(), plan.budget_s * _EXAMPLE_SHARE)
    runs = subject.sizes(example)
    profiled = subject.attempt("the model cannot be profiled", lambda: subject.profile(example))
    traced = subject.attempt("operations cannot be traced", lambda: trace(subject.module, subject.args))
    peaks = roofline.measure(subject.device, _dtypes([traced, *(r.trace for r in runs)]))
    found = _assembled(subject, _Seen(first_call_s, memory, example, runs, profiled, traced, peaks))
    said = (*notes(found, unwrap(subject.module)), *_on_price(workload), *subject.problems)
    return msgspec.structs.replace(found, notes=said)


class _Run(NamedTuple):
    """One size of the traffic."""

    sampled: mix.Sampled
    times: CallTimes | None
    trace: Trace | None
    problem: str | None


class _Seen(NamedTuple):
    """What was measured."""

    first_call_s: float
    memory: MemoryUse
    example: CallTimes
    runs: tuple[_Run, ...]
    profiled: profiles.Profiled | None
    traced: Trace | None
    peaks: Peaks


@dataclass
class _Subject:
    """A model with its example, and what could not be found out about it."""

    workload: Workload
    module: nn.Module
    args: tuple[Any, ...]
    plan: Plan
    problems: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where it runs: an accelerator, if any of its tensors is on one."""
        held = [*self.module.parameters(), *self.module.buffers(), *tensors(self.args)]
        return next((t.device for t in held if t.device.type == "cuda"), torch.device("cpu"))

    def run(self) -> object:
        """One call on the example, finished when it returns."""
        return latency.finishing(lambda: self.module(*self.args), self.device)()

    def first_call(self) -> float:
        """Seconds of the first call."""
        origin = None if self.workload.origin is None else Path(self.workload.origin)
        started = time.perf_counter()
        call_user(self.run, what="the model's forward on its example inputs", where=origin)
        return time.perf_counter() - started

    def memory(self) -> MemoryUse:
        """Memory of the second call."""
        resident, device = latency.resident_bytes(), self.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        peak = latency.peak_during(self.run)
        return MemoryUse(
            resident_bytes=resident,
            peak_bytes=max(peak, resident),
            device_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )

    def profile(self, example: CallTimes) -> profiles.Profiled:
        """Where the time of a call on the example goes."""
        return profiles.profile(
            self.module,
            self.args,
            self.device,
            call_s=example.median_s,
            budget_s=self.plan.budget_s * _PROFILE_SHARE,
        )

    def sizes(self, example: CallTimes) -> tuple[_Run, ...]:
        """Run sizes of the traffic, each for its share of the time; fewer where calls are slow."""
        budget_s = self.plan.budget_s * (1 - _EXAMPLE_SHARE - _PROFILE_SHARE)
        affordable = int(budget_s / (_CALLS_A_SIZE * example.median_s))
        chosen = mix.sampled(self.workload.spec(), min(self.plan.sizes, max(_FEWEST_SIZES, affordable)))
        share = budget_s / len(chosen)
        return tuple(self._run_size(sampled, share) for sampled in chosen)

    def _run_size(self, sampled: mix.Sampled, budget_s: float) -> _Run:
        try:
            args = self._inputs(sampled.arrival)
            once = latency.finishing(lambda: self.module(*args), self.device)
            times = latency.times(once, MonotonicClock(), budget_s)
        except InputError as error:
            return _Run(sampled, None, None, error.what)
        except compat.capture_errors() as error:
            return _Run(sampled, None, None, export.one_line(error))
        try:
            return _Run(sampled, times, trace(self.module, args), None)
        except compat.capture_errors() as error:
            return _Run(sampled, times, None, f"operations cannot be traced: {export.one_line(error)}")

    def _inputs(self, arrival: Arrival) -> tuple[Any, ...]:
        """Inputs of a request, each on the device of the example's."""
        made = materialize(self.workload, self._case(arrival))
        return tuple(
            value.to(like.device) if isinstance(value, torch.Tensor) else value
            for value, like in zip(made, self.args, strict=True)
        )

    def _case(self, arrival: Arrival) -> Case:
        # without recorded traffic the one arrival is the example, whose own values are right for sure
        values = "random" if self.workload.traffic else "example"
        return Case(
            name="mix",
            kind="traffic",
            sizes=arrival.sizes,
            scalars=arrival.scalars,
            values=values,
            seed=self.plan.seed,
        )

    def program(self) -> ExportedProgram | None:
        """The captured program, from its file or made now."""
        if self.plan.program is not None:
            return programs.load(self.plan.program)
        if self.plan.refused is not None:
            return None
        exported = export.export(self.workload, self.workload.module())
        return None if isinstance(exported, export.Refused) else exported

    def attempt(self, what: str, function: Callable[[], T]) -> T | None:
        """What ``function`` gives; None, and a note, where torch raises."""
        try:
            return function()
        except compat.capture_errors() as error:
            self.problems.append(f"{what}: {export.one_line(error)}")
            return None


def _assembled(subject: _Subject, seen: _Seen) -> Inventory:
    """The record, without its notes."""
    spec, own = subject.workload.spec(), unwrap(subject.module)
    sizes = tuple(_figures(run, seen.peaks) for run in seen.runs)
    mean_s = _mean_s(seen.runs)
    price = subject.workload.policy.dollars_per_hour
    traces = [Weighted(r.trace, r.sampled.requests) for r in seen.runs if r.trace is not None]
    program = subject.attempt("the captured program cannot be read", subject.program)
    return Inventory(
        device=str(subject.device),
        threads=torch.get_num_threads(),
        weights=weights.weights(own),
        modules=tables.modules(own, seen.traced, traces, seen.profiled),
        ops=tables.ops(seen.traced, traces, seen.peaks, seen.profiled) if seen.traced else (),
        coverage=coverage(program, _called(seen.traced)),
        traffic=mix.traffic_mix(spec, recorded=bool(subject.workload.traffic)),
        first_call_s=seen.first_call_s,
        example=seen.example,
        least_bytes=seen.traced.least_bytes if seen.traced else None,
        sizes=sizes,
        mean_s=mean_s,
        memory=msgspec.structs.replace(
            seen.memory, live_bytes=seen.traced.live_bytes if seen.traced else None
        ),
        profile=tables.profile(seen.profiled) if seen.profiled else None,
        roofline=_roofline(seen, sizes, mean_s),
        requests_per_s=None if mean_s is None else cost.capacity(mean_s),
        dollars_per_million=(
            None if price is None or mean_s is None else cost.dollars_per_million(price, mean_s)
        ),
        notes=(),
    )


def _figures(run: _Run, peaks: Peaks) -> SizeFigures:
    traced = run.trace
    least = work.least(traced, peaks) if traced else None
    return SizeFigures(
        sizes=run.sampled.arrival.sizes,
        scalars=run.sampled.arrival.scalars,
        requests=run.sampled.requests,
        times=run.times,
        work=work.tally([Weighted(traced, 1)], work.total).get("") if traced else None,
        least_bytes=traced.least_bytes if traced else None,
        live_bytes=traced.live_bytes if traced else None,
        operations_s=least.operations_s if least else None,
        fused_s=least.fused_s if least else None,
        text=run.problem,
    )


def _roofline(seen: _Seen, sizes: tuple[SizeFigures, ...], mean_s: float | None) -> Roofline | None:
    if seen.traced is None:
        return None
    example = work.bounds(seen.example.median_s, *work.least(seen.traced, seen.peaks))
    bounded = [
        (s.requests, s.operations_s, s.fused_s)
        for s in sizes
        if s.operations_s is not None and s.fused_s is not None
    ]
    if mean_s is None or len(bounded) < len(sizes):
        return Roofline(peaks=seen.peaks, example=example)
    requests = sum(n for n, _, _ in bounded)
    operations = sum(n * operation for n, operation, _ in bounded) / requests
    fused = sum(n * one for n, _, one in bounded) / requests
    return Roofline(peaks=seen.peaks, example=example, mix=work.bounds(mean_s, operations, fused))


def _mean_s(runs: tuple[_Run, ...]) -> float | None:
    """Seconds a request over the mix, by medians."""
    timed = [(r.sampled.requests, r.times.median_s) for r in runs if r.times is not None]
    if len(timed) < len(runs):
        return None
    return sum(n * seconds for n, seconds in timed) / sum(n for n, _ in timed)


def _called(traced: Trace | None) -> Counter[Any]:
    """Operations of a call, as torch's own objects; views too, which engines have to translate."""
    found: Counter[Any] = Counter()
    for (place, _), calls in traced.calls.items() if traced else ():
        found[place.target] += calls
    return found


def _on_price(workload: Workload) -> tuple[str, ...]:
    if workload.policy.dollars_per_hour is not None:
        return ()
    return ("no cost is given: set policy.dollars_per_hour to the price of this machine",)


def _dtypes(traces: list[Trace | None]) -> set[str]:
    return {cost.dtype for one in traces if one is not None for _, cost in one.calls}
