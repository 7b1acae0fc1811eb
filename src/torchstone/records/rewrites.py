"""What rewriting a program came to: which rules fired where, and which were declined."""

from __future__ import annotations

from typing import Literal

from torchstone.records.base import Record

__all__ = ["Declined", "Explanation", "Firing", "Rewrites"]


class Firing(Record, frozen=True, kw_only=True):
    """A rule that was applied at one place."""

    rule: str
    """Its name."""
    family: str
    """Its family."""
    numerics: Literal["exact", "reassociates", "lossy"]
    """Its numerics class."""
    at: tuple[str, ...]
    """Nodes that it replaced, in the order that they ran."""
    source: str = ""
    """Line of the user's code that the last of them comes from, as ``file.py:12``."""
    before_s: float
    """Seconds of what was replaced: an estimate, or measured."""
    after_s: float
    """Seconds of what came in its place."""
    measured: bool = False
    """Whether both were measured."""


class Declined(Record, frozen=True, kw_only=True):
    """A rule that matched and was not applied."""

    rule: str
    """Its name."""
    at: str
    """The node whose result it would have replaced."""
    why: str
    """One sentence without a full stop."""


class Rewrites(Record, frozen=True, kw_only=True):
    """The firing log of one program."""

    fired: tuple[Firing, ...] = ()
    """What was applied, in order."""
    declined: tuple[Declined, ...] = ()
    """What was not."""
    folded: int = 0
    """Constants that were computed ahead of time."""
    program_s: float = 0.0
    """Seconds of the program as it was, an estimate."""

    @property
    def saved(self) -> float:
        """Share of the program's seconds that the rewrites save; 0 where nothing is known of it."""
        won = sum(one.before_s - one.after_s for one in self.fired)
        return won / self.program_s if self.program_s > 0 else 0.0


class Explanation(Record, frozen=True, kw_only=True):
    """What rewriting would do to a workload's program."""

    workload: str
    """Its name."""
    recipe: str
    """Text form of the rewrite step."""
    refused: str | None = None
    """Why there is no program to rewrite; None where there is one."""
    nodes: tuple[int, int] = (0, 0)
    """Operations in the program before and after."""
    rewrites: Rewrites = Rewrites()
    """The firing log."""
