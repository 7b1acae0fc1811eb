"""What a problem's study may spend, and what was compiled before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchstone.kernelbench.jobs import Built
from torchstone.kernelbench.process import Failed

__all__ = ["Ahead", "Policy"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits and numbers of samples."""

    build_s: float = 300.0
    """Limit of building one column."""
    begin_s: float = 300.0
    """Limit of loading a problem."""
    call_s: float = 120.0
    """Limit of one trial of one column, or of one sample."""
    race: int = 5
    """Rounds of the race."""
    rounds: int = 20
    """Final rounds."""
    fewest: int = 7
    """Final rounds that are made whatever they cost."""
    seconds: float = 4.0
    """Seconds of final rounds after which no other begins."""


@dataclass(frozen=True)
class Ahead:
    """What compiling a problem's columns ahead gave."""

    built: dict[str, Built | Failed] = field(default_factory=dict)
    """By column."""
    failed: Failed | None = None
    """Why the problem cannot be loaded, if so."""
