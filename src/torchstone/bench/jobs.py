"""What the benchmark runs inside a candidate's worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from torchstone.bench.clock import MonotonicClock
from torchstone.bench.load import Served, arrivals, open_loop
from torchstone.errors import InputError
from torchstone.records import Case
from torchstone.verify.inputs import materialize
from torchstone.worker import workload_of

__all__ = ["load", "round", "season"]

Request = dict[str, Any]
"""``{"sizes": {dim: size}, "scalars": {input: value}}``; scalars may be left out."""

# Times the requested seconds: an overloaded run stops then, and what is still waiting is late for good.
_DRAIN = 2.0


def season(state: dict[str, Any], case: Case) -> None:
    """Answer one case untimed, unless this process has done so; the largest is what it is for.

    A process that has served its largest request is quicker from then on: glibc raises the size from
    which it maps memory anew for each tensor (``M_MMAP_THRESHOLD`` in mallopt(3)), and page faults go
    away with it. For a small encoder on a CPU that is more than candidates may be promoted for, so all
    that are compared must have the same past.
    """
    served: set[str] = state.setdefault("served", set())
    if case.name not in served:
        served.add(case.name)
        _call_of(state)(*materialize(workload_of(state), case))


def round(  # noqa: A001  the job's name in a plan is "round", and nothing here rounds
    state: dict[str, Any], requests: Sequence[Request], seed: int
) -> tuple[float, ...]:
    """One pass over the requests.

    Inputs are made once and kept; making them is never timed. On an accelerator a call ends when the
    device has finished it.

    :param requests: sizes and scalars of each request, in order.
    :param seed: of the inputs' values.
    :returns: seconds of each call, in the order of the requests.
    """
    call, inputs = _prepared(state, requests, seed)
    seconds = []
    for arguments in inputs:
        start = time.perf_counter()
        call(*arguments)
        seconds.append(time.perf_counter() - start)
    return tuple(seconds)


def load(
    state: dict[str, Any], rate: float, seconds: float, requests: Sequence[Request], seed: int
) -> Served:
    """Open-loop Poisson load on this one process, first come, first served.

    Arrivals are scheduled in advance, each a request drawn from ``requests``. A process that cannot keep
    up is stopped at twice ``seconds``: requests not started by then are its errors.

    :param rate: requests offered a second.
    :param seconds: length of the schedule.
    """
    call, inputs = _prepared(state, requests, seed)
    schedule = arrivals(rate, seconds, seed)
    picks = np.random.default_rng(seed + 1).integers(0, len(inputs), len(schedule)).tolist()
    return open_loop(schedule, lambda i: call(*inputs[picks[i]]), MonotonicClock(), _DRAIN * seconds)


def _prepared(
    state: dict[str, Any], requests: Sequence[Request], seed: int
) -> tuple[Callable[..., object], list[tuple[Any, ...]]]:
    call = _call_of(state)
    if not requests:
        raise InputError("there are no requests to replay")
    cache: dict[bytes, tuple[Any, ...]] = state.setdefault("bench_inputs", {})
    inputs = []
    for request in requests:
        sizes, scalars = request["sizes"], request.get("scalars", {})
        # Requests alike share their tensors: traffic repeats a few sizes many times.
        key = msgspec.json.encode((sizes, scalars, seed), order="deterministic")
        if key not in cache:
            name = f"bench-{len(cache)}"
            case = Case(name=name, kind="traffic", sizes=sizes, scalars=scalars, seed=seed)
            cache[key] = materialize(workload_of(state), case)
        inputs.append(cache[key])
    return _finishing(call, inputs), inputs


def _call_of(state: dict[str, Any]) -> Callable[..., object]:
    if "call" not in state:
        raise InputError("no candidate is loaded in this worker", hint="run a build or load job first")
    call: Callable[..., object] = state["call"]
    return call


def _finishing(call: Callable[..., object], inputs: list[tuple[Any, ...]]) -> Callable[..., object]:
    """The call, made to wait for the device if its inputs live on one."""
    if not any(isinstance(t, torch.Tensor) and t.is_cuda for arguments in inputs for t in arguments):
        return call

    def finished(*arguments: Any) -> object:
        result = call(*arguments)
        torch.cuda.synchronize()
        return result

    return finished
