"""What the tuner's cache holds, and what exchanging it came to."""

from __future__ import annotations

import datetime
from typing import Annotated

import msgspec

from torchstone.records.base import Record
from torchstone.records.tuning import Measurement, TuningKey, key_of

__all__ = ["Dropped", "Header", "Imported", "Row", "Shelf"]


class Row(Record, frozen=True, kw_only=True):
    """One measurement, and when it was appended."""

    at: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    """UTC, as the writer's clock had it."""
    measurement: Measurement
    """What was found out about one config, failures included."""


class Shelf(Record, frozen=True, kw_only=True):
    """All that is kept of one key."""

    key: TuningKey
    """Of what, where."""
    rows: tuple[Row, ...]
    """Every row, oldest first; of one moment what is not right comes last."""

    @property
    def latest(self) -> tuple[Measurement, ...]:
        """The last word on each config."""
        return tuple({key_of(r.measurement.config): r.measurement for r in self.rows}.values())


class Header(Record, frozen=True, kw_only=True):
    """First line of an exported file."""

    format: int
    """Of the lines that follow."""
    devices: tuple[str, ...]
    """Names of the devices that the rows were measured on."""
    keys: int
    """How many shelves follow."""
    rows: int
    """How many rows they have together."""


class Imported(Record, frozen=True, kw_only=True):
    """What became of a file's rows, in numbers."""

    added: int
    """New here."""
    known: int
    """Here already."""
    foreign: int
    """Left out, being from another machine."""


class Dropped(Record, frozen=True, kw_only=True):
    """A key that pruning dropped, or would drop."""

    key: TuningKey
    """Of what, where."""
    why: str
    """In words."""
    bytes: int
    """On disk."""
