"""``torchstone run``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option


@click.command(
    "run",
    epilog="Example: torchstone run examples/minilm --package bundles/minilm",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("workload", type=click.Path(path_type=Path))
@click.option(
    "--recipe", "recipes", multiple=True, help="Candidate to try; repeat. Default: all installed."
)
@click.option(
    "--resume", is_flag=True, help="Go on with the latest run of this workload; repeat nothing valid."
)
@click.option("--package", type=click.Path(path_type=Path), help="Also write the bundle to this folder.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@home_option
@json_option
def command(  # noqa: PLR0913  a command's options are its parameters
    workload: Path,
    recipes: tuple[str, ...],
    resume: bool,
    package: Path | None,
    seed: int,
    home: Path | None,
    as_json: bool,
) -> int:
    """Find the fastest version of WORKLOAD that can be proven right, and promote it.

    WORKLOAD is a folder with a torchstone.toml, or the file itself. Every candidate is built in a
    process of its own, judged against the float64 reference, timed interleaved with eager, and loaded
    with open-loop traffic. Ctrl-C leaves a usable partial run; --resume goes on with it.

    Exit code 0: a candidate was promoted, or eager is kept for good reason. 1: held, the evidence does
    not suffice.
    """
    from torchstone import recipe as recipe_module
    from torchstone import run as run_module
    from torchstone import workload as workload_module
    from torchstone.report import progress as progress_module

    request = run_module.Request(
        workload=workload_module.read(workload),
        recipes=tuple(recipe_module.parse(text) for text in recipes),
        home=home_of(home),
        seed=seed,
        resume=resume,
    )
    watcher = progress_module.QuietProgress() if as_json else progress_module.LiveProgress()
    try:
        outcome = run_module.execute(request, watcher)
    except KeyboardInterrupt:
        watcher.done()
        click.echo(f"interrupted; go on with: torchstone run {workload} --resume", err=True)
        raise
    page = outcome.report()
    bundle = outcome.package(package) if package is not None and outcome.packable is None else None
    if as_json:
        answer_json(outcome.summary(page, bundle))
    else:
        from rich.console import Console

        from torchstone.report import terminal

        terminal.render(outcome.collected(), Console())
        click.echo(f"report  {page}")
        if package is not None:
            click.echo(f"bundle  {bundle}" if bundle else f"no bundle: {outcome.packable}")
    return 1 if outcome.decision is None or outcome.decision.kind == "HOLD" else 0
