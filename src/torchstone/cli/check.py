"""``torchstone check``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchstone.cli.options import as_json as to_json
from torchstone.records import CheckReport, FileCheck, Finding


@click.command(
    "check",
    epilog="Example: torchstone check model.py layers.py --format sarif --output shapes.sarif",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--checker",
    type=click.Choice(["both", "pyrefly", "symbolic"]),
    default="both",
    show_default=True,
    help="Who looks: Pyrefly reads the code, symbolic execution runs it on tensors without values.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "junit"]),
    default="text",
    show_default=True,
    help="How to answer.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the answer here.")
@click.option("--all", "everything", is_flag=True, help="Tell also of type errors not about shapes.")
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that the execution of one file may take.",
)
def command(form: str, as_json: bool, output: Path | None, **options: Any) -> int:
    """Say where the shapes in FILES do not fit, before anything is run.

    A FILE says how its model is called by a torchstone.toml beside it, by a comment
    "# torchstone: check Net(), x=f32[B, 3, 32, 32]", or by functions build() and example(); of other
    classes the inputs are guessed where they can be.

    Exit code 0: nothing found. 1: shapes do not fit. 2: bad input. 3: pyrefly is asked for and absent.
    """
    from torchstone.shapecheck import check, exchange

    report = check(
        options["files"],
        checker=options["checker"],
        everything=options["everything"],
        limit_s=options["limit_s"],
    )
    forms = {"text": _text, "json": to_json, "sarif": exchange.sarif, "junit": exchange.junit}
    answer = forms["json" if as_json else form](report)
    if output is None:
        click.echo(answer.rstrip("\n"))
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(answer.rstrip("\n") + "\n", encoding="utf-8")
    return 0 if report.passed else 1


def _text(report: CheckReport) -> str:
    from torchstone.report import format as fmt

    lines = [text for file in report.files for text in _file(file)]
    errors = sum(f.kind != "could-not-run" for file in report.files for f in file.findings)
    entries = [entry for file in report.files for entry in file.entries]
    executed = sum(entry.status != "not-run" for entry in entries)
    refuted = sum(len(file.refuted) for file in report.files)
    lines += [f"note: {note}" for note in report.notes]
    told = f"{_count(errors, 'error')} in {_count(len(report.files), 'file')}"
    told += f"; {_count(executed, 'model')} executed" if "symbolic" in report.checkers else ""
    told += f"; {_count(refuted, 'false alarm')} refuted" if refuted else ""
    return fmt.clean("\n".join([*lines, f"{told}; {fmt.seconds(report.seconds)}"]))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _file(file: FileCheck) -> list[str]:
    lines = [text for finding in file.findings for text in _finding(finding)]
    for entry in file.entries:
        if entry.notes:
            lines += [f"{file.file}:{entry.line}: note: {entry.name}: {note}" for note in entry.notes]
    if file.held:
        told = f"{_count(len(file.held), 'finding')} of pyrefly on lines that were not reached"
        lines.append(f"{file.file}: note: {told}: look again once the above is mended")
    return lines + [f"{file.file}: note: {note}" for note in file.notes]


def _finding(finding: Finding) -> list[str]:
    from torchstone.shapecheck.exchange import proof

    place = finding.place
    word = "note: " if finding.kind == "could-not-run" else ""
    lines = [f"{place.file}:{place.line}:{place.column}: {word}{finding.message} [{proof(finding)}]"]
    if finding.operands:
        shapes = ", ".join(f"[{', '.join(map(str, o.shape))}]" for o in finding.operands)
        lines.append(f"    {finding.rule}({shapes})")
    at = [f"in {finding.path}" if finding.path else "", f"of {finding.entry}" if finding.entry else ""]
    at += [", ".join(f"{name}={size}" for name, size in finding.sizes.items())]
    at += [f"raised at {finding.within}" if finding.within else ""]
    told = "; ".join(text for text in at if text)
    return [*lines, f"    {told}"] if told else lines
