"""What the suite's problems run in: jobs of the workers that compile and of the one that times.

One problem at a time is at hand in a worker's ``state``. What a problem or a column raises is not
caught.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchstone import settings
from torchstone.bench import roofline
from torchstone.bench.timer import Flusher, Timed
from torchstone.errors import InputError
from torchstone.inspection import trace as tracing
from torchstone.kernelbench import gate
from torchstone.kernelbench.columns import Column, Unfit
from torchstone.kernelbench.judge import Desk, Judged, Trial, same
from torchstone.kernelbench.load import Loaded, Setup, forget, load
from torchstone.kernelbench.ours import CONTRACTS, Candidate
from torchstone.records.inventory import Peaks
from torchstone.verify import tensors

__all__ = [
    "Built",
    "Described",
    "Line",
    "Minimum",
    "Prepared",
    "begin",
    "build",
    "calm",
    "clear",
    "describe",
    "drop",
    "end",
    "enlist",
    "enter",
    "healthy",
    "judge",
    "minimum",
    "prepare",
    "sample",
    "size",
]

State = dict[str, Any]
_COPY_BYTES = 2**30  # read, on a device; as many are written
_COPY_BYTES_CPU = 2**27
_COPIES = 12
_WAIT_CYCLES = 8_000_000  # some 5 milliseconds, twice as long as a process's turn on a shared device
_CROWDED = 1.4
_FLUSHED_BYTES = 2**28  # before each call, by the suite


@dataclass(frozen=True, kw_only=True)
class Line:
    """Who takes part: dotted names ``module:NAME`` of the two tuples, so that workers find them."""

    columns: str = "torchstone.kernelbench.columns:COLUMNS"
    """Of :class:`~torchstone.kernelbench.columns.Column`."""
    candidates: str = "torchstone.kernelbench.ours:CANDIDATES"
    """Of :class:`~torchstone.kernelbench.ours.Candidate`."""

    def all(self) -> tuple[Column | Candidate, ...]:
        """Columns, then candidates.

        :raises InputError: where a name leads nowhere.
        """
        return (*_named(self.columns), *_named(self.candidates))


class Built(NamedTuple):
    """What building a column and calling it once gave."""

    seconds: float
    """Of both."""
    unfit: str = ""
    """Why it is not for this problem, if so."""
    cold: bool = False
    """Whether nothing of it was in the caches on disk."""
    note: str = ""
    """What it was made of."""


class Prepared(NamedTuple):
    """What is known of a trial before any column is judged."""

    problem: str
    """Why there is no float64 reference."""
    eager_relative: float | None
    """Eager's largest relative error; None where not known."""
    constant: bool | None
    """Whether the outputs depend on the inputs no more than rounding; None where not yet known."""


class Minimum(NamedTuple):
    """The least that a problem asks for."""

    bytes: int
    """Inputs, outputs and used parameters, each once."""
    flops: float
    """Of all operations."""
    compute_s: float
    """Least seconds of computing."""


class Described(NamedTuple):
    """The device."""

    name: str
    """Its name."""
    peaks: Peaks
    """What it does at best."""
    copy_bytes_per_s: float
    """Bytes read and written by a large copy, a second."""
    memory_bytes: int
    """Of the device; 0 on a CPU."""


def enlist(state: State, setup: Setup, line: Line, cache: str, closing: str | None) -> None:
    """Make a worker of this process.

    :param cache: folder of compiled code, which the compiler was told by the process that started us.
    :param closing: the gate's file, for those that compile while another one times.
    """
    if torch.device(setup.device).index is not None:
        torch.cuda.set_device(setup.device)
    if closing is not None:
        gate.heed(Path(closing), _drain)
        _compile_alone()
    state.update(setup=setup, line={one.name: one for one in line.all()}, cache=Path(cache))


def size(state: State, path: str) -> int:
    """Bytes of a problem's parameters and inputs, without allocating them."""
    setup = Setup(device="meta", dtype=state["setup"].dtype, inputs_on="meta")
    loaded = load(Path(path), setup)
    held = [*loaded.module.parameters(), *loaded.module.buffers(), *loaded.inputs()]
    forget()
    return sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))


