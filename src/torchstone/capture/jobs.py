"""Jobs of capture, run in a worker."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from torchstone import compat
from torchstone.capture import dynamo, export, program
from torchstone.records import Capture
from torchstone.worker import workload_of
from torchstone.workload import Workload

__all__ = ["capture"]


def capture(state: dict[str, Any], path: str) -> Capture:
    """Capture the worker's workload: one exported program written to ``path``, else regions.

    :raises WorkloadError: where the model's factory or its inputs fail.
    """
    workload = workload_of(state)
    started = time.perf_counter()
    module = workload.module()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            found = _export_and_save(workload, module, path)
    finally:
        sys.stdout.write(printed.getvalue())  # into the worker's log
    parameters = sum(p.numel() for p in module.parameters())
    if isinstance(found, export.Refused):
        regions = dynamo.regions(module, workload.example())
        return Capture(
            mode="dynamo",
            program=None,
            seconds=time.perf_counter() - started,
            nodes=regions.nodes,
            graphs=regions.graphs,
            breaks=regions.breaks,
            refused=found.reason,
            narrowed=found.narrowed,
            parameters=parameters,
        )
    exported, digest = found
    return Capture(
        mode="export",
        program=digest,
        seconds=time.perf_counter() - started,
        nodes=sum(n.op == "call_function" for n in exported.graph.nodes),
        breaks=_silenced(printed.getvalue()),
        output_spec=program.output_spec(exported),
        parameters=parameters,
    )


def _export_and_save(
    workload: Workload, module: nn.Module, path: str
) -> tuple[ExportedProgram, str] | export.Refused:
    exported = export.export(workload, module)
    if isinstance(exported, export.Refused):
        return exported
    try:
        return exported, program.save(exported, path)
    except compat.capture_errors() as error:
        return export.Refused(f"the program cannot be stored: {export.one_line(error)}")


def _silenced(printed: str) -> tuple[str, ...]:
    lines = printed.strip().splitlines()
    return (f"the model prints ({lines[0][:80]!r}, ...): the program does not",) if lines else ()
