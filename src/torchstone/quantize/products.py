"""Products of the captured graph in another format, by the format's name."""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram

from torchstone.quantize.half import DTYPES, halve
from torchstone.quantize.split import PARTS, split

__all__ = ["converted"]


def converted(program: ExportedProgram, form: str) -> tuple[fx.GraphModule, dict[str, int]]:
    """The program's graph with its products in a format of ``precision``, and how many came to have
    half operands, and to be split.

    :param form: a format for which :attr:`torchstone.recipe.Precision.products` is true.
    """
    if form in DTYPES:
        found, count = halve(program, DTYPES[form])
        return found, {"half": count}
    if form in PARTS:
        found, count = split(program, PARTS[form])
        return found, {"split": count}
    # as exact as the libraries are: TF32 in convolutions, float32 elsewhere
    found, halved = halve(program, torch.float16, convolutions=True)
    found, splits = split(found, PARTS["bf16x3"])
    return found, {"half": halved, "split": splits}
