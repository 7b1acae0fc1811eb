"""Reading ``torchstone.toml`` and the Python file beside it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from torchstone.errors import InputError, PolicyError, WorkloadError
from torchstone.policy import Policy
from torchstone.recipe import Recipe
from torchstone.recipe import parse as parse_recipe
from torchstone.records import Dim
from torchstone.workload import traffic
from torchstone.workload.core import Workload
from torchstone.workload.dims import Shape, did_you_mean, parse_dim
from torchstone.workload.place import line_in, located
from torchstone.workload.usercode import import_file

__all__ = ["FILE", "parse", "read", "toml_path"]

FILE = "torchstone.toml"
SECTIONS = ("workload", "dims", "inputs", "candidates", "policy")
FUNCTIONS = ("model", "inputs", "holdout", "metric", "generate", "perturb")
"""Keys of ``[workload]`` that name a function."""

_REFERENCE = re.compile(r"([\w./-]+):([A-Za-z_]\w*)\Z")
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_AT_KEY = re.compile(r"\$\.(\w+)|`(\w+)`$")
T = TypeVar("T", bound=msgspec.Struct)


class _Main(msgspec.Struct, forbid_unknown_fields=True):
    """``[workload]``."""

    model: str
    inputs: str
    name: str | None = None
    holdout: str | None = None
    metric: str | None = None
    generate: str | None = None
    perturb: str | None = None
    traffic: str | None = None
    recipes: tuple[str, ...] = ()


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    """``[inputs.NAME]``."""

    shape: tuple[int | str, ...] | None = None
    low: float | None = None
    high: float | None = None


def toml_path(path: Path) -> Path:
    """The TOML file of a workload given as a folder or as that file.

    :raises WorkloadError: where there is none.
    """
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        hint = f"give a folder with a {FILE}, or the file itself"
        raise WorkloadError("there is no workload here", where=path, hint=hint)
    if path.suffix != ".toml":
        hint = f"describe the workload in a {FILE} beside {path.name} and give that"
        raise WorkloadError(f"{path.name} is no TOML file", where=path, hint=hint)
    return path


def parse(path: Path) -> dict[str, Any]:
    """The TOML file's content.

    :raises WorkloadError: with the line of a syntax error.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise WorkloadError(f"is not UTF-8: {error}", where=path, hint="save it as UTF-8") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _AT_LINE.search(str(error))
        line = int(found[1]) if found else len(text.splitlines())
        raise WorkloadError(f"TOML syntax: {error}", where=path, line=line, hint="see toml.io") from None


def read(path: Path | str) -> Workload:
    """Read a workload.

    :param path: a folder with a ``torchstone.toml``, or a TOML file.
    :returns: the workload; the Python files that it names are imported, no function has run yet.
    :raises InputError: (WorkloadError, PolicyError, RecipeError) with file, line and hint.
    """
    file = toml_path(Path(path))
    content = parse(file)
    _known(file, (), content, SECTIONS)
    main = _section(file, ("workload",), content, _Main)
    inputs = {
        name: _section(file, ("inputs", name), content, _Input)
        for name in _table(file, ("inputs",), content)
    }
    dims = _dims(file, content)
    modules: dict[Path, ModuleType] = {}
    functions = {
        key: _function(file, ("workload", key), getattr(main, key), modules)
        for key in FUNCTIONS
        if getattr(main, key) is not None
    }
    return Workload(
        name=main.name or file.resolve().parent.name,
        **functions,
        dims=dims,
        shapes=_shapes(inputs),
        ranges=_ranges(file, inputs),
        traffic=_traffic(file, main.traffic, dims),
        candidates={
            name: _function(file, ("candidates", name), target, modules)
            for name, target in _table(file, ("candidates",), content).items()
        },
        recipes=_recipes(file, main.recipes),
        policy=_section(file, ("policy",), content, Policy, error_type=PolicyError),
        origin=str(file),
    )


def _table(file: Path, keys: tuple[str, ...], content: dict[str, Any]) -> dict[str, Any]:
    table = content
    for key in keys:
        table = table.get(key, {})
        if not isinstance(table, dict):
            what = f"{'.'.join(keys)} is no table"
            hint = f"write it as a section: [{'.'.join(keys)}]"
            raise WorkloadError(what, where=file, line=line_in(file, keys), hint=hint)
    return table


