"""A space of configs: typed knobs, what cannot be, neighbours, mixing, and numbers for models.

A :class:`Space` is immutable and knows no kernel and no device. Every config that it gives is valid:
inside each knob's values, knobs that do not matter at their default, refused by no constraint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from torchstone.errors import InputError
from torchstone.records.tuning import Config, Value, key_of

__all__ = [
    "Boolean",
    "Choice",
    "Constraint",
    "Integer",
    "Knob",
    "Only",
    "Permutation",
    "PowerOfTwo",
    "Space",
    "key_of",
]

_ENUMERABLE = 65_536
_TRIES = 2_000

Constraint = Callable[[Config], str | bool | None]
"""Says what is wrong with a config: a sentence or False; None or True if nothing is."""


@dataclass(frozen=True)
class PowerOfTwo:
    """A power of two from ``low`` to ``high``, both included; a model sees its logarithm."""

    low: int
    high: int
    default: int | None = None

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.high) or any(n & (n - 1) for n in (self.low, self.high)):
            raise InputError(f"a power of two from {self.low} to {self.high}: both ends must be one")

    @property
    def values(self) -> tuple[Value, ...]:
        """All values, ascending."""
        return tuple(2**e for e in range(self.low.bit_length() - 1, self.high.bit_length()))


@dataclass(frozen=True)
class Integer:
    """An integer from ``low`` to ``high``, both included, in steps of ``step``."""

    low: int
    high: int
    default: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high or self.step < 1:
            raise InputError(f"an integer from {self.low} to {self.high} in steps of {self.step}")

    @property
    def values(self) -> tuple[Value, ...]:
        """All values, ascending."""
        return tuple(range(self.low, self.high + 1, self.step))


@dataclass(frozen=True)
class Boolean:
    """On or off."""

    default: bool = False

    @property
    def values(self) -> tuple[Value, ...]:
        """Off, on."""
        return (False, True)


@dataclass(frozen=True)
class Choice:
    """One of some values; numbers are in order, anything else has no order."""

    values: tuple[Value, ...]
    default: Value | None = None

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) != len(self.values):  # 1 and True are one value
            raise InputError(f"a choice needs values, each once: {self.values!r}")


@dataclass(frozen=True)
class Permutation:
    """An order of ``0 .. length - 1``; a model sees the place of each item."""

    length: int
    default: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 7:
            raise InputError(f"a permutation of {self.length} items: from 1 to 7 can be searched")

    @property
    def values(self) -> tuple[Value, ...]:
        """All orders."""
        return tuple(itertools.permutations(range(self.length)))


@dataclass(frozen=True)
class Only:
    """A knob that matters only where another has one of some values; elsewhere it is at its default."""

    knob: PowerOfTwo | Integer | Boolean | Choice | Permutation
    on: str
    among: tuple[Value, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        """The knob's values."""
        return self.knob.values

    @property
    def default(self) -> Value | None:
        """The knob's default."""
        return self.knob.default


Knob = PowerOfTwo | Integer | Boolean | Choice | Permutation | Only


