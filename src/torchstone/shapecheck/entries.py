"""What to execute in a file: models, and inputs to call them with.

Looked for in this order, and the first that gives anything is it:

1. a ``torchstone.toml`` in the file's folder whose model is in this file;
2. ``# torchstone: check`` comments (:mod:`torchstone.shapecheck.directive`);
3. pairs of functions without arguments, one that makes the model and one that makes its inputs;
4. module classes that their defaults make, and whose inputs can be told
   (:mod:`torchstone.shapecheck.infer`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from torchstone import workload as workloads
from torchstone.errors import WorkloadError
from torchstone.records import Dim, factor_and_dim
from torchstone.shapecheck.directive import Directive, TensorArgument, directives
from torchstone.workload.toml import FILE as WORKLOAD_FILE
from torchstone.workload.toml import parse as parse_toml

__all__ = ["Arguments", "Form", "FreeDim", "Target", "as_module", "size_at", "targets"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""

_BUILDERS = ("build", "build_model", "make_model", "create_model", "get_model", "model", "factory")
_EXAMPLES = (
    "example",
    "examples",
    "example_inputs",
    "inputs",
    "make_inputs",
    "get_inputs",
    "sample_inputs",
    "dummy_inputs",
)
_PAIRS = (("build_", "example_"), ("build_", "inputs_"), ("make_", "example_"), ("make_", "inputs_"))
"""Beginnings of names that belong together when what follows is the same."""


class FreeDim(NamedTuple):
    """A named dim of the inputs."""

    name: str
    """The user's name of it."""
    stated: Dim | None = None
    """Its range, where the user stated one: then it must run at every size in it."""
    leading: bool = False
    """Whether it is the first of an input: a batch, for which any size will do."""
    usual: int | None = None
    """The size that it has in the user's example."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to call a model."""

    make: Callable[[Mapping[str, Any]], Arguments]
    """Its arguments at given sizes (numbers, or symbols) of the dims; called under the fake mode."""
    dims: tuple[FreeDim, ...] = ()
    """The dims that it names."""
    ranks: tuple[int, ...] = ()
    """How many dims its tensors have, where they are guessed."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model, and the ways to call it."""

    name: str
    """As the user would write it: ``Net(width=64)``."""
    how: Any
    """As in :class:`~torchstone.records.CheckedEntry`."""
    line: int
    """The line that says so."""
    build: Callable[[], object]
    """Makes the model."""
    forms: Callable[[object], tuple[Form, ...]]
    """Ways to call what was made: one where the user said it, else guesses, of which one must run."""


def targets(module: ModuleType, path: Path, text: str) -> tuple[Target, ...]:
    """What to execute in a file.

    :param module: the file, imported.
    :param text: its content.
    :raises WorkloadError: where a directive or the workload is malformed.
    """
    from torchstone.shapecheck import infer

    for source in (_of_workload, _of_directives, _of_pairs, infer.classes):
        found = tuple(source(module, path, text))
        if found:
            return found
    return ()


def _only(form: Form) -> Callable[[object], tuple[Form, ...]]:
    return lambda _made: (form,)


def _of_workload(_module: ModuleType, path: Path, _text: str) -> Iterator[Target]:
    file = path.parent / WORKLOAD_FILE
    if not file.is_file():
        return
    section = parse_toml(file).get("workload")
    model = section.get("model") if isinstance(section, dict) else None
    if not isinstance(model, str) or model.partition(":")[0] != path.stem:
        return
    workload = workloads.read(file)
    name = f"{model.partition(':')[2]}()"
    line = workload.model.__code__.co_firstlineno if inspect.isfunction(workload.model) else 1
    form = Form(make=_of_example(workload), dims=_workload_dims(workload))
    yield Target(name=name, how="workload", line=line, build=workload.module, forms=_only(form))


def _workload_dims(workload: workloads.Workload) -> tuple[FreeDim, ...]:
    first = {factor_and_dim(s[0])[1] for s in workload.shapes.values() if s and isinstance(s[0], str)}
    return tuple(FreeDim(dim.name, dim, dim.name in first) for dim in workload.dims)


def _of_example(workload: workloads.Workload) -> Callable[[Mapping[str, Any]], Arguments]:
    def make(sizes: Mapping[str, Any]) -> Arguments:
        made = []
        for name, value in zip(workload.names, workload.example(), strict=True):
            shape = workload.shapes.get(name)
            if shape is None or not isinstance(value, torch.Tensor):
                made.append(value)
            else:
                made.append(value.new_empty([_sized(size, sizes) for size in shape]))
        return tuple(made), {}

    return make


def _sized(size: int | str, sizes: Mapping[str, Any]) -> Any:
    if isinstance(size, int):
        return size
    factor, dim = factor_and_dim(size)
    return factor * sizes[dim]


