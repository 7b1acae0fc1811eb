"""Which ATen operations the exporters and compilers of torch know: private tables, no public door."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.export import ExportedProgram

__all__ = ["inductor_form", "inductor_lowers", "onnx_form", "onnx_translates"]


def onnx_form(program: ExportedProgram) -> ExportedProgram:
    """The program after the decompositions that ``torch.onnx.export`` applies."""
    from torch.onnx._internal.exporter import _decomp

    with _quiet():
        known = set(_decomp.get_onnx_implemented_overloads(_onnx_registry()))
        table = _decomp.create_onnx_friendly_decomposition_table(known)
        found: ExportedProgram = program.run_decompositions(table)
    return found


def onnx_translates(op: Any) -> bool:
    """Whether ``torch.onnx`` has a translation of an operation of :func:`onnx_form`."""
    with _quiet():
        return bool(_onnx_registry().is_registered(op))


def inductor_form(program: ExportedProgram) -> ExportedProgram:
    """The program after the decompositions that Inductor applies."""
    import torch._dynamo  # before torch._inductor: pytorch#154463
    import torch._inductor.lowering  # noqa: F401  its decompositions ask it, and do not import it
    from torch._inductor.decomposition import select_decomp_table

    found: ExportedProgram = program.run_decompositions(dict(select_decomp_table()))
    return found


def inductor_lowers(op: Any) -> bool:
    """Whether Inductor lowers or decomposes an operation, and does not hand it back to ATen."""
    import torch._dynamo  # before torch._inductor: pytorch#154463
    from torch._inductor import lowering
    from torch._inductor.decomposition import select_decomp_table

    if not isinstance(op, torch._ops.OpOverload):
        return True  # getitem and arithmetic of sizes
    names = {op, op.overloadpacket}
    known = not names.isdisjoint(lowering.lowerings) or op in select_decomp_table()
    return known and names.isdisjoint(lowering.fallbacks)


@cache
def _onnx_registry() -> Any:
    from torch.onnx._internal.exporter import _registration

    return _registration.ONNXRegistry.from_torchlib()


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """The registry warns of torchvision's absence when it is made."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
