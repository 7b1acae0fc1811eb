"""A problem's model and inputs, made as the suite makes them (its ``eval.py`` and ``timing.py``).

Seeds are set before the inputs and before the model, both 42; trials of correctness take their seeds
from a generator seeded with that. The model stays in training mode: BatchNorm uses the batch's
statistics and changes its buffers, dropout is live. Two differences, both on purpose:

* Only floating-point tensors are converted to the dtype asked for. The suite converts all, which turns
  class labels and token ids into floats that the models then refuse.
* Where ``inputs_on`` is the device, tensors are drawn there, with the same seeds by the device's own
  generator: a billion numbers take seconds on a CPU. ``cpu`` gives the suite's very values.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torchstone.errors import InputError

__all__ = ["SEED", "TOLERANCE", "Loaded", "Setup", "forget", "load", "seed_all", "trial_seeds"]

SEED = 42
"""The suite's."""
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
"""The suite's, absolute and relative alike, by dtype."""

_PREFIX = "torchstone_kernelbench_problem_"
_COUNT = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where and in what a problem runs."""

    device: str
    """``cpu``, ``cuda``, ``cuda:1``."""
    dtype: str = "float32"
    """Of parameters and floating-point inputs, a key of :data:`TOLERANCE`."""
    inputs_on: str = "cpu"
    """Device whose generator draws parameters and inputs."""


@dataclass(frozen=True)
class Loaded:
    """One problem in this process."""

    path: Path
    """Its file."""
    setup: Setup
    """Where it runs."""
    module: nn.Module
    """Eager, in training mode, on the device."""
    generate: Callable[[], Any]
    """The file's ``get_inputs``."""

    def inputs(self, seed: int = SEED) -> tuple[Any, ...]:
        """Inputs drawn with a seed, on the device."""
        seed_all(seed)
        with torch.device(self.setup.inputs_on):
            made = self.generate()
        return tuple(_placed(value, self.setup) for value in made)

    def again(self) -> nn.Module:
        """The model once more: its class made anew from the file, with the same parameters and buffers.

        A class of its own gives each compiled column a cache of its own in Dynamo, which keeps graphs by
        code object and gives up after eight.
        """
        module = _model(_execute(self.path), self.path, self.setup)
        module.load_state_dict(self.module.state_dict())
        return module


def load(path: Path, setup: Setup) -> Loaded:
    """Import a problem and make its model.

    :raises InputError: where the file is no problem of the suite. What the file itself raises comes as
        it is: a package that it lacks, a model that it cannot download.
    """
    namespace = _execute(path)
    return Loaded(path, setup, _model(namespace, path, setup), namespace.get_inputs)


def seed_all(seed: int) -> None:
    """Seed torch's generators, as the suite does."""
    torch.manual_seed(seed)  # of every device too


def trial_seeds(count: int) -> tuple[int, ...]:
    """The seeds of the suite's trials of correctness."""
    generator = torch.Generator().manual_seed(SEED)
    return tuple(int(torch.randint(0, 2**32 - 1, (1,), generator=generator)) for _ in range(count))


def forget() -> None:
    """Drop the modules of all problems that were loaded."""
    for name in [name for name in sys.modules if name.startswith(_PREFIX)]:
        del sys.modules[name]


def _execute(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{_PREFIX}{next(_COUNT)}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError("is no Python file", where=path)
    namespace = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = namespace  # Dynamo looks globals of inlined functions up by module
    spec.loader.exec_module(namespace)
    lacking = [n for n in ("Model", "get_inputs", "get_init_inputs") if not hasattr(namespace, n)]
    if lacking:
        raise InputError(f"does not define {', '.join(lacking)}", where=path)
    return namespace


def _model(namespace: ModuleType, path: Path, setup: Setup) -> nn.Module:
    seed_all(SEED)
    with torch.device(setup.inputs_on):
        given = namespace.get_init_inputs()
    values = [_placed(v, setup) for v in given] if not isinstance(given, dict) else given
    seed_all(SEED)
    with torch.device(setup.inputs_on):
        made = namespace.Model(**values) if isinstance(values, dict) else namespace.Model(*values)
    if not isinstance(made, nn.Module):
        raise InputError("its Model is no torch.nn.Module", where=path)
    return made.to(device=setup.device, dtype=getattr(torch, setup.dtype))


def _placed(value: Any, setup: Setup) -> Any:
    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wide = leaf.is_floating_point()
        return leaf.to(device=setup.device, dtype=getattr(torch, setup.dtype) if wide else None)

    return tree_map(place, value)
