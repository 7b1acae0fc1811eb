"""Which config a kernel runs with: what tuning proved and kept, else the heuristic's choice.

``HOME/kernels.json`` holds one config for each kernel, class of sizes, dtype and device. Sizes of one
class have the same powers of two above them. It is read once a process; a damaged file, or a config that
the kernel's space no longer has, is told by a warning, and the heuristic decides.
"""

from __future__ import annotations

import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchstone import settings
from torchstone.errors import InputError
from torchstone.kernels.base import Kernel, power
from torchstone.records.tuning import Config

__all__ = ["config", "forget", "keep"]

_FILE = "kernels.json"
_made: dict[tuple[Any, ...], Config] = {}


def config(kernel: Kernel, args: tuple[Any, ...]) -> Config:
    """The config for a kernel on arguments."""
    first = next(a for a in args if isinstance(a, torch.Tensor))
    sizes = kernel.sizes(*args)
    static = tuple(a for a in args if isinstance(a, bool | int | str))
    key = (kernel.name, *sizes.values(), static, first.dtype, first.device)
    found = _made.get(key)
    if found is None:
        found = _made[key] = _decide(kernel, args, _key(kernel, sizes, first.dtype, first.device))
    return found


def keep(
    kernel: Kernel,
    args: tuple[Any, ...],
    chosen: Config,
    home: Path | None = None,
    device: torch.device | None = None,
) -> Path:
    """Use a config from now on for arguments of this class, in any process with this ``HOME``.

    Only what was proved and found faster belongs here: ``Tuned.config`` of a decision to promote.

    :param args: the operator's; tensors may be on the meta device.
    :param device: that it was proved on; that of the first tensor by default.
    :returns: the file.
    :raises InputError: where the config is none of the kernel's for these arguments.
    """
    why = kernel.space(*args).why_not(chosen)
    if why is not None:
        raise InputError(f"this config of {kernel.name} cannot be kept: {why}")
    first = next(a for a in args if isinstance(a, torch.Tensor))
    path = (home or settings.load().home) / _FILE
    key = _key(kernel, kernel.sizes(*args), first.dtype, device or first.device)
    rows = {**_read(path), key: chosen}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{_FILE}.{os.getpid()}")
    beside.write_text(json.dumps(rows, indent=1, sort_keys=True), encoding="utf-8")
    beside.replace(path)
    forget()
    return path


def forget() -> None:
    """Read the file anew at the next call."""
    _made.clear()
    _kept.cache_clear()


def _decide(kernel: Kernel, args: tuple[Any, ...], key: str) -> Config:
    space = kernel.space(*args)
    kept = _kept(settings.load().home / _FILE).get(key)
    if kept is None:
        return space.default()
    try:
        return space.read(kept)
    except InputError as error:
        warnings.warn(f"the kept config of {key} is not used: {error}", stacklevel=2)
        return space.default()


def _key(kernel: Kernel, sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> str:
    classes = ",".join(f"{name}<={power(size)}" for name, size in sizes.items())
    return f"{kernel.name} {classes} {str(dtype).removeprefix('torch.')} {_device(device)}"


@cache
def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _kept(path: Path) -> dict[str, Config]:
    return _read(path)


def _read(path: Path) -> dict[str, Config]:
    try:
        rows: dict[str, Config] = msgspec.json.decode(path.read_bytes(), type=dict[str, Config])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        text = f"{path} is damaged and not used, kernels run with their defaults: {error}"
        warnings.warn(text, stacklevel=2)
        return {}
    return rows
