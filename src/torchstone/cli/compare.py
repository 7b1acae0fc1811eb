"""``torchstone compare``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option


@click.command(
    "compare",
    epilog="Example: torchstone compare main-run latest --ci --junit compare.xml --markdown out.md",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("old")
@click.argument("new")
@click.option("--ci", is_flag=True, help="Exit with 1 where NEW became slower or less right.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write JUnit XML here.")
@click.option(
    "--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write a summary here."
)
@click.option("--allow-environment", is_flag=True, help="Compare although the environments differ.")
@home_option
@json_option
def command(  # noqa: PLR0913  a command's options are its parameters
    old: str,
    new: str,
    ci: bool,
    junit: Path | None,
    markdown: Path | None,
    allow_environment: bool,
    home: Path | None,
    as_json: bool,
) -> int:
    """Say whether run NEW became slower or less right than run OLD.

    Runs from environments or workloads that differ are refused (exit code 2), not compared.
    """
    from torchstone import compare as compare_module
    from torchstone import store

    runs = [store.find(home_of(home), name) for name in (old, new)]
    before, after = (compare_module.RunView(header=r.header, entries=r.entries) for r in runs)
    diff = compare_module.compare_runs(before, after, allow_environment=allow_environment)
    for path, text in ((junit, compare_module.junit), (markdown, compare_module.markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(diff), encoding="utf-8")
    if as_json:
        answer_json(diff)
    else:
        click.echo(compare_module.markdown(diff))
    if diff.refused is not None:
        return 2
    return 1 if ci and not diff.passed else 0
