"""Exported programs: to and from a file, and what has to be known of one before it is compiled."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    TensorArgument,
)

from torchstone.records import Record

__all__ = ["Interface", "constants", "interface", "load", "output_spec", "reloaded", "save"]


class Interface(Record, frozen=True, kw_only=True):
    """How a program is called, as far as engines that see only tensors do not know it."""

    inputs: tuple[str, ...]
    """Names of the positional inputs in the graph."""
    outputs: int
    """Number of leaves of the result."""
    constants: tuple[tuple[int, bool | int | float | str | None], ...] = ()
    """Leaves that the capture fixed (``None``, numbers), with their positions."""
    mutates: tuple[int, ...] = ()
    """Positions of inputs that a call changes in place."""
    state: tuple[str, ...] = ()
    """Buffers that a call changes."""
    symbolic: bool = False
    """Whether a leaf is a number computed from sizes."""
    dtypes: tuple[str, ...] = ()
    """Torch dtypes of tensor inputs and outputs, without prefix, sorted."""


def load(path: Path | str) -> ExportedProgram:
    """Read a program that :func:`save` wrote."""
    if _calls_ours(path):
        from torchstone.kernels import registry  # noqa: F401  registers the operators
    return torch.export.load(str(path))


def _calls_ours(path: Path | str) -> bool:
    """Whether a program has operators of ours, which torch must know before it reads them."""
    with zipfile.ZipFile(path) as file:
        graphs = [name for name in file.namelist() if name.endswith(".json")]
        return any(b"torchstone." in file.read(name) for name in graphs)


def save(program: ExportedProgram, path: Path | str) -> str:
    """Write a program and give the SHA-256 of the file.

    :raises SerializeError: for what torch.export cannot store.
    """
    torch.export.save(program, str(path))
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reloaded(program: ExportedProgram) -> ExportedProgram:
    """The program as it would come from a file.

    A fresh one tells its compiler that sizes are at least 2, whatever was declared; a stored one
    does not.

    :raises SerializeError: for what torch.export cannot store.
    """
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def output_spec(program: ExportedProgram) -> str | None:
    """The pytree of the outputs as text; None for types that pytree cannot write."""
    from torch.utils import _pytree

    tree = program.call_spec.out_spec
    assert tree is not None  # export always writes it
    try:
        return _pytree.treespec_dumps(tree)
    except NotImplementedError:  # pytree says so of a type that has no text form
        return None


def constants(program: ExportedProgram) -> Mapping[str, torch.Tensor]:
    """Parameters, buffers and lifted constants, by the names that AOTInductor asks for."""
    lifted = {k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}
    return {**program.state_dict, **lifted}


def interface(program: ExportedProgram) -> Interface:
    """Describe how the program is called."""
    outputs = [s for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    fixed = tuple((i, s.arg.value) for i, s in enumerate(outputs) if isinstance(s.arg, ConstantArgument))
    known = sum(isinstance(s.arg, TensorArgument | ConstantArgument) for s in outputs)
    mutates, state = _mutations(program)
    return Interface(
        inputs=_input_names(program),
        outputs=len(outputs),
        constants=fixed,
        mutates=mutates,
        state=state,
        symbolic=known < len(outputs),
        dtypes=_dtypes(program),
    )


def _input_names(program: ExportedProgram) -> tuple[str, ...]:
    specs = program.graph_signature.input_specs
    return tuple(s.arg.name for s in specs if s.kind == InputKind.USER_INPUT)


def _dtypes(program: ExportedProgram) -> tuple[str, ...]:
    names = {*program.graph_signature.user_inputs, *program.graph_signature.user_outputs}
    values = (n.meta.get("val") for n in program.graph.nodes if n.name in names)
    return tuple(
        sorted({str(v.dtype).removeprefix("torch.") for v in values if isinstance(v, torch.Tensor)})
    )


def _mutations(program: ExportedProgram) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Inputs and buffers that change: only functionalization tells them from changed intermediates."""
    if not any(_writes(node) for node in program.graph.nodes):
        return (), ()
    signature = program.run_decompositions({}).graph_signature
    names = [s.arg.name for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    positions = sorted(names.index(name) for name in signature.user_inputs_to_mutate.values())
    return tuple(positions), tuple(sorted(set(signature.buffers_to_mutate.values())))


def _writes(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True  # its subgraphs may
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)
