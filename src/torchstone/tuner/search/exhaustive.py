"""Every config, in the order of the space, the default first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchstone.errors import InputError
from torchstone.records.tuning import Config
from torchstone.tuner.search.base import Problem, Proposal, Seen, Stop
from torchstone.tuner.search.random import Simple, State, opening
from torchstone.tuner.space import key_of

__all__ = ["Exhaustive", "ExhaustiveState"]


@dataclass(frozen=True)
class ExhaustiveState(State):
    """Where it is in the list."""

    configs: tuple[Config, ...] = ()
    """All of the space."""
    at: int = 0
    """The first that is neither proposed nor passed over."""


@dataclass(frozen=True)
class Exhaustive(Simple[ExhaustiveState]):
    """All configs, each once: how tables are made, and what small spaces deserve."""

    name: str = "exhaustive"

    def init(self, problem: Problem, seed: int) -> ExhaustiveState:
        """The first state.

        :raises InputError: where the space is too large to be listed.
        """
        if problem.space.all is None:
            raise InputError(
                f"a space of {problem.space.product} combinations is too large to try each config",
                hint="take another searcher, or narrow the space",
            )
        return ExhaustiveState(problem, Seen(seed), configs=problem.space.all)

    def ask(self, state: ExhaustiveState, count: int) -> tuple[tuple[Proposal, ...], ExhaustiveState]:
        """The next configs."""
        made = opening(state.problem.space, state.seen)[:count]
        taken = state.seen.keys | {key_of(p.config) for p in made}
        at = state.at
        while len(made) < count and at < len(state.configs):
            if key_of(state.configs[at]) not in taken:
                made.append(Proposal(dict(state.configs[at]), self.name))
            at += 1
        return tuple(made), replace(state, seen=state.seen.after(made), at=at)

    def done(self, state: ExhaustiveState) -> Stop | None:
        """When all were proposed."""
        if state.at < len(state.configs):
            return None
        return Stop("EXHAUSTED", f"all {len(state.configs)} configs were tried")
