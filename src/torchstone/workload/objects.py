"""A workload from Python objects: the door behind ``torchstone.optimize(model, inputs)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torchstone.errors import WorkloadError
from torchstone.records import Dim
from torchstone.workload.core import Workload
from torchstone.workload.dims import Shape, did_you_mean, parse_dim

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Given", "from_objects"]


@dataclass(frozen=True)
class Given:
    """A function of no arguments that gives what it was made with."""

    value: Any
    """The model, or the inputs."""
    label: str
    """What it is, for messages."""

    def __call__(self) -> Any:
        """Give the value."""
        return self.value


def from_objects(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    dims: Mapping[str, str | int | Dim] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    **more: Any,
) -> Workload:
    """Make a workload from a model and example inputs.

    :param model: the module, or a function that makes it.
    :param inputs: example inputs: a tuple, a dict of keyword inputs, or one tensor.
    :param dims: named dims, in the grammar of :func:`~torchstone.workload.dims.parse_dim`.
    :param shapes: argument to shape with names of dims: ``{"x": ("B", 3)}``.
    :param more: any further field of :class:`~torchstone.workload.core.Workload`: ``policy``,
        ``ranges``, ``holdout``, ``metric``, ``traffic`` and so on.
    :raises WorkloadError: where these do not fit together, or ``model`` is neither.
    """
    from torch import nn

    maker: object = model  # users without a type checker give other things
    known = [f.name for f in fields(Workload)]
    for name in more:
        if name not in known:
            raise WorkloadError(f"unknown argument {name!r}", hint=did_you_mean(name, known))
    if not isinstance(maker, nn.Module) and not callable(maker):
        what = f"model is a {type(model).__name__}, not a torch.nn.Module or a function that makes one"
        raise WorkloadError(what, hint="give the module itself")
    given = isinstance(model, nn.Module)
    label = type(model).__name__ if given else getattr(model, "__name__", "model")
    return Workload(
        name=more.pop("name", label),
        model=Given(model, "model") if given else model,
        inputs=Given(inputs, "inputs"),
        dims=tuple(parse_dim(name, text) for name, text in (dims or {}).items()),
        shapes={name: tuple(shape) for name, shape in (shapes or {}).items()},
        **more,
    )
