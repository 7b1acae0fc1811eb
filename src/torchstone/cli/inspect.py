"""``torchstone inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option

_PARTS = ("capture", "inventory", "breaks", "recompiles", "contract", "ladder")


@click.command(
    "inspect",
    epilog="Example: torchstone inspect examples/minilm --html inspection.html",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("workload", type=click.Path(path_type=Path))
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(_PARTS), help="Only this part; repeat."
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page here.  [HOME/inspections/NAME.html]",
)
@home_option
@json_option
def command(
    workload: Path, parts: tuple[str, ...], html: Path | None, home: Path | None, as_json: bool
) -> int:
    """Say what WORKLOAD is, where it breaks, which shapes hold and what each costs.

    Nothing is optimized. Each part is found out in a process of its own; one that fails says why and
    leaves the others standing. Beside the page lies the same as JSON.

    Exit code 0: inspected. 1: the traffic makes torch.compile compile more often than the policy's
    max_recompiles.
    """
    from torchstone import workload as workload_module
    from torchstone.inspection import study
    from torchstone.report import inspection as report
    from torchstone.report.html import inspection as page
    from torchstone.report.progress import LiveProgress, QuietProgress

    given = workload_module.read(workload)
    chosen = tuple(part for part in study.PARTS if not parts or part in parts)
    watcher = QuietProgress() if as_json else LiveProgress()
    found = study.study(given, parts=chosen, progress=watcher)
    path = html or home_of(home) / "inspections" / f"{found.workload.name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(found), encoding="utf-8")
    path.with_suffix(".json").write_bytes(report.to_json(found))
    if as_json:
        answer_json(found)
    else:
        from rich.console import Console

        report.render(found, Console())
        click.echo(f"page  {path}")
    return 1 if found.recompiles is not None and found.recompiles.exceeds else 0
