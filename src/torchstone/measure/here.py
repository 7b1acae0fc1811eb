"""Proves and times in this process, on copies of a call's own arguments; a crash is not survived."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from torchstone.bench.timer import Flusher, Timed
from torchstone.errors import InputError
from torchstone.measure import prove
from torchstone.measure.prove import Proof, Prover
from torchstone.records.tuning import Config, Measurement, MeasurePolicy
from torchstone.tuner.search.base import Proposal
from torchstone.tuner.space import Space, key_of
from torchstone.tuner.tunable import Tunable
from torchstone.verify import drive, tensors

__all__ = ["HereMeasurer", "Trial"]

_Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A function that writes to its arguments, and one call of it."""

    build: Callable[[Config], _Call]
    space: Space
    inputs: tuple[Any, ...]
    """The arguments: never written to."""
    names: Sequence[str]
    """Of the arguments."""
    kept: frozenset[str] = frozenset()
    """Arguments whose values before the call matter, if it writes to them."""
    outputs: Sequence[str] = ()
    """Arguments that it writes to, if that is known."""
    reference: Callable[[Sequence[str]], _Call] | None = None
    """Given the names of the outputs, a function that does the same; None: the first config is right."""
    refuses: tuple[type[Exception], ...] = ()
    """What is raised where a config cannot be built."""
    verify: bool = True
    """Whether configs are proved."""


