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
from torchstone.capture import dynamo, export, program, tracer
from torchstone.records import Capture, ScalarSpec, TensorSpec, factor_and_dim
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
            traced = _traced(workload, module)
            refused = str(traced) if isinstance(traced, tracer.Refusal) else None
            found: tuple[ExportedProgram, str] | export.Refused = export.Refused(refused or "")
            if isinstance(traced, nn.Module):
                found = _export_and_save(workload, traced, path)
                if isinstance(found, export.Refused):
                    refused = found.reason
            if isinstance(found, export.Refused):
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
            trace_refused=refused,
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
        traced=refused is None,
        trace_refused=refused,
        parameters=parameters,
    )


def _traced(workload: Workload, module: nn.Module) -> nn.Module | tracer.Refusal:
    """The light tracer's graph as a module, at sizes that tell nothing special."""
    spec = workload.spec()
    scalar = next((s.name for s in spec.inputs if isinstance(s, ScalarSpec)), None)
    if scalar is not None:
        return tracer.Refusal(f"argument {scalar} is a Python number", None)
    varying = {dim.name for dim in spec.dims if dim.high > dim.low}
    axes = [
        {
            axis: size
            for axis, size in enumerate(tensor.shape)
            if isinstance(size, str) and factor_and_dim(size)[1] in varying
        }
        for tensor in spec.inputs
        if isinstance(tensor, TensorSpec)
    ]
    dims = [dim for dim in spec.dims if dim.name in varying]
    found = tracer.attempt(module, export.arguments(workload, spec), axes, dims)
    return found if isinstance(found, tracer.Refusal) else found.as_module()


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
