"""What ``verify`` and ``bench`` have in common: a run of a few recipes that stops early."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torchstone import recipe as recipes_module
from torchstone import run as run_module
from torchstone import workload as workload_module
from torchstone.report.progress import LiveProgress, QuietProgress

__all__ = ["ask"]


def ask(  # noqa: PLR0913  what two commands share of their options
    workload: Path,
    recipes: tuple[str, ...],
    *,
    home: Path,
    seed: int,
    until: Literal["verify", "bench"],
    quiet: bool,
) -> run_module.Run:
    """Run these recipes, and the baseline, up to a stage."""
    request = run_module.Request(
        workload=workload_module.read(workload),
        recipes=tuple(recipes_module.parse(text) for text in recipes),
        home=home,
        seed=seed,
        until=until,
    )
    return run_module.execute(request, QuietProgress() if quiet else LiveProgress())
