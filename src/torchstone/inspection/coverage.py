"""Which of a model's operations each installed engine has an implementation for.

Counted on the exported program, after the decompositions that the engine itself applies, since that is
what it has to translate; OpenVINO's are its own matter, so there the program is as captured. Where
export refuses the model, the operations of a call stand in: engines that take one whole graph cannot
have this model then, and what is said of the others is an approximation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import torch
from torch.export import ExportedProgram

from torchstone import backends, compat
from torchstone.backends import interchange
from torchstone.backends.base import refuse
from torchstone.capture import program as programs
from torchstone.compat import coverage as doors
from torchstone.records import Unsupported
from torchstone.records.inventory import Coverage, OpCount

__all__ = ["coverage"]

_AHEAD = "aotinductor"
_WHOLE = "one whole graph, and export refused the model"
_CANNOT = "it cannot convert the program"
_UNCONVERTED = re.compile(
    r"(?:No conversion rule found for|Conversion is failed for)(?: operations)?: (.+)"
)


def coverage(program: ExportedProgram | None, called: Mapping[Any, int]) -> tuple[Coverage, ...]:
    """What each engine makes of the model's operations, in the order of the engines.

    Operations in place are counted as those that they stand for: capture makes them so.

    :param program: the captured program; None where export refused.
    :param called: the operations (``OpOverload``) of one call, each with its count, for that case.
    """
    called = _functional(called)
    found: dict[str, Coverage] = {}
    for backend in backends.BACKENDS:
        name, absent = backend.name, backend.probe()
        if name in ("eager", "custom"):  # the one runs everything, the other is the user's own code
            continue
        if absent is not None:
            found[name] = Coverage(engine=name, source="calls", operations=0, absent=absent)
        elif name == _AHEAD and "inductor" in found:
            found[name] = _ahead_of_time(found["inductor"], program)
        else:
            found[name] = _of_engine(name, program, called)
    return tuple(found.values())


def _of_engine(name: str, program: ExportedProgram | None, called: Mapping[Any, int]) -> Coverage:
    count = _ENGINES.get(name)
    if count is None:
        return _unknown(name, program, called, "there is no list of what it takes")
    try:
        return count(program, called)
    except compat.capture_errors() as error:
        return _unknown(name, program, called, refuse(error, "not counted").text)


def _onnxruntime(program: ExportedProgram | None, called: Mapping[Any, int]) -> Coverage:
    if program is None:
        return _split("onnxruntime", called, doors.onnx_translates, falls_back=False)
    ops = _ops(doors.onnx_form(program))
    found = _split("onnxruntime", ops, doors.onnx_translates, falls_back=False, source="program")
    return msgspec.structs.replace(found, text=_interface_problem(program, "onnxruntime"))


def _openvino(program: ExportedProgram | None, called: Mapping[Any, int]) -> Coverage:
    """OpenVINO has no list of what it takes of exported programs, so it has to convert this one."""
    if program is None:
        return _unknown(
            "openvino", None, called, "it takes one whole graph, and export refused the model"
        )
    import openvino
    from openvino import frontend

    names = Counter({str(op): count for op, count in _ops(program).items()})
    problem = _interface_problem(program, "openvino")
    try:
        openvino.convert_model(program)
    except (frontend.OpConversionFailure, frontend.NotImplementedFailure) as error:
        lacking = _unconverted(str(error))
        if not lacking:
            return _unknown(
                "openvino", program, called, refuse(error, "cannot convert the program").text
            )
        missing = {name: names[name] or 1 for name in lacking}
        left = max(0, sum(names.values()) - sum(missing.values()))
        return Coverage(
            engine="openvino",
            source="program",
            operations=sum(names.values()),
            translated=left,
            missing=_counts(missing),
            text=problem,
        )
    except (frontend.OpValidationFailure, frontend.GeneralFailure) as error:
        return _unknown("openvino", program, called, refuse(error, _CANNOT).text)
    total = sum(names.values())
    return Coverage(
        engine="openvino", source="program", operations=total, translated=total, text=problem
    )


def _inductor(program: ExportedProgram | None, called: Mapping[Any, int]) -> Coverage:
    if program is None:
        return _split("inductor", called, doors.inductor_lowers, falls_back=True)
    ops = _ops(doors.inductor_form(program))
    return _split("inductor", ops, doors.inductor_lowers, falls_back=True, source="program")


def _ahead_of_time(lazy: Coverage, program: ExportedProgram | None) -> Coverage:
    """AOTInductor's: the same lowerings, of one whole graph."""
    if program is None:
        text = f"it compiles {_WHOLE}"
        return Coverage(engine=_AHEAD, source="calls", operations=lazy.operations, text=text)
    return msgspec.structs.replace(lazy, engine=_AHEAD)


Source = Literal["program", "calls"]
Count = Callable[[ExportedProgram | None, Mapping[Any, int]], Coverage]

_ENGINES: dict[str, Count] = {
    "inductor": _inductor,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def _ops(program: ExportedProgram) -> Counter[Any]:
    """Operations of a program and of the graphs within it; sizes and tuples are no operations."""
    graphs = (m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule))
    return Counter(
        node.target
        for graph in graphs
        for node in graph.nodes
        if node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
        and not str(node.target).startswith(("aten.sym_", "aten._assert"))
    )


def _functional(called: Mapping[Any, int]) -> Counter[Any]:
    """Operations of a call as capture would write them: none in place, and no marks on constants."""
    found: Counter[Any] = Counter()
    for op, count in called.items():
        name, overload = str(op).removeprefix("aten.").partition(".")[::2]
        if name in ("lift_fresh", "detach"):
            continue
        plain = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
        found[getattr(plain, overload, op)] += count
    return found


def _split(
    engine: str,
    ops: Mapping[Any, int],
    known: Callable[[Any], bool],
    *,
    falls_back: bool,
    source: Source = "calls",
) -> Coverage:
    lacking = _counts({str(op): count for op, count in ops.items() if not known(op)})
    total = sum(ops.values())
    return Coverage(
        engine=engine,
        source=source,
        operations=total,
        translated=total - sum(c.count for c in lacking),
        fallbacks=lacking if falls_back else (),
        missing=() if falls_back else lacking,
    )


def _counts(found: Mapping[str, int]) -> tuple[OpCount, ...]:
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return tuple(OpCount(op=op, count=count) for op, count in ordered)


def _unconverted(text: str) -> list[str]:
    names = [name.strip() for found in _UNCONVERTED.findall(text) for name in found.split(",")]
    return sorted({name for name in names if name and not name.startswith("<")})


def _interface_problem(program: ExportedProgram, engine: str) -> str | None:
    found: Unsupported | None = interchange.unsupported(programs.interface(program), engine)
    return None if found is None else found.text


def _unknown(
    engine: str, program: ExportedProgram | None, called: Mapping[Any, int], text: str
) -> Coverage:
    ops = called if program is None else _ops(program)
    return Coverage(
        engine=engine,
        source="calls" if program is None else "program",
        operations=sum(ops.values()),
        text=text,
    )
