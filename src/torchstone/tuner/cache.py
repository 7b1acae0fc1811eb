"""The cache: whatever tuning has measured, failures included, shared by processes and machines.

::

    HOME/tuning/
      lock                  held for a moment: to begin or repair a file, to import, to prune
      KERNEL-DIGEST/        one TuningKey; DIGEST is of key.json, which holds it
        rows-ID.jsonl       one writer's rows, a line each: "DIGEST JSON"; flocked while it is written to
        corrupt/            files in which lines were damaged, kept for inspection

Rows are only ever appended, each by one write and one sync, by a process to a file of its own: writers
wait for nobody, and a kill loses at most the line being written. A line's digest covers the key too, so
that no row passes for one of another key. The last row of a config counts; its time is later than that
of any row that its writer had read, whatever the clocks say: a verdict overrules those that it answers.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import gzip
import hashlib
import io
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from torchstone.errors import InputError, StoreError
from torchstone.records.cache import Dropped, Header, Imported, Row, Shelf
from torchstone.records.tuning import Config, Measurement, TuningKey
from torchstone.store import exclusive, slug, write_durably

__all__ = ["FORMAT", "Cache", "merge"]

FORMAT = 1
"""Version of exported files."""
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError)
_DAY = datetime.timedelta(days=1)
_TICK = datetime.timedelta(microseconds=1)


class _Place(NamedTuple):
    key: TuningKey
    named: bytes  # what its key.json holds
    folder: Path


class Cache:
    """A folder of measurements, made when the first is kept. Not for several threads.

    :param path: ``HOME/tuning``.
    :param clock: gives the time, UTC.
    """

    def __init__(self, path: Path, clock: Callable[[], datetime.datetime] | None = None) -> None:
        self.path = path
        self.problems: list[str] = []
        """What was found damaged, one sentence each."""
        self._clock = clock or (lambda: datetime.datetime.now(datetime.UTC))
        self._newest = datetime.datetime.min.replace(tzinfo=datetime.UTC)
        self._files: dict[tuple[int, Path], io.FileIO] = {}  # by process: a fork's child needs its own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files written to; another append begins another."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def append(self, key: TuningKey, measurement: Measurement) -> None:
        """Keep a measurement; it is on disk when this returns.

        :raises InputError: where it holds what cannot be kept: a time that is not finite.
        :raises StoreError: where it cannot be written.
        """
        self._newest = max(self._clock(), self._newest + _TICK)
        try:
            row = _encode(Row(at=self._newest, measurement=measurement))
            msgspec.json.decode(row, type=Row)
        except (UnicodeEncodeError, msgspec.DecodeError) as error:
            raise InputError(f"a measurement that cannot be kept: {error}") from None
        place = self._place(key)
        mine = os.getpid(), place.folder
        try:
            if mine not in self._files:
                self._files[mine] = self._begin(place)
            left = _line(place.named, row)
            while left:
                left = left[self._files[mine].write(left) :]
            os.fsync(self._files[mine])
        except OSError as error:
            self.close()  # its last line may be cut short: none may follow
            hint = "see that there is room, and that the folder may be written to"
            raise StoreError(
                f"cannot keep a measurement: {error}", where=place.folder, hint=hint
            ) from None

    def demote(self, key: TuningKey, config: Config, why: str) -> None:
        """Say that a config is wrong, whatever its rows so far say."""
        self.append(key, Measurement(config=config, status="wrong", text=why))

    def rows(self, key: TuningKey) -> tuple[Measurement, ...]:
        """The last word on each config of this very key."""
        return self._shelf(self._place(key)).latest

    def histories(self, key: TuningKey) -> tuple[tuple[TuningKey, tuple[Measurement, ...]], ...]:
        """What is kept of near keys: same kernel, same space, anything else different. Priors only."""
        near = [p for p in self._places(slug(key.kernel)) if p.key != key]
        found = [self._shelf(p) for p in near if (p.key.kernel, p.key.space) == (key.kernel, key.space)]
        return tuple((s.key, s.latest) for s in found if s.rows)

    def shelves(self) -> tuple[Shelf, ...]:
        """Everything."""
        return tuple(self._shelf(place) for place in self._places())

    def export(self, path: Path, keys: Iterable[TuningKey] | None = None) -> Header:
        """Write all rows, or those of some keys, to one file; the same rows give the same bytes.

        :param path: JSON lines; gzipped if it ends in ``.gz``.
        """
        wanted = None if keys is None else set(map(_encode, keys))
        return _pack(path, [s for s in self.shelves() if wanted is None or _encode(s.key) in wanted])

    def import_(
        self, path: Path, *, device: str, versions: Mapping[str, str], foreign: bool = False
    ) -> Imported:
        """Take in an exported file.

        :param device: this machine's, with ``versions``: rows of others are left out.
        :param foreign: take those too: under their own keys, hence only as priors.
        :raises InputError: where the file is damaged, or all of it would be left out; nothing is taken.
        """
        shelves = _unpack(path)
        ours = [s for s in shelves if foreign or (s.key.device, s.key.versions) == (device, versions)]
        if shelves and not ours:
            key = shelves[0].key
            what = f"nothing in it is of this machine: it has {key.device}, {key.versions}; this is"
            hint = "--foreign takes it, as something to learn from"
            raise InputError(f"{what} {device}, {dict(versions)}", where=path, hint=hint)
        if any(r.at > self._clock() + _DAY for s in ours for r in s.rows):
            raise InputError("its rows are of the future", where=path, hint="set this machine's clock")
        added, total = 0, sum(len(s.rows) for s in ours)
        foreign_rows = sum(len(s.rows) for s in shelves) - total
        with exclusive(self.path / "lock"):
            for place, shelf in [(self._place(s.key), s) for s in ours]:
                have = set(map(_encode, self._shelf(place, repair=False).rows))
                new = [_line(place.named, row) for row in map(_encode, shelf.rows) if row not in have]
                if new:
                    _make(place)
                    write_durably(_fresh(place.folder), b"".join(new))
                added += len(new)
        return Imported(added=added, known=total - added, foreign=foreign_rows)

    def prune(
        self,
        *,
        versions: Mapping[str, str] | None = None,
        older_than_s: float | None = None,
        dry_run: bool = False,
    ) -> tuple[Dropped, ...]:
        """Drop keys of other versions than these, and keys whose last row is older; none in use.

        :raises InputError: where neither is asked for.
        """
        if versions is None and older_than_s is None:
            raise InputError("what to prune?", hint="say --other-versions, --older-than DAYS, or both")
        dropped = []
        with exclusive(self.path / "lock"):
            for place in self._places():
                rows = self._shelf(place, repair=False).rows
                age = (self._clock() - rows[-1].at).total_seconds() if rows else float("inf")
                why = "old" if older_than_s is not None and age > older_than_s else ""
                why = "other versions" if versions not in (None, place.key.versions) else why
                files = [f for f in place.folder.rglob("*") if f.is_file()]
                if not why or any(map(_live, files)):
                    continue
                size = sum(f.stat().st_size for f in files)
                dropped.append(Dropped(key=place.key, why=why, bytes=size))
                if not dry_run:  # all at once: without the row that overrules it, another would count
                    place.folder.rename(self.path / f".dropped.{secrets.token_hex(8)}")
            for gone in self.path.glob(".dropped.*"):
                shutil.rmtree(gone)
        return tuple(dropped)

    def _place(self, key: TuningKey) -> _Place:
        named = _encode(key)
        return _Place(key, named, self.path / f"{slug(key.kernel)}-{_digest(named)}")

    def _places(self, slug: str = "*") -> Iterator[_Place]:
        for folder in sorted(self.path.glob(f"{slug}-{'?' * 16}")):
            named, key = b"", None
            with contextlib.suppress(OSError, *_DAMAGE):
                named = (folder / "key.json").read_bytes()
                key = msgspec.json.decode(named, type=TuningKey)
            if key is not None and folder.name.endswith(_digest(named)):
                yield _Place(key, named, folder)
            elif any(folder.glob("rows-*")):  # else it is just being made
                self._tell(f"{folder}: its key.json is damaged or of another version; left out")

    def _shelf(self, place: _Place, repair: bool = True) -> Shelf:
        while True:
            rows: dict[bytes, Row] = {}
            try:
                for path in sorted(place.folder.glob("rows-*.jsonl")):
                    rows.update(self._read(path, place.named, repair))
            except FileNotFoundError:  # another process has repaired or pruned it
                continue
            self._newest = max(self._newest, *(r.at for r in rows.values())) if rows else self._newest
            return Shelf(key=place.key, rows=_ordered(rows))

    def _read(self, path: Path, named: bytes, repair: bool) -> dict[bytes, Row]:
        live = _live(path)  # asked before reading: what nobody writes to is whole
        lines = path.read_bytes().split(b"\n")
        rows: dict[bytes, Row] = {}
        good, damaged = [], False
        for number, line in enumerate(lines, 1):
            if _line(named, line[17:]) == line + b"\n":
                good.append(line + b"\n")
                try:
                    rows[line[17:]] = msgspec.json.decode(line[17:], type=Row)
                except _DAMAGE as error:
                    self._tell(f"{path}:{number}: a row of another version ({error}); left out")
            elif line and not (live and number == len(lines)):  # that one is being written
                self._tell(f"{path}:{number}: a row is cut short or does not match its digest; left out")
                damaged = True
        if damaged and repair and not live:
            with contextlib.suppress(OSError):  # where it may not be written to, it is read as it is
                self._repair(path, good)
        return rows

    def _repair(self, path: Path, good: list[bytes]) -> None:
        with exclusive(self.path / "lock"):
            (path.parent / "corrupt").mkdir(exist_ok=True)
            if good and path.exists():
                write_durably(_fresh(path.parent), b"".join(good))
            path.rename(path.parent / "corrupt" / path.name)

    def _begin(self, place: _Place) -> io.FileIO:
        with exclusive(self.path / "lock"):
            _make(place)
            file = io.FileIO(_fresh(place.folder), "x")
            fcntl.flock(file, fcntl.LOCK_EX)
            for folder in (place.folder, self.path):
                handle = os.open(folder, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
        return file

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def merge(paths: Iterable[Path], out: Path) -> Header:
    """Write all rows of several exported files to one: the same bytes, in whatever order they come.

    :raises InputError: where a file is damaged; nothing is written.
    """
    return _pack(out, [shelf for path in paths for shelf in _unpack(path)])


def _pack(path: Path, shelves: Iterable[Shelf]) -> Header:
    union: dict[bytes, dict[bytes, Row]] = {}
    for shelf in shelves:
        if shelf.rows:
            union.setdefault(_encode(shelf.key), {}).update({_encode(r): r for r in shelf.rows})
    keys = [msgspec.json.decode(named, type=TuningKey) for named in sorted(union)]
    kept = [Shelf(key=key, rows=_ordered(union[_encode(key)])) for key in keys]
    devices = tuple(sorted({k.device for k in keys}))
    header = Header(format=FORMAT, devices=devices, keys=len(keys), rows=sum(len(s.rows) for s in kept))
    body = b"".join(_encode(part) + b"\n" for part in (header, *kept))
    data = body + _seal(body)
    write_durably(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return header


def _unpack(path: Path) -> list[Shelf]:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"cannot be read: {error}", where=path, hint="copy or export it again"
        ) from None
    lines = data.splitlines(keepends=True)
    if len(lines) < 2 or lines[-1] != _seal(b"".join(lines[:-1])):
        what = "no exported cache, or cut short or changed since: its last line does not match the rest"
        raise InputError(what, where=path, hint="copy or export it again")
    try:
        header = msgspec.json.decode(lines[0], type=Header)
        if header.format != FORMAT:
            raise msgspec.DecodeError(f"format {header.format}, not {FORMAT}")
        return [msgspec.json.decode(line, type=Shelf) for line in lines[1:-1]]
    except _DAMAGE as error:
        hint = "use the version of Torchstone that wrote it"
        raise InputError(f"written by another version: {error}", where=path, hint=hint) from None


def _make(place: _Place) -> None:
    place.folder.mkdir(exist_ok=True)
    write_durably(place.folder / "key.json", place.named)


def _ordered(rows: Mapping[bytes, Row]) -> tuple[Row, ...]:
    # of one moment and one config, the bytes go by status, of which "unverifiable" and "wrong" are last
    return tuple(rows[row] for row in sorted(rows, key=lambda row: (rows[row].at, row)))


def _live(path: Path) -> bool:
    """Whether a process writes to the file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _line(named: bytes, row: bytes) -> bytes:
    return f"{_digest(named + row)} ".encode() + row + b"\n"


def _seal(body: bytes) -> bytes:
    return b'{"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _fresh(folder: Path) -> Path:
    return folder / f"rows-{secrets.token_hex(8)}.jsonl"
