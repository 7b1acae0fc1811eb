"""A run while it is going on: live on a terminal, plain lines elsewhere, or nothing.

Both classes fit the ``Progress`` protocol that the stages speak to. All methods may be called from any
thread, and ``done`` any number of times.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torchstone.report import format as fmt

__all__ = ["LiveProgress", "QuietProgress"]


class QuietProgress:
    """Says nothing."""

    def stage(self, name: str, total: int | None, limit_s: float | None) -> None:
        """A stage begins."""

    def step(self, text: str) -> None:
        """A step begins."""

    def advance(self, n: int = 1) -> None:
        """Steps are done."""

    def note(self, text: str) -> None:
        """A result."""

    def done(self) -> None:
        """The run is over."""


class _Stage:
    """One stage as it is shown; written under the lock of its :class:`LiveProgress`."""

    def __init__(self, name: str, total: int | None, limit_s: float | None, now: float) -> None:
        self.name = name
        self.total = total
        self.limit_s = limit_s
        self.started = now
        self.ended: float | None = None
        self.count = 0
        self.step = ""
        self.step_started = now

    def counted(self) -> str:
        """``3/12``, or how many where the total is not known."""
        return f"{self.count}/{self.total}" if self.total is not None else str(self.count or "")

    def timing(self, now: float) -> str:
        """``1 min 04 s of at most 30 min``; only the time it took once it is over."""
        taken = fmt.duration((now if self.ended is None else self.ended) - self.started)
        if self.ended is not None or self.limit_s is None:
            return taken
        return f"{taken} of at most {fmt.duration(self.limit_s)}"


class LiveProgress:
    """Stages as a ladder that stays in place while results scroll past above it.

    Where the console is no terminal, every stage, step and result is one plain line.

    :param console: where to; standard error if not given, so that a pipe gets the answer alone.
    :param clock: monotonic seconds.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._clock = clock
        self._lock = threading.RLock()
        self._stages: list[_Stage] = []
        self._live: Live | None = None

    def stage(self, name: str, total: int | None, limit_s: float | None) -> None:
        """A stage begins, and the one before is over.

        :param total: its number of steps, if known.
        :param limit_s: an upper bound of its seconds, if known.
        """
        with self._lock:
            self._end_stage()
            self._stages.append(_Stage(fmt.clean(name), total, limit_s, self._clock()))
            if self._console.is_terminal:
                self._start()
            else:
                steps = "" if total is None else f", {total} steps"
                limit = "" if limit_s is None else f", at most {fmt.duration(limit_s)}"
                self._line(f"{name}{steps}{limit}")

    def step(self, text: str) -> None:
        """A step of the stage begins."""
        with self._lock:
            stage = self._current()
            stage.step, stage.step_started = fmt.clean(text), self._clock()
            if not self._console.is_terminal:
                place = (
                    "" if stage.total is None else f"{min(stage.count + 1, stage.total)}/{stage.total} "
                )
                self._line(f"  {place}{text}")
            elif self._live is not None:
                self._live.refresh()

    def advance(self, n: int = 1) -> None:
        """``n`` steps of the stage are done."""
        with self._lock:
            self._current().count += n

    def note(self, text: str) -> None:
        """A result or a remark, on a line of its own that stays."""
        with self._lock:
            self._line(text if self._console.is_terminal else f"  {text}")

    def done(self) -> None:
        """The run is over or was interrupted: leave the ladder as it stands and restore the terminal."""
        with self._lock:
            self._end_stage()
            if self._live is not None:
                self._live.stop()
                self._live = None
                self._stages = []
                atexit.unregister(self.done)

    def _current(self) -> _Stage:
        if not self._stages:
            self.stage("run", None, None)
        return self._stages[-1]

    def _end_stage(self) -> None:
        if self._stages and self._stages[-1].ended is None:
            self._stages[-1].ended = self._clock()

    def _start(self) -> None:
        if self._live is None:
            # an exception that skips done() must not leave the cursor hidden
            atexit.register(self.done)
            self._live = Live(
                console=self._console, get_renderable=self._ladder, refresh_per_second=4, transient=False
            )
            self._live.start()
        self._live.refresh()

    def _line(self, text: str) -> None:
        self._console.print(
            Text(fmt.clean(text), overflow="fold"), soft_wrap=not self._console.is_terminal
        )

    def _ladder(self) -> RenderableType:
        # called with the display's own lock held: taking ours here would order the two both ways
        stages, now = tuple(self._stages), self._clock()
        grid = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(4):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        for stage in stages:
            grid.add_row(*_row(stage, now))
        if not stages or stages[-1].ended is not None or not stages[-1].step:
            return grid
        running = fmt.duration(now - stages[-1].step_started)
        step = Text(f"  {stages[-1].step}  {running}", style="dim", no_wrap=True, overflow="ellipsis")
        return Group(grid, step)


def _row(stage: _Stage, now: float) -> tuple[RenderableType, ...]:
    over = stage.ended is not None
    bar: RenderableType = Text("")
    if not over and stage.total:
        bar = ProgressBar(total=stage.total, completed=min(stage.count, stage.total), width=16)
    return (
        Text(stage.name, style="dim" if over else "bold"),
        Text(stage.counted(), style="dim" if over else ""),
        bar,
        Text(stage.timing(now), style="dim"),
    )
