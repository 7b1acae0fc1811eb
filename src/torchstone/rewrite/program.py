"""A captured program, rewritten: from program to program, with the firing log."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from torchstone import compat, settings
from torchstone.bench import roofline
from torchstone.capture import export
from torchstone.capture import program as programs
from torchstone.recipe import FAMILIES, Rewrite
from torchstone.records import Unsupported
from torchstone.records.inventory import Peaks
from torchstone.records.rewrites import Rewrites
from torchstone.rewrite import composites, constants, cost, driver
from torchstone.rewrite import graph as graphs
from torchstone.rewrite.families import PASSES, RULES, Pass
from torchstone.rewrite.memory import Memory
from torchstone.rewrite.rule import Rule
from torchstone.workload import Workload

__all__ = ["Rewritten", "log", "rewrite", "rewrite_module", "rules_of"]


_WORTH = 0.01
"""Share of a program's time that rewrites must save for the program to be a candidate."""


@dataclass(frozen=True)
class Rewritten:
    """What rewriting gave."""

    program: ExportedProgram
    """The same function, for the same sizes."""
    log: Rewrites
    """What fired."""


def rules_of(step: Rewrite) -> tuple[Rule, ...]:
    """The rules that a step switches on."""
    families = FAMILIES if step.families == "all" else step.families.split(".")
    return tuple(rule for rule in RULES if rule.family in families)


def passes_of(step: Rewrite) -> tuple[Pass, ...]:
    """What the families of a step do once no rule fires any more."""
    families = FAMILIES if step.families == "all" else step.families.split(".")
    return tuple(one for family, one in PASSES.items() if family in families)


def rewrite_module(
    module: nn.Module, args: tuple[Any, ...], step: Rewrite
) -> tuple[fx.GraphModule, Rewrites] | Unsupported:
    """Capture a module for the sizes of ``args`` alone, in the mode that it is in, and rewrite it.

    :returns: a module with the same state, the parameters and buffers that it shares being the same; or
        ``Unsupported`` where it cannot be one graph, or no rule fires.
    :raises BrokenGraphError: for a rule that makes another program of it.
    """
    try:
        with torch.no_grad():
            program = torch.export.export(module, args)
    except compat.capture_errors() as error:
        return Unsupported(text=f"it cannot be one graph: {export.one_line(error)}")
    found, fired = log(program, step)
    return (found, fired) if _pays(fired) else Unsupported(text="no rewrite pays on this program")


def rewrite(program: ExportedProgram, step: Rewrite, workload: Workload) -> Rewritten | Unsupported:
    """Rewrite a program by the rules of a step until none pays.

    :returns: ``Unsupported`` where no rule fires, or where the result cannot be one graph for the
        workload's sizes.
    :raises BrokenGraphError: for a rule that makes another program of it.
    """
    module, found = log(program, step)
    if not _pays(found):
        return Unsupported(text="no rewrite pays on this program")
    exported = export.export(workload, module)
    if isinstance(exported, export.Refused):
        return Unsupported(text=f"the rewritten program cannot be exported: {exported.reason}")
    return Rewritten(programs.reloaded(exported), found)


def _pays(found: Rewrites) -> bool:
    """Whether a program is worth trying: removals of what costs nothing are not worth a compilation.

    Kernels are: only the whole shows whether they pay.
    """
    return found.saved >= _WORTH or any(one.family == "kernels" for one in found.fired)


@cache
def _peaks(device: torch.device, home: Path) -> Peaks:
    known = roofline.kept(device, home)
    if known is None:
        known = roofline.measure(device, ("float32",))
        roofline.keep(known, home)
    return known


def _device(program: ExportedProgram) -> torch.device:
    values = (n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder")
    tensors = (v for v in values if isinstance(v, torch.Tensor))
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def log(program: ExportedProgram, step: Rewrite) -> tuple[fx.GraphModule, Rewrites]:
    """Rewrite a program's graph, and say what was done; the program is left as it is."""
    device = _device(program)
    module = graphs.of(program)
    composites.expand(module)
    home = settings.load().home
    weigher = cost.Weigher(_peaks(device, home.resolve()), device)
    memory = Memory(home / "rewrites.jsonl")
    rewriter = driver.Rewriter(module, rules_of(step), weigher, passes_of(step), memory)
    program_s = weigher.seconds(module.graph.nodes, constants.constant(module).__contains__)
    rewriter.run()
    return module, Rewrites(
        program_s=program_s,
        fired=tuple(rewriter.fired),
        declined=tuple(rewriter.declined.values()),
        folded=rewriter.folded,
    )
