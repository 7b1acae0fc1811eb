"""``torchstone report``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option


@click.command(
    "report",
    epilog="Example: torchstone report latest --html out/report.html",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("run", default="latest")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page here.")
@home_option
@json_option
def command(run: str, html: Path | None, home: Path | None, as_json: bool) -> int:
    """Show RUN: its folder, its id or the start of it, or 'latest'. Works on a partial run too."""
    from torchstone import run as run_module
    from torchstone import store

    outcome = run_module.Run(store.find(home_of(home), run))
    collected = outcome.collected()
    if html is not None:
        from torchstone.report import html as page

        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page.render(collected), encoding="utf-8")
    if as_json:
        answer_json(collected)
    else:
        from rich.console import Console

        from torchstone.report import terminal

        terminal.render(collected, Console())
        click.echo(f"report  {html or outcome.report()}")
    for problem in outcome.store.problems:
        click.echo(f"damaged: {problem}", err=True)
    return 0
