"""The manifest of a bundle, and the proof that no byte changed since it was written.

``MANIFEST.sha256`` holds the digest of ``manifest.json``, which holds that of every other file, in the
format of ``sha256sum``. Whoever keeps (or signs) the digest of ``manifest.json`` has bound all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from torchstone.bundle.envelope import Envelope
from torchstone.errors import BundleError
from torchstone.records import Environment, InputSpec, Record

__all__ = [
    "CODE",
    "FORMAT",
    "MANIFEST",
    "PROGRAM",
    "SEAL",
    "WEIGHTS",
    "File",
    "Manifest",
    "check_files",
    "inventory",
    "output_types",
    "read",
    "seal",
]

FORMAT = 1
"""Version of the layout that this module writes, and the only one that it reads."""
MANIFEST = "manifest.json"
"""Name of the manifest's file."""
SEAL = "MANIFEST.sha256"
"""Name of the file with the manifest's own digest."""

CODE = "code"
"""Folder of the engine's files."""
PROGRAM = "fallback/program.pt2"
"""The exported program."""
WEIGHTS = "weights/model.safetensors"
"""The program's weights; absent where they stay inside the program."""

_HINT = "a bundle is never edited: take a fresh copy of it, or write it again"


class File(Record, frozen=True, kw_only=True):
    """One file of the bundle."""

    sha256: str
    """Digest of its bytes, hexadecimal."""
    size: int
    """Its length, bytes."""


class Manifest(Record, frozen=True, kw_only=True):
    """What a bundle is, and what it needs."""

    format: int
    """Version of the layout."""
    name: str
    """The workload's name."""
    created: str
    """When it was written: UTC, ISO 8601."""
    recipe: str
    """The recipe's text form."""
    decision: Literal["PROMOTE", "KEEP_BASELINE", "HOLD"]
    """What the gate decided."""
    torchstone: str
    """Version of torchstone that wrote it."""
    torch: str
    """Version of torch that it was built with."""
    engine: dict[str, str]
    """Packages whose version the code is tied to, with that version; empty where code/ is absent."""
    requires: tuple[str, ...]
    """Packages needed to load it."""
    environment: Environment
    """Where it was built and measured."""
    envelope: Envelope
    """The calls that it was proven on, and the instruction sets that its code needs."""
    inputs: tuple[InputSpec, ...]
    """Positional inputs in order, as declared by the workload."""
    outputs: str | None
    """Serialized pytree of the outputs (``torch.utils._pytree``); None: as in the exported program."""
    files: dict[str, File]
    """Every file but this one and its digest's, by its path in the bundle with ``/`` between parts."""
    parameters: int = 0
    """Number of parameters, a tied one counted once."""
    mutates: tuple[str, ...] = ()
    """Names of the inputs that a call changes in place, as the model does."""
    signature: None = None
    """Reserved: signature of the manifest's digest."""
    sbom: None = None
    """Reserved: the bill of materials."""
    schema: None = None
    """Reserved: the schema of the inputs as tables."""


class _Format(msgspec.Struct):
    format: int = 0


def inventory(directory: Path) -> dict[str, File]:
    """Digest every file below a folder, in parallel; keys are relative paths with ``/``.

    :raises BundleError: on a symlink, or on what is neither file nor folder.
    """
    paths = [p for p in _walk(directory) if p not in (MANIFEST, SEAL)]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(lambda p: _digest(directory / p), paths), strict=True))


def seal(directory: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` and, last of all, its digest."""
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(raw)
    (directory / SEAL).write_bytes(_sealed(raw))


def read(directory: Path) -> Manifest:
    """Read the manifest and check every byte below the folder against it.

    :raises BundleError: naming the file that is changed, missing, extra, or not a plain file.
    """
    if not directory.is_dir():
        raise BundleError("there is no bundle here", where=directory)
    found = _walk(directory)
    for name in (MANIFEST, SEAL):
        if name not in found:
            raise BundleError(f"{name} is missing", where=directory / name, hint=_HINT)
    raw = (directory / MANIFEST).read_bytes()
    if (directory / SEAL).read_bytes() != _sealed(raw):
        raise BundleError(
            f"{MANIFEST} does not match {SEAL}: one of them was changed",
            where=directory / SEAL,
            hint=_HINT,
        )
    manifest = _decode(raw, directory / MANIFEST)
    _check_names(directory, manifest, found)
    check_files(directory, manifest, sorted(manifest.files))
    return manifest


def check_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check size and digest of the files named, in parallel.

    :raises BundleError: naming the first file that changed.
    """
    names = list(names)
    for name in names:
        size = (directory / name).stat().st_size
        if size != manifest.files[name].size:
            _changed(directory / name, f"it has {size} bytes, not {manifest.files[name].size}")
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for name, file in zip(names, pool.map(lambda n: _digest(directory / n), names), strict=True):
            if file != manifest.files[name]:
                _changed(directory / name, f"its SHA-256 is {file.sha256}")


def output_types(output_spec: str | None) -> Iterator[str]:
    """Names of the containers in a serialized pytree that Python itself does not have."""
    pending = [] if output_spec is None else [json.loads(output_spec)[1]]
    while pending:
        node = pending.pop()
        pending.extend(node["children_spec"])
        if node["type"] is not None and not node["type"].startswith(("builtins.", "collections.")):
            yield node["type"]


def _changed(path: Path, how: str) -> None:
    raise BundleError(
        f"{path.name} was changed since the bundle was written: {how}", where=path, hint=_HINT
    )


def _sealed(raw: bytes) -> bytes:
    return f"{hashlib.sha256(raw).hexdigest()}  {MANIFEST}\n".encode()


def _digest(path: Path) -> File:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return File(sha256=digest, size=stream.tell())


def _decode(raw: bytes, path: Path) -> Manifest:
    try:
        version = msgspec.json.decode(raw, type=_Format).format
        if version == FORMAT:
            return msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BundleError(f"not a manifest: {error}", where=path) from None
    raise BundleError(
        f"the bundle has format {version}; this torchstone reads format {FORMAT}",
        where=path,
        hint="load it with the torchstone version that its manifest names",
    )


def _walk(directory: Path) -> list[str]:
    """Relative paths of all files, sorted. An empty folder is listed too, with a ``/`` at its end."""
    paths: list[str] = []
    pending = [PurePosixPath()]
    while pending:
        folder = pending.pop()
        entries = list(os.scandir(directory / folder))
        if not entries and folder.parts:
            paths.append(f"{folder}/")
        for entry in entries:
            relative = folder / entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                pending.append(relative)
            elif stat.S_ISREG(mode):
                paths.append(str(relative))
            else:
                kind = "a symlink" if stat.S_ISLNK(mode) else "not a plain file"
                raise BundleError(f"{entry.name} is {kind}", where=directory / relative, hint=_HINT)
    return sorted(paths)


def _check_names(directory: Path, manifest: Manifest, found: list[str]) -> None:
    expected = {*manifest.files, MANIFEST, SEAL}
    for name in sorted(expected - set(found)):
        raise BundleError(f"{name} is missing", where=directory / name, hint=_HINT)
    for name in sorted(set(found) - expected):
        raise BundleError(f"{name} is not in the manifest", where=directory / name, hint=_HINT)
