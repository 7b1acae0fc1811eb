"""Runs: the Python door, and what the command line calls.

:func:`optimize` is the one call; :class:`Run` is what it gives back.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchstone import backends, bundle, env, pipeline, quantize, settings, store
from torchstone import recipe as recipes_module
from torchstone import workload as workload_module
from torchstone.candidate import Context, Progress, slug
from torchstone.errors import BundleError, StoreError, WorkloadError
from torchstone.policy import Policy
from torchstone.recipe import Recipe
from torchstone.records import (
    Build,
    Capture,
    Crashed,
    Decision,
    Dim,
    Environment,
    ReferenceErrors,
    RunHeader,
    VerdictEntry,
    Verified,
    WorkloadSpec,
)
from torchstone.report import collect, html
from torchstone.report.progress import LiveProgress, QuietProgress
from torchstone.store import RunStore
from torchstone.worker import Limits, Worker
from torchstone.workload import Workload

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Request", "Run", "Summary", "describe", "execute", "limits", "optimize"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is asked for."""

    workload: Workload
    """The workload."""
    recipes: tuple[Recipe, ...] = ()
    """Candidates; the workload's own, or the default ones, where empty."""
    home: Path
    """Where runs are kept."""
    seed: int = 0
    """Seed of everything random."""
    resume: bool = False
    """Go on with the latest run of the same request rather than start one."""
    until: pipeline.Stage = "decide"
    """Last stage to run."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in short: what ``torchstone run --json`` prints."""

    run: str
    """The run's folder."""
    decision: Decision | None
    """What was decided; None for a run that did not get there."""
    report: str | None
    """The HTML report."""
    bundle: str | None
    """The bundle, if one was written."""
    no_bundle: str | None
    """Why there can be none, if so."""
    problems: tuple[str, ...]
    """What was found damaged in the run's folder."""


class Run:
    """A run: its evidence, its decision, and the model that it promoted."""

    def __init__(self, run_store: RunStore, workload: Workload | None = None) -> None:
        self.store = run_store
        self._workload = workload

    @property
    def decision(self) -> Decision | None:
        """What the gate decided; None while the run is partial."""
        return self.store.get("decision", Decision)

    @cached_property
    def model(self) -> Callable[..., Any]:
        """What to call: the bundle's own code where the model could be exported, else the candidate.

        Takes the model's inputs and gives the model's outputs. Before a decision, and for
        KEEP_BASELINE, it is the model itself.
        """
        if self.packable is None:
            shipped: Callable[..., Any] = bundle.load(self._own_bundle())
            return shipped
        return _in_process(self._recipe, self.workload)

    @property
    def workload(self) -> Workload:
        """The workload, as given or as kept with the run."""
        if self._workload is None:
            self._workload = workload_module.load(self.store.files / "workload")
        return self._workload

    @property
    def packable(self) -> str | None:
        """None if a bundle can be written, else why not, in one sentence."""
        capture = self.store.get("capture", Capture)
        if capture is None:
            return "the run did not get as far as capturing the model"
        if capture.mode != "export":
            return f"the model cannot be exported as one graph: {capture.refused}"
        fallback = self.store.get(f"verdict/{recipes_module.fallback()}", VerdictEntry)
        if fallback is None or not isinstance(fallback.verdict, Verified):
            why = (
                "not judged yet" if fallback is None else getattr(fallback.verdict, "text", "timed out")
            )
            return f"the exported program, on which it would fall back, is not proven: {why}"
        if isinstance(self._recipe.engine, recipes_module.Custom):
            return f"{self._recipe} is the user's own Python code, which has no artifact to ship"
        if isinstance(self._recipe.engine, recipes_module.Inductor) and self._recipe.engine.module:
            return f"{self._recipe} compiles the user's own module; its artifact is recipe 'inductor'"
        return None

    def report(self, directory: Path | None = None) -> Path:
        """Write ``report.html`` and ``report.json``, beside the run's entries by default.

        :returns: the page's path.
        """
        directory = directory or self.store.path
        directory.mkdir(parents=True, exist_ok=True)
        collected = self.collected()
        (directory / "report.json").write_bytes(collect.to_json(collected))
        page = directory / "report.html"
        page.write_text(html.render(collected), encoding="utf-8")
        return page

    def collected(self) -> collect.Report:
        """The report as a record: what ``report.json`` holds."""
        return collect.collect(self.store.header, self.store.entries)

    def package(self, path: str | Path) -> Path:
        """Write the bundle of the promoted candidate, or of eager where eager is kept.

        :raises BundleError: if there can be none; :attr:`packable` says so beforehand.
        """
        why = self.packable
        if why is not None:
            raise BundleError(f"no bundle: {why}", where=self.store.path)
        page = self.report()
        chosen = str(self._recipe)
        build = self.store.get(f"build/{chosen}", Build)
        capture = self.store.get("capture", Capture)
        assert capture is not None
        references = [e for e in self.store.entries if isinstance(e, ReferenceErrors)]
        contents = bundle.Contents(
            name=self.store.header.workload.name,
            recipe=chosen,
            decision=self.decision.kind if self.decision else "KEEP_BASELINE",
            program=self.store.files / "program.pt2",
            artifact=self.store.files / slug(chosen) if build is not None and build.artifact else None,
            spec=self.store.header.workload,
            cases=tuple(r.case for r in references if r.problem is None),
            environment=self.store.header.environment,
            evidence=(page, page.with_name("report.json")),
            output_spec=capture.output_spec,
        )
        return bundle.write(contents, Path(path))

    def asked(self, recipes: tuple[str, ...]) -> tuple[str, ...]:
        """The recipes' canonical texts, in the order given."""
        return tuple(str(recipes_module.parse(text)) for text in recipes)

    def summary(self, page: Path | None, packaged: Path | None) -> Summary:
        """The run in short."""
        return Summary(
            run=str(self.store.path),
            decision=self.decision,
            report=None if page is None else str(page),
            bundle=None if packaged is None else str(packaged),
            no_bundle=self.packable,
            problems=tuple(self.store.problems),
        )

    def _own_bundle(self) -> Path:
        path = self.store.work / f"bundle-{len(self.store.entries)}-{os.getpid()}"
        return path if path.is_dir() else self.package(path)

    @property
    def _recipe(self) -> Recipe:
        decision = self.decision
        return recipes_module.parse(decision.recipe) if decision else recipes_module.baseline()


