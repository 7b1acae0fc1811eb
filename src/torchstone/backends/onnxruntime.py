"""ONNX Runtime on the program that ``torch.onnx`` exports."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchstone import env, recipe
from torchstone.backends import interchange
from torchstone.backends.base import (
    Built,
    Context,
    engine_call,
    read_interface,
    refuse,
    write_interface,
)
from torchstone.records import Absent, Unsupported

__all__ = ["OnnxRuntimeBackend"]

_MODEL = "model.onnx"


@dataclass(frozen=True)
class OnnxRuntimeBackend:
    """ONNX Runtime, CPU provider, all graph optimizations."""

    name: str = "onnxruntime"
    engine: type[recipe.Engine] = recipe.OnnxRuntime

    def probe(self) -> Absent | None:
        """Needs the runtime, and onnx and onnxscript to export."""
        packages = (("onnxruntime", (1, 22)), ("onnx", (1, 17)), ("onnxscript", (0, 5)))
        found = (env.missing_package(self.name, name, "onnx", oldest) for name, oldest in packages)
        return next((absent for absent in found if absent is not None), None)

    def build(self, context: Context) -> Built | Unsupported:
        """Export to ONNX and make a session."""
        import torch

        found = interchange.program(context, self.name)
        if isinstance(found, Unsupported):
            return found
        program, interface = found
        try:
            with _quiet():
                exported = torch.onnx.export(program, dynamo=True, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            return refuse(error, "torch.onnx cannot export the program")
        assert exported is not None
        exported.save(context.directory / _MODEL)
        write_interface(context.directory, interface)
        return self.load(context)

    def load(self, context: Context) -> Built | Unsupported:
        """Make a session of the file."""
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        interface = read_interface(context.directory)
        try:
            session = _session(context.directory / _MODEL)
        except (state.NotImplemented, state.InvalidGraph, state.Fail) as error:
            return refuse(error, "ONNX Runtime refuses the model")
        names = [i.name for i in session.get_inputs()]
        fed = interchange.fed(names, len(session.get_outputs()), interface, self.name)
        if isinstance(fed, Unsupported):
            return fed
        files = sorted(p.name for p in context.directory.iterdir() if p.is_file())
        return Built(call=engine_call(_run(session, names, fed), interface), files=tuple(files))


def _session(path: Path) -> Any:
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    # idle threads stop spinning when a call ends, or they would slow what is measured next
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _run(session: Any, names: list[str], fed: tuple[int, ...]) -> Callable[[list[Any]], list[Any]]:
    pairs = tuple(zip(names, fed, strict=True))

    def run(given: list[Any]) -> list[Any]:
        outputs = session.run(None, {name: given[i].detach().numpy() for name, i in pairs})
        return interchange.tensors(outputs)

    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of torchvision's absence and prints progress whatever ``verbose`` says."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
