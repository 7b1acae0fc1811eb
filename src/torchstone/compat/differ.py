"""Private doors that the differ uses: operators by name, and what is known of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "argument_names",
    "is_random",
    "is_unwritten",
    "name_of",
    "named_operator",
    "own_module",
    "replay_errors",
    "result_count",
    "written",
    "written_positions",
]

_UNWRITTEN = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


def name_of(target: Any) -> str:
    """An operator's name, ``aten.sub.Tensor``; of another function, its module and name."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return f"{target._qualified_op_name.replace('::', '.')}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def named_operator(name: str) -> Callable[..., Any] | None:
    """The operator of a name that :func:`name_of` gave; None where this torch has none."""
    if name == "_operator.getitem":
        return operator.getitem
    space, _, rest = name.partition(".")
    if rest.startswith("from_file"):
        return None  # reads and makes files: a trace may come from elsewhere
    packet = getattr(getattr(torch.ops, space, None), rest.partition(".")[0], None)
    found: Callable[..., Any] | None = getattr(packet, rest.partition(".")[2], None)
    return found


def is_random(function: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def is_unwritten(name: str) -> bool:
    """Whether an operator returns memory that nothing was written to."""
    return name.split(".")[1] in _UNWRITTEN


def written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes to, lists of tensors flattened."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        many = value if isinstance(value, list | tuple) else (value,)
        found += [tensor for tensor in many if isinstance(tensor, torch.Tensor)]
    return found


def written_positions(name: str) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes to."""
    schema = getattr(named_operator(name), "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    infos = [argument.alias_info for argument in schema.arguments]
    return tuple(p for p, info in enumerate(infos) if info is not None and info.is_write)


def result_count(name: str, recorded: int) -> int:
    """How many of an operation's recorded results it returns; the others are arguments written to."""
    schema = getattr(named_operator(name), "_schema", None)
    returned = len(schema.returns) if schema is not None and written_positions(name) else recorded
    return min(returned, recorded)


def argument_names(name: str) -> tuple[str, ...]:
    """Names of an operator's arguments, in order; empty where it has no schema here."""
    schema = getattr(named_operator(name), "_schema", None)
    return () if schema is None else tuple(argument.name for argument in schema.arguments)


def own_module(qualified: str) -> str:
    """The module path in a node's ``nn_module_stack``, as the user wrote it.

    Export writes ``L['self'].layers.0`` or ``layers.0``, by version and mode.
    """
    return qualified.replace("L['self']", "").replace("self.", "").lstrip(".")


def replay_errors() -> tuple[type[Exception], ...]:
    """What an operator raises that is called on operands of another dtype or shape than it was."""
    return (RuntimeError, TypeError, ValueError, IndexError)
