"""Jobs of an inspection, run in workers: each finds out one part, on a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from torchstone.backends import compiler
from torchstone.capture import export
from torchstone.capture import program as programs
from torchstone.capture.compiled import breaks as breaks_module
from torchstone.capture.compiled import recompiles, stale
from torchstone.capture.shapes import contract as contract_module
from torchstone.capture.shapes import ladder
from torchstone.inspection import inventory as inventory_module
from torchstone.records import (
    BreakStudy,
    Capture,
    Inventory,
    LadderStudy,
    RecompileStudy,
    ShapeContract,
    Stale,
)
from torchstone.worker import workload_of

__all__ = ["breaks", "contract", "inventory", "ladder_of", "recompiles_of", "stale_of"]

State = dict[str, Any]
_TIMED_S = 12.0  # enough for a first look; the policy's benchmark time where that is less


def inventory(state: State, capture: Capture | None, program: str) -> Inventory:
    """Weights, work, traffic, latency, memory, roofline, cost.

    :param capture: what the capture's job gave; None where it failed, or was not asked.
    :param program: the file that it wrote, if it captured one graph.
    """
    workload = workload_of(state)
    captured = capture is not None and capture.mode == "export"
    plan = inventory_module.Plan(
        budget_s=min(_TIMED_S, workload.policy.bench_s),
        program=program if captured else None,
        refused=None if captured or capture is None else capture.refused,
    )
    return inventory_module.inventory(workload, plan=plan)


def breaks(state: State) -> BreakStudy:
    """Graph breaks, measured."""
    workload = workload_of(state)
    seconds = min(_TIMED_S / 2, workload.policy.bench_s)
    return breaks_module.study_breaks(workload, workload.module(), seconds=seconds)


def recompiles_of(state: State) -> RecompileStudy:
    """Compilations over the traffic."""
    workload = workload_of(state)
    return recompiles.study_recompiles(workload, workload.module())


def stale_of(state: State) -> Stale | None:
    """A wrong answer of compiled code over the traffic, if there is one."""
    workload = workload_of(state)
    return stale.study_staleness(workload, workload.module())


def contract(state: State, capture: Capture, program: str, within_s: float) -> ShapeContract:
    """The sizes that the captured program holds for.

    :param capture: what the capture's job gave, or that it failed.
    :param program: the file that it wrote, if it captured one graph.
    """
    workload = workload_of(state)
    captured: ExportedProgram | export.Refused = (
        programs.load(Path(program))
        if capture.mode == "export"
        else export.Refused(capture.refused or "", capture.narrowed)
    )
    return contract_module.contract(workload, workload.module(), captured, limit_s=within_s)


def ladder_of(state: State, within_s: float) -> LadderStudy:
    """How to compile for dynamic sizes; with Inductor where a compiler is there."""
    workload = workload_of(state)
    backend = "inductor" if compiler.absent("inductor") is None else "eager"
    return ladder.climb(workload, workload.module(), backend=backend, limit_s=within_s)
