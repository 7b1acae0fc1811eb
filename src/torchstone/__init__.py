"""Torchstone: the fastest version of a PyTorch model that it can prove right.

::

    run = torchstone.optimize(model, inputs, policy=torchstone.Policy(max_relative_error=1e-2))
    run.decision        # PROMOTE, KEEP_BASELINE or HOLD, with reasons
    run.model(x)        # what was promoted, or the model itself
    run.package("bundle/")
    model = torchstone.load("bundle/")

``import torchstone`` loads neither torch nor any engine; the names below are found when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchstone.bundle.load import load as load
    from torchstone.capture.tracer import trace as trace
    from torchstone.capture.tracer.program import Program as Program
    from torchstone.inspection.study import inspect as inspect
    from torchstone.policy import Policy as Policy
    from torchstone.recipe import Recipe as Recipe
    from torchstone.run import Run as Run
    from torchstone.run import optimize as optimize
    from torchstone.workload import Workload as Workload

__version__ = "0.1.0"
__all__ = ["Policy", "Program", "Recipe", "Run", "Workload", "inspect", "load", "optimize", "trace"]

_HOMES = {
    "Policy": "torchstone.policy",
    "Program": "torchstone.capture.tracer",
    "Recipe": "torchstone.recipe",
    "Run": "torchstone.run",
    "Workload": "torchstone.workload",
    "inspect": "torchstone.inspection.study",
    "load": "torchstone.bundle",
    "optimize": "torchstone.run",
    "trace": "torchstone.capture.tracer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'torchstone' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # so that this is asked once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
