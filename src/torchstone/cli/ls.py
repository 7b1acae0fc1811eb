"""``torchstone ls``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from torchstone.cli.options import answer_json, home_of, home_option, json_option


class Line(msgspec.Struct, frozen=True):
    """One run."""

    run: str
    """Its id."""
    started_at: str
    """UTC, ISO 8601."""
    state: str
    """PROMOTE, KEEP_BASELINE, HOLD, partial or running."""
    recipe: str | None
    """What was decided on."""
    entries: int
    """Number of entries."""


@click.command(
    "ls",
    epilog="Example: torchstone ls --json",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@home_option
@json_option
def command(home: Path | None, as_json: bool) -> int:
    """List the runs, oldest first."""
    from torchstone import store
    from torchstone.records import Decision

    runs, problems = store.listing(home_of(home))
    lines = []
    for run in runs:
        entries = run.entries
        decision = next((e for e in reversed(entries) if isinstance(e, Decision)), None)
        state = decision.kind if decision else "running" if run.in_use else "partial"
        recipe = decision.recipe if decision else None
        lines.append(Line(run.run_id, run.header.started_at, state, recipe, len(entries)))
        problems += tuple(run.problems)
    if as_json:
        answer_json(lines)
    for line in () if as_json else lines:
        click.echo(f"{line.run:<52} {line.state:<14} {line.recipe or ''}")
    if not lines and not as_json:
        click.echo(f"no runs in {home_of(home)}; start one with: torchstone run WORKLOAD")
    for problem in problems:
        click.echo(f"damaged: {problem}", err=True)
    return 0
