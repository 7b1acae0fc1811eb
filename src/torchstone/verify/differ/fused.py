"""What a bisection left, as a :class:`~torchstone.records.Divergence` and as a file that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from torchstone.records import Divergence
from torchstone.verify.differ import region as regions
from torchstone.verify.differ import repro
from torchstone.verify.differ.between import NOTHING
from torchstone.verify.differ.bisect import Found
from torchstone.verify.differ.parts import Part, operations
from torchstone.verify.differ.region import Region, Side

__all__ = ["ENGINES", "source", "told"]

_DRAW_BYTES = 64 << 10

ENGINES = {
    "inductor": """def compiled(function, inputs):
    return torch.compile(function, fullgraph=True, options={options})(*inputs)""",
    "aotinductor": """class Module(torch.nn.Module):
    def forward(self, {names}):
        return a_side({names})


def compiled(function, inputs):
    program = torch.export.export(Module(), inputs)
    path = torch._inductor.aoti_compile_and_package(program, inductor_configs={options})
    return torch._inductor.aoti_load_package(path)(*inputs)""",
    "onnxruntime": """class Module(torch.nn.Module):
    def forward(self, {names}):
        return a_side({names})


def compiled(function, inputs):
    import onnxruntime

    program = torch.onnx.export(Module(), inputs, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    fed = zip((i.name for i in session.get_inputs()), inputs)
    return torch.from_numpy(session.run(None, {{name: x.numpy() for name, x in fed}})[0])""",
    "openvino": """class Module(torch.nn.Module):
    def forward(self, {names}):
        return a_side({names})


def compiled(function, inputs):
    import openvino

    model = openvino.convert_model(torch.export.export(Module(), inputs))
    run = openvino.Core().compile_model(model, "CPU", {options})
    return torch.from_numpy(run([x.numpy() for x in inputs])[0])""",
}
"""By engine, code of ``compiled(function, inputs)``; needs the engine's package beside torch."""


def told(
    found: Found, labels: tuple[str, str], engine: tuple[str, dict[str, Any]], reproduction: Path | None
) -> Divergence:
    """Say what a bisection found.

    :param labels: what A and B are.
    :param engine: name and options, for the reproduction.
    :param reproduction: where to write it; None writes none.
    """
    a, b = labels
    notes = (found.cut_short,) if found.cut_short else ()
    if found.part is None:
        return Divergence(
            a=a, b=b, kind="NONE", text=NOTHING, compared=found.compiled, notes=notes,
            local_error=found.whole.error, bound=found.whole.bound, global_error=found.whole.error,
        )  # fmt: skip
    region = _region(found.part, found.output)
    kind: Literal["OP", "FUSED"] = "OP" if len(region.b.ops) == 1 else "FUSED"
    text = _sentence(engine[0], region)
    reproduced = None if reproduction is None else _write(region, reproduction, text, engine)
    return Divergence(
        a=a,
        b=b,
        kind=kind,
        text=text,
        ops=region.b.sites(),
        operands=regions.statistics(region.operands, region.labels),
        local_error=found.held.error,
        eager_error=found.held.eager_error,
        bound=found.held.bound,
        global_error=found.whole.error,
        compared=found.compiled,
        reproduction=None if reproduced is None else str(reproduction),
        reproduced=reproduced,
        notes=notes,
    )


def _sentence(engine: str, region: Region) -> str:
    named = [op.target for op in region.b.ops if op.target != "_operator.getitem"]
    names = [target.rpartition(".")[0] for target in named]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    if len(names) == 1:
        return f"{engine} computes {listed} wrongly"
    return f"{engine} computes {listed} wrongly where it compiles them together"


def _region(part: Part, output: int) -> Region:
    """The part with names; its parameters are operands like any other."""
    ops, numbers = operations(part)
    returned = part.module.graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    names: dict[int, str] = {}
    side = Side(ops, names, 0)  # the same operations: what differs is who computes them
    region = Region(side, side)
    given = iter(part.inputs)
    for node, number in numbers.items():
        if node.op == "call_function":
            names[number] = f"t{number}"
            continue
        names[number] = name = f"x{len(region.operands)}"
        attribute = node.op == "get_attr"
        region.operands[name] = _attribute(part.module, str(node.target)) if attribute else next(given)
        if attribute:
            region.labels[name] = str(node.target)
    side.result = numbers[returned[output]]  # type: ignore[index] # a node
    return region


def _attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    assert isinstance(value, torch.Tensor)
    return value.detach()


def source(
    part: Part, output: int, engine: tuple[str, dict[str, Any]], *, title: str = "", drawn: bool = False
) -> str:
    """The file that shows how an engine computes one output of a part.

    :param engine: name, one of :data:`ENGINES`, and options.
    :param drawn: whether to draw large operands from a seed rather than to hold them.
    """
    return _source(_region(part, output), engine, title=title, drawn=drawn)


def _source(region: Region, engine: tuple[str, dict[str, Any]], *, title: str, drawn: bool) -> str:
    filled = ENGINES[engine[0]].format(names=", ".join(region.operands), options=repr(engine[1]))
    return repro.engine_source(region, title, filled, drawn=drawn)


def _write(region: Region, path: Path, title: str, engine: tuple[str, dict[str, Any]]) -> bool | None:
    """Write the file: with drawn operands if it shows the fault with these, else with the real ones."""
    if engine[0] not in ENGINES:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(t.numel() * t.element_size() for t in region.operands.values())
    for drawn in (True, False) if size > _DRAW_BYTES else (False,):
        path.write_text(_source(region, engine, title=title, drawn=drawn), encoding="utf-8")
        if repro.shows(path):
            return True
    return False
