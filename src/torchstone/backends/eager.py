"""PyTorch as the user runs it: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torchstone import recipe
from torchstone.backends.base import Built, Context, module_call
from torchstone.records import Absent, Unsupported

__all__ = ["EagerBackend"]


@dataclass(frozen=True)
class EagerBackend:
    """The user's module, converted if the recipe says so."""

    name: str = "eager"
    engine: type[recipe.Engine] = recipe.Eager

    def probe(self) -> Absent | None:
        """Always there: torch is required."""
        return None

    def build(self, context: Context) -> Built | Unsupported:
        """Make the module; writes nothing."""
        from torchstone import quantize

        step = context.recipe.engine
        assert isinstance(step, recipe.Eager)
        if context.workload is None or step.program:
            return self._from_program(context)
        module = context.workload.module()
        if context.recipe.numeric is not None:
            module = quantize.transform(module, context.recipe.numeric, context.workload.example())
        return Built(call=module_call(module), module=module)

    def load(self, context: Context) -> Built | Unsupported:
        """As :meth:`build`: there are no files."""
        return self.build(context)

    def _from_program(self, context: Context) -> Built | Unsupported:
        from torchstone.capture import program

        if context.recipe.numeric is not None:
            return Unsupported(text="eager with a number format needs the user's module")
        if context.program is None:
            return Unsupported(text="there is no exported program, since export refused the model")
        return Built(call=module_call(program.load(context.program).module(check_guards=False)))