class Space:
    """The configs that a kernel may have.

    :param knobs: by name, in an order that a :class:`Only` respects: what it depends on comes before.
    :param valid: constraints, each a function of a config.
    :param derived: figures of a config that a model may learn from: ``{"tile": lambda c: c["M"] *
        c["N"]}``.
    :raises InputError: where knobs contradict each other, or no config is valid.
    """

    def __init__(
        self,
        knobs: Mapping[str, Knob],
        *,
        valid: Sequence[Constraint] = (),
        derived: Mapping[str, Callable[[Config], float]] | None = None,
    ) -> None:
        if not knobs:
            raise InputError("a space needs a knob")
        self.knobs = dict(knobs)
        self.valid = tuple(valid)
        self.derived = dict(derived or {})
        self._values = {name: tuple(knob.values) for name, knob in self.knobs.items()}
        self._known = {name: {_marked(v) for v in values} for name, values in self._values.items()}
        for name, knob in self.knobs.items():
            self._check(name, knob)

    def _check(self, name: str, knob: Knob) -> None:
        if knob.default is not None and _marked(knob.default) not in self._known[name]:
            raise InputError(f"knob {name}: its default {knob.default!r} is none of its values")
        if isinstance(knob, Only):
            before = list(self.knobs)[: list(self.knobs).index(name)]
            if knob.on not in before:
                raise InputError(
                    f"knob {name} depends on {knob.on!r}, which no knob before it is called"
                )
            if not {_marked(v) for v in knob.among} <= self._known[knob.on]:
                raise InputError(f"knob {name} needs {knob.on} among {knob.among}: not all its values")

    def restricted(self, *constraints: Constraint) -> Space:
        """The same space with more constraints."""
        return Space(self.knobs, valid=(*self.valid, *constraints), derived=self.derived)

    @property
    def product(self) -> int:
        """Number of combinations of values, valid or not."""
        return math.prod(len(v) for v in self._values.values())

    @cached_property
    def all(self) -> tuple[Config, ...] | None:
        """Every valid config, in the order of the knobs' values; None where there are too many."""
        if self.product > _ENUMERABLE:
            return None
        return tuple(self._enumerate())

    def _enumerate(self) -> Iterator[Config]:
        for values in itertools.product(*self._values.values()):
            config = dict(zip(self.knobs, values, strict=True))
            if self.why_not(config) is None:
                yield config

    def default(self) -> Config:
        """The config of all defaults; where there is none, or it is not valid, the first that is near.

        :raises InputError: where no valid config can be found.
        """
        start = {name: self._default(name) for name in self.knobs}
        if self.why_not(start) is None:
            return start
        rng = np.random.default_rng(0)
        found = self.all if self.all is not None else [self.sample(rng) for _ in range(64)]
        if not found:
            raise InputError("no config of the space is valid", hint="see the constraints of the space")
        return min(found, key=lambda c: self.distance(start, c))

    def why_not(self, config: Config) -> str | None:
        """Why a config cannot be; None if it can."""
        if config.keys() != self.knobs.keys():
            odd = sorted(config.keys() ^ self.knobs.keys())
            return f"knobs are {', '.join(self.knobs)}; {', '.join(odd)} is missing or unknown"
        for name, value in config.items():
            if _marked(value) not in self._known[name]:
                return f"{name} cannot be {value!r}"
            if not self.active(config, name) and value != self._default(name):
                return f"{name} does not matter here and must be {self._default(name)!r}"
        for constraint in self.valid:
            said = constraint(config)
            if said is False:
                return f"refused by {getattr(constraint, '__name__', 'a constraint')}"
            if isinstance(said, str):
                return said
        return None

    def active(self, config: Config, name: str) -> bool:
        """Whether a knob matters in this config."""
        knob = self.knobs[name]
        if not isinstance(knob, Only):
            return True
        return config.get(knob.on) in knob.among and self.active(config, knob.on)

    def settled(self, config: Config) -> Config:
        """The config with every knob that does not matter at its default."""
        made: Config = {}
        for name in self.knobs:
            made[name] = config[name]
            if not self.active(made, name):
                made[name] = self._default(name)
        return made

    def sample(self, rng: np.random.Generator) -> Config:
        """A random valid config, each valid one as likely where they can be listed.

        :raises InputError: where none is found.
        """
        if self.all is not None:
            if not self.all:
                raise InputError(
                    "no config of the space is valid", hint="see the constraints of the space"
                )
            return dict(self.all[int(rng.integers(len(self.all)))])
        for _ in range(_TRIES):
            drawn = {n: v[int(rng.integers(len(v)))] for n, v in self._values.items()}
            config = self.settled(drawn)
            if self.why_not(config) is None:
                return config
        raise InputError(
            f"none of {_TRIES} random configs is valid",
            hint="narrow the knobs: constraints that refuse nearly everything cannot be searched",
        )

    def neighbours(self, config: Config) -> list[Config]:
        """Valid configs that differ in one knob, by one step where its values are in order."""
        found = []
        for name, values in self._values.items():
            if not self.active(config, name):
                continue
            for value in self._beside(name, config[name], values):
                changed = self.settled({**config, name: value})
                if self.why_not(changed) is None:
                    found.append(changed)
        return found

    def mutate(self, config: Config, rng: np.random.Generator, knobs: int) -> Config | None:
        """The config with some knobs drawn anew; None where that is not valid."""
        names = rng.permutation(list(self.knobs))[:knobs].tolist()
        drawn = {n: self._values[n][int(rng.integers(len(self._values[n])))] for n in names}
        changed = self.settled({**config, **drawn})
        return changed if self.why_not(changed) is None else None

    def mix(self, a: Config, b: Config, rng: np.random.Generator) -> Config | None:
        """Each knob from one of two configs; None where that is not valid."""
        mixed = self.settled({n: (a if rng.random() < 0.5 else b)[n] for n in self.knobs})
        return mixed if self.why_not(mixed) is None else None

    def distance(self, a: Config, b: Config) -> float:
        """Sum over knobs: steps over the number of steps where values are in order, else 0 or 1."""
        total = 0.0
        for name, values in self._values.items():
            if a[name] == b[name]:
                continue
            if self.ordered(name):
                steps = abs(values.index(a[name]) - values.index(b[name]))
                total += max(steps / (len(values) - 1), 1e-9)
            else:
                total += 1.0
        return total

    def ordered(self, name: str) -> bool:
        """Whether a knob's values have an order."""
        knob = self.knobs[name]
        knob = knob.knob if isinstance(knob, Only) else knob
        if isinstance(knob, Choice):
            return all(isinstance(v, int | float) for v in knob.values)
        return not isinstance(knob, Permutation)

    def value(self, name: str, text: Any) -> Value:
        """The value of a knob that is written as ``text``, or is JSON's form of it.

        :raises InputError: where it is none of its values.
        """
        values, given = self._values[name], tuple(text) if isinstance(text, list) else text
        found = [v for v in values if v == given] or [
            v for v in values if str(v) == text
        ]  # "1" before 1
        if not found:
            raise InputError(f"{name} cannot be {text!r}", hint=f"values: {values}")
        return found[0]

    def read(self, found: Mapping[str, Any]) -> Config:
        """A config from what JSON or an endpoint gives.

        :raises InputError: where it is not a valid config.
        """
        if found.keys() != self.knobs.keys():
            odd = sorted(found.keys() ^ self.knobs.keys())
            raise InputError(
                f"a config has the knobs {', '.join(self.knobs)}", hint=f"see {', '.join(odd)}"
            )
        config = self.settled({n: self.value(n, found[n]) for n in self.knobs})
        why = self.why_not(config)
        if why is not None:
            raise InputError(why)
        return config

    def encode(self, configs: Sequence[Config]) -> np.ndarray:
        """What a model sees of configs: float64, one row a config.

        Ordered knobs are one column (the logarithm where all values are positive), others one a value; a
        permutation is the place of each item; then the derived figures, by ``sign(x) * log2(1 + |x|)``.
        """
        columns = [self._column(name, configs) for name in self.knobs]
        for figure in self.derived.values():
            column = np.array([float(figure(c)) for c in configs]).reshape(-1, 1)
            columns.append(np.sign(column) * np.log2(1 + np.abs(column)))
        return np.concatenate(columns, axis=1) if configs else np.zeros((0, 0))

    def _column(self, name: str, configs: Sequence[Config]) -> np.ndarray:
        values = self._values[name]
        given = [c[name] for c in configs]
        if self._permutes(name):
            return np.argsort(np.array(given, dtype=np.float64), axis=1).astype(np.float64)
        if self.ordered(name):
            column = np.array(given, dtype=np.float64).reshape(-1, 1)
            return np.log2(column) if min(map(float, values)) > 0 else column  # type: ignore[arg-type]
        return np.array([[float(v == w) for w in values] for v in given])

    def _beside(self, name: str, value: Value, values: tuple[Value, ...]) -> list[Value]:
        if isinstance(value, tuple) and self._permutes(name):
            return [_swapped(value, i) for i in range(len(value) - 1)]
        if not self.ordered(name):
            return [v for v in values if v != value]
        at = values.index(value)
        return [values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)]

    def _permutes(self, name: str) -> bool:
        knob = self.knobs[name]
        return isinstance(knob.knob if isinstance(knob, Only) else knob, Permutation)

    def _default(self, name: str) -> Value:
        default = self.knobs[name].default
        return self._values[name][0] if default is None else default


def _marked(value: Value) -> tuple[str, Value]:
    """A value that is not equal to one of another kind: True is not 1."""
    return (
        "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "",
        value,
    )


def _swapped(order: tuple[int, ...], at: int) -> tuple[int, ...]:
    changed = list(order)
    changed[at], changed[at + 1] = changed[at + 1], changed[at]
    return tuple(changed)
