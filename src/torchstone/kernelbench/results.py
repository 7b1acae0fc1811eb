"""What is known already: a file for each problem, written the moment that it is known.

::

    OUT/
      asked.json                     what was asked and where; another question needs another folder
      machine.json                   where, and what the device does at best, as measured last
      lock-1-of-1                    held by the process that works on this shard
      problems/1-23-SHA256.json      one result each, named by the digest of its bytes
      cache/  work/1-of-1/           compiled code; logs of the workers
      results.json  results.md       all of it, as of the last run that ended

A file whose bytes no longer match its name is set aside, told, and its problem done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchstone.errors import StoreError
from torchstone.kernelbench.jobs import Described
from torchstone.kernelbench.suite import Problem
from torchstone.records import Environment, Record
from torchstone.records.kernelbench import BenchProblem
from torchstone.store import write_durably

__all__ = ["Asked", "Machine", "Results"]


class Asked(Record, frozen=True, kw_only=True):
    """What results of one folder have in common."""

    device: str
    """``cpu``, ``cuda``."""
    dtype: str
    """Of parameters and inputs."""
    inputs_on: str
    """Whose generator drew them."""
    columns: tuple[str, ...]
    """Names of the columns and candidates, in order."""
    versions: dict[str, str]
    """Of the packages that decide, and the names of devices and processor."""
    threads: int
    """Of the process that times."""


class Machine(Record, frozen=True, kw_only=True):
    """Where results were measured."""

    environment: Environment
    """The machine and its packages."""
    described: Described
    """The device at its best."""


class Results:
    """The folder of a run.

    :param asked: what its results are to have in common; None to take them as they are.
    :raises StoreError: where the folder holds results of another question, or is damaged.
    """

    def __init__(self, folder: Path, asked: Asked | None) -> None:
        self.folder = folder
        self.damaged: list[str] = []
        """What was found damaged or outdated: one sentence each."""
        if asked is not None:
            (folder / "problems").mkdir(parents=True, exist_ok=True)
        self.asked = self._agreed(asked)
        """What all of it has in common."""
        self._known = {r.key: r for r in self._read()}

    @contextlib.contextmanager
    def writing(self, shard: tuple[int, int]) -> Iterator[None]:
        """Hold the shard's lock.

        :raises StoreError: if another process works on it.
        """
        with (self.folder / f"lock-{shard[0]}-of-{shard[1]}").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    "another process is working on this shard",
                    where=self.folder,
                    hint="wait for it, or take another --out or --shard",
                ) from None
            yield

    def get(self, problem: Problem) -> BenchProblem | None:
        """The result of a problem, if it is known and the file is still the same."""
        found = self._known.get(problem.key)
        return found if found is not None and found.digest == problem.digest else None

    def put(self, result: BenchProblem) -> None:
        """Keep a result durably."""
        data = msgspec.json.encode(result)
        name = f"{result.level}-{result.number}-{hashlib.sha256(data).hexdigest()}.json"
        write_durably(self.folder / "problems" / name, data)
        for old in (self.folder / "problems").glob(f"{result.level}-{result.number}-*.json"):
            if old.name != name:
                old.unlink()
        self._known[result.key] = result

    def keep_machine(self, machine: Machine) -> None:
        """Keep where this was measured."""
        write_durably(self.folder / "machine.json", msgspec.json.encode(machine))

    def machine(self) -> Machine | None:
        """Where it was measured, as of the last run that measured anything."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode((self.folder / "machine.json").read_bytes(), type=Machine)
        return None

    def all(self) -> tuple[BenchProblem, ...]:
        """All that is known, by level and number; of other shards too, as they are on disk by now."""
        self._known |= {r.key: r for r in self._read()}
        return tuple(sorted(self._known.values(), key=lambda r: (r.level, r.number)))

    def _agreed(self, asked: Asked | None) -> Asked:
        path = self.folder / "asked.json"
        if asked is not None and not path.exists():
            write_durably(path, msgspec.json.encode(asked))
            return asked
        try:
            before = msgspec.json.decode(path.read_bytes(), type=Asked)
        except FileNotFoundError:
            raise StoreError("holds no results of this command", where=self.folder) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"is damaged ({error})", where=path, hint="take another --out") from None
        if asked is None:
            return before
        different = [
            f"{name}: {getattr(before, name)} before, now {getattr(asked, name)}"
            for name in Asked.__struct_fields__
            if getattr(before, name) != getattr(asked, name)
        ]
        if different:
            raise StoreError(
                f"holds results of another question ({'; '.join(different)[:600]})",
                where=self.folder,
                hint="figures of different machines, versions or columns are not put together: take "
                "another --out",
            )
        return asked

    def _read(self) -> Iterator[BenchProblem]:
        for path in sorted((self.folder / "problems").glob("*.json")):
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != path.stem.rpartition("-")[2]:
                aside = path.with_suffix(".damaged")
                path.rename(aside)
                self.damaged.append(f"{path.name} no longer matches its digest; set aside, to be redone")
                continue
            try:
                yield msgspec.json.decode(data, type=BenchProblem)
            except msgspec.DecodeError as error:
                self.damaged.append(f"{path.name} is of another version ({error}); to be redone")
