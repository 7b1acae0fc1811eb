"""``torchstone doctor``."""

from __future__ import annotations

import click
import msgspec

from torchstone.cli.options import answer_json, json_option


class Diagnosis(msgspec.Struct, frozen=True):
    """What the machine has and lacks."""

    environment: object
    """The environment, as a run would record it."""
    present: tuple[str, ...]
    """Engines that can be used."""
    absent: tuple[object, ...]
    """Engines that cannot, each with why and what to do."""
    lacks: tuple[str, ...]
    """What every run needs and is not there."""
    gemm: dict[str, str]
    """What ``inductor(gemm=...)`` takes, and why it cannot be used; empty where it can."""


@click.command(
    "doctor",
    epilog="Example: torchstone doctor --json",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@json_option
def command(as_json: bool) -> int:
    """Say what this machine has, which engines are absent and why, and the command that brings each.

    Exit code 0: eager and at least one other engine can be used. 3: not so.
    """
    from torchstone import backends, env, settings
    from torchstone.backends import gemm

    environment = env.environment(settings.load().threads)
    absent = {b.name: b.probe() for b in backends.BACKENDS}
    products = {}
    if "torch" in environment.packages:
        found_of = {name: gemm.absent(name) for name in gemm.NAMES}
        products = {name: "" if why is None else why.why for name, why in found_of.items()}
    present = tuple(name for name, why in absent.items() if why is None)
    lacks = () if "torch" in environment.packages else ("torch: pip install 'torch>=2.11,<2.16'",)
    found = Diagnosis(
        environment, present, tuple(a for a in absent.values() if a is not None), lacks, products
    )
    if as_json:
        answer_json(found)
    else:
        isa = " ".join(environment.isa) or "no vector extensions known"
        click.echo(f"machine   {environment.cpu}, {environment.cores} cores, {isa}")
        click.echo(f"packages  {', '.join(f'{k} {v}' for k, v in sorted(environment.packages.items()))}")
        for name, why in absent.items():
            click.echo(f"{name:<12}  present" if why is None else f"{name:<12}  absent: {why.why}")
            if why is not None and why.hint:
                click.echo(f"{'':<12}  {why.hint}")
        for name, text in products.items():
            click.echo(f"gemm {name:<7}  {f'absent: {text}' if text else 'present'}")
        for text in lacks:
            click.echo(f"lacks {text}")
    usable = set(present) - {"custom"}
    return 0 if not lacks and len(usable) > 1 else 3
