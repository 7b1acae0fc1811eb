"""What all records are."""

from __future__ import annotations

import msgspec

__all__ = ["Record"]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records; each also says ``kw_only=True``, which msgspec does not inherit."""
