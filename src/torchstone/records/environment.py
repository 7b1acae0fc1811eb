"""Where a run was made, and what it was asked."""

from __future__ import annotations

from torchstone.records.base import Record
from torchstone.records.workload import WorkloadSpec

__all__ = ["Environment", "RunHeader"]


class Environment(Record, frozen=True, kw_only=True):
    """Where a measurement was made; records from environments that differ are not compared."""

    python: str
    """Python version."""
    platform: str
    """``sys.platform`` and machine: ``linux-x86_64``."""
    cpu: str
    """Model name of the processor."""
    isa: tuple[str, ...]
    """Instruction sets that kernels choose by (``avx2``, ``avx512_vnni``, ``amx_bf16``), sorted."""
    cores: int
    """Cores that this process may use."""
    threads: int
    """Intra-op threads that candidates ran with."""
    memory_bytes: int
    """Physical memory."""
    packages: dict[str, str]
    """Versions of the packages that can change an answer or a time; absent ones are left out."""
    devices: tuple[str, ...] = ()
    """Accelerators, by name."""


class RunHeader(Record, frozen=True, kw_only=True):
    """First record of a run: what was asked, of what, where."""

    format: int
    """Version of the record format."""
    workload: WorkloadSpec
    """The workload."""
    policy: dict[str, object]
    """The policy, as plain data (its type lives in :mod:`torchstone.policy`)."""
    recipes: tuple[str, ...]
    """Candidates asked for, baseline first."""
    environment: Environment
    """Where."""
    seed: int
    """Seed of everything random in the run."""
    origin: str | None
    """Argument that ``torchstone run`` was given, for the reproduce lines; None from Python."""
    started_at: str
    """UTC, ISO 8601."""
