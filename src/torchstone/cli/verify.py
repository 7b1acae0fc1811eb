"""``torchstone verify``."""

from __future__ import annotations

from typing import Any

import click

from torchstone.cli.ask import answer, ask, question


@click.command(
    "verify",
    epilog="Example: torchstone verify examples/minilm --recipe 'aotinductor + precision(bf16)'",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@question
def command(recipes: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Build each recipe for WORKLOAD and judge it against the float64 reference; time nothing.

    Exit code 0: all are Verified. 1: one is not. 3: an engine is not installed.
    """
    from torchstone.records import Unsupported, VerdictEntry, Verified

    outcome = ask(recipes=recipes, as_json=as_json, until="verify", **options)
    verdicts = [outcome.store.get(f"verdict/{text}", VerdictEntry) for text in outcome.asked(recipes)]
    entries = [v for v in verdicts if v is not None]
    answer(outcome, entries, as_json=as_json)
    if all(isinstance(e.verdict, Verified) for e in entries):
        return 0
    absent = all(isinstance(e.verdict, Verified) or _not_installed(e.verdict) for e in entries)
    return 3 if absent and any(isinstance(e.verdict, Unsupported) for e in entries) else 1


def _not_installed(verdict: object) -> bool:
    from torchstone.records import Unsupported

    return isinstance(verdict, Unsupported) and verdict.hint is not None