def _of_directives(module: ModuleType, path: Path, text: str) -> Iterator[Target]:
    for given in directives(path, text):
        yield Target(
            name=given.model,
            how="directive",
            line=given.line,
            build=_evaluated(module, given, path),
            forms=_only(Form(make=_of_directive(given), dims=_directive_dims(given))),
        )


def _evaluated(module: ModuleType, given: Directive, path: Path) -> Callable[[], object]:
    code = compile(given.model, f"<{path.name}:{given.line}>", "eval")
    return lambda: eval(code, vars(module))  # the user's own expression, in the user's own file


def _directive_dims(given: Directive) -> tuple[FreeDim, ...]:
    stated = {dim.name: dim for dim in given.dims}
    tensors = [a for a in (*given.positional, *given.keywords.values()) if isinstance(a, TensorArgument)]
    first = {t.sizes[0] for t in tensors if t.sizes}
    return tuple(FreeDim(name, stated.get(name), name in first) for name in given.names)


def _of_directive(given: Directive) -> Callable[[Mapping[str, Any]], Arguments]:
    def value(argument: object, sizes: Mapping[str, Any]) -> object:
        if not isinstance(argument, TensorArgument):
            return argument
        shape = [size_at(s, sizes) for s in argument.sizes]
        return torch.empty(shape, dtype=getattr(torch, argument.dtype))

    def make(sizes: Mapping[str, Any]) -> Arguments:
        keywords = {n: value(a, sizes) for n, a in given.keywords.items()}
        return tuple(value(a, sizes) for a in given.positional), keywords

    return make


def size_at(text: str, sizes: Mapping[str, Any]) -> Any:
    """The size that an expression of dims has.

    :param text: numbers and names of dims, with ``+ - * //``: ``"2*S + 1"``.
    :raises KeyError: where it holds anything else.
    """
    return _size(ast.parse(text, mode="eval").body, sizes)


def _size(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if not isinstance(node, ast.BinOp):
        raise KeyError(ast.unparse(node))
    left, right = _size(node.left, sizes), _size(node.right, sizes)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.FloorDiv):
        return left // right
    raise KeyError(ast.unparse(node))


def _of_pairs(module: ModuleType, _path: Path, _text: str) -> Iterator[Target]:
    own = {n: f for n, f in vars(module).items() if _without_arguments(f, module)}
    pairs = [(b, e) for b in _BUILDERS for e in _EXAMPLES if b in own and e in own][:1]
    for build, example in _PAIRS:
        rest = [name.removeprefix(build) for name in own if name.startswith(build)]
        pairs += [(build + r, example + r) for r in rest if r and example + r in own]
    for build, example in pairs:
        make = _of_function(own[example])
        yield Target(
            name=f"{build}()",
            how="factory",
            line=own[build].__code__.co_firstlineno,
            build=own[build],
            forms=_only(Form(make=make, dims=_shared_batch(make))),
        )


def _without_arguments(value: object, module: ModuleType) -> bool:
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(value).parameters.values()
    return all(p.default is not p.empty or p.kind in kinds for p in parameters)


def _of_function(function: Callable[[], object]) -> Callable[[Mapping[str, Any]], Arguments]:
    def make(sizes: Mapping[str, Any]) -> Arguments:
        given = function()
        if isinstance(given, Mapping):
            return (), {n: _resized(v, sizes) for n, v in given.items()}
        given = given if isinstance(given, tuple | list) else (given,)
        return tuple(_resized(value, sizes) for value in given), {}

    return make


def _resized(value: object, sizes: Mapping[str, Any]) -> object:
    if "B" not in sizes or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value.new_empty([sizes["B"], *value.shape[1:]])


def _shared_batch(make: Callable[[Mapping[str, Any]], Arguments]) -> tuple[FreeDim, ...]:
    """The first size of all example tensors as a dim, where they agree on it."""
    from torchstone.compat import shapecheck as compat

    try:
        with compat.fake_mode(None):
            positional, keywords = make({})
    except (RuntimeError, TypeError, ValueError, AttributeError):  # told when it is executed
        return ()
    tensors = [v for v in (*positional, *keywords.values()) if isinstance(v, torch.Tensor)]
    first = {t.shape[0] if t.dim() else 0 for t in tensors}
    size = next(iter(first), 0)
    return (FreeDim("B", None, True, size),) if len(first) == 1 and size > 1 else ()


def as_module(made: object, name: str) -> nn.Module | Callable[..., Any]:
    """What a target made, if it can be called.

    :raises WorkloadError: where it cannot.
    """
    if isinstance(made, nn.Module) or (callable(made) and not isinstance(made, type)):
        return made
    raise WorkloadError(f"{name} gave a {type(made).__qualname__}, not a module or a function")
