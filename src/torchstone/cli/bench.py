"""``torchstone bench``."""

from __future__ import annotations

from typing import Any

import click

from torchstone.cli.ask import answer, ask, question


@click.command(
    "bench",
    epilog="Example: torchstone bench examples/digits --recipe openvino --recipe onnxruntime",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@question
def command(recipes: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Time recipes for WORKLOAD interleaved with eager, on the recorded traffic.

    What is not right is not timed: each recipe is verified first. The answer is a ratio with its
    interval, beside the noise that eager shows against itself in the same session.

    Exit code 0: all were timed. 1: one could not be, since it is not Verified.
    """
    from torchstone.records import Comparison

    outcome = ask(recipes=recipes, as_json=as_json, until="bench", **options)
    asked = set(outcome.asked(recipes))
    latest = {e.recipe: e for e in outcome.store.entries if isinstance(e, Comparison)}
    answer(outcome, [c for text, c in latest.items() if text in asked], as_json=as_json)
    return 0 if asked - {"eager"} <= set(latest) else 1
