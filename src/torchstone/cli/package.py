"""``torchstone package``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option


@click.command(
    "package",
    epilog="Example: torchstone package latest --output bundles/minilm",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("run", default="latest")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@home_option
@json_option
def command(run: str, output: Path, home: Path | None, as_json: bool) -> int:
    """Write the bundle of RUN: code, weights, manifest, envelope, evidence and the tested fallback.

    Exit code 1: the run has no decision to ship yet, or was held.
    """
    from torchstone import run as run_module
    from torchstone import store

    outcome = run_module.Run(store.find(home_of(home), run))
    if outcome.decision is None or outcome.decision.kind == "HOLD":
        state = "is not finished" if outcome.decision is None else "was held"
        raise click.exceptions.Exit(_refuse(f"nothing to ship: the run {state}", as_json))
    why = outcome.packable
    if why is not None:
        raise click.exceptions.Exit(_refuse(f"no bundle: {why}", as_json))
    path = outcome.package(output)
    if as_json:
        answer_json(outcome.summary(None, path))
    else:
        click.echo(f"bundle  {path}  ({outcome.decision.recipe})")
    return 0


def _refuse(text: str, as_json: bool) -> int:
    if as_json:
        answer_json({"error": text})
    else:
        click.echo(text, err=True)
    return 1
