"""Searchers, one a file; :data:`SEARCHERS` lists them, :func:`searcher_of` makes one by name."""

from __future__ import annotations

from collections.abc import Callable

from torchstone.errors import InputError
from torchstone.llm import from_settings
from torchstone.tuner.search.base import AnySearcher
from torchstone.tuner.search.evolution import Evolution
from torchstone.tuner.search.exhaustive import Exhaustive
from torchstone.tuner.search.guided import Guided
from torchstone.tuner.search.lfbo import LFBO
from torchstone.tuner.search.llm import LLM
from torchstone.tuner.search.pattern import Pattern
from torchstone.tuner.search.random import Random

__all__ = ["SEARCHERS", "searcher_of"]


def _llm() -> AnySearcher:
    proposer = from_settings()
    if proposer is None:
        raise InputError(
            "no endpoint for an LLM is set",
            hint="set TORCHSTONE_LLM_URL, TORCHSTONE_LLM_MODEL and, if it needs one, TORCHSTONE_LLM_KEY",
        )
    return LLM(proposer, Guided())


SEARCHERS: tuple[tuple[str, Callable[[], AnySearcher]], ...] = (
    ("guided", Guided),
    ("lfbo", LFBO),
    ("pattern", Pattern),
    ("evolution", Evolution),
    ("random", Random),
    ("exhaustive", Exhaustive),
    ("llm", _llm),
)
"""Every searcher by name, the default first."""


def searcher_of(name: str) -> AnySearcher:
    """A searcher with its default hyperparameters.

    :raises InputError: for an unknown name, or ``llm`` without an endpoint.
    """
    for known, make in SEARCHERS:
        if known == name:
            return make()
    raise InputError(f"no searcher {name!r}", hint=f"searchers are {', '.join(n for n, _ in SEARCHERS)}")
