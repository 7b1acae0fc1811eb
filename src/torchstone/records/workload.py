"""What a workload is, as far as it can be said without running it."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchstone.records.base import Record

__all__ = ["Arrival", "Dim", "InputSpec", "ScalarSpec", "TensorSpec", "WorkloadSpec", "factor_and_dim"]


class Dim(Record, frozen=True, kw_only=True):
    """A named dimension and the sizes it may take."""

    name: str
    """The name used in shapes: ``"B"``."""
    low: int
    """Smallest size, inclusive."""
    high: int
    """Largest size, inclusive."""
    multiple: int = 1
    """Every size is a multiple of this."""


class TensorSpec(Record, frozen=True, kw_only=True, tag="tensor"):
    """One tensor input."""

    name: str
    """The argument's name."""
    dtype: str
    """The torch dtype without its prefix: ``"float32"``."""
    shape: tuple[int | str, ...]
    """Fixed sizes, names of dims, and multiples of them (``"5*b"``); see :func:`factor_and_dim`."""
    low: float | None = None
    """Smallest value that the model must take, if stated or, for integers, as seen in the example."""
    high: float | None = None
    """Largest value, likewise."""


def factor_and_dim(size: str) -> tuple[int, str]:
    """What a named size stands for: ``"b"`` is (1, "b"), ``"5*b"`` is (5, "b")."""
    factor, _, name = size.rpartition("*")
    return (int(factor) if factor else 1), name.strip()


class ScalarSpec(Record, frozen=True, kw_only=True, tag="scalar"):
    """One Python number passed as an input."""

    name: str
    """The argument's name."""
    kind: Literal["int", "float", "bool"]
    """Its Python type."""
    low: float
    """Smallest value seen or stated."""
    high: float
    """Largest value seen or stated."""


InputSpec = TensorSpec | ScalarSpec


class Arrival(Record, frozen=True, kw_only=True):
    """One recorded request of the traffic."""

    sizes: dict[str, int]
    """Size of every named dim."""
    scalars: dict[str, float] = msgspec.field(default_factory=dict)
    """Value of scalar inputs, by name."""
    at_s: float | None = None
    """Arrival time since the recording's start, seconds."""


class WorkloadSpec(Record, frozen=True, kw_only=True):
    """What can be said of a workload without running it."""

    name: str
    """Its name."""
    inputs: tuple[InputSpec, ...]
    """Positional inputs, in order."""
    dims: tuple[Dim, ...]
    """Named dims."""
    example_sizes: dict[str, int]
    """Size of each dim in the example inputs."""
    traffic: tuple[Arrival, ...]
    """Recorded requests; one of the example's sizes where none were recorded."""
    metric: str | None
    """Name of the metric on labelled holdout data, if there is one."""
    candidates: tuple[str, ...] = ()
    """Names of the user's own implementations, for ``custom(NAME)``."""
    perturbs: bool = False
    """Whether the user gave a function that changes module state between calls."""
    digest: str
    """SHA-256 of everything that defines the workload."""
