"""What timing two ways gave, kept: a program is rewritten the same way each time, and quickly.

One file, ``HOME/rewrites.jsonl``, only ever appended to, a line at a time, so that processes may share
it. A line that is damaged is as if it were not there. The key holds what a time depends on: the rule,
the operations with their constants, how their inputs lie in memory, the device and torch's version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

from torchstone.rewrite import cost
from torchstone.store import exclusive

__all__ = ["Memory", "key_of"]


class _Line(msgspec.Struct, frozen=True):
    key: str
    before_s: float
    after_s: float


class Memory:
    """Seconds before and after, by key.

    :param path: the file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[float, float]] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    found = msgspec.json.decode(line, type=_Line)
                except msgspec.DecodeError:
                    continue
                self._known[found.key] = (found.before_s, found.after_s)

    def get(self, key: str) -> tuple[float, float] | None:
        """What was measured, if it was."""
        return self._known.get(key)

    def alone(self) -> AbstractContextManager[None]:
        """While it is entered no other process with this memory times anything."""
        return exclusive(self._path.with_suffix(".lock"))

    def keep(self, key: str, seconds: tuple[float, float]) -> None:
        """Append what was measured now."""
        self._known[key] = seconds
        line = msgspec.json.encode(_Line(key, *seconds)) + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def key_of(
    rule: str, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], where: tuple[torch.device, int, bool]
) -> str:
    """Digest of what both times depend on.

    :param nodes: that match, the root first.
    :param where: the device, how much of the replacement is computed ahead of time, and whether the
        result's layout is the program's.
    """
    device, fixed, leaves = where
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    places = {n: f"%{i}" for i, n in enumerate((*inputs, *reversed(nodes)))}
    calls = [f"{places[n]}={n.target}{_text((n.args, n.kwargs), places)}" for n in reversed(nodes)]
    given = [_lies(cost.concrete(n.meta.get("val"))) for n in inputs]
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    text = "\n".join((rule, name, str((threads, fixed, leaves)), torch.__version__, *calls, *given))
    return hashlib.sha256(text.encode()).hexdigest()


def _text(arguments: Any, places: dict[fx.Node, str]) -> str:
    named = fx.map_arg(arguments, lambda n: places.get(n, "%?"))
    return str(named)


def _lies(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.stride()} {value.dtype}"
