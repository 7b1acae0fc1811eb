"""A divergence as lines of text, for the terminal and for the page; pure but for :func:`render`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchstone.records import Divergence, OperandStats, Origin, Site
from torchstone.report import format as fmt

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["headline", "lines", "operand", "place", "render"]

_SHOWN = 8


def headline(found: Divergence) -> str:
    """What was found, in one sentence."""
    if found.kind == "NONE":
        return f"{found.b} against {found.a}: {found.text}"
    if found.kind == "UNKNOWN":
        return f"not told where it diverges: {found.text}"
    return f"first diverges: {found.text}"


def lines(found: Divergence) -> list[str]:
    """The facts below the headline."""
    if found.kind in ("NONE", "UNKNOWN"):
        return list(found.notes)
    listed = [line for site in found.ops[:_SHOWN] for line in _site("B", site)]
    listed += [line for site in found.instead_of[:_SHOWN] for line in _site("A", site)]
    hidden = max(0, len(found.ops) - _SHOWN) + max(0, len(found.instead_of) - _SHOWN)
    listed += [f"and {hidden} more operations"] if hidden else []
    listed += [f"   {operand(given)}" for given in found.operands[:_SHOWN]]
    listed.append(errors(found))
    if found.reproduction is not None:
        listed.append(reproduction(found))
    return [*listed, *found.notes]


def _site(side: str, site: Site) -> list[str]:
    where = place(site.origin)
    return [f"{side}  {site.code}", *([f"   {where}"] if where else [])]


def place(origin: Origin) -> str:
    """Where an operation comes from: file, line, its text, and the submodule."""
    parts = []
    if origin.file is not None:
        parts.append(f"{origin.file}:{origin.line}")
    if origin.text:
        parts.append(origin.text)
    text = ": ".join(parts)
    return f"{text} (in {origin.module})" if origin.module and text else text or origin.module


def operand(given: OperandStats) -> str:
    """One operand's statistics."""
    text = f"{given.name}: {given.dtype}{list(given.shape)}"
    if given.low is not None and given.high is not None:
        text += f", {_figure(given.low)} to {_figure(given.high)}"
        text += f", mean {_figure(given.mean)}, rms {_figure(given.rms)}"
    return f"{text}, {fmt.count(given.non_finite)} not finite" if given.non_finite else text


def errors(found: Divergence) -> str:
    """The figures: here, what rounding explains, and in the model's result."""
    text = f"error there {fmt.error(found.local_error)}"
    if found.bound is not None:
        text += f", of which rounding explains {fmt.error(found.bound)}"
    return f"{text}; in the model's result {fmt.error(found.global_error)}"


def reproduction(found: Divergence) -> str:
    """The command that shows it, and whether it did."""
    text = f"python {found.reproduction}"
    return text if found.reproduced else f"{text} (it did not show it when it was run)"


def _figure(value: float | None) -> str:
    return fmt.DASH if value is None else f"{value:.3g}"


def render(found: Divergence, console: Console) -> None:
    """Print a divergence, lines unbroken, since paths and code are copied from here."""
    from rich.text import Text

    style = "bold green" if found.kind == "NONE" else "bold red" if found.kind != "UNKNOWN" else "bold"
    console.print(Text(fmt.clean(headline(found)), style=style), soft_wrap=True)
    for line in lines(found):
        console.print(Text(f"  {fmt.clean(line)}"), soft_wrap=True)
