"""The command line: thin, one module per command, each imported only when it is asked for."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from torchstone import __version__
from torchstone.errors import TorchstoneError

__all__ = ["cli", "main"]

COMMANDS = (
    ("run", "Find, prove and promote the fastest version of a workload."),
    ("verify", "Build one recipe and judge it against the float64 reference."),
    ("bench", "Time recipes against eager, interleaved."),
    ("compare", "Fail when a run is slower or less right than another."),
    ("report", "Show a run: in the terminal, as HTML or as JSON."),
    ("package", "Write a run's bundle: code, weights, evidence, fallback."),
    ("inspect", "Say what a model is, where it breaks and which shapes hold."),
    ("explain", "Say which rewrites fire on a model's program, and which do not, and why."),
    ("tune", "Find the fastest config of a kernel that can be proved right."),
    (
        "kernelbench",
        "Run the public KernelBench suite: eager, torch.compile and ours, proved and timed.",
    ),
    ("check", "Say where shapes do not fit, before anything is run."),
    ("diff", "Find the first operation where one implementation is not what another is."),
    ("ls", "List the runs."),
    ("cache", "List, export, import, merge and prune what tuning has measured."),
    ("doctor", "Say what this machine has and what it lacks."),
)
"""Every command with its one-line help; the module of the same name in this package defines it."""


class _Lazy(click.Group):
    """A group that imports a command's module when the command is used, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, _ in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in dict(COMMANDS):
            return None
        command: click.Command = importlib.import_module(f"torchstone.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(COMMANDS)


@click.group(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 promoted or nothing to complain of, 1 the gate failed or held, 2 bad input, "
    "3 the environment lacks something, 130 interrupted.",
)
@click.version_option(__version__, prog_name="torchstone")
def cli() -> None:
    """Torchstone finds the fastest version of a PyTorch model that it can prove right.

    \b
    Example:
      torchstone run examples/minilm
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs a command and turns our errors into a message and an exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code: Any = cli.main(args=arguments, standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = 2
    except TorchstoneError as error:
        if "--json" in arguments:
            facts = {"error": error.what, "where": error.where, "line": error.line, "hint": error.hint}
            click.echo(json.dumps(facts))
        else:
            click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        code = 130
    sys.exit(code if isinstance(code, int) else 0)
