"""What identifies a workload: a digest that is the same in every process that reads the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import msgspec

from torchstone.workload import toml

if TYPE_CHECKING:
    from torchstone.workload.core import Workload

__all__ = ["digest", "digest_folder"]

JUDGING = ("policy",)
"""Sections that say how candidates are judged; they do not change what the workload is."""
PLAIN = (bool, int, float, str, type(None))


def digest(workload: Workload) -> str:
    """SHA-256 of what defines the workload, as hex. The policy and the list of recipes are left out.

    Read from a file: the TOML's content, every Python file of its folder (and of the packages in it),
    and the traffic. Made of Python objects: weights, settings and mode of the model, example inputs,
    dims, shapes, ranges, traffic, and the source files of the model's classes and of the functions.
    """
    if workload.origin is not None:
        return digest_folder(Path(workload.origin))
    sha = hashlib.sha256()
    for name, data in _objects(workload):
        _add(sha, name, data)
    return sha.hexdigest()


def digest_folder(file: Path) -> str:
    """The digest of a workload by its TOML file; runs none of the user's code.

    :raises WorkloadError: where the file does not parse.
    """
    sha = hashlib.sha256()
    content = {key: value for key, value in toml.parse(file).items() if key not in JUDGING}
    main = dict(content.get("workload", {}))
    main.pop("recipes", None)
    content["workload"] = main
    _add(sha, "toml", json.dumps(content, sort_keys=True, default=str).encode())
    folder = file.resolve().parent
    for python in sorted(_python_files(folder)):
        _add(sha, python.relative_to(folder).as_posix(), python.read_bytes())
    if isinstance(name := main.get("traffic"), str):
        _add(sha, "traffic", (folder / name).read_bytes())
    return sha.hexdigest()


def _add(sha: Any, name: str, data: bytes) -> None:
    for part in (name.encode(), data):
        sha.update(len(part).to_bytes(8, "little"))  # so that no two lists of parts read the same
        sha.update(part)


def _python_files(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.py")
    for package in folder.iterdir():
        if (package / "__init__.py").is_file():
            yield from _python_files(package)


def _objects(workload: Workload) -> Iterator[tuple[str, bytes]]:
    facts = (workload.name, workload.dims, workload.shapes, workload.ranges, workload.traffic)
    yield "facts", msgspec.json.encode(facts, order="deterministic")
    module = workload.module()
    yield "model", f"{module}".encode()
    for name, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if not key.startswith("_"):
                yield f"{name}.{key}", _bytes(value)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        yield name, _bytes(value)
    for name, value in zip(workload.names, workload.example(), strict=True):
        yield f"input {name}", _bytes(value)
    codes: dict[str, CodeType] = {}
    for part in module.modules():
        codes.update(_codes(type(part)))
    functions = (workload.model, workload.holdout, workload.metric, workload.generate, workload.perturb)
    for function in (*functions, *workload.candidates.values()):
        codes.update(_codes(function))
    yield from _sources(codes)


def _bytes(value: Any) -> bytes:
    import torch

    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        raw = dense.cpu().contiguous().reshape(-1).view(torch.uint8) if dense.numel() else dense
        return f"{value.dtype} {tuple(value.shape)}".encode() + raw.numpy().tobytes()
    if isinstance(value, PLAIN):
        return repr(value).encode()
    if isinstance(value, tuple | list) and all(isinstance(v, PLAIN) for v in value):
        return repr(value).encode()
    return type(value).__qualname__.encode()


def _codes(owner: Any) -> dict[str, CodeType]:
    """Code of a function, or of a class's methods, unless it is torch's; by qualified name."""
    members = vars(owner).values() if isinstance(owner, type) else (owner,)
    codes = {}
    for member in members:
        code = getattr(member, "__code__", None)
        module = getattr(member, "__module__", None) or ""
        if isinstance(code, CodeType) and module.split(".")[0] not in ("torch", "torchstone"):
            codes[member.__qualname__] = code
    return codes


def _sources(codes: dict[str, CodeType]) -> Iterator[tuple[str, bytes]]:
    # a whole source file rather than one function: forward may call a helper beside its class
    files = {code.co_filename for code in codes.values() if Path(code.co_filename).is_file()}
    for file in sorted(files):
        yield Path(file).name, Path(file).read_bytes()
    for name, code in sorted(codes.items()):
        if code.co_filename not in files:
            yield name, repr(_plain(code)).encode()


def _plain(code: CodeType) -> tuple[Any, ...]:
    def constant(value: Any) -> Any:
        if isinstance(value, CodeType):
            return _plain(value)
        return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)

    return code.co_code, code.co_names, tuple(constant(value) for value in code.co_consts)
