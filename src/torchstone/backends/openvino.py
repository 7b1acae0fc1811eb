"""OpenVINO on the captured program."""

from __future__ import annotations

from collections.abc import Callable
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

__all__ = ["OpenVINOBackend"]

_MODEL = "model.xml"
_FILES = ("interface.json", "model.bin", "model.xml")
_CAPABILITY = {"bf16": "BF16", "f16": "FP16"}


@dataclass(frozen=True)
class OpenVINOBackend:
    """OpenVINO's CPU plugin, latency hint, precision as the recipe says."""

    name: str = "openvino"
    engine: type[recipe.Engine] = recipe.OpenVINO

    def probe(self) -> Absent | None:
        """Needs the package."""
        return env.missing_package(self.name, "openvino", "openvino", (2025, 3))

    def build(self, context: Context) -> Built | Unsupported:
        """Convert the program, keep its weights as they are, and compile."""
        import openvino
        from openvino import frontend

        lacking = _lacking(context)
        if lacking is not None:
            return lacking
        found = interchange.program(context, self.name)
        if isinstance(found, Unsupported):
            return found
        program, interface = found
        try:
            model = openvino.convert_model(program)
        except (
            frontend.OpConversionFailure,
            frontend.NotImplementedFailure,
            frontend.OpValidationFailure,
            frontend.GeneralFailure,  # one result returned twice, among others
        ) as error:
            return refuse(error, "OpenVINO cannot convert the program")
        openvino.save_model(model, context.directory / _MODEL, compress_to_fp16=False)
        write_interface(context.directory, interface)
        return self.load(context)

    def load(self, context: Context) -> Built | Unsupported:
        """Compile the model in the file."""
        lacking = _lacking(context)
        if lacking is not None:
            return lacking
        interface = read_interface(context.directory)
        model = _compiled(context.directory / _MODEL, context.recipe)
        names = [port.get_any_name() if port.get_names() else "" for port in model.inputs]
        fed = interchange.fed(names, len(model.outputs), interface, self.name)
        if isinstance(fed, Unsupported):
            return fed
        return Built(call=engine_call(_run(model, fed), interface), files=_FILES)


def _lacking(context: Context) -> Unsupported | None:
    """A precision hint that this processor has no instructions for would silently run in another."""
    import openvino

    step = context.recipe.engine
    assert isinstance(step, recipe.OpenVINO)
    needed = _CAPABILITY.get(step.hint)
    has = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if needed is None or needed in has:
        return None
    return Unsupported(text=f"this processor has no {step.hint} instructions that OpenVINO uses")


def _compiled(path: Path, made: recipe.Recipe) -> Any:
    import openvino
    import torch

    step = made.engine
    assert isinstance(step, recipe.OpenVINO)
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    if step.hint != "auto":
        options["INFERENCE_PRECISION_HINT"] = step.hint
    return openvino.Core().compile_model(path, "CPU", options)


def _run(model: Any, fed: tuple[int, ...]) -> Callable[[list[Any]], list[Any]]:
    request = model.create_infer_request()
    outputs = range(len(model.outputs))

    def run(given: list[Any]) -> list[Any]:
        arrays = [given[i].detach().numpy() for i in fed]
        # inputs are read where they lie; outputs are copied, for the request writes the next ones there
        results = request.infer(arrays, share_inputs=True, share_outputs=False)
        return interchange.tensors([results[i] for i in outputs])

    return run
