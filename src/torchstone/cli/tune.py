"""``torchstone tune``."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option
from torchstone.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from torchstone.tuner.tunable import Tunable
    from torchstone.tuning import Tuned

_BUDGET_S = 120.0


@click.command(
    "tune",
    epilog="Example: torchstone tune examples/kernels/softmax.py --size rows=4096 --budget 60",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("kernel")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="NAME=N",
    help="A size to be fast at, instead of its own; repeat.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help=f"Of the search; the finals come on top.  [{_BUDGET_S:g}, unless --measurements is given]",
)
@click.option("--measurements", type=click.IntRange(min=1), help="Configs to measure at most.")
@click.option("--searcher", default="guided", show_default=True, help="What chooses the configs.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option("--fresh", is_flag=True, help="Measure anew what the cache knows of this very kernel.")
@click.option(
    "--no-siblings", is_flag=True, help="Learn nothing from other sizes, devices and versions."
)
@click.option("--ci", is_flag=True, help="Tell of progress in plain lines, on a terminal too.")
@home_option
@json_option
def command(  # noqa: PLR0913  a command's options are its parameters
    kernel: str,
    sizes: tuple[str, ...],
    budget: float | None,
    measurements: int | None,
    searcher: str,
    seed: int,
    fresh: bool,
    no_siblings: bool,
    ci: bool,
    home: Path | None,
    as_json: bool,
) -> int:
    """Find the fastest config of KERNEL that can be proved right.

    KERNEL is FILE.py:NAME or MODULE:NAME of a torchstone.tuner.tunable.Tunable, or of a kernel that
    makes one; NAME may be left out where there is only one. Every config is built and run in a process
    of its own and held against the reference in float64; the best are proved once more on inputs held
    out, and timed beside the default. Measurements are kept: Ctrl-C loses none, and the same command
    goes on.

    Exit code 0: a config is promoted, or the default is kept for good reason. 1: held, the default could
    not be proved or timed. 2: bad input. 3: the environment lacks something.
    """
    from rich.console import Console

    from torchstone.report import tuning as report
    from torchstone.tuner.driver import Budget
    from torchstone.tuner.search import searcher_of
    from torchstone.tuning import Request, execute

    chosen = searcher_of(searcher)
    tunable, name, module = _load(kernel)
    tunable = replace(tunable, sizes=_sized(tunable, sizes))
    seconds = _BUDGET_S if budget is None and measurements is None else budget
    request = Request(
        budget=Budget(seconds, measurements),
        searcher=chosen,
        seed=seed,
        home=home_of(home),
        fresh=fresh,
        siblings=not no_siblings,
        origin=kernel,
    )
    goal = report.Goal(name=tunable.name, budget_s=seconds, most=measurements)
    stderr = Console(stderr=True, force_terminal=False if ci else None)
    display = None if as_json else report.LiveTuning(goal, stderr)
    try:
        tuned = execute(tunable, request, display=display)
    except KeyboardInterrupt:
        click.echo("interrupted; what was measured is kept, and the same command goes on", err=True)
        raise
    finally:
        if display is not None:
            display.done()
    if as_json:
        answer_json(tuned.record)
        click.echo(f"report  {tuned.path / 'report.html'}", err=True)
    else:
        _show(tuned, name, module, Console(force_terminal=False if ci else None))
    return 1 if tuned.record.decision == "HOLD" else 0


def _show(tuned: Tuned, name: str, module: str, console: Console) -> None:
    from torchstone.report import tune_words
    from torchstone.report import tuning as report

    files = {"report": str(tuned.path / "report.html"), "record": str(tuned.path / "tuning.json")}
    held = tuned.record.decision == "HOLD"
    use = None if held else tune_words.snippet(tuned.record, name, module)
    report.render(tuned.record, console, files, use)


def _load(kernel: str) -> tuple[Tunable, str, str]:
    """The tunable, how Python names it, and the module to import that from.

    :raises InputError: where there is none.
    """
    from torchstone.tuner.tunable import Tunable

    where, _, name = kernel.partition(":") if ":" in kernel else (kernel, "", "")
    module, hint = (
        _module(where),
        "it must be a torchstone.tuner.tunable.Tunable, or have a method tunable()",
    )
    if not name:
        names = _tunables(module)
        if len(names) != 1:
            listed = f"there are {', '.join(names)}" if names else f"define one; {hint}"
            raise InputError(
                f"{'none' if not names else 'more than one'} of its names is a tunable",
                where=where,
                hint=f"say which: {where}:NAME; {listed}" if names else listed,
            )
        (name,) = names
    found = getattr(module, name, None)
    if found is None:
        listed = ", ".join(_tunables(module)) or "none"
        raise InputError(f"has no {name!r}", where=where, hint=f"its tunables are: {listed}")
    if isinstance(found, Tunable):
        return found, name, Path(where).stem if where.endswith(".py") else where
    if not _makes(found):
        raise InputError(f"{name} is of type {type(found).__name__}", where=where, hint=hint)
    made = found.tunable()
    if not isinstance(made, Tunable):
        raise InputError(f"{name}.tunable() gave a {type(made).__name__}", where=where, hint="a Tunable")
    return made, f"{name}.tunable()", Path(where).stem if where.endswith(".py") else where


def _module(where: str) -> ModuleType:
    from torchstone.workload import usercode

    if where.endswith(".py") or "/" in where:
        path = Path(where)
        if not path.is_file():
            raise InputError("there is no such file", where=path, hint="KERNEL is FILE.py:NAME")
        return usercode.import_file(path)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    return usercode.call(lambda: importlib.import_module(where), what=f"importing {where}")


def _makes(value: Any) -> bool:
    return not isinstance(value, type | ModuleType) and callable(getattr(value, "tunable", None))


def _tunables(module: ModuleType) -> list[str]:
    """Names of what can be tuned; of two names of one thing, the first."""
    from torchstone.tuner.tunable import Tunable

    found = {id(v): n for n, v in reversed(vars(module).items()) if isinstance(v, Tunable) or _makes(v)}
    return list(reversed(found.values()))


def _sized(tunable: Tunable, given: tuple[str, ...]) -> dict[str, int]:
    sizes = dict(tunable.sizes)
    for text in given:
        name, _, number = text.partition("=")
        if name not in tunable.sizes:
            known = ", ".join(tunable.sizes) or "none"
            raise InputError(f"{tunable.name} has no size {name!r}", hint=f"its sizes are: {known}")
        if not number.isdecimal() or int(number) < 1:
            raise InputError(f"--size {text}: not NAME=N with N from 1 on", hint="--size rows=4096")
        sizes[name] = int(number)
    return sizes
