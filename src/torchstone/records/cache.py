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
    measurement: Measurement


class Shelf(Record, frozen=True, kw_only=True):
    """All that is kept of one key: every row, oldest first, and of one moment what is not right last."""

    key: TuningKey
    rows: tuple[Row, ...]

    @property
    def latest(self) -> tuple[Measurement, ...]:
        """The last word on each config."""
        return tuple({key_of(r.measurement.config): r.measurement for r in self.rows}.values())


class Header(Record, frozen=True, kw_only=True):
    """First line of an exported file: its devices, and numbers of keys and rows."""

    format: int
    devices: tuple[str, ...]
    keys: int
    rows: int


class Imported(Record, frozen=True, kw_only=True):
    """What became of a file's rows: numbers of those new here, known here, and left out as foreign."""

    added: int
    known: int
    foreign: int


class Dropped(Record, frozen=True, kw_only=True):
    """A key that pruning dropped, or would drop: why, and its bytes on disk."""

    key: TuningKey
    why: str
    bytes: int
