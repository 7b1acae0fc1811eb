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
    from torchstone.adapters.triton import autotune as autotune
    from torchstone.bundle.load import load as load
    from torchstone.capture.tracer import trace as trace
    from torchstone.capture.tracer.program import Program as Program
    from torchstone.inspection.study import inspect as inspect
    from torchstone.policy import Policy as Policy
    from torchstone.recipe import Recipe as Recipe
    from torchstone.run import Run as Run
    from torchstone.run import optimize as optimize
    from torchstone.tuner.space import Boolean as Boolean
    from torchstone.tuner.space import Choice as Choice
    from torchstone.tuner.space import Integer as Integer
    from torchstone.tuner.space import Only as Only
    from torchstone.tuner.space import Permutation as Permutation
    from torchstone.tuner.space import PowerOfTwo as PowerOfTwo
    from torchstone.tuner.space import Space as Space
    from torchstone.tuner.tunable import Tunable as Tunable
    from torchstone.tuning import tune as tune
    from torchstone.workload import Workload as Workload

__version__ = "0.1.0"
__all__ = [
    "Boolean",
    "Choice",
    "Integer",
    "Only",
    "Permutation",
    "Policy",
    "PowerOfTwo",
    "Program",
    "Recipe",
    "Run",
    "Space",
    "Tunable",
    "Workload",
    "autotune",
    "inspect",
    "load",
    "optimize",
    "trace",
    "tune",
]

_HOMES = {
    **dict.fromkeys(
        ("Boolean", "Choice", "Integer", "Only", "Permutation", "PowerOfTwo", "Space"),
        "torchstone.tuner.space",
    ),
    "Tunable": "torchstone.tuner.tunable",
    "autotune": "torchstone.adapters.triton",
    "tune": "torchstone.tuning",
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
