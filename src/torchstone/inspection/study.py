"""An inspection: each part in a process of its own, so that what fails leaves the others standing."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchstone import env, run, settings, store
from torchstone import workload as workload_module
from torchstone.candidate import Progress
from torchstone.errors import TorchstoneError
from torchstone.policy import Policy
from torchstone.records import (
    BreakStudy,
    Capture,
    Dim,
    Environment,
    Inspection,
    Inventory,
    LadderStudy,
    Part,
    PartName,
    RecompileStudy,
    ShapeContract,
    Stale,
)
from torchstone.report.progress import LiveProgress, QuietProgress
from torchstone.worker import Worker
from torchstone.workload import Workload

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PARTS", "inspect", "study"]

FORMAT = 1

PARTS: tuple[PartName, ...] = ("capture", "inventory", "breaks", "recompiles", "contract", "ladder")
"""Every part, in order: what later ones use comes first."""

_SWEEP_S = 60.0  # for trying sizes: what it leaves out is said

_DOING = {
    "capture": "capturing one graph",
    "inventory": "counting, timing and profiling the model",
    "breaks": "looking for graph breaks",
    "recompiles": "replaying the traffic through torch.compile",
    "contract": "trying sizes against the captured graph",
    "ladder": "compiling for dynamic sizes",
}


class _Found(NamedTuple):
    value: Any
    part: Part


def inspect(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    policy: Policy | None = None,
    dims: Mapping[str, str | int | Dim] | None = None,
    **options: Any,
) -> Inspection:
    """Find out what a model is, where it breaks and which shapes hold.

    :param model: a module, or a function that makes it.
    :param inputs: example inputs: a tensor, a tuple, or a dict by argument name.
    :param policy: ``dollars_per_hour`` and ``max_recompiles`` are used, and ``build_s`` for each part.
    :param dims: named dimensions and their ranges, ``{"B": "1..64"}``.
    :param options: as in :func:`torchstone.optimize`, and ``parts`` (names, see :data:`PARTS`),
        ``progress`` (True for live progress).
    :raises WorkloadError: for inputs that are not tensors or numbers, dims that do not fit, ...
    """
    watch = LiveProgress() if options.pop("progress", False) else QuietProgress()
    parts = tuple(options.pop("parts", PARTS))
    workload = workload_module.from_objects(
        model, inputs, dims=dims or {}, policy=policy or Policy(), **options
    )
    return study(workload, parts=parts, progress=watch)


def study(workload: Workload, *, parts: tuple[PartName, ...], progress: Progress) -> Inspection:
    """Inspect a workload.

    A part that crashes, raises or takes longer than ``policy.build_s`` is told as such.

    :param parts: those wanted; each is given without the others, except that the contract's needs the
        capture, which is then made too.
    :raises WorkloadError: where the workload's own code fails before there is a model.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    environment = env.environment(settings.load().threads)
    spec = run.describe(workload, environment)
    wanted = [p for p in PARTS if p in parts or (p == "capture" and "contract" in parts)]
    progress.stage("inspect", len(wanted), None)
    try:
        with tempfile.TemporaryDirectory(prefix="torchstone-") as folder:
            file = Path(folder) / "workload"
            workload_module.dump(workload, file, spec)
            with store.exclusive(settings.load().home / "timing.lock"):
                found = _Bench(workload, environment, file, progress).find(wanted)
    finally:
        progress.done()
    values = {name: one.value for name, one in found.items()}
    return Inspection(
        format=FORMAT,
        workload=spec,
        origin=workload.origin,
        environment=environment,
        started_at=started,
        parts=tuple(one.part for name, one in found.items() if name != "stale"),
        **values,
    )


class _Bench:
    """Runs the parts, one after the other: several of them are timed."""

    def __init__(
        self, workload: Workload, environment: Environment, file: Path, progress: Progress
    ) -> None:
        self.limit_s = workload.policy.build_s
        self.limits = run.limits(workload, environment)
        self.file = file
        self.progress = progress

    def find(self, wanted: list[PartName]) -> dict[str, _Found]:
        found: dict[str, _Found] = {}
        program = str(self.file.with_name("program.pt2"))
        for name in wanted:
            self.progress.step(_DOING[name])
            capture = found["capture"].value if "capture" in found else None
            found[name] = self._part(name, *_job(name, capture, program, self.limit_s))
            if name == "recompiles":
                stale = self._part(name, "torchstone.inspection.jobs:stale_of", Stale, {})
                found["stale"] = stale
                self._tell(stale.part)  # beside recompiles it has no place of its own on the page
            if name == "capture" and found[name].value is None:  # the others go on without one graph
                failed = f"capture failed: {found[name].part.failed}"
                regions = Capture(mode="dynamo", program=None, seconds=0.0, graphs=0, refused=failed)
                found[name] = found[name]._replace(value=regions)
            self.progress.advance()
            self._tell(found[name].part)
        return found

    def _part(self, name: PartName, target: str, kind: type, options: dict[str, Any]) -> _Found:
        started = time.perf_counter()
        limit_s = 1.25 * self.limit_s + 30  # beyond what a job keeps to, so that it can say what it left
        with Worker(name, directory=self.file.parent, workload=self.file, limits=self.limits) as worker:
            try:
                value = worker.call(target, stage=name, limit_s=limit_s, **options)
            except TorchstoneError as error:  # the model fails on its own example, say
                seconds = time.perf_counter() - started
                return _Found(None, Part(name=name, seconds=seconds, failed=str(error)))
        seconds = time.perf_counter() - started
        if isinstance(value, kind) or value is None:
            return _Found(value, Part(name=name, seconds=seconds))
        why = getattr(value, "text", None) or f"no answer within {value.limit_s:.0f} s"
        return _Found(None, Part(name=name, seconds=seconds, failed=why, log=value.log))

    def _tell(self, part: Part) -> None:
        if part.failed is not None:
            self.progress.note(f"{part.name}: {part.failed}")


def _job(
    name: PartName, capture: Capture | None, program: str, limit_s: float
) -> tuple[str, type, dict[str, Any]]:
    """The job of a part, what it gives, and its arguments."""
    here = "torchstone.inspection.jobs"
    match name:
        case "capture":
            return "torchstone.capture.jobs:capture", Capture, {"path": program}
        case "inventory":
            return f"{here}:inventory", Inventory, {"capture": capture, "program": program}
        case "breaks":
            return f"{here}:breaks", BreakStudy, {}
        case "recompiles":
            return f"{here}:recompiles_of", RecompileStudy, {}
        case "contract":
            options = {"capture": capture, "program": program, "within_s": min(limit_s, _SWEEP_S)}
            return f"{here}:contract", ShapeContract, options
        case "ladder":
            return f"{here}:ladder_of", LadderStudy, {"within_s": min(limit_s, _SWEEP_S)}