def optimize(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    policy: Policy | None = None,
    dims: Mapping[str, str | int | Dim] | None = None,
    **options: Any,
) -> Run:
    """Find the fastest version of a model that can be proven right.

    :param model: a module, in the mode that it will serve in, or a function that makes it.
    :param inputs: example inputs: a tensor, a tuple, or a dict by argument name.
    :param policy: constraints and objective; the defaults are safe.
    :param dims: named dimensions and their ranges, ``{"B": "1..64"}``.
    :param options: ``shapes`` (argument name -> shape with dim names), ``ranges``, ``traffic``,
        ``holdout``, ``metric``, ``generate``, ``candidates``, ``perturb``, ``name`` as in
        :class:`torchstone.Workload`; ``recipes`` (texts), ``home``, ``seed``, ``resume``,
        ``progress`` (True for live progress).
    :returns: the run, with :attr:`Run.model` to call.
    :raises WorkloadError: for inputs that are not tensors or numbers, dims that do not fit, ...
    :raises RecipeError: for a recipe that does not parse.
    """
    watch = options.pop("progress", False)
    request_options = {
        "recipes": tuple(recipes_module.parse(r) for r in options.pop("recipes", ())),
        "home": Path(options.pop("home", settings.load().home)),
        "seed": options.pop("seed", 0),
        "resume": options.pop("resume", False),
    }
    workload = workload_module.from_objects(
        model, inputs, dims=dims or {}, policy=policy or Policy(), **options
    )
    request = Request(workload=workload, **request_options)
    return execute(request, LiveProgress() if watch else QuietProgress())


def execute(request: Request, progress: Progress) -> Run:
    """Start or resume the run that a request asks for, and see it through."""
    workload = request.workload
    environment = env.environment(settings.load().threads)
    spec = describe(workload, environment)
    wanted = request.recipes or workload.recipes or default_recipes(environment)
    header = _header(request, spec, with_baseline(wanted), environment)
    run_store = _resumable(request.home, header) if request.resume else None
    if run_store is None:
        run_store = store.create(request.home, header)
    if not (run_store.files / "workload").is_file():
        _dump(workload, run_store.files / "workload", spec)
    context = Context(
        store=run_store,
        workload=run_store.files / "workload",
        spec=spec,
        policy=workload.policy,
        limits=limits(workload, environment),
        seed=request.seed,
        progress=progress,
    )
    with run_store.writing():
        try:
            pipeline.run(context, with_baseline(wanted), request.until)
        finally:
            progress.done()
    return Run(run_store, workload)


