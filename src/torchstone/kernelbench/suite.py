"""Finding the suite's problems, and choosing among them. Pure: reads names and bytes, runs nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchstone.errors import InputError

__all__ = ["SAMPLE", "Problem", "Selection", "find", "parse_levels", "parse_problems", "parse_shard"]

SAMPLE: dict[int, int] = {1: 24, 2: 24, 3: 12}
"""Problems of each level in the fixed sample: those whose file names have the least SHA-256."""

Half = Literal["even", "odd"]

_NAME = re.compile(r"(\d+)_.+\.py")
_LEVEL = re.compile(r"level(\d+)")


@dataclass(frozen=True, order=True)
class Problem:
    """One file of the suite."""

    level: int
    """Of its folder, ``level1`` to ``level4``."""
    number: int
    """The number that its file's name begins with."""
    name: str
    """The file's name."""
    path: Path
    """The file."""
    digest: str
    """SHA-256 of its bytes."""

    @property
    def key(self) -> str:
        """``level/number``: ``1/23``."""
        return f"{self.level}/{self.number}"

    @property
    def half(self) -> Half:
        """Even numbers are for development, odd ones for the final measurement only."""
        return "odd" if self.number % 2 else "even"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which problems to take; all that is given has to hold."""

    levels: tuple[int, ...] = ()
    """Levels; all that are there if empty."""
    problems: tuple[tuple[int, int], ...] = ()
    """Pairs of level and number; all if empty."""
    sample: bool = False
    """Whether to take only the fixed sample, see :data:`SAMPLE`."""
    half: Half | None = None
    """Even numbers or odd ones only."""
    shard: tuple[int, int] = (1, 1)
    """Which of how many parts of what is left, the first being 1."""

    def of(self, problems: Sequence[Problem]) -> tuple[Problem, ...]:
        """Those chosen, by level and number.

        The shards of a selection are disjoint and make up the whole, and neighbours, which tend to cost
        alike, go to different ones.

        :raises InputError: where a problem is asked for that is not there, or none is left.
        """
        there = {(p.level, p.number) for p in problems}
        absent = [f"{level}/{n}" for level, n in self.problems if (level, n) not in there]
        absent += [f"level {n}" for n in self.levels if n not in {p.level for p in problems}]
        if absent:
            have = ", ".join(f"level {n}" for n in sorted({level for level, _ in there}))
            raise InputError(f"the suite has no {', '.join(absent)}", hint=f"it has {have}")
        taken = sorted(p for p in problems if self._takes(p))
        if self.sample:
            taken = sorted(_sample(problems) & set(taken))
        part, parts = self.shard
        taken = [p for i, p in enumerate(taken) if i % parts == part - 1]
        if not taken:
            raise InputError("no problem is left", hint="the options for choosing exclude each other")
        return tuple(taken)

    def _takes(self, problem: Problem) -> bool:
        return (
            (not self.levels or problem.level in self.levels)
            and (not self.problems or (problem.level, problem.number) in self.problems)
            and (self.half is None or problem.half == self.half)
        )


def find(path: Path) -> tuple[Problem, ...]:
    """All problems of a checkout, by level and number.

    :param path: the suite's repository, or the folder in it that holds ``level1`` and so on.
    :raises InputError: where there is no suite at ``path``.
    """
    if not path.is_dir():
        raise InputError("is no folder" if path.exists() else "there is no such folder", where=path)
    root = path / "KernelBench" if (path / "KernelBench").is_dir() else path
    levels = [(int(m[1]), f) for f in root.iterdir() if f.is_dir() and (m := _LEVEL.fullmatch(f.name))]
    if not levels:
        raise InputError(
            "has no folder level1, level2, ...",
            where=root,
            hint="give a checkout of https://github.com/ScalingIntelligence/KernelBench",
        )
    found = [problem for level, folder in levels for problem in _of_level(level, folder)]
    if not found:
        raise InputError("its levels hold no file NUMBER_NAME.py", where=root)
    return tuple(sorted(found))


def _of_level(level: int, folder: Path) -> Iterable[Problem]:
    seen: dict[int, str] = {}
    for file in sorted(folder.glob("*.py")):
        match = _NAME.fullmatch(file.name)
        if match is None:
            continue
        number = int(match[1])
        if number in seen:
            raise InputError(f"both {seen[number]} and {file.name} are number {number}", where=folder)
        seen[number] = file.name
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        yield Problem(level, number, file.name, file.resolve(), digest)


def _sample(problems: Iterable[Problem]) -> set[Problem]:
    by_hash = sorted(problems, key=lambda p: hashlib.sha256(p.name.encode()).hexdigest())
    return {
        p for level, count in SAMPLE.items() for p in [q for q in by_hash if q.level == level][:count]
    }


def parse_levels(text: str) -> tuple[int, ...]:
    """``1,2,3``.

    :raises InputError: where that is not what it says; so the two below.
    """
    return tuple(_number(part, "--levels", "--levels 1,2") for part in _parts(text))


def parse_problems(text: str) -> tuple[tuple[int, int], ...]:
    """``1/1,1/23,2/12``."""
    pairs = [part.partition("/") for part in _parts(text)]
    hint = "--problems 1/23,2/12: level and number"
    return tuple((_number(a, "--problems", hint), _number(b, "--problems", hint)) for a, _, b in pairs)


def parse_shard(text: str) -> tuple[int, int]:
    """``2/4``: the second of four parts."""
    hint = "--shard 2/4: the second of four parts"
    part, _, parts = text.partition("/")
    shard = (_number(part, "--shard", hint), _number(parts, "--shard", hint))
    if not 1 <= shard[0] <= shard[1]:
        raise InputError(f"--shard {text}: there is no such part", hint=hint)
    return shard


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str, option: str, hint: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{option}: {text!r} is no number", hint=hint)
    return int(text)
