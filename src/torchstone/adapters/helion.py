"""Kernels of Helion as tunables: Helion says which configs there are, and compiles them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.records.tuning import Config, Value
from torchstone.tuner.space import Boolean, Choice, Integer, Knob, Permutation, PowerOfTwo, Space
from torchstone.tuner.tunable import Tunable
from torchstone.workload import usercode

__all__ = ["tunable"]

_VERSIONS = "helion>=1.2,<1.6"


def tunable(
    kernel: Any,
    inputs: Callable[..., tuple[Any, ...]],
    reference: Callable[..., Any] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    **details: Any,
) -> Tunable:
    """What ``torchstone tune`` and :func:`torchstone.tune` take.

    :param kernel: made by ``helion.kernel``, under a name of its module: other processes find it there.
    :param inputs: ``inputs(seed, **sizes)``: its arguments.
    :param reference: the same in plain PyTorch; Helion's eager reference mode where not given.
    :param details: more fields of :class:`~torchstone.tuner.tunable.Tunable`.
    :raises EnvironmentLacksError: where Helion is absent, or says of its configs what cannot be read.
    :raises InputError: where the kernel has no such name.
    """
    module = sys.modules[kernel.fn.__module__]
    name = next((n for n, v in vars(module).items() if v is kernel), None)
    if name is None:
        raise InputError(
            f"kernel {kernel.name} has no name in {module.__name__}", hint="define it there"
        )
    here = _Kernel(module.__name__, str(module.__file__), name, inputs, tuple((sizes or {}).items()))
    return Tunable(
        name=kernel.name,
        build=functools.partial(_Compiled, here),
        space=_Configs(here),
        inputs=inputs,
        reference=reference or functools.partial(_eager, here),
        sizes=dict(sizes or {}),
        **details,
    )


@dataclass(frozen=True)
class _Kernel:
    """Where a kernel is found: it cannot be sent to another process."""

    module: str
    file: str
    name: str
    inputs: Callable[..., tuple[Any, ...]]
    sizes: tuple[tuple[str, int], ...]

    @functools.cached_property
    def kernel(self) -> Any:
        """Helion's."""
        found = getattr(sys.modules.get(self.module), self.name, None)
        if found is None:
            found = getattr(usercode.import_file(Path(self.file)), self.name)
        return found

    @functools.cached_property
    def generation(self) -> Any:
        """Helion's flat form of configs, for the sizes tuned for."""
        module = _helion("autotuner.config_generation")
        return module.ConfigGeneration(self.kernel.bind(self.inputs(0, **dict(self.sizes))).config_spec)

    @functools.cached_property
    def slots(self) -> list[tuple[str, Any]]:
        """Each place of the flat form: a name, and the fragment that says what may be there."""
        names = []
        for key, count, listed in self.generation.config_spec.flat_key_layout():
            names += [f"{key}[{i}]" for i in range(count)] if listed else [key] * count
        return list(zip(names, self.generation.flat_spec, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kernel, (self.module, self.file, self.name, self.inputs, self.sizes)

    def knobs(self) -> dict[str, Knob]:
        """One for each fragment, and for each item of a list of them."""
        found: dict[str, Knob] = {}
        for (name, fragment), value in zip(self.slots, self.generation.default_flat(), strict=True):
            for part, inner, default in _parts(name, fragment, value):
                found[part] = _knob(inner, _said(default))
        return found

    def flat(self, config: Config) -> list[Any]:
        """As Helion has it."""
        made: list[Any] = []
        for name, fragment in self.slots:
            items = [_meant(inner, config[part]) for part, inner, _ in _parts(name, fragment, None)]
            made.append(items if hasattr(fragment, "inner") else items[0])
        return made

    def config(self, flat: list[Any]) -> Config:
        """As we have it."""
        pairs = zip(self.slots, flat, strict=True)
        return {p: _said(v) for (name, f), value in pairs for p, _, v in _parts(name, f, value)}


class _Configs(Space):
    """What Helion can compile. Of configs that it makes the same of, the one that it would write."""

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel = kernel
        try:
            super().__init__(kernel.knobs(), valid=(self._refusal,))
        except AttributeError as error:
            raise _unreadable(f"no {error.name}") from error

    def settled(self, config: Config) -> Config:
        """The config as Helion would write it."""
        generation = self._kernel.generation
        try:
            flat = generation.flatten(generation.unflatten(self._kernel.flat(config)))
        except _helion("exc").InvalidConfig:
            return config  # and refused
        return self._kernel.config(flat)

    def _refusal(self, config: Config) -> str | None:
        try:
            self._kernel.generation.unflatten(self._kernel.flat(config))
        except _helion("exc").InvalidConfig as error:
            return str(error)
        return None if self.settled(config) == config else "Helion would write it otherwise"


class _Compiled:
    """A config compiled, for each signature of arguments that it meets."""

    def __init__(self, kernel: _Kernel, config: Config) -> None:
        self._kernel, self._config = kernel, kernel.generation.unflatten(kernel.flat(config))
        self._calls: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple((v.shape, v.stride(), v.dtype) for v in args if isinstance(v, torch.Tensor))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._kernel.kernel.bind(args).compile_config(self._config)
        return call(*args)


def _eager(kernel: _Kernel, *args: Any) -> Any:
    mode = _helion("runtime.ref_mode").RefMode.EAGER
    return importlib.import_module("helion").kernel(kernel.kernel.fn, ref_mode=mode)(*args)


def _helion(module: str) -> Any:
    try:
        return importlib.import_module(f"helion.{module}")
    except ImportError as error:
        raise _unreadable(f"no {error.name}") from error


def _unreadable(what: str) -> EnvironmentLacksError:
    return EnvironmentLacksError(f"Helion as installed has {what}", hint=f"pip install '{_VERSIONS}'")


def _parts(name: str, fragment: Any, value: Any) -> list[tuple[str, Any, Any]]:
    """A fragment, or the items of a list of them: each with a name and its value."""
    if not hasattr(fragment, "inner"):
        return [(name, fragment, value)]
    values = value or [None] * fragment.length
    return [(f"{name}[{i}]", fragment.inner, values[i]) for i in range(fragment.length)]


def _knob(fragment: Any, default: Any) -> Knob:
    kinds = _helion("autotuner.config_fragment")
    if isinstance(fragment, kinds.PermutationFragment):
        return Permutation(fragment.length, default)
    if isinstance(fragment, kinds.PowerOfTwoFragment):
        return PowerOfTwo(fragment.low, fragment.high, default)
    if isinstance(fragment, kinds.BaseIntegerFragment):
        return Integer(fragment.low, fragment.high, default)
    if isinstance(fragment, kinds.BooleanFragment):
        return Boolean(default)
    return Choice(tuple(map(_said, _choices(fragment))), default)


def _choices(fragment: Any) -> list[Any]:
    values = getattr(fragment, "choices", None) or fragment.search_values()
    if values is None:
        raise _unreadable(f"a {type(fragment).__name__} that does not list its values")
    return list(values)


def _said(value: Any) -> Value:
    """A value as we have it: of what is no number and no text, its text."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return value if isinstance(value, bool | int | float | str) else str(value)


def _meant(fragment: Any, value: Value) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if hasattr(fragment, "low") or isinstance(value, bool):
        return value
    return next(
        (v for v in _choices(fragment) if _said(v) == value and type(_said(v)) is type(value)), value
    )
