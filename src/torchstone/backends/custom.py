"""The user's own implementation of the module."""

from __future__ import annotations

from dataclasses import dataclass

from torchstone import recipe
from torchstone.backends.base import Built, Context, module_call
from torchstone.records import Absent, Unsupported

__all__ = ["CustomBackend"]


@dataclass(frozen=True)
class CustomBackend:
    """``workload.candidates[name](module)``."""

    name: str = "custom"
    engine: type[recipe.Engine] = recipe.Custom

    def probe(self) -> Absent | None:
        """Whether the workload has it is known in the worker only."""
        return None

    def build(self, context: Context) -> Built | Unsupported:
        """Call the user's function with a module of its own."""
        step = context.recipe.engine
        assert isinstance(step, recipe.Custom)
        if context.workload is None:
            return Unsupported(text=f"{context.recipe} is the user's own code, which no bundle carries")
        if step.target not in context.workload.candidates:
            names = ", ".join(context.workload.candidates) or "none"
            return Unsupported(text=f"the workload has no candidate {step.target!r}; it has {names}")
        module = context.workload.module()
        function = context.workload.implementation(step.target, module)
        return Built(call=module_call(function), module=module)

    def load(self, context: Context) -> Built | Unsupported:
        """As :meth:`build`: there are no files."""
        return self.build(context)