def _known(
    file: Path,
    keys: tuple[str, ...],
    table: dict[str, Any],
    known: tuple[str, ...],
    error_type: type[InputError] = WorkloadError,
) -> None:
    for key in table:
        if key not in known:
            section = f"key {key!r} in [{'.'.join(keys)}]" if keys else f"section [{key}]"
            line = line_in(file, (*keys, key))
            raise error_type(f"unknown {section}", where=file, line=line, hint=did_you_mean(key, known))


def _section(
    file: Path,
    keys: tuple[str, ...],
    content: dict[str, Any],
    kind: type[T],
    *,
    error_type: type[InputError] = WorkloadError,
) -> T:
    table = _table(file, keys, content)
    known = tuple(field.name for field in msgspec.structs.fields(kind))
    _known(file, keys, table, known, error_type)
    with located(file, keys):
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            at = _AT_KEY.search(str(error))
            key = (at[1] or at[2],) if at else ()
            what = f"{'.'.join((*keys, *key))}: {str(error).split(' - at')[0]}"
            line = line_in(file, (*keys, *key))
            raise error_type(what, where=file, line=line, hint="correct the value") from None


def _dims(file: Path, content: dict[str, Any]) -> tuple[Dim, ...]:
    dims = []
    for name, text in _table(file, ("dims",), content).items():
        with located(file, ("dims", name)):
            dims.append(parse_dim(name, text))
    return tuple(dims)


def _shapes(inputs: dict[str, _Input]) -> dict[str, Shape]:
    return {name: given.shape for name, given in inputs.items() if given.shape is not None}


def _ranges(file: Path, inputs: dict[str, _Input]) -> dict[str, tuple[float, float]]:
    ranges = {}
    for name, given in inputs.items():
        if given.low is None and given.high is None:
            continue
        if given.low is None or given.high is None:
            stated = "low" if given.high is None else "high"
            what = f"input {name!r} has {stated} alone"
            line = line_in(file, ("inputs", name, stated))
            raise WorkloadError(what, where=file, line=line, hint="state both low and high")
        ranges[name] = (given.low, given.high)
    return ranges


def _traffic(file: Path, name: str | None, dims: tuple[Dim, ...]) -> tuple[Any, ...]:
    if name is None:
        return ()
    with located(file, ("workload", "traffic")):
        return traffic.parse(file.parent / name, dims)


def _recipes(file: Path, texts: tuple[str, ...]) -> tuple[Recipe, ...]:
    with located(file, ("workload", "recipes")):
        return tuple(parse_recipe(text) for text in texts)


def _function(
    file: Path, keys: tuple[str, ...], reference: object, modules: dict[Path, ModuleType]
) -> Callable[..., Any]:
    with located(file, keys):
        if not isinstance(reference, str):
            raise WorkloadError(
                f"{'.'.join(keys)} = {reference!r} is no text", hint="write 'file:function'"
            )
        match = _REFERENCE.match(reference)
        if match is None or match[1].endswith(".py"):
            what = f"{keys[-1]} = {reference!r} names no function"
            stem = Path(reference.partition(":")[0]).with_suffix("").as_posix() or "workload"
            raise WorkloadError(what, hint=f"write 'file:function' without .py: '{stem}:{keys[-1]}'")
        python = (file.parent / f"{match[1]}.py").resolve()
        if not python.is_file():
            what = f"{keys[-1]} = {reference!r}: there is no {python.name} in {python.parent}"
            known = sorted(p.stem for p in file.parent.resolve().glob("*.py"))
            raise WorkloadError(what, hint=did_you_mean(match[1], known))
        if python not in modules:
            modules[python] = import_file(python)
        function = getattr(modules[python], match[2], None)
        if not callable(function):
            defined = [n for n, v in vars(modules[python]).items() if callable(v) and n[0] != "_"]
            what = f"{keys[-1]} = {reference!r}: {python.name} has no function {match[2]!r}"
            raise WorkloadError(what, hint=did_you_mean(match[2], defined))
        return function  # type: ignore[no-any-return] # the user's own, of any type
