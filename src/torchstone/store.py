"""The store: runs as append-only, content-addressed folders that survive a power cut.

::

    HOME/                     TORCHSTONE_HOME, or .torchstone in the working directory
      timing.lock             held while a run times, so that two runs do not disturb each other
      runs/RUN_ID/
        header.json           what was asked, where; written once
        lock                  held while a process writes to the run
        entries/NNNNNN-SHA256.json    one entry each, named by the digest of its bytes
        files/                the program, engines' artifacts; entries name them with their digests
        work/                 scratch of the workers; may be deleted at any time
        corrupt/              entries that no longer match their name, kept for inspection

An entry is written to a temporary file, synced, renamed into place, and the folder synced; nothing is
ever changed in place. What an entry needs beside itself (a compiled artifact) is listed in it with
digests; an entry is *valid* only while all of these still match.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from torchstone.errors import StoreError
from torchstone.records import Entry, Record, RunHeader

__all__ = [
    "FORMAT",
    "RunStore",
    "create",
    "digest_of",
    "exclusive",
    "find",
    "listing",
    "slug",
    "write_durably",
]

FORMAT = 1
"""Version of the record format; a run of another is not resumed."""

T = TypeVar("T")


class Stored(Record, frozen=True, kw_only=True):
    """One entry as it lies on disk."""

    key: str
    """What it answers: ``build/openvino``; the latest valid entry of a key counts."""
    files: dict[str, str]
    """Files that it depends on, relative to the run's ``files/``, with their SHA-256."""
    entry: Entry
    """The record."""


class RunStore:
    """One run's folder. Open for reading by anybody; appended to only within :meth:`writing`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = path / "files"
        self.work = path / "work"
        self.problems: list[str] = []
        """What was found damaged, one sentence each; reported, and redone by a resumed run."""
        self.header = self._read_header()
        self._stored: list[Stored] | None = None
        self._digests: dict[str, str] = {}  # files checked by this process, so that each is read once

    @property
    def run_id(self) -> str:
        """The run's name within its home."""
        return self.path.name

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries whose own bytes are intact, in the order written."""
        return tuple(s.entry for s in self._load())

    def get(self, key: str, kind: type[T]) -> T | None:
        """The latest valid entry of ``key`` and of this record type, or None."""
        for stored in reversed(self._load()):
            if stored.key == key and isinstance(stored.entry, kind) and self._files_match(stored):
                return stored.entry
        return None

    def put(self, key: str, entry: Entry, files: Sequence[Path] = ()) -> None:
        """Append an entry durably.

        :param files: files or folders below :attr:`files` that it depends on.
        """
        digests = {
            str(f.relative_to(self.files)): digest_of(f) for root in files for f in _files_below(root)
        }
        stored = Stored(key=key, files=digests, entry=entry)
        known = self._load()
        data = msgspec.json.encode(stored)
        number = self._next_number()
        write_durably(
            self.path / "entries" / f"{number:06d}-{hashlib.sha256(data).hexdigest()}.json", data
        )
        known.append(stored)
        self._digests.update(digests)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the run's lock.

        :raises StoreError: if another process is writing to this run.
        """
        with (self.path / "lock").open("w") as lock:
            if not _locked(lock.fileno()):
                raise StoreError(
                    "another process is working on this run",
                    where=self.path,
                    hint="wait for it, or start a new run without --resume",
                )
            yield

    @property
    def in_use(self) -> bool:
        """Whether a process holds the run's lock."""
        try:
            with self.writing():
                return False
        except StoreError:
            return True

    def _read_header(self) -> RunHeader:
        path = self.path / "header.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunHeader)
        except FileNotFoundError:
            raise StoreError("not a run", where=self.path, hint="torchstone ls shows the runs") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"the run's header is damaged or of another version ({error})",
                where=path,
                hint="its entries are intact beside it; start a new run",
            ) from None

    def _load(self) -> list[Stored]:
        if self._stored is None:
            self._stored = []
            for path in sorted((self.path / "entries").glob("*.json")):
                stored = self._read(path)
                if stored is not None:
                    self._stored.append(stored)
        return self._stored

    def _read(self, path: Path) -> Stored | None:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.stem.partition("-")[2]:
            self.problems.append(
                f"entry {path.name} no longer matches its digest; set aside, to be redone"
            )
            corrupt = self.path / "corrupt"
            corrupt.mkdir(exist_ok=True)
            path.rename(corrupt / f"{path.name}.{secrets.token_hex(4)}")
            return None
        try:
            return msgspec.json.decode(data, type=Stored)
        except msgspec.DecodeError as error:
            self.problems.append(f"entry {path.name} is of another version ({error}); ignored")
            return None

    def _files_match(self, stored: Stored) -> bool:
        for name, digest in stored.files.items():
            file = self.files / name
            if self._digests.get(name) == digest:
                continue
            if not file.is_file() or digest_of(file) != digest:
                self.problems.append(f"file {name} of {stored.key} is missing or changed; to be redone")
                return False
            self._digests[name] = digest
        return True

    def _next_number(self) -> int:
        names = [p.name for p in (self.path / "entries").iterdir() if p.suffix == ".json"]
        return 1 + max((int(n.partition("-")[0]) for n in names), default=0)


def create(home: Path, header: RunHeader) -> RunStore:
    """Make a new run."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = home / "runs" / f"{slug(header.workload.name)}-{stamp}-{secrets.token_hex(3)}"
    unfinished = path.with_name(f".{path.name}")
    for folder in ("entries", "files", "work"):
        (unfinished / folder).mkdir(parents=True)
    write_durably(unfinished / "header.json", msgspec.json.encode(header))
    unfinished.rename(path)
    return RunStore(path)


def listing(home: Path) -> tuple[tuple[RunStore, ...], tuple[str, ...]]:
    """All runs of a home, oldest first, and what could not be read."""
    runs, problems = [], []
    root = home / "runs"
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.name.startswith("."):  # a run whose creation was cut short
            continue
        try:
            runs.append(RunStore(path))
        except StoreError as error:
            problems.append(str(error))
    return tuple(sorted(runs, key=lambda r: r.header.started_at)), tuple(problems)


def find(home: Path, name: str | Path) -> RunStore:
    """A run by its folder, its id, the start of its id, or ``latest``.

    :raises StoreError: if there is none, or more than one.
    """
    if Path(name).joinpath("header.json").is_file():
        return RunStore(Path(name))
    runs, _ = listing(home)
    if str(name) == "latest" and runs:
        return runs[-1]
    matches = [r for r in runs if r.run_id.startswith(str(name))]
    exact = [r for r in matches if r.run_id == str(name)]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    what = f"no run {str(name)!r}" if not matches else f"{str(name)!r} fits {len(matches)} runs"
    raise StoreError(what, where=home, hint="torchstone ls shows the runs")


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a machine-wide lock file, waiting for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locked(file: int) -> bool:
    """Take the lock; a moment's patience, since a look at :attr:`RunStore.in_use` holds it briefly."""
    for _ in range(10):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return True
    return False


def _files_below(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    else:
        yield from (p for p in sorted(root.rglob("*")) if p.is_file())


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def slug(name: str) -> str:
    """A short name for a folder, from any text."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")[:40] or "model"