def begin(state: State, path: str, mark: str) -> None:
    """Take a problem up.

    :param mark: names the problem in the cache's marks of what was compiled.
    """
    end(state)
    loaded = load(Path(path), state["setup"])
    state["loaded"], state["mark"] = loaded, mark
    state["desk"] = Desk(loaded, CONTRACTS)
    state["inputs"] = loaded.inputs()


def end(state: State) -> int:
    """Let the problem at hand go.

    :returns: bytes of the device that are still held by something.
    """
    for name in ("loaded", "desk", "inputs"):
        state.pop(name, None)
    for name in ("of", "given", "changed"):
        state.get("place", {}).pop(name, None)
    state.update(calls={}, timed={})
    _reset_compiler()
    forget()
    gc.collect()
    if not _cuda(state):
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def build(state: State, column: str) -> Built:
    """Build a column and call it once, which is when most compile."""
    mark = state["cache"] / "built" / f"{state['mark']}-{column.replace('/', '-')}"
    cold = not mark.exists()
    one = state["line"][column]
    given = tensors.copies(state["inputs"])
    base = getattr(one, "of", None)
    if base is None:
        source = module = state["loaded"].again()
    elif base in state["calls"]:
        source, module = state["calls"][base]
    else:
        return Built(0.0, f"{base} is not there")
    _finish(state)
    started = time.perf_counter()
    call = one.build(source, given)
    if isinstance(call, Unfit):
        return Built(0.0, call.why)
    call(*given)
    _finish(state)
    seconds = time.perf_counter() - started
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    state["calls"][column] = (call, module)
    return Built(seconds, cold=cold, note=getattr(call, "note", ""))


def drop(state: State, column: str, whole: bool = False) -> None:
    """Let a column go.

    :param whole: also what the compiler keeps for all columns in this process, CUDA graphs' memory among
        it; only where no other column is needed.
    """
    state["calls"].pop(column, None)
    state["timed"].pop(column, None)
    if whole:
        _reset_compiler()
    if _cuda(state):
        gc.collect()  # graphs hold their pools in cycles
        torch.cuda.empty_cache()


def prepare(state: State, trial: Trial) -> Prepared:
    """Make a trial's inputs and references."""
    desk: Desk = state["desk"]
    truth = desk.prepare(trial)
    relatives = [e.relative for e in truth.own]
    known = [r for r in relatives if r is not None]
    worst = max(known, default=0.0) if truth.own and len(known) == len(relatives) else None
    return Prepared(truth.problem, worst, desk.constant() if trial.suite else None)


def judge(state: State, column: str, hold: bool) -> Judged:
    """Hold a column against the trial at hand."""
    call, module = state["calls"][column]
    judged: Judged = state["desk"].judge(call, module, hold=hold)
    return judged


def clear(state: State) -> None:
    """Let the trial at hand go; its tensors may be large."""
    state["desk"].truth = None


def enter(state: State, column: str) -> None:
    """Warm a column up for :func:`sample`; all are timed on the same inputs in the same place."""
    call, module = state["calls"][column]
    if "place" not in state:
        state["place"] = {"flusher": None}
        if _cuda(state):
            where = torch.device(state["setup"].device)
            cache = torch.cuda.get_device_properties(where).L2_cache_size
            times = math.ceil(_FLUSHED_BYTES / (2 * cache))
            state["place"] = {"flusher": Flusher(where), "flushes": times}
    state["desk"].reset(module)
    given, changed = _place(state)

    def reset() -> None:
        for i in changed:
            given[i].copy_(state["inputs"][i])

    flusher = state["place"]["flusher"]
    timed = Timed(_dropping(call), given, reset if changed else None, flusher)
    state["timed"][column] = (timed, reset)


