"""What an engine is given where the recipe rewrites the program; engines know nothing of it."""

from __future__ import annotations

from dataclasses import replace

from torchstone.backends.base import Context
from torchstone.records import Unsupported
from torchstone.records.rewrites import Rewrites

__all__ = ["built", "files", "loaded"]

_FILE = "rewritten.pt2"


def built(context: Context) -> tuple[Context, Rewrites | None] | Unsupported:
    """Rewrite the program and keep it beside the engine's files; gives what the engine is built from."""
    step = context.recipe.rewrite
    if step is None:
        return context, None
    if context.program is None or context.workload is None:
        return Unsupported(text="there is no exported program, since export refused the model")
    from torchstone.capture import program as programs
    from torchstone.rewrite import program as rewriting

    found = rewriting.rewrite(programs.load(context.program), step, context.workload)
    if isinstance(found, Unsupported):
        return found
    programs.save(found.program, context.directory / _FILE)
    return loaded(context), found.log


def loaded(context: Context) -> Context:
    """The context with the program that :func:`built` kept, where the recipe rewrites."""
    if context.recipe.rewrite is None:
        return context
    return replace(context, program=context.directory / _FILE)


def files(context: Context) -> tuple[str, ...]:
    """What was kept."""
    return () if context.recipe.rewrite is None else (_FILE,)
