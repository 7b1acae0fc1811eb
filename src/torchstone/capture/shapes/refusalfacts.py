"""What an error of torch carries: its text, the user's line, and the sizes behind torch's symbols."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torchstone.compat import shapes
from torchstone.compat.sizenames import Names
from torchstone.records import Axis, Refusal, RefusalCode, SourceLine

__all__ = ["Facts", "Make", "listed"]


@dataclass(frozen=True)
class Facts:
    """An error and all that helps to understand it."""

    error: BaseException
    """The error, as caught."""
    names: Names
    """Translates names of sizes."""
    seen: shapes.Watch
    """Guards recorded while tracing."""

    @cached_property
    def where(self) -> SourceLine | None:
        """The user's line at fault, as far as the error itself tells."""
        return shapes.user_line(self.error)

    @cached_property
    def traced(self) -> SourceLine | None:
        """The line that Dynamo was at, if it was Dynamo that raised."""
        return shapes.line_traced(self.error)

    @cached_property
    def sources(self) -> dict[str, str]:
        """Symbols to sizes: the watched trace's, and the one's that raised."""
        known = {k: v for guard in self.seen.guards for k, v in guard.sources.items() if v}
        return known | self.seen.marked | shapes.symbol_sources(self.error)

    @cached_property
    def raw(self) -> str:
        """Type and first line of the error."""
        lines = (" ".join(line.split()) for line in str(self.error).splitlines())
        first = next((line for line in lines if line), "")
        return f"{type(self.error).__name__}: {first}"[:400].rstrip(": ")

    def plain(self, expression: str) -> tuple[str, tuple[Axis, ...]]:
        """A condition in terms of dims, and the axes that it speaks of."""
        return self.names.plain(expression, self.sources)

    def line_of(self, axes: tuple[Axis, ...]) -> SourceLine | None:
        """The line of the latest recorded guard that speaks of exactly these axes."""
        wanted = set(axes)
        for guard in reversed(self.seen.guards):
            _, spoken = self.names.plain(guard.code, guard.sources)
            if set(spoken) == wanted and guard.where is not None:
                return guard.where
        return None

    def refusal(self, code: RefusalCode, text: str, fix: str, **more: object) -> Refusal:
        """A refusal with what is known of it anyway."""
        given: dict[str, object] = {"where": self.where, "raw": self.raw} | more
        return Refusal(code=code, text=text, fix=fix, **given)  # type: ignore[arg-type]


Make = Callable[[Facts, re.Match[str]], Refusal]
"""Makes a refusal of what a pattern found in a message."""


def listed(axes: tuple[Axis, ...], names: Names) -> str:
    """``B (axis 0 of x) and C (axis 0 of y)``."""
    return " and ".join(
        f"{axis.dim} (axis {axis.axis} of {axis.input})" if axis.dim else names.called(axis)
        for axis in axes
    )
