"""Compiled calls that are wrong because something changed unseen: found by replay, named by experiment.

A guard that is missing makes no recompile, but a wrong answer. So the traffic is replayed with the
backend that serves, each call is compared with eager, and where one is wrong the same calls are run
again with one thing changed at a time. What brings back the right answer is the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from torchstone import compat
from torchstone.capture.compiled import outputs, state
from torchstone.capture.compiled.replay import Replay, Way, plan
from torchstone.compat import dynamo as doors
from torchstone.records import Case, ScalarSpec, Stale, StaleCause
from torchstone.workload import Workload

__all__ = ["study_staleness"]


class _Finding(NamedTuple):
    cause: StaleCause
    what: tuple[str, ...]
    sentence: str
    fix: str
    code: str | None = None


def study_staleness(
    workload: Workload, module: nn.Module, *, calls: int = 16, backend: str = "inductor"
) -> Stale | None:
    """Find the first replayed call that compiled code answers otherwise than eager, and why.

    Runs in a worker. Models whose answers are random cannot be compared, and give None.

    :param module: the workload's module; its state may be another one afterwards.
    :param calls: most calls to replay.
    :returns: what was found; None where every call agrees, or Dynamo cannot run the model.
    """
    cases = plan(workload, calls)
    desk = _Desk(workload, outputs.copied(module), cases, backend)
    wrong, relative, breaks = desk.first_wrong()
    if wrong is None:
        return None
    finding = _find(desk, wrong, breaks)
    return Stale(
        call=wrong,
        relative=relative,
        cause=finding.cause,
        what=finding.what,
        sentence=finding.sentence,
        fix=finding.fix,
        code=finding.code,
        evidence=tuple(desk.evidence),
    )


class _Desk:
    """Runs experiments, always from the state in which the module came."""

    def __init__(
        self, workload: Workload, module: nn.Module, cases: tuple[Case, ...], backend: str
    ) -> None:
        self.workload = workload
        self.backend = backend
        self.cases = cases
        self.evidence: list[str] = []
        self._module = module

    def way(self, **config: bool) -> Way:
        return Way(backend=self.backend, compare=True, config=config)

    def replay(self) -> Replay:
        return Replay(self.workload, outputs.copied(self._module), self.cases)

    def first_wrong(self) -> tuple[int | None, float | None, list[doors.BreakEvent]]:
        """The first call that is wrong, its error, and the graph breaks on the way."""
        with doors.watch_breaks() as breaks:
            try:
                found = self.replay().run(Way(backend=self.backend, compare=True))
            except compat.capture_errors():
                return None, None, []
        if found.wrong is None:
            return None, None, []
        self.evidence.append(f"{self.backend}: call {found.wrong} differs from eager")
        return found.wrong, found.errors[found.wrong], breaks

    def right(self, name: str, way: Way | None = None, only: int | None = None) -> bool:
        """Whether the calls come out right with one thing changed; kept as evidence."""
        chosen = way or Way(backend=self.backend, compare=True)
        try:
            right = self.replay().run(chosen, only).wrong is None
        except compat.capture_errors() as error:
            self.evidence.append(f"{name}: {type(error).__name__}")
            return False
        self.evidence.append(f"{name}: {'right' if right else 'still wrong'}")
        return right


def _find(desk: _Desk, wrong: int, breaks: list[doors.BreakEvent]) -> _Finding:
    finders: tuple[Callable[[], _Finding | None], ...] = (
        lambda: _of_region(desk),
        lambda: _of_float(desk, wrong, breaks),
        lambda: _of_state(desk, wrong),
        lambda: _of_compiler(desk),
    )
    for finder in finders:
        if (finding := finder()) is not None:
            return finding
    return _Finding(
        "UNKNOWN",
        (),
        "Compiled code answers otherwise than eager, and no single change explains it.",
        "Run `torchstone diff` on this call to find the first operation that differs.",
    )


def _of_region(desk: _Desk) -> _Finding | None:
    """A ``nested_compile_region`` is traced once; what it read then is not read again."""
    module = desk.replay().target
    with doors.regions_inlined(state.namespaces(module)) as regions:
        if not regions or not desk.right("without torch.compiler.nested_compile_region"):
            return None
    written = set().union(*(state.globals_written(f.__code__) for f in state.functions(module)))
    for name, region in regions.items():
        names = tuple(sorted(written & state.globals_read(region.__code__)))
        if names:
            return _Finding(
                "REGION_GLOBAL",
                names,
                f"The global {', '.join(names)} is assigned between two calls of {name}(), a "
                "nested_compile_region, which is traced once and reuses what it read then.",
                "Pass it to the region as an argument, or leave the region mark out.",
                f"{name}({', '.join(names)})",
            )
    return _Finding(
        "REGION_GLOBAL",
        tuple(regions),
        f"The nested_compile_region {', '.join(regions)} was traced once and reuses what it read then.",
        "Pass what it reads as arguments, or leave the region mark out.",
    )


def _of_float(desk: _Desk, wrong: int, breaks: list[doors.BreakEvent]) -> _Finding | None:
    """A Python float became symbolic, and the compiler baked one of its values in without a guard."""
    if not desk.right("specialize_float=True", desk.way(specialize_float=True)):
        return None
    names = _varied_floats(desk, wrong)
    items = [e for e in breaks if "item()" in e.kind or "Data dependent operator" in e.kind]
    if not names and items:
        place = items[0].stack[-1]
        text = (place.line or "").strip()
        return _Finding(
            "BREAK_VALUE",
            (f"{place.filename}:{place.lineno}: {text}",),
            f"The number that comes out of the graph break at {text!r} was made symbolic when it "
            "changed, and the compiler baked one of its values in without a guard.",
            "Keep the number a tensor: without .item() there is no break, and nothing to bake in.",
            "torch._dynamo.config.specialize_float = True",
        )
    if not names:
        names = ("a float that the code reads",)
    return _Finding(
        "FLOAT_ARGUMENT",
        names,
        f"The float argument {', '.join(names)} was made symbolic when it changed, and the compiler "
        "baked one of its values in without a guard.",
        "Pass it as a tensor, or let every float have code of its own.",
        "torch._dynamo.config.specialize_float = True",
    )


def _varied_floats(desk: _Desk, wrong: int) -> tuple[str, ...]:
    names = [
        s.name for s in desk.workload.spec().inputs if isinstance(s, ScalarSpec) and s.kind == "float"
    ]
    values = {n: {case.scalars.get(n) for case in desk.cases[: wrong + 1]} for n in names}
    return tuple(n for n in names if len(values[n]) > 1)


def _of_state(desk: _Desk, wrong: int) -> _Finding | None:
    """Compiled afresh the call is right: what was compiled before should not have been used again."""
    if not wrong or not desk.right("compiled afresh for this call", only=wrong):
        return None
    replay = desk.replay()
    for _ in range(wrong - 1):
        desk.workload.disturb(replay.module)
    before = state.snapshot(replay.target)
    desk.workload.disturb(replay.module)
    names = state.changed(before, state.snapshot(replay.target))
    own = tuple(name for name in names if name.startswith("self."))
    chosen = own or names
    told = ", ".join(chosen) if chosen else "something that the model reads"
    return _Finding(
        "MODULE_ATTRIBUTE" if own else "UNGUARDED_STATE",
        chosen,
        f"{told} changed between calls and no guard covers it: the code compiled before was used again.",
        "Assign it in the usual way (self.NAME = value), keep it in a buffer, or call "
        "torch.compiler.reset() after changing it.",
    )


def _of_compiler(desk: _Desk) -> _Finding | None:
    """Dynamo's graphs, run eagerly, are right: the backend's code is not."""
    if not desk.right("the same graphs, run eagerly", Way(backend="eager", compare=True)):
        return None
    return _Finding(
        "COMPILER",
        (desk.backend,),
        f"Nothing was reused wrongly: {desk.backend} computes these graphs otherwise than eager does.",
        "Run `torchstone diff` on this call to find the first operation that differs.",
    )
