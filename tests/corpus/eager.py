"""Running a model of the corpus for real: small tensors of random values, in eager."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchstone.shapecheck import sizes as sizes_of
from torchstone.shapecheck.entries import Form, targets
from torchstone.workload.usercode import import_file

__all__ = ["Ran", "run"]


class Ran(NamedTuple):
    """One call of a model."""

    sizes: Mapping[str, int]
    """Sizes of its named dims."""
    error: str | None
    """What it raised."""
    line: int | None
    """The deepest line of the file on the way to it."""


def run(path: Path) -> tuple[Ran, ...]:
    """Call what a file says how to call, at a few sizes each."""
    torch.manual_seed(0)
    module = import_file(path)
    ran = []
    for target in targets(module, path.resolve(), path.read_text(encoding="utf-8")):
        model = target.build()
        form = target.forms(model)[0]
        ran += [_call(path, model, form, sizes) for sizes in _sizes(form)]
    return tuple(ran)


def _sizes(form: Form) -> Iterator[Mapping[str, int]]:
    generic = sizes_of.generic(form.dims)
    yield generic
    free = {dim.name for dim in form.dims if dim.stated is None}
    yield {name: size + 2 if name in free else size for name, size in generic.items()}
    yield from sizes_of.ends(form.dims)


def _call(path: Path, model: Any, form: Form, sizes: Mapping[str, int]) -> Ran:
    positional, keywords = form.make(sizes)
    try:
        with torch.no_grad():
            model(
                *map(_filled, positional), **{name: _filled(value) for name, value in keywords.items()}
            )
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.resolve())
        ]
        return Ran(sizes, f"{type(error).__name__}: {error}", frames[-1].lineno if frames else None)
    return Ran(sizes, None, None)


def _filled(value: Any) -> Any:
    """Values that are valid for any model: normal ones, the index 0, and True."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn_like(value)
    return torch.ones_like(value) if value.dtype == torch.bool else torch.zeros_like(value)
