"""How a workload reaches another process: as the name of its TOML file, or as cloudpickle bytes.

A file is one line of JSON (the header), then, for a workload of Python objects, its pickle.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from torchstone.errors import WorkloadError
from torchstone.policy import Policy
from torchstone.recipe import parse as parse_recipe
from torchstone.records import Record, WorkloadSpec
from torchstone.workload.core import Workload
from torchstone.workload.digest import digest_folder
from torchstone.workload.toml import read

__all__ = ["dump", "load"]

FACTORY = "give a function that makes the model, in a file that the worker can import"


class Header(Record, frozen=True, kw_only=True):
    """What is known of a dumped workload before any of its code runs."""

    origin: str | None
    """Absolute path of the TOML file; None where a pickle follows."""
    digest: str | None
    """Digest of the folder when it was dumped."""
    policy: Policy
    """The policy, which may have been changed since it was read."""
    recipes: tuple[str, ...]
    """The recipes, likewise."""
    sys_path: tuple[str, ...]
    """Where the dumping process found modules."""
    spec: WorkloadSpec | None = None
    """Its description, where known: making it anew would make the model."""


def dump(workload: Workload, path: Path, spec: WorkloadSpec | None = None) -> None:
    """Write a workload to a file that :func:`load` reads in any process of this machine.

    :param spec: its description, where known; saves every reader making the model to know it.
    :raises WorkloadError: where its objects cannot be pickled, or do not fit together.
    """
    file = None if workload.origin is None else Path(workload.origin).resolve()
    if file is None:
        workload.spec()  # kept, and travels along: a pickled class has lost the file that it came from
    header = Header(
        origin=None if file is None else str(file),
        digest=None if file is None else digest_folder(file),
        policy=workload.policy,
        recipes=tuple(str(recipe) for recipe in workload.recipes),
        sys_path=tuple(os.path.abspath(entry) for entry in sys.path),
        spec=spec,
    )
    payload = b"" if file is not None else _pickle(workload)
    path.write_bytes(msgspec.json.encode(header) + b"\n" + payload)


def load(path: Path) -> Workload:
    """Read a workload that :func:`dump` wrote; its ``sys.path`` entries are added to this process's.

    A pickle runs code when it is read: load only what the same user's process has dumped.

    :raises WorkloadError: where the folder has changed since, or a module cannot be imported here.
    """
    line, _, payload = path.read_bytes().partition(b"\n")
    header = msgspec.json.decode(line, type=Header)
    sys.path.extend(entry for entry in header.sys_path if entry not in sys.path)
    if header.origin is None:
        return _unpickle(payload)
    if digest_folder(Path(header.origin)) != header.digest:
        what = "the workload has changed since the run of it began"
        raise WorkloadError(what, where=header.origin, hint="start a new run, or restore its files")
    recipes = tuple(parse_recipe(text) for text in header.recipes)
    loaded = replace(read(Path(header.origin)), policy=header.policy, recipes=recipes)
    if header.spec is not None:
        loaded.remember(header.spec)
    return loaded


def _pickle(workload: Workload) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(workload)
    # what __reduce__ and __getstate__ of locks, handles, tensor subclasses, ... refuse with
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        what = f"workload {workload.name!r} cannot be sent to a worker: {error}"
        raise WorkloadError(what, hint=FACTORY) from error
    return data


def _unpickle(payload: bytes) -> Workload:
    try:
        workload = pickle.loads(payload)
    except (ImportError, AttributeError) as error:
        raise WorkloadError(f"the worker cannot import the workload: {error}", hint=FACTORY) from error
    assert isinstance(workload, Workload)  # dump wrote it
    return workload
