"""What ``torchstone explain`` says: which rewrites fire on a program, which do not, and why."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torchstone import env, run, settings, store
from torchstone import workload as workload_module
from torchstone.errors import WorkloadError
from torchstone.recipe import parse
from torchstone.records import TimedOut
from torchstone.records.rewrites import Explanation
from torchstone.worker import Worker
from torchstone.workload import Workload

__all__ = ["explain"]


def explain(workload: Workload, families: str = "all") -> Explanation:
    """Capture and rewrite a workload in a process of its own; nothing is compiled.

    :param families: of rules, joined by a dot; see :data:`torchstone.recipe.FAMILIES`.
    :raises RecipeError: for a family that there is not.
    :raises WorkloadError: where the workload's own code fails.
    """
    step = parse(f"inductor + rewrite({families})").rewrite
    assert step is not None
    environment = env.environment(settings.load().threads)
    spec, limits = run.describe(workload, environment), run.limits(workload, environment)
    with tempfile.TemporaryDirectory(prefix="torchstone-") as folder:
        file = Path(folder) / "workload"
        workload_module.dump(workload, file, spec)
        with (
            store.exclusive(settings.load().home / "timing.lock"),
            Worker("explain", directory=Path(folder), workload=file, limits=limits) as worker,
        ):
            found = worker.call(
                "torchstone.rewrite.jobs:explain",
                stage="rewrite",
                limit_s=workload.policy.build_s,
                families=step.families,
                path=str(Path(folder) / "program.pt2"),
            )
    if isinstance(found, Explanation):
        return found
    why = f"no answer within {found.limit_s:.0f} s" if isinstance(found, TimedOut) else found.text
    raise WorkloadError(f"rewriting did not finish: {why}", where=workload.origin)
