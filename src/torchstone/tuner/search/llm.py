"""Proposals of a language model, mixed with those of another searcher.

An answer is data: a JSON list of configs, each read by :meth:`~torchstone.tuner.space.Space.read`,
measured and proved like any other. An endpoint that fails costs proposals, never a search.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchstone.errors import InputError
from torchstone.llm import Proposer, one_line
from torchstone.records.tuning import Config, Measurement
from torchstone.tuner.search.base import AnySearcher, Problem, Proposal, Seen, Stop
from torchstone.tuner.search.random import opening
from torchstone.tuner.space import Only, Space, key_of

__all__ = ["LLM", "LLMState"]

_SHOWN = 24
_SILENT = 2


@dataclass(frozen=True)
class LLMState:
    """What was proposed by both, and how the model fares."""

    problem: Problem
    seen: Seen
    inner: Any
    """The other searcher's state."""
    calls: int = 0
    """How often the model was asked."""
    silent: int = 0
    """How often in a row it had no answer."""
    refused: tuple[str, ...] = ()
    """Why configs that it proposed were not valid: one sentence each."""


@dataclass(frozen=True)
class LLM:
    """The first batch from a language model, a share of the next few; the rest from another searcher.

    :param about: what is tuned, in words, where the problem does not say it: the kernel's source.
    :param calls: how many batches the model takes part in; after two without an answer it is given up.
    :param share: its share of a batch that is not the first.
    """

    proposer: Proposer
    inner: AnySearcher
    about: str = ""
    calls: int = 4
    share: float = 0.5
    name: str = "llm"

    def init(self, problem: Problem, seed: int) -> LLMState:
        """The first state."""
        return LLMState(problem, Seen(seed), self.inner.init(problem, seed))

    def ask(self, state: LLMState, count: int) -> tuple[tuple[Proposal, ...], LLMState]:
        """What the model proposes, then what the other searcher does."""
        made = opening(state.problem.space, state.seen)[:count]
        taken = set(state.seen.keys) | {key_of(p.config) for p in made}
        room = count - len(made)
        if room and state.calls < self.calls and state.silent < _SILENT:
            wanted = room if state.calls == 0 else max(1, int(room * self.share))
            answer = self.proposer.propose(_prompt(state, wanted, self.about or state.problem.about))
            configs, refused = _parsed(answer, state.problem.space, 4 * wanted)
            fresh = {key_of(c): c for c in configs if key_of(c) not in taken}
            made += [Proposal(c, self.name) for c in list(fresh.values())[:wanted]]
            taken |= {key_of(p.config) for p in made}
            silent = 0 if answer else state.silent + 1
            refused = (*state.refused, *refused)
            state = replace(state, calls=state.calls + 1, silent=silent, refused=refused)
        inner = state.inner
        while len(made) < count:
            more, inner = self.inner.ask(inner, count - len(made))
            if not more:
                break
            made += [p for p in more if key_of(p.config) not in taken]
        return tuple(made), replace(state, seen=state.seen.after(made), inner=inner)

    def tell(self, state: LLMState, found: Sequence[Measurement]) -> LLMState:
        """Tells the other searcher too."""
        return replace(state, seen=state.seen.hearing(found), inner=self.inner.tell(state.inner, found))

    def done(self, state: LLMState) -> Stop | None:
        """When the other searcher has had enough."""
        return self.inner.done(state.inner)


def _parsed(answer: str, space: Space, limit: int) -> tuple[list[Config], tuple[str, ...]]:
    """Valid configs of the last JSON list of objects, and why the others are not; ``limit`` are read."""
    listed: list[Any] = []
    for match in list(re.finditer(r"\[\s*\{", answer))[-8:]:
        try:
            listed = json.JSONDecoder().raw_decode(answer, match.start())[0]
        except (ValueError, RecursionError):  # no JSON, or deeper than any config
            continue
    configs, refused = [], []
    for one in listed[:limit]:
        try:
            configs.append(space.read(one if isinstance(one, dict) else {}))
        except (InputError, RecursionError) as error:
            refused.append(one_line(getattr(error, "what", "nested too deep")))
    return configs, tuple(refused)


def _prompt(state: LLMState, wanted: int, about: str) -> str:
    """What the model is asked: the space, the sizes and the device, what was measured."""
    problem, told = state.problem, state.seen.told
    timed = sorted((m for m in told if m.time is not None), key=lambda m: m.time or 0.0)
    failed = [m for m in told if m.time is None]
    rows = [f"{(m.time or 0.0) * 1e6:.4g} us {key_of(m.config)}" for m in timed]
    floor = [f"{problem.floor_s * 1e6:.4g} us"] if problem.floor_s else []
    features = [json.dumps(dict(problem.features))] if problem.features else []
    parts: dict[str, Sequence[str]] = {
        "Kernel:": [about] if about else [],
        "Knobs:": [_knob(problem.space, name) for name in problem.space.knobs],
        "Rules:": [one_line(c.__doc__) for c in problem.space.valid if c.__doc__],
        "Sizes and device:": features,
        "No config can take less than:": floor,
        "Default:": [key_of(problem.space.default())],
        f"Quickest of {len(timed)}:": rows[:8],
        "Slowest:": rows[8:][-3:],
        f"Last of {len(failed)} that failed:": [
            f"{m.status} {key_of(m.config)} {one_line(m.text)}" for m in failed[-5:]
        ],
        "Proposed, but not valid:": state.refused[-5:],
    }
    text = "\n".join("\n".join([title, *lines]) for title, lines in parts.items() if lines)
    return (
        f"Tune a kernel: find the config that takes the least time.\n{text}\n"
        f"Answer with a JSON list of {wanted} new configs, best first, each an object with all knobs."
    )


def _knob(space: Space, name: str) -> str:
    knob, values = space.knobs[name], space.knobs[name].values
    last = f" and so on to {json.dumps(values[-1])}" if len(values) > _SHOWN else ""
    only = f", if {knob.on} is among {json.dumps(knob.among)}" if isinstance(knob, Only) else ""
    return f"{json.dumps(name)}: one of {json.dumps(values[:_SHOWN])}{last}{only}"
