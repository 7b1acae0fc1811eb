"""``torchstone cache``."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from torchstone.cli.options import answer_json, home_of, home_option, json_option

if TYPE_CHECKING:
    from torchstone.records.cache import Shelf
    from torchstone.tuner.cache import Cache

_HELP = {"help_option_names": ["-h", "--help"]}
_FILE = click.Path(dir_okay=False, path_type=Path)


class Line(msgspec.Struct, frozen=True):
    """One key."""

    kernel: str
    """Its kernel."""
    sizes: dict[str, int]
    """The problem's sizes."""
    device: str
    """On what it was measured."""
    versions: dict[str, str]
    """Driver, torch, the compiler."""
    configs: int
    """Number of configs measured."""
    failed: int
    """How many of them gave no time: wrong, crashed, not built, ..."""
    best_s: float | None
    """Median seconds of the quickest that is right."""
    newest: datetime.datetime | None
    """When the last row was appended, UTC."""


@click.group("cache", epilog="Example: torchstone cache ls --json", context_settings=_HELP)
def command() -> None:
    """List, export, import, merge and prune what tuning has measured.

    Measurements are kept in HOME/tuning. They answer only for the same kernel, sizes, device and
    versions; for others they are something to learn from. Every command takes --json.
    """


@command.command("ls", epilog="Example: torchstone cache ls --kernel softmax", context_settings=_HELP)
@click.option("--kernel", metavar="NAME", help="Only this kernel.")
@home_option
@json_option
def ls(kernel: str | None, home: Path | None, as_json: bool) -> int:
    """List what was measured: one line for a kernel at one size, on one device, with some versions."""
    from torchstone.report import format as fmt

    cache = _open(home)
    lines = [_line(shelf) for shelf in cache.shelves() if kernel in (None, shelf.key.kernel)]
    if as_json:
        answer_json(lines)
        return _told(cache)
    for line in lines:
        sizes = " x ".join(f"{name}={size}" for name, size in line.sizes.items())
        best = fmt.maybe(fmt.seconds, line.best_s)
        counts = f"{line.configs:>6} configs {line.failed:>5} failed"
        versions = " ".join(f"{name} {version}" for name, version in line.versions.items())
        click.echo(
            fmt.clean(
                f"{line.kernel:<18} {sizes:<26} {counts}  best {best:>9}  {line.device}, {versions}"
            )
        )
    if not lines:
        click.echo(f"nothing is kept in {cache.path}")
    return _told(cache)


@command.command(
    "export", epilog="Example: torchstone cache export h200.jsonl.gz", context_settings=_HELP
)
@click.argument("file", type=_FILE)
@click.option("--kernel", metavar="NAME", help="Only this kernel.")
@home_option
@json_option
def export(file: Path, kernel: str | None, home: Path | None, as_json: bool) -> int:
    """Write measurements to FILE, gzipped if it ends in .gz; the same ones give the same bytes."""
    cache = _open(home)
    keys = [s.key for s in cache.shelves() if kernel in (None, s.key.kernel)]
    header = cache.export(file, keys)
    if as_json:
        answer_json(header)
    else:
        click.echo(f"{file}: {header.rows} rows of {header.keys} keys; {', '.join(header.devices)}")
    return _told(cache)


@command.command(
    "import", epilog="Example: torchstone cache import h200.jsonl.gz --foreign", context_settings=_HELP
)
@click.argument("file", type=_FILE)
@click.option("--foreign", is_flag=True, help="Also what other devices or versions gave, to learn from.")
@home_option
@json_option
def import_(file: Path, foreign: bool, home: Path | None, as_json: bool) -> int:
    """Take in measurements that another machine like this one has exported to FILE."""
    from torchstone.measure.device import here

    cache = _open(home)
    device, versions = here()
    found = cache.import_(file, device=device, versions=versions, foreign=foreign)
    if as_json:
        answer_json(found)
    else:
        click.echo(f"{found.added} rows added; {found.known} were known")
        if found.foreign:
            click.echo(f"{found.foreign} left out, of other devices or versions: --foreign takes them")
    return _told(cache)


@command.command(
    "merge",
    epilog="Example: torchstone cache merge all.jsonl.gz a.jsonl b.jsonl.gz",
    context_settings=_HELP,
)
@click.argument("out", type=_FILE)
@click.argument("files", type=_FILE, nargs=-1, required=True)
@json_option
def merge(out: Path, files: tuple[Path, ...], as_json: bool) -> int:
    """Write all measurements of several exported FILES to OUT; their order does not matter."""
    from torchstone.tuner import cache

    header = cache.merge(files, out)
    if as_json:
        answer_json(header)
    else:
        click.echo(f"{out}: {header.rows} rows of {header.keys} keys; {', '.join(header.devices)}")
    return 0


@command.command(
    "prune", epilog="Example: torchstone cache prune --older-than 90 --dry-run", context_settings=_HELP
)
@click.option(
    "--older-than", "days", type=click.FloatRange(min=0), metavar="DAYS", help="What is older."
)
@click.option("--other-versions", is_flag=True, help="What other versions than those here have given.")
@click.option("--dry-run", is_flag=True, help="Only say what would be dropped.")
@home_option
@json_option
def prune(
    days: float | None, other_versions: bool, dry_run: bool, home: Path | None, as_json: bool
) -> int:
    """Drop what is no longer of use: of two criteria, one is enough. What is in use stays."""
    from torchstone.report import format as fmt

    cache = _open(home)
    versions = None
    if other_versions:
        from torchstone.measure.device import here

        versions = here()[1]
    older_than_s = None if days is None else days * 86_400
    dropped = cache.prune(versions=versions, older_than_s=older_than_s, dry_run=dry_run)
    if as_json:
        answer_json(dropped)
        return _told(cache)
    for one in dropped:
        sizes = " x ".join(map(str, one.key.sizes.values()))
        click.echo(
            fmt.clean(f"{one.key.kernel} {sizes}, {one.key.device}: {one.why}, {fmt.size(one.bytes)}")
        )
    total = fmt.size(sum(d.bytes for d in dropped))
    click.echo(f"{len(dropped)} keys {'would be ' if dry_run else ''}dropped, {total}")
    return _told(cache)


def _open(home: Path | None) -> Cache:
    from torchstone.tuner.cache import Cache

    return Cache(home_of(home) / "tuning")


def _told(cache: Cache) -> int:
    for problem in cache.problems:
        click.echo(f"damaged: {problem}", err=True)
    return 0


def _line(shelf: Shelf) -> Line:
    times = [m.time for m in shelf.latest]
    right = [t for t in times if t is not None]
    key = shelf.key
    return Line(
        kernel=key.kernel,
        sizes=key.sizes,
        device=key.device,
        versions=key.versions,
        configs=len(times),
        failed=len(times) - len(right),
        best_s=min(right, default=None),
        newest=shelf.rows[-1].at if shelf.rows else None,
    )
