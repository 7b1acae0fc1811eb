"""Everything that ``torchstone inspect`` finds out about a workload."""

from __future__ import annotations

from typing import Literal

from torchstone.records.base import Record
from torchstone.records.compiles import BreakStudy, RecompileStudy, Stale
from torchstone.records.environment import Environment
from torchstone.records.evidence import Capture
from torchstone.records.inventory import Inventory
from torchstone.records.shapes import LadderStudy, ShapeContract
from torchstone.records.workload import WorkloadSpec

__all__ = ["Inspection", "Part", "PartName"]

PartName = Literal["capture", "inventory", "breaks", "recompiles", "contract", "ladder"]
"""The parts of an inspection, each found out in a process of its own."""


class Part(Record, frozen=True, kw_only=True):
    """How the finding of one part went."""

    name: PartName
    """Which."""
    seconds: float
    """Time it took, the start of its process included."""
    failed: str | None = None
    """Why there is nothing to show, in one line: it crashed, raised, or ran out of time."""
    log: str = ""
    """The last lines that its process printed, where it failed."""


class Inspection(Record, frozen=True, kw_only=True, tag="inspection"):
    """What a model is, where it breaks and which shapes hold, before anything is optimized."""

    format: int
    """Version of this format, 1."""
    workload: WorkloadSpec
    """The workload."""
    origin: str | None
    """Its ``torchstone.toml``; None from Python."""
    environment: Environment
    """Where it was inspected."""
    started_at: str
    """UTC, ISO 8601."""
    parts: tuple[Part, ...]
    """The parts that were asked for, in the order that they were found out."""
    capture: Capture | None = None
    """Whether and how the model becomes one graph."""
    inventory: Inventory | None = None
    """Weights, work, traffic, latency, memory, roofline, cost."""
    breaks: BreakStudy | None = None
    """Graph breaks, and what nested graph breaks do."""
    recompiles: RecompileStudy | None = None
    """Compilations over the recorded traffic."""
    stale: Stale | None = None
    """A compiled call that answered wrongly, where there was one."""
    contract: ShapeContract | None = None
    """The sizes that the capture holds for."""
    ladder: LadderStudy | None = None
    """How to compile for dynamic sizes."""
