"""Jobs of rewriting, run in a worker."""

from __future__ import annotations

from typing import Any

from torchstone import recipe
from torchstone.capture import jobs as capturing
from torchstone.capture import program as programs
from torchstone.records.rewrites import Explanation
from torchstone.rewrite import program as rewriting
from torchstone.worker import workload_of

__all__ = ["explain"]


def explain(state: dict[str, Any], families: str, path: str) -> Explanation:
    """Capture the worker's workload to ``path``, rewrite it, and say what fired."""
    workload, step = workload_of(state), recipe.Rewrite(families)
    name, text = workload.spec().name, "rewrite" if families == "all" else f"rewrite({families})"
    captured = capturing.capture(state, path)
    if captured.program is None:
        return Explanation(workload=name, recipe=text, refused=captured.refused)
    module, log = rewriting.log(programs.load(path), step)
    after = sum(n.op == "call_function" for n in module.graph.nodes)
    return Explanation(workload=name, recipe=text, nodes=(captured.nodes or 0, after), rewrites=log)
