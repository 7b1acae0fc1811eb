"""``torchstone bench``."""

from __future__ import annotations

from pathlib import Path

import click

from torchstone.cli.options import answer_json, home_of, home_option, json_option


@click.command(
    "bench",
    epilog="Example: torchstone bench examples/digits --recipe openvino --recipe onnxruntime",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("workload", type=click.Path(path_type=Path))
@click.option("--recipe", "recipes", multiple=True, required=True, help="Recipe to time; repeat.")
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@home_option
@json_option
def command(
    workload: Path, recipes: tuple[str, ...], seed: int, home: Path | None, as_json: bool
) -> int:
    """Time recipes for WORKLOAD interleaved with eager, on the recorded traffic.

    What is not right is not timed: each recipe is verified first. The answer is a ratio with its
    interval, beside the noise that eager shows against itself in the same session.

    Exit code 0: all were timed. 1: one could not be, since it is not Verified.
    """
    from torchstone.cli.ask import ask
    from torchstone.records import Comparison

    outcome = ask(workload, recipes, home=home_of(home), seed=seed, until="bench", quiet=as_json)
    asked = set(outcome.asked(recipes))
    latest = {e.recipe: e for e in outcome.store.entries if isinstance(e, Comparison)}
    comparisons = [c for text, c in latest.items() if text in asked]
    if as_json:
        answer_json(comparisons)
    else:
        from rich.console import Console

        from torchstone.report import terminal

        terminal.render(outcome.collected(), Console())
    return 0 if asked - {"eager"} <= set(latest) else 1
