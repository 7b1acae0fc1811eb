"""What measuring runs in workers; each public function is a job. What configs raise is not caught."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchstone.bench import roofline
from torchstone.bench.timer import Flusher, Timed
from torchstone.compat import triton
from torchstone.measure import device, prove
from torchstone.measure.prove import Proof, Prover
from torchstone.records import Case
from torchstone.records.inventory import Peaks
from torchstone.records.tuning import Config, Measurement, MeasurePolicy
from torchstone.tuner.tunable import Tunable
from torchstone.verify import tensors

__all__ = [
    "Built",
    "Described",
    "begin",
    "build",
    "describe",
    "enter",
    "healthy",
    "hold_out",
    "leave",
    "measure",
    "sample",
]

State = dict[str, Any]
_KEPT_BYTES = 1 << 28  # larger truths are made as quickly as they are read
_TRESPASS = "it changes memory that is not its own"


class Built(NamedTuple):
    """What a build gave, beside the function."""

    seconds: float
    facts: dict[str, float]


class Described(NamedTuple):
    """Where a tunable runs, and on what."""

    signature: tuple[str, ...]
    """One an input: dtype, shape, strides, whether its address is a multiple of 16; or its type."""
    device: dict[str, float]
    """Figures of the device; none on a CPU."""
    dtype: str
    """Of the first floating-point input."""
    peaks: Peaks | None
    """What the device does at best; measured where the tunable says how much work it is."""

    def floor(self, tunable: Tunable, sizes: Mapping[str, int]) -> float | None:
        """Seconds below which no config can be at these sizes, if that is known."""
        if self.peaks is None or tunable.work is None:
            return None
        bytes_, flops = tunable.work(**sizes)
        return roofline.least_s(self.peaks, flops, bytes_, self.dtype)


def begin(state: State, tunable: str, truths: str | None) -> None:
    """Load a tunable; where configs will be run, its truths too: from their file if that is there."""
    held: Tunable = pickle.loads(Path(tunable).read_bytes())
    state.update(tunable=held, calls={}, entered={}, held_out={})
    if truths is None:
        state["inputs"] = held.inputs(0, **held.sizes)
        return
    path = Path(truths)
    if path.exists():
        known = torch.load(path, weights_only=False)  # another worker of this measurer wrote it
    else:
        known = [prove.truth(held, case) for case in prove.searched(held)]
        if sum(value.nbytes for one in known for value in one.tensors) <= _KEPT_BYTES:
            torch.save(known, path)
    state["prover"] = prover = Prover(held, *known)
    state.update(inputs=known[0].inputs, digest=prover.digest())


def describe(state: State) -> Described:
    """Where the inputs are, and what that device can do."""
    where = _device(state)
    given = [v for v in state["inputs"] if isinstance(v, torch.Tensor)]
    dtype = next(
        (str(v.dtype).removeprefix("torch.") for v in given if v.is_floating_point()), "float32"
    )
    peaks = roofline.measure(where, [dtype]) if state["tunable"].work is not None else None
    signature = tuple(_signature(value) for value in state["inputs"])
    return Described(signature, device.facts() if where.type == "cuda" else {}, dtype, peaks)


def build(state: State, config: Config, slot: str = "") -> Built:
    """Build a config; what Triton would compile at the first launch is compiled, nothing is launched."""
    started = time.perf_counter()
    call = state["calls"][slot] = state["tunable"].build(dict(config))
    facts: dict[str, float] = {}
    if triton.serves(_device(state).type):
        with triton.compiling() as kernels:
            # who builds ahead only needs their shapes; a copy would be made beside what is being timed
            call(*(tensors.copies(state["inputs"]) if "prover" in state else state["inputs"]))
        facts = triton.facts(kernels)
    return Built(time.perf_counter() - started, facts)


def healthy(state: State) -> bool:
    """Whether the device still computes, and nobody has written to what only we write to."""
    count = torch.arange(1025, device=_device(state)).sum()
    return int(count) == 1024 * 1025 // 2 and _intact(state)


def measure(state: State, config: Config, policy: MeasurePolicy, best_s: float | None) -> Measurement:
    """Prove the config built last, time it, prove it again."""
    began = time.perf_counter()
    call, prover = state["calls"][""], state["prover"]
    proof, seconds, dropped = prover.prove(call), [], False
    if proof.status is None:
        timed = _timed(state, call)
        room = (policy.call_s / 2 - (time.perf_counter() - began)) / timed.seconds
        seconds = timed.samples(policy.race, policy.flush)
        dropped = best_s is not None and min(seconds) > policy.race_factor * best_s
        more = min(policy.samples, int(room)) - policy.race
        if not dropped and more > 0:
            seconds += timed.samples(more, policy.flush)
        proof = prover.again(call, timed.given, proof._replace(live=timed.last))
    proof = _told(state, proof)
    right = proof.status is None
    return Measurement(
        config=config,
        status=proof.status or ("dropped" if dropped else "timed"),
        seconds=tuple(seconds) if right else (),
        relative=proof.relative,
        text=proof.text,
        facts={"deterministic": float(proof.deterministic)} if right else {},
    )


def hold_out(state: State, cases: tuple[Case, ...], slot: str) -> Proof:
    """Prove a config as a search does, then on cases held out; these are made once in a process."""
    call, prover, known = state["calls"][slot], state["prover"], state["held_out"]
    proof = prover.prove(call)
    for case in cases:
        if proof.status is None:
            known[case.name] = known.get(case.name) or prove.truth(state["tunable"], case)
            proof = prover.on(call, known[case.name], proof)
    return _told(state, proof)


def enter(state: State, slot: str) -> None:
    """Warm a config up for :func:`sample`."""
    state["entered"][slot] = _timed(state, state["calls"][slot])


def sample(state: State, slot: str, flush: bool) -> float:
    """Seconds of one call of a config that has entered."""
    return float(state["entered"][slot].samples(1, flush)[0])


def leave(state: State, slot: str) -> Proof:
    """Prove a config that has entered once more, after its last sample."""
    timed = state["entered"].pop(slot)
    return _told(state, state["prover"].again(timed.call, timed.given, Proof(live=timed.last)))


def _told(state: State, proof: Proof) -> Proof:
    return proof._replace(live=()) if _intact(state) else proof.wrong(_TRESPASS)


def _timed(state: State, call: Any) -> Timed:
    """All configs are timed on the same inputs in the same place."""
    first, where = state["prover"].first, _device(state)
    if "given" not in state:
        state["given"] = tensors.copies(first.inputs)
        state["flusher"] = Flusher(where) if where.type == "cuda" else None
    # whatever an earlier one left there
    given = state["given"] = prove.put(state["given"], first.inputs)

    def reset() -> None:
        for i in first.mutated:
            given[i].copy_(first.inputs[i])

    return Timed(call, given, reset if first.mutated else None, state["flusher"])


def _intact(state: State) -> bool:
    return "prover" not in state or state["prover"].digest() == state["digest"]


def _device(state: State) -> torch.device:
    found = [value.device for value in state["inputs"] if isinstance(value, torch.Tensor)]
    return found[0] if found else torch.device("cpu")


def _signature(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    aligned = "" if value.data_ptr() % 16 == 0 else " unaligned"
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}{aligned}".removeprefix("torch.")
