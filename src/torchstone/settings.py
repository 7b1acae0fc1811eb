"""The only place that reads the process's environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

__all__ = ["Secret", "Settings", "child_environment", "load"]

_KEY = "TORCHSTONE_LLM_KEY"


class Secret(str):
    """A text that is not shown where what holds it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment may set; everything else is an argument or in ``torchstone.toml``."""

    home: Path
    """Where runs are kept: ``TORCHSTONE_HOME``, else ``.torchstone`` in the working directory."""
    threads: int | None
    """Intra-op threads: ``TORCHSTONE_THREADS``, else ``OMP_NUM_THREADS``, else all cores."""
    keep_workers: bool
    """``TORCHSTONE_KEEP_WORKERS=1``: leave the working files of workers in place, for debugging."""
    llm_url: str | None
    """``TORCHSTONE_LLM_URL``: an OpenAI-compatible endpoint that may propose configs."""
    llm_model: str | None
    """``TORCHSTONE_LLM_MODEL``: the name of its model."""
    llm_key: Secret | None
    """``TORCHSTONE_LLM_KEY``: sent to that endpoint, and to nothing else; workers do not get it."""


def load() -> Settings:
    """Read the settings from the environment, now."""
    threads = os.environ.get("TORCHSTONE_THREADS") or os.environ.get("OMP_NUM_THREADS")
    key = os.environ.get(_KEY)
    return Settings(
        home=Path(os.environ.get("TORCHSTONE_HOME", ".torchstone")),
        threads=int(threads) if threads and threads.isdigit() and int(threads) > 0 else None,
        keep_workers=os.environ.get("TORCHSTONE_KEEP_WORKERS") == "1",
        llm_url=os.environ.get("TORCHSTONE_LLM_URL") or None,
        llm_model=os.environ.get("TORCHSTONE_LLM_MODEL") or None,
        llm_key=Secret(key) if key else None,
    )


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a child process: this one's with ``changes``, less the endpoint's key."""
    return {**{k: v for k, v in os.environ.items() if k != _KEY}, **changes}
