"""Capture by Dynamo: the regions between the places that one graph cannot cross."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from torchstone import compat

__all__ = ["Regions", "regions"]


class Regions(NamedTuple):
    """What Dynamo makes of a module."""

    graphs: int
    """Number of graphs; 0 where Dynamo cannot run the module at all."""
    nodes: int
    """Operations in all of them."""
    breaks: tuple[str, ...]
    """Each break: its reason and the user's source line."""


def regions(module: nn.Module, args: tuple[Any, ...]) -> Regions:
    """Find the regions that ``torch.compile`` would compile, for inputs of the example's sizes."""
    try:
        with torch.no_grad():
            return Regions(*compat.explain(module, args))
    except compat.capture_errors() as error:
        text = " ".join(str(error).split())[:300]
        return Regions(0, 0, (f"{type(error).__name__}: {text}",))
