"""``torchstone diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchstone.cli.options import answer_json, json_option

if TYPE_CHECKING:
    from torchstone.records import Divergence


@click.command(
    "diff",
    epilog="Example: torchstone diff float64 'inductor(freezing)' --workload examples/minilm",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("a")
@click.argument("b")
@click.option("--workload", type=click.Path(path_type=Path), help="The model and its inputs.")
@click.option("--inputs", metavar="FILE.PY:FUNCTION", help="Makes inputs, where there is no workload.")
@click.option("--case", default="example", show_default=True, help="Verification case to compare on.")
@click.option("--save-trace", type=click.Path(dir_okay=False, path_type=Path), help="Write A's trace.")
@click.option(
    "--repro", type=click.Path(dir_okay=False, path_type=Path), help="Write a file that shows it alone."
)
@click.option("--limit", default=600.0, show_default=True, help="Seconds for all of it.")
@json_option
def command(  # noqa: PLR0913  a command's options are its parameters
    a: str,
    b: str,
    workload: Path | None,
    inputs: str | None,
    case: str,
    save_trace: Path | None,
    repro: Path | None,
    limit: float,
    as_json: bool,
) -> int:
    """Find the first operation where B is not what A is.

    A and B are each a recipe, 'float64' (the reference), a saved trace, or FILE.PY:FUNCTION (a function
    that makes a module). Engines are bisected: their parts are compiled and compared with float64.

    Exit code 0: no divergence beyond rounding. 1: there is one, or it could not be told.
    """
    from torchstone import diff as differ
    from torchstone import workload as workloads
    from torchstone.errors import InputError

    if workload is not None and inputs is not None:
        raise InputError("--workload and --inputs are both given", hint="leave one of them out")
    question = differ.Question(
        a=a,
        b=b,
        case=case,
        inputs=inputs,
        reproduction=None if repro is None else str(repro),
        save_trace=None if save_trace is None else str(save_trace),
        limit_s=limit,
    )
    found = differ.diff(question, None if workload is None else workloads.read(workload))
    if as_json:
        answer_json(found)
    else:
        _show(found)
    return 0 if found.kind == "NONE" else 1


def _show(found: Divergence) -> None:
    from rich.console import Console

    from torchstone.report import divergence

    divergence.render(found, Console())
