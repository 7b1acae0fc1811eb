"""``torchstone explain``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, json_option

__all__ = ["command"]


@click.command(
    "explain",
    epilog="Example: torchstone explain examples/minilm --families pooling.folding",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("workload", type=click.Path(path_type=Path))
@click.option("--families", default="all", show_default=True, help="Families of rules, joined by a dot.")
@json_option
def command(workload: Path, families: str, as_json: bool) -> int:
    """Say which rewrites fire on the program of WORKLOAD, which do not, and why.

    Nothing is compiled or proved here; `torchstone run` tries the rewritten program and proves it.
    """
    from torchstone import explain
    from torchstone import workload as workload_module
    from torchstone.report import rewrites as report

    found = explain.explain(workload_module.read(workload), families)
    if as_json:
        answer_json(found)
    else:
        from rich.console import Console

        report.render(found, Console())
    return 0
