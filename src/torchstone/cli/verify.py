"""``torchstone verify``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option


@click.command(
    "verify",
    epilog="Example: torchstone verify examples/minilm --recipe 'aotinductor + precision(bf16)'",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("workload", type=click.Path(path_type=Path))
@click.option("--recipe", "recipes", multiple=True, required=True, help="Recipe to judge; repeat.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@home_option
@json_option
def command(
    workload: Path, recipes: tuple[str, ...], seed: int, home: Path | None, as_json: bool
) -> int:
    """Build each recipe for WORKLOAD and judge it against the float64 reference; time nothing.

    Exit code 0: all are Verified. 1: one is not. 3: an engine is not installed.
    """
    from torchstone.cli.ask import ask
    from torchstone.records import Unsupported, VerdictEntry, Verified

    outcome = ask(workload, recipes, home=home_of(home), seed=seed, until="verify", quiet=as_json)
    verdicts = [outcome.store.get(f"verdict/{text}", VerdictEntry) for text in outcome.asked(recipes)]
    entries = [v for v in verdicts if v is not None]
    if as_json:
        answer_json(entries)
    else:
        from rich.console import Console

        from torchstone.report import terminal

        terminal.render(outcome.collected(), Console())
    if all(isinstance(e.verdict, Verified) for e in entries):
        return 0
    absent = all(isinstance(e.verdict, Verified) or _not_installed(e.verdict) for e in entries)
    return 3 if absent and any(isinstance(e.verdict, Unsupported) for e in entries) else 1


def _not_installed(verdict: object) -> bool:
    from torchstone.records import Unsupported

    return isinstance(verdict, Unsupported) and verdict.hint is not None