def default_recipes(environment: Environment) -> tuple[Recipe, ...]:
    """What a run tries that names no recipes.

    Number formats that the processor would emulate come last: they cost minutes and rarely pay.
    """
    listed = recipes_module.default_recipes()
    if environment.devices:
        return listed
    return tuple(sorted(listed, key=lambda r: quantize.lacking(r.numeric, environment.isa) is not None))


def _dump(workload: Workload, path: Path, spec: WorkloadSpec) -> None:
    unfinished = path.with_name(".workload")
    workload_module.dump(workload, unfinished, spec)
    unfinished.rename(path)


def _in_process(recipe: Recipe, workload: Workload) -> Callable[..., Any]:
    """The candidate in this process, giving outputs as the model does."""
    import torch
    from torch.utils import _pytree as pytree

    module = workload.module()
    if recipe == recipes_module.baseline():
        return module
    directory = Path(tempfile.mkdtemp(prefix="torchstone-"))
    context = backends.Context(workload=workload, recipe=recipe, program=None, directory=directory)
    built = backends.of(recipe).build(context)
    if not isinstance(built, backends.Built):
        raise BundleError(f"{recipe} cannot be built here: {built.text}", hint=built.hint)
    with torch.no_grad():
        structure = pytree.tree_structure(module(*workload.example()))
    call = built.call
    return lambda *inputs: pytree.tree_unflatten(list(call(*inputs)), structure)


def with_baseline(recipes: tuple[Recipe, ...]) -> tuple[Recipe, ...]:
    """The recipes without repeats; the baseline and the fallback first, whether named or not."""
    return tuple(dict.fromkeys((recipes_module.baseline(), recipes_module.fallback(), *recipes)))


def describe(workload: Workload, environment: Environment) -> WorkloadSpec:
    """The workload's description; of one from files, made where its code cannot harm this process.

    :raises WorkloadError: where its code fails.
    """
    if workload.origin is None:
        return workload.spec()
    with tempfile.TemporaryDirectory(prefix="torchstone-") as folder:
        file, allowed = Path(folder) / "workload", limits(workload, environment)
        workload_module.dump(workload, file)
        with Worker("spec", directory=Path(folder), workload=file, limits=allowed) as worker:
            result = worker.call("torchstone.stages:spec", stage="spec", limit_s=workload.policy.build_s)
    if isinstance(result, WorkloadSpec):
        return result
    why = result.text if isinstance(result, Crashed) else f"no answer in {workload.policy.build_s:g} s"
    what = f"the workload's code fails: {why}\n{result.log}"
    raise WorkloadError(what, where=workload.origin, hint="call its functions by themselves")


def limits(workload: Workload, environment: Environment) -> Limits:
    """What each worker of the workload may use."""
    half = environment.memory_bytes // 2
    return Limits(memory_bytes=workload.policy.memory_bytes or half, threads=environment.threads)


def _header(
    request: Request, spec: WorkloadSpec, recipes: tuple[Recipe, ...], environment: Environment
) -> RunHeader:
    return RunHeader(
        format=store.FORMAT,
        workload=spec,
        policy=msgspec.json.decode(msgspec.json.encode(request.workload.policy)),  # as it is read back
        recipes=tuple(str(r) for r in recipes),
        environment=environment,
        seed=request.seed,
        origin=request.workload.origin,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _resumable(home: Path, header: RunHeader) -> RunStore | None:
    """The latest run that asked for the same, of the same, in the same environment."""
    runs, _ = store.listing(home)
    same = [r for r in runs if _question(r.header) == _question(header)]
    if not same:
        return None
    if same[-1].in_use:
        raise StoreError(
            "the run to resume is being worked on by another process",
            where=same[-1].path,
            hint="wait for it, or start a new run without --resume",
        )
    return same[-1]


def _question(header: RunHeader) -> RunHeader:
    return msgspec.structs.replace(header, started_at="", origin=None)