def sample(state: State, column: str) -> float:
    """Seconds of one call of a column that has entered.

    On a GPU as the suite takes them: the device is idle, the cache is flushed by as many bytes as the
    suite writes, and events are recorded around the call, so a call that launches more slowly than its
    kernels run is as slow as its launches.
    """
    timed, reset = state["timed"][column]
    flusher: Flusher | None = state["place"]["flusher"]
    if flusher is None:
        return float(timed.samples(1, flush=True)[0])
    reset()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    flusher(state["place"]["flushes"])
    start.record()
    timed.call(*timed.given)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def calm(state: State) -> bool:
    """Whether the device is ours alone: another process's work takes turns with ours, some milliseconds
    each, so that a wait of a few milliseconds lasts twice as long.
    """
    if not _cuda(state):
        return True
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call] # torch's
    end.record()
    torch.cuda.synchronize()
    took = float(start.elapsed_time(end))
    state["wait"] = min(took, state.get("wait", float("inf")))
    return took < _CROWDED * float(state["wait"])


def minimum(state: State, peaks: Peaks) -> Minimum:
    """Count the problem's operations."""
    loaded: Loaded = state["loaded"]
    found = tracing.trace(loaded.module, tensors.copies(state["inputs"]))
    flops = sum((cost.flops + cost.other) * n for (_, cost), n in found.calls.items())
    computing = sum(
        n * roofline.least_s(peaks, cost.flops + cost.other, 0, cost.dtype)
        for (_, cost), n in found.calls.items()
    )
    return Minimum(found.least_bytes, float(flops), computing)


def describe(state: State) -> Described:
    """Measure the device."""
    where = torch.device(state["setup"].device)
    peaks = roofline.measure(where, [state["setup"].dtype])
    roofline.keep(peaks, settings.load().home)  # or every process that rewrites would measure, at once
    size = _COPY_BYTES if where.type == "cuda" else _COPY_BYTES_CPU
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    flusher = Flusher(where) if where.type == "cuda" else None
    copying = Timed(target.copy_, (source,), None, flusher)
    seconds = sorted(copying.samples(_COPIES, flush=True))[_COPIES // 2]
    memory = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else 0
    return Described(peaks.device, peaks, 2 * size / seconds, memory)


def healthy(state: State) -> bool:
    """Whether the device still computes."""
    count = torch.arange(1025, device=state["setup"].device).sum()
    return int(count) == 1024 * 1025 // 2


def _place(state: State) -> tuple[tuple[Any, ...], Sequence[int]]:
    """The inputs that are timed on, and which of them eager changes."""
    if state["place"].get("of") is not state["inputs"]:
        loaded, inputs = state["loaded"], state["inputs"]
        given = tensors.copies(inputs)
        loaded.module(*given)
        pairs = enumerate(zip(given, inputs, strict=True))
        changed = [i for i, (after, before) in pairs if not same(after, before)]
        for i in changed:
            given[i].copy_(inputs[i])
        state["place"].update(of=inputs, given=given, changed=changed)
    return state["place"]["given"], state["place"]["changed"]


def _dropping(call: Callable[..., Any]) -> Callable[..., None]:
    """The call without its result: a dozen columns that each hold one would fill a device."""

    def dropping(*given: Any) -> None:
        call(*given)

    return dropping


def _named(dotted: str) -> tuple[Any, ...]:
    module, _, name = dotted.partition(":")
    try:
        found = getattr(importlib.import_module(module), name or "CANDIDATES")
    except (ImportError, AttributeError) as error:
        raise InputError(f"{dotted}: {error}", hint="MODULE:NAME of a tuple of candidates") from error
    return tuple(found)


def _reset_compiler() -> None:
    if "torch._dynamo" in sys.modules:  # which takes seconds to import
        torch.compiler.reset()


def _compile_alone() -> None:
    """One compile thread: many of these processes share the cores already."""
    import torch._dynamo  # before torch._inductor: pytorch#154463
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def _cuda(state: State) -> bool:
    return "setup" in state and state["setup"].device.startswith("cuda")


def _drain() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        with contextlib.suppress(RuntimeError):  # what is wrong shows where the result is used
            torch.cuda.synchronize()


def _finish(state: State) -> None:
    if _cuda(state):
        torch.cuda.synchronize()
