"""``torchstone kernelbench``."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option
from torchstone.errors import InputError

if TYPE_CHECKING:
    from torchstone.kernelbench.run import Request, Watch
    from torchstone.kernelbench.suite import Selection
    from torchstone.records.kernelbench import BenchRun

_ALL, _CORE = "all", "core"


@click.command(
    "kernelbench",
    epilog="Example: torchstone kernelbench ~/KernelBench --problems 1/12,1/23 --columns core",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--levels", metavar="1,2,..", help="Levels to take.  [all that are there]")
@click.option("--problems", metavar="1/23,2/12,..", help="Problems to take, by level and number.")
@click.option(
    "--sample", is_flag=True, help="Only the fixed sample: 24, 24 and 12 of levels 1 to 3, by a hash."
)
@click.option(
    "--half",
    type=click.Choice(["even", "odd"]),
    help="Only even numbers (for development) or odd ones (for the final measurement).",
)
@click.option("--shard", metavar="I/N", default="1/1", help="Only the I-th of N parts of these.")
@click.option(
    "--columns",
    metavar=f"{_ALL}|{_CORE}|NAME,..",
    default=_ALL,
    show_default=True,
    help="Baselines beside eager and torch.compile; core: none.",
)
@click.option(
    "--candidates", metavar="MODULE:NAME", help="A tuple of candidates to run instead of ours."
)
@click.option("--device", help="cpu, cuda, cuda:1, ...  [cuda where there is one]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of parameters and floating-point inputs.",
)
@click.option(
    "--inputs-on",
    type=click.Choice(["cpu", "device"]),
    default="device",
    show_default=True,
    help="Whose generator draws inputs and weights; cpu gives the suite's very values, slowly.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that compile.  [cores - 3; CPU: 1]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the results.")
@click.option(
    "--resume",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a run to go on with; the same as --out, but it must be there.",
)
@click.option("--known", is_flag=True, help="Run nothing: report what --resume or --out holds so far.")
@click.option("--ci", is_flag=True, help="Tell of progress in plain lines, on a terminal too.")
@home_option
@json_option
def command(  # noqa: PLR0913  a command's options are its parameters
    path: Path,
    levels: str | None,
    problems: str | None,
    sample: bool,
    half: str | None,
    shard: str,
    columns: str,
    candidates: str | None,
    device: str | None,
    dtype: str,
    inputs_on: str,
    jobs: int | None,
    out: Path | None,
    resume: Path | None,
    known: bool,
    ci: bool,
    home: Path | None,
    as_json: bool,
) -> int:
    """Run the public KernelBench suite at PATH, a checkout of it: eager, torch.compile and ours.

    Every candidate is held against the suite's own comparison and against float64; the fastest that is
    proved and faster than torch.compile is ours, under each contract, else the baseline is kept. A
    result is written when it is known: the same command with the same --out, or --resume, goes on.

    Exit code 0: every problem is right, or keeps its baseline. 1: some problem cannot be run, or one
    promoted was found wrong. 2: bad input. 3: the environment lacks something.
    """
    from rich.console import Console

    from torchstone import env, settings
    from torchstone.kernelbench.jobs import Line
    from torchstone.kernelbench.load import Setup
    from torchstone.kernelbench.run import Request
    from torchstone.report import kernelbench as report

    if out is not None and resume is not None and out != resume:
        raise InputError("--out and --resume name two folders", hint="give one of them")
    where = device or ("cuda" if env.environment().devices else "cpu")
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    request = Request(
        path=path,
        out=resume or out or home_of(home) / "kernelbench" / stamp,
        home=home_of(home),
        selection=_selection(levels, problems, sample, half, shard),
        setup=Setup(device=where, dtype=dtype, inputs_on=where if inputs_on == "device" else "cpu"),
        line=Line(candidates=candidates) if candidates else Line(),
        columns={_ALL: (), _CORE: ("none",)}.get(columns, tuple(columns.split(","))),
        jobs=jobs,
        threads=settings.load().threads,
        command=" ".join(["torchstone", *sys.argv[1:]]),
    )
    told = Console(stderr=True, force_terminal=False if ci else None)
    record = _recorded(request, known, None if as_json else report.Progress(told))
    (request.out / "results.md").write_text(report.markdown(record), encoding="utf-8")
    if as_json:
        answer_json(record)
    else:
        report.render(record, Console(force_terminal=False if ci else None), request.out)
    return 0 if report.clean(record) else 1


def _recorded(request: Request, known: bool, progress: Watch | None) -> BenchRun:
    from torchstone.kernelbench.run import execute, gather

    if known:
        return gather(request)
    try:
        return execute(request, progress)
    except KeyboardInterrupt:
        click.echo(f"interrupted; what is known is kept: --resume {request.out}", err=True)
        raise


def _selection(
    levels: str | None, problems: str | None, sample: bool, half: str | None, shard: str
) -> Selection:
    from torchstone.kernelbench import suite

    return suite.Selection(
        levels=suite.parse_levels(levels or ""),
        problems=suite.parse_problems(problems or ""),
        sample=sample,
        half=None if half is None else "odd" if half == "odd" else "even",
        shard=suite.parse_shard(shard),
    )
