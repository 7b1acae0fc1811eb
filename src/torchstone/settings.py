"""The only place that reads the process's environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

__all__ = ["Settings", "child_environment", "load"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment may set; everything else is an argument or in ``torchstone.toml``."""

    home: Path
    """Where runs are kept: ``TORCHSTONE_HOME``, else ``.torchstone`` in the working directory."""
    threads: int | None
    """Intra-op threads: ``TORCHSTONE_THREADS``, else ``OMP_NUM_THREADS``, else all cores."""
    keep_workers: bool
    """``TORCHSTONE_KEEP_WORKERS=1``: leave the working files of workers in place, for debugging."""


def load() -> Settings:
    """Read the settings from the environment, now."""
    threads = os.environ.get("TORCHSTONE_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return Settings(
        home=Path(os.environ.get("TORCHSTONE_HOME", ".torchstone")),
        threads=int(threads) if threads and threads.isdigit() and int(threads) > 0 else None,
        keep_workers=os.environ.get("TORCHSTONE_KEEP_WORKERS") == "1",
    )


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a child process: this one's with ``changes``."""
    return {**os.environ, **changes}
