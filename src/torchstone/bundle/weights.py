"""Take the weights out of an exported program, and put them back.

The program that ships holds *meta* tensors where ``model.safetensors`` holds the numbers, so that
loading it by mistake without them raises on the first call instead of answering from stale memory. Its
example inputs are replaced by zeros: torch needs their structure for the program's guards (without
them it drops every guard), but nobody's data ships.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torchstone.errors import BundleError

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

__all__ = ["attach", "neutral", "save", "split"]

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""What is moved out; a tensor of any other dtype stays inside the program."""


def split(program: ExportedProgram, path: Path, weights: Path, code: Path | None = None) -> None:
    """Save a program with its weights apart. The program handed in is changed: do not use it further.

    Moved out are plain, contiguous CPU tensors, parameters, buffers and constants alike; tensors that
    are one and the same (tied weights) are stored once, and what the code's own weights hold is not
    stored again. Whatever else there is stays inside. The result is read back and compared bit by bit;
    if it differs, or nothing can be moved out, everything stays inside and no weights file is written.

    :param program: with its example inputs already :func:`neutral`.
    :param path: where the program goes, ``.pt2``.
    :param weights: where the weights go, ``.safetensors``. Its metadata say of every tensor of the
        program in which file, by its path from this one's folder (empty for itself), and under which
        name it lies.
    :param code: folder that may hold other ``.safetensors`` files with the same weights.
    """
    import torch
    from safetensors.torch import save_file

    whole = {**program.constants, **program.state_dict}
    held = {} if code is None else _held(code, weights.parent)
    places: dict[str, tuple[str, str]] = {}
    stored: dict[str, torch.Tensor] = {}
    for names in _separable(program):
        tensor = whole[names[0]].detach()
        place = next(((held[n][0], n) for n in names if n in held and _equal(held[n][1], tensor)), None)
        if place is None:
            place = ("", names[0])
            stored[names[0]] = tensor
        places.update(dict.fromkeys(names, place))
    if places:
        save_file(stored, weights, metadata={"format": "pt", "places": json.dumps(places)})
        _replace(program, {name: torch.empty_like(whole[name], device="meta") for name in places})
        save(program, path)
        if _same(whole, attach(path, weights)):
            return
        weights.unlink()
        _replace(program, {name: whole[name] for name in places})
    save(program, path)


def attach(path: Path, weights: Path | None) -> ExportedProgram:
    """Load a program and give it back the weights that :func:`split` took out.

    :raises BundleError: if a tensor is left without numbers, or does not fit its place.
    """
    import torch
    from safetensors import safe_open

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations while it reads
        program = torch.export.load(path)
    if weights is not None:
        with safe_open(weights, framework="pt") as header:
            places: dict[str, tuple[str, str]] = json.loads(header.metadata()["places"])
        stored = {
            file: _read(weights.parent / file if file else weights)
            for file in {file for file, _ in places.values()}
        }
        try:
            _replace(program, {name: stored[file][key] for name, (file, key) in places.items()})
        except KeyError as error:
            raise BundleError(f"the program and its weights differ: no {error}", where=weights) from None
    for name, tensor in {**program.constants, **program.state_dict}.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise BundleError(f"the weights file lacks {name!r}", where=weights or path)
    return program


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _held(code: Path, start: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Tensors of the code's own weights: name -> file relative to ``start``, and the tensor."""
    return {
        name: (os.path.relpath(path, start), tensor)
        for path in sorted(code.rglob("*.safetensors"))
        for name, tensor in _read(path).items()
    }


def neutral(program: ExportedProgram) -> None:
    """Replace a program's example inputs by zeros of the same shapes and dtypes, in place."""
    import torch
    from torch.utils import _pytree as pytree

    def zeros(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)

    if program.example_inputs is not None:
        program.example_inputs = pytree.tree_map(zeros, program.example_inputs)


def save(program: ExportedProgram, path: Path) -> None:
    """Save a program whole."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "no complete tensor": meta tensors have no storage to share
        torch.export.save(program, path)


def _separable(program: ExportedProgram) -> list[list[str]]:
    """The names of every tensor that can move out; more than one where it is tied."""
    import torch

    dtypes = {getattr(torch, name) for name in _DTYPES}
    groups: dict[int, dict[str, torch.Tensor]] = {}
    clash = program.constants.keys() & program.state_dict.keys()
    for name, value in {**program.constants, **program.state_dict}.items():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
            groups.setdefault(value.untyped_storage().data_ptr(), {})[name] = value
    found = []
    for group in groups.values():
        tensor = next(iter(group.values()))
        # views of one storage that are not one and the same would lose their sharing: they stay inside
        same = all(v.shape == tensor.shape and v.stride() == tensor.stride() for v in group.values())
        same = same and len({(v.data_ptr(), v.dtype) for v in group.values()}) == 1
        plain = tensor.device.type == "cpu" and tensor.dtype in dtypes and not tensor.is_neg()
        if same and plain and tensor.is_contiguous() and tensor.numel() and not clash & group.keys():
            found.append(list(group))
    return found


def _replace(program: ExportedProgram, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors in the place of those of the same names, which must agree in shape and dtype."""
    import torch

    for name, tensor in tensors.items():
        home = program.state_dict if name in program.state_dict else program.constants
        old = home[name]
        if tensor.shape != old.shape or tensor.dtype != old.dtype:
            raise BundleError(
                f"weight {name!r} is {tensor.dtype} {tuple(tensor.shape)}, not as exported"
            )
        if isinstance(old, torch.nn.Parameter):
            home[name] = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
        else:
            home[name] = tensor


def _same(whole: dict[str, torch.Tensor], program: ExportedProgram) -> bool:
    """Whether a program read back has every tensor of the whole, bit by bit and with the same ties."""
    import torch

    back = {**program.constants, **program.state_dict}
    if whole.keys() != back.keys():
        return False
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [n for n, v in whole.items() if type(v) in plain and v.layout == torch.strided]
    for name in tensors:
        old, new = whole[name], back[name]
        if type(old) is not type(new) or not _equal(old.detach(), new.detach()):
            return False
    return _ties(whole, tensors) == _ties(back, tensors)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape, strides and bits."""
    import torch

    alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return alike and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: NaN compares equal to itself there."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _ties(tensors: dict[str, torch.Tensor], names: list[str]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name in names:
        if tensors[name].numel():
            # not by storage: all tensors read from one file share the mapping of that file
            groups.setdefault(tensors[name].data_ptr(), set()).add(name)
    return {frozenset(group) for group in groups.values()}
