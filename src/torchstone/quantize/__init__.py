"""Number formats: what a recipe's precision step makes of a module or of a program. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from torchstone import env
from torchstone.recipe import Numeric, Precision, Quantize
from torchstone.records import Absent, Unsupported

if TYPE_CHECKING:
    from typing import Any

    from torch import nn
    from torch.export import ExportedProgram

    from torchstone.workload import Workload

__all__ = ["lacking", "needs_program", "probe", "program", "transform"]

_INSTRUCTIONS = {
    "int8": ("avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm"),
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
"""Instruction sets that multiply numbers of a format as they are."""


def lacking(numeric: Numeric | None, isa: Collection[str] | None = None) -> str | None:
    """What the processor lacks for the format to pay; None where it lacks nothing or does not say.

    :param isa: its instruction sets; those of this machine if None.
    """
    if numeric is None:
        return None
    if isinstance(numeric, Precision) and numeric.products:
        return "products in other formats pay where tensor cores are much faster than float32"
    word = numeric.format.partition("_")[0] if isinstance(numeric, Precision) else "int8"
    has = set(env.instruction_sets() if isa is None else isa)
    if not has or has.intersection(_INSTRUCTIONS[word]):
        return None
    return f"the processor has no {word} instructions: {word} runs on slow paths"


def needs_program(numeric: Numeric | None) -> bool:
    """Whether the format is applied to the captured graph and not to the module."""
    if isinstance(numeric, Precision):
        return numeric.products
    return isinstance(numeric, Quantize) and numeric.scheme.startswith("pt2e")


def probe(numeric: Numeric, engine: str) -> Absent | None:
    """Why a number format cannot be used here."""
    if isinstance(numeric, Precision):
        return None
    return env.missing_package(engine, "torchao", "quant", (0, 14))


def transform(module: nn.Module, numeric: Numeric, example: tuple[Any, ...]) -> nn.Module:
    """A converted copy of ``module``; the module itself is left as it is.

    :param numeric: a step for which :func:`needs_program` is false.
    :param example: positional inputs, to see the dtypes of the outputs with.
    """
    from torchstone.quantize import int8, precision

    if isinstance(numeric, Precision):
        return precision.convert(module, numeric.format, example)
    return int8.quantize(module, numeric.scheme)


def program(
    path: Path, numeric: Numeric | None, workload: Workload | None
) -> ExportedProgram | Unsupported:
    """The captured program, or that of the converted module.

    :param path: the captured program.
    :param workload: None where there is only a bundle, which cannot convert.
    """
    from torchstone import compat
    from torchstone.capture import export
    from torchstone.capture import program as programs

    captured = programs.load(path)
    if numeric is None:
        return captured
    if workload is None:
        return Unsupported(text=f"{numeric} converts the user's module, which no bundle carries")
    if isinstance(numeric, Precision) and numeric.products:
        from torchstone.quantize import products

        found, counts = products.converted(captured, numeric.format)
        if not any(counts.values()):
            return Unsupported(text="there is no float32 product that is large enough")
        converted: nn.Module = found
    elif needs_program(numeric):
        from torchstone.quantize import pt2e

        assert isinstance(numeric, Quantize)
        converted = pt2e.quantize(
            captured,
            workload,
            dynamic=numeric.scheme == "pt2e_dynamic",
            reduce_range=lacking(numeric) is not None,
        )
    else:
        converted = transform(workload.module(), numeric, workload.example())
    exported = export.export(workload, converted)
    if isinstance(exported, export.Refused):
        return Unsupported(text=f"the converted model cannot be exported: {exported.reason}")
    try:
        return programs.reloaded(exported)
    except compat.capture_errors() as error:
        return Unsupported(text=f"the converted program cannot be stored: {export.one_line(error)}")