class HereMeasurer:
    """A :class:`~torchstone.tuner.driver.Measurer` of a trial.

    :raises Exception: what the first config raises, if none can be built.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial, self._policy, self._started = trial, MeasurePolicy(), time.monotonic()
        where = next((v.device for v in trial.inputs if isinstance(v, torch.Tensor) and v.is_cuda), None)
        self._flusher = None if where is None else Flusher(where)
        self.why = "no config was tried"
        """What was wrong with the latest that was not right."""
        self._first = trial.inputs
        self.default, call = self._first_that_runs()
        self._prover = self._prover_by(call) if trial.verify else None
        self.written = [i for i, v in enumerate(self._first) if isinstance(v, torch.Tensor)]
        """Places of what is written, or may be."""
        if self._prover is not None:
            self._first = self._prover.first.inputs
            self.written = sorted({*self._prover.first.mutated, *self._prover.second.mutated})
        self._given = tensors.copies(self._first)

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    def measure(self, proposals: Sequence[Proposal], best_s: float | None) -> Iterator[Measurement]:
        """Measure each config once, in order."""
        for proposal in proposals:
            found = self.one(proposal.config, best_s)
            yield msgspec.structs.replace(found, proposer=proposal.by)
            if found.time is not None:
                best_s = min(found.time, best_s or found.time)

    def one(self, config: Config, best_s: float | None = None) -> Measurement:
        """Prove a config, time it, and look at what its last call gave.

        :raises InputError: where the config leaves the device unusable.
        """
        began = time.monotonic()
        made = Measurement(config=config, status="invalid")
        try:
            proof, seconds, dropped = self._measured(self._trial.build(config), best_s)
        except self._trial.refuses as error:
            made = msgspec.structs.replace(made, text=_sentence(error))
        except RuntimeError as error:
            self._check(config, error)
            made = msgspec.structs.replace(made, status="crashed", text=_sentence(error))
        else:
            made = Measurement(
                config=config,
                status=proof.status or ("dropped" if dropped else "timed"),
                seconds=() if proof.status else tuple(seconds),
                relative=proof.relative,
                text=re.sub(r"input\[(\d+)\]", lambda m: self._trial.names[int(m[1])], proof.text),
            )
        self.why = made.text or self.why
        return msgspec.structs.replace(made, measure_s=time.monotonic() - began)

    def _measured(self, call: _Call, best_s: float | None) -> tuple[Proof, list[float], bool]:
        policy, prover = self._policy, self._prover
        proof = Proof() if prover is None else prover.prove(call)
        if proof.status is not None:
            return proof, [], False
        given = self._given = prove.put(self._given, self._first)

        def reset() -> None:
            for i in self.written:
                given[i].copy_(self._first[i])

        timed = Timed(call, given, reset, self._flusher)
        seconds = timed.samples(policy.race, policy.flush)
        dropped = best_s is not None and min(seconds) > policy.race_factor * best_s
        if not dropped:
            seconds += timed.samples(policy.samples - policy.race, policy.flush)
        if prover is not None:
            proof = proof.also(prover.first.judged(prover.held, (), given))
        return proof, seconds, dropped

    def _first_that_runs(self) -> tuple[Config, _Call]:
        trial, failed = self._trial, Exception("no config")
        default = trial.space.default()
        for config in (default, *(c for c in trial.space.all or () if c != default)):
            call = trial.build(config)
            try:
                call(*tensors.copies(self._first))
                return config, call
            except trial.refuses as error:
                failed = error
        raise failed

    def _prover_by(self, call: _Call) -> Prover:
        """Learn what is written, and what is right: here, and with the same values in other places."""
        trial, first = self._trial, self._first
        second = _moved(first)
        named = [trial.names.index(n) for n in trial.outputs]
        asked = [i for i in named or range(len(first)) if trial.names[i] not in trial.kept]
        blank = _only_written(call, first, asked)
        places = named or sorted({*blank, *_written(call, first), *_written(call, second)})
        sets = [_blanked(inputs, blank) for inputs in (first, second)]
        held = Tunable(
            name="",
            build=lambda _: call,
            space=trial.space,
            inputs=lambda seed: sets[seed],
            reference=trial.reference and trial.reference([trial.names[i] for i in places]),
        )
        return Prover(held, *(prove.truth(held, case) for case in prove.searched(held)))

    def _check(self, config: Config, error: RuntimeError) -> None:
        if self._flusher is None:
            return
        try:
            torch.cuda.synchronize()
            self._flusher()
            torch.cuda.synchronize()
        except RuntimeError:
            what = f"config {key_of(config)} has left the device unusable for this process: {error}"
            hint = "leave it out, or tune in other processes: isolate=True"
            raise InputError(what, hint=hint) from error


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _written(call: _Call, inputs: tuple[Any, ...]) -> set[int]:
    given = tensors.copies(inputs)
    call(*given)
    pairs = enumerate(zip(given, inputs, strict=True))
    return {i for i, (a, b) in pairs if isinstance(a, torch.Tensor) and not drive.same(a, b)}


def _only_written(call: _Call, inputs: tuple[Any, ...], asked: Sequence[int]) -> dict[int, torch.Tensor]:
    """Of those tensors the elements that are written, and not from what was there before.

    NaN there does not stay, nor come out. Integers are not asked, for they may be places, or locks.
    """
    plain, found = tensors.copies(inputs), {}
    call(*plain)
    for i in asked:
        if isinstance(inputs[i], torch.Tensor) and inputs[i].is_floating_point():
            blank = tensors.copies(inputs)
            blank[i].fill_(float("nan"))
            call(*blank)
            elements = ~blank[i].isnan()
            if elements.any():
                found[i] = elements | plain[i].isnan()
    return found


def _blanked(inputs: tuple[Any, ...], where: dict[int, torch.Tensor]) -> tuple[Any, ...]:
    """The inputs with NaN there: what a config leaves unwritten shows."""
    made = tensors.copies(inputs)
    for i, elements in where.items():
        made[i].copy_(torch.where(elements, torch.full_like(made[i], float("nan")), made[i]))
    return made


def _moved(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same floats in other places; integers may be places themselves, and stay."""
    made = tensors.copies(inputs)
    for i, (old, new) in enumerate(zip(inputs, made, strict=True)):
        if isinstance(new, torch.Tensor) and new.is_floating_point() and 0 not in old.stride():
            by = (
                1 + old.numel() * (i % 5 + 1) // 7
            )  # by one step for all, elementwise results stay right
            new.copy_(old.flatten().roll(by).view(old.shape))
    return made
