"""What ``verify`` and ``bench`` have in common: a run of a few recipes that stops early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option

if TYPE_CHECKING:
    from torchstone.run import Run

__all__ = ["answer", "ask", "question"]

F = TypeVar("F", bound=Callable[..., Any])


def question(function: F) -> F:
    """WORKLOAD and the options of both commands, named as the parameters of :func:`ask`."""
    options = (
        click.argument("workload", type=click.Path(path_type=Path)),
        click.option("--recipe", "recipes", multiple=True, required=True, help="A recipe; repeat."),
        click.option("--seed", default=0, show_default=True, help="Seed of everything random."),
        home_option,
        json_option,
    )
    for option in reversed(options):
        function = option(function)
    return function


def ask(  # noqa: PLR0913  what two commands share of their options
    workload: Path,
    recipes: tuple[str, ...],
    *,
    home: Path | None,
    seed: int,
    until: Literal["verify", "bench"],
    as_json: bool,
) -> Run:
    """Run these recipes, and the baseline, up to a stage."""
    from torchstone import recipe as recipes_module
    from torchstone import run as run_module
    from torchstone import workload as workload_module
    from torchstone.report.progress import LiveProgress, QuietProgress

    request = run_module.Request(
        workload=workload_module.read(workload),
        recipes=tuple(recipes_module.parse(text) for text in recipes),
        home=home_of(home),
        seed=seed,
        until=until,
    )
    return run_module.execute(request, QuietProgress() if as_json else LiveProgress())


def answer(outcome: Run, found: Sequence[object], *, as_json: bool) -> None:
    """What was found as JSON, or all of the run as tables."""
    if as_json:
        answer_json(found)
        return
    from rich.console import Console

    from torchstone.report import terminal

    terminal.render(outcome.collected(), Console())
