"""Options that several commands share, and how a command answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from torchstone import settings

__all__ = ["answer_json", "as_json", "home_of", "home_option", "json_option"]

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """``--json``: answer with JSON on standard output, and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Answer as JSON on standard output.")(
        function
    )


def home_option(function: F) -> F:
    """``--home``: where the runs are."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        help="Where runs are kept.  [TORCHSTONE_HOME, else .torchstone]",
    )(function)


def home_of(home: Path | None) -> Path:
    """The folder that the option or the environment names."""
    return home or settings.load().home


def as_json(value: object) -> str:
    """A record, or plain data, as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def answer_json(value: object) -> None:
    """Print a command's JSON answer."""
    click.echo(as_json(value))
