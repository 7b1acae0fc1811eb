"""``torchstone diff A B``: the first operation where B is not what A is.

What can be compared (:func:`parse_side`): a recipe, ``float64`` (the reference), a saved trace, a
factory of a module in a Python file. What runs operation by operation is recorded and compared by
:mod:`torchstone.verify.differ`; engines, whose intermediate values cannot be seen, are bisected over the
captured program instead. All of it runs in one worker, since it runs the user's code and engines.

:func:`compare_modules` is the Python door, in this process.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchstone import backends, env
from torchstone import recipe as recipes
from torchstone import workload as workloads
from torchstone.errors import InputError
from torchstone.policy import Policy
from torchstone.recipe import Recipe
from torchstone.records import Case, Crashed, Divergence, TimedOut
from torchstone.verify import budget, inputs
from torchstone.worker import Limits, Worker, workload_of

if TYPE_CHECKING:
    import torch
    from torch import fx, nn

    from torchstone.capture.export import Refused
    from torchstone.verify.differ.bisect import CompilePart
    from torchstone.verify.differ.trace import Trace
    from torchstone.workload import Workload

__all__ = ["FLOAT64", "Question", "compare_modules", "compile_part", "diff", "find", "parse_side"]

FLOAT64 = "float64"
"""Names the reference: the model with everything in float64."""

_BISECT = 0.8  # of the time; the rest is for writing and running the reproduction


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be compared."""

    a: str
    """What is right, as :func:`parse_side` reads it."""
    b: str
    """What is examined."""
    case: str = "example"
    """Name of the verification case whose inputs are used."""
    seed: int = 0
    """Seed of the case's values."""
    inputs: str | None = None
    """``file.py:function`` that makes inputs, where a factory takes the place of a workload."""
    program: str | None = None
    """The exported program's file, where there is one already."""
    reproduction: str | None = None
    """Where to write the file that shows the divergence on its own."""
    save_trace: str | None = None
    """Where to write A's trace."""
    limit_s: float = 600.0
    """Time for all of it; a bisection stops in time to say what it has."""


class Factory(msgspec.Struct, frozen=True):
    """A function in a Python file, ``file.py:function``."""

    file: Path
    """The file."""
    function: str
    """Its name there."""

    def __call__(self) -> Any:
        """Import the file and call the function: for workers only, since it runs the user's code.

        :raises WorkloadError: where the file does not import or the function raises.
        """
        from torchstone.workload import usercode

        found = getattr(usercode.import_file(self.file), self.function, None)
        if not callable(found):
            raise InputError(f"has no function {self.function!r}", where=self.file)
        return usercode.call(found, what=self.label, where=self.file)

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"{self.function}()"


Side = Recipe | Factory | Path | None
"""A recipe, a factory, a trace's file, or None for float64."""


def parse_side(text: str) -> Side:
    """Read what one side of a comparison is.

    :raises InputError: where the text is none of the four, or names a file that is not there.
    """
    if text == FLOAT64:
        return None
    file, colon, _ = text.rpartition(":")
    if colon and file.endswith(".py"):
        return factory(text)
    path = Path(text)
    if path.is_file():
        return path
    if path.suffix == ".trace" or "/" in text:
        raise InputError("there is no such trace", where=text, hint="--save-trace FILE writes one")
    return recipes.parse(text)


def factory(text: str) -> Factory:
    """Read ``file.py:function``.

    :raises InputError: where there is no such file, or the function's name is none.
    """
    file, _, function = text.rpartition(":")
    if not Path(file).is_file():
        raise InputError("there is no such file", where=file, hint="write file.py:function")
    if not function.isidentifier():
        raise InputError(
            f"{function!r} is no function's name", where=file, hint="write file.py:function"
        )
    return Factory(Path(file).resolve(), function)


def compare_modules(
    a: Callable[..., Any],
    b: Callable[..., Any],
    given: Sequence[Any],
    *,
    reproduction: Path | None = None,
) -> Divergence:
    """The first operation where module ``b`` is not what module ``a`` is, in this process.

    Both are called once, without gradients, on copies of the inputs, from the same random seed.

    :param a: what is right; any callable of tensors.
    :param b: what is examined.
    :param given: positional inputs.
    :param reproduction: where to write a file that shows a divergence on its own.
    """
    from torchstone.verify.differ.between import between
    from torchstone.verify.differ.record import record

    names = [type(m).__name__ if not hasattr(m, "__name__") else str(m.__name__) for m in (a, b)]
    return between(record(a, given, names[0]), record(b, given, names[1]), reproduction=reproduction)


def diff(question: Question, workload: Workload | None, *, home: Path | None = None) -> Divergence:
    """Answer a question in a worker of its own.

    :param workload: None where the sides need none: two traces.
    :param home: folder for the worker's log; a temporary one if None.
    :returns: what was found; where the worker dies or takes too long, a divergence that is UNKNOWN.
    :raises InputError: where a side is bad or does not go with the other.
    """
    sides = [parse_side(text) for text in (question.a, question.b)]
    if question.inputs is not None:
        factory(question.inputs)
        if not any(isinstance(s, Factory) for s in sides):
            raise InputError(
                "inputs are given without a factory", hint="give A or B as file.py:function"
            )
    elif workload is None and not all(isinstance(s, Path) for s in sides):
        raise InputError(
            f"{question.a!r} and {question.b!r} cannot be compared without inputs",
            hint="give --workload W, or --inputs file.py:function with a factory",
        )
    environment = env.environment()
    limits = Limits(memory_bytes=environment.memory_bytes // 2, threads=environment.threads)
    with tempfile.TemporaryDirectory(prefix="torchstone-") as folder:
        file = None
        if workload is not None:
            file = Path(folder) / "workload"
            workloads.dump(workload, file)
        with Worker("diff", directory=home or Path(folder), workload=file, limits=limits) as worker:
            return ask(worker, question)


def ask(worker: Worker, question: Question) -> Divergence:
    """Answer a question in a given worker; what it dies of is part of the answer.

    :raises InputError: where a side is bad or does not go with the other.
    """
    result = worker.call(
        "torchstone.diff:find", stage="diff", limit_s=question.limit_s, question=question
    )
    if isinstance(result, Divergence):
        return result
    why = result.text if isinstance(result, Crashed) else f"no answer within {question.limit_s:g} s"
    assert isinstance(result, Crashed | TimedOut)
    return _unknown(question, f"the comparison itself failed: {why}")


# --- in the worker --------------------------------------------------------------------------------


def find(state: dict[str, Any], question: Question) -> Divergence:
    """A job: answer a question about the worker's workload.

    :raises InputError: where a side is bad or does not go with the other.
    """
    a, b = parse_side(question.a), parse_side(question.b)
    if question.inputs is not None:
        model = next(s for s in (a, b) if isinstance(s, Factory))
        made = workloads.Workload(name="model", model=model, inputs=factory(question.inputs))
        state["workload"] = made
    found = _answer(state, question, a, b)
    case = question.case if state.get("workload_path") else ""
    return msgspec.structs.replace(found, a=question.a, b=question.b, case=case)


def _answer(state: dict[str, Any], question: Question, a: Side, b: Side) -> Divergence:
    from torchstone.verify.differ import store
    from torchstone.verify.differ.between import between

    if isinstance(b, Recipe) and _is_opaque(b):
        if question.save_trace is not None and not (isinstance(a, Recipe) and _is_opaque(a)):
            store.save(_trace(state, question, a, question.a), Path(question.save_trace))
        return _bisected(state, question, b)
    if isinstance(a, Recipe) and _is_opaque(a):
        hint = f"swap them: torchstone diff {question.b!r} {question.a!r}"
        raise InputError(f"{question.a} shows no intermediate values to compare with", hint=hint)
    right = _trace(state, question, a, question.a)
    if question.save_trace is not None:
        store.save(right, Path(question.save_trace))
    examined = _trace(state, question, b, question.b)
    unlike = _watched(state, question, b, examined)
    if unlike is not None:
        return _unknown(question, unlike)
    path = None if question.reproduction is None else Path(question.reproduction)
    return between(right, examined, reproduction=path)


def _is_opaque(recipe: Recipe) -> bool:
    return not isinstance(recipe.engine, recipes.Eager | recipes.Custom)


def _trace(state: dict[str, Any], question: Question, side: Side, label: str) -> Trace:
    from torchstone.verify.differ import store
    from torchstone.verify.differ.record import record

    if isinstance(side, Path):
        return store.load(side)
    given = _inputs(state, question)
    if side is None:
        return _float64(workload_of(state).module(), given)
    return record(_callable(state, question, side), given, label)


def _float64(module: nn.Module, given: tuple[Any, ...]) -> Trace:
    from torchstone.verify.differ.record import record_float64

    try:
        return record_float64(module, given, FLOAT64)
    except RuntimeError as error:
        raise InputError(f"the model does not run in float64: {error}") from error


def _callable(state: dict[str, Any], question: Question, side: Recipe | Factory) -> Callable[..., Any]:
    """What to run for a side that runs operation by operation."""
    from torchstone import quantize

    workload = workload_of(state)
    if isinstance(side, Factory):
        return replace(workload, model=side).module()
    module = workload.module()
    if isinstance(side.engine, recipes.Custom):
        return workload.implementation(side.engine.target, module)
    if side == recipes.fallback():
        program = _program(question, workload)
        if isinstance(program, str):
            raise InputError(f"there is no exported program: {program}")
        made: Callable[..., Any] = program.module(check_guards=False)
        return made
    if side.numeric is None:
        return module
    return quantize.transform(module, side.numeric, workload.example())


def _watched(state: dict[str, Any], question: Question, side: Side, trace: Trace) -> str | None:
    """Why a trace does not show what runs when nobody watches: compiled code steps aside for it."""
    from torchstone.verify.differ.measure import held
    from torchstone.verify.drive import leaves
    from torchstone.verify.tensors import copies

    if not (isinstance(side, Recipe) and isinstance(side.engine, recipes.Custom)):
        return None
    import torch

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        alone = leaves(_callable(state, question, side)(*copies(_inputs(state, question))))
    for (name, number), leaf in zip(trace.outputs, alone, strict=False):
        seen = None if number is None else trace.values[number].tensor
        if seen is None or not isinstance(leaf, torch.Tensor):
            continue
        if not held(leaf, seen.to(torch.float64) if seen.is_floating_point() else seen, seen).right:
            text = f"{side} gives another {name} when its operations are watched"
            return f"{text}: it compiles, and what is compiled cannot be seen"
    return None


def _inputs(state: dict[str, Any], question: Question) -> tuple[Any, ...]:
    workload = workload_of(state)
    if question.case == "example":
        return workload.example()
    known = inputs.cases(workload.spec(), question.seed)
    case = next((c for c in known if c.name == question.case), None)
    if case is None:
        hint = f"the cases are {', '.join(c.name for c in known)}"
        raise InputError(f"there is no case {question.case!r}", hint=hint)
    return inputs.materialize(workload, _once(case))


def _once(case: Case) -> Case:
    return msgspec.structs.replace(case, protocol="once")


# --- engines --------------------------------------------------------------------------------------


def _bisected(state: dict[str, Any], question: Question, recipe: Recipe) -> Divergence:
    from torchstone.verify.differ.bisect import bisect
    from torchstone.verify.differ.fused import told
    from torchstone.verify.differ.parts import Graph

    absent = backends.probe(recipe)
    if absent is not None:
        raise InputError(f"{recipe} cannot be built here: {absent.why}", hint=absent.hint)
    workload = workload_of(state)
    program = _program(question, workload)
    if isinstance(program, str):
        text = f"there is no one graph to cut into parts, since export refused the model: {program}"
        return _unknown(question, text)
    with tempfile.TemporaryDirectory(prefix="torchstone-") as folder:
        graph = Graph(_functional(program), _inputs(state, question))
        found = bisect(
            graph,
            compile_part(recipe, Path(folder)),
            limit_s=_BISECT * question.limit_s,
            rules=_rules(recipe, workload.policy),
        )
        path = None if question.reproduction is None else Path(question.reproduction)
        engine = str(recipe.engine.__struct_config__.tag)
        answer = told(found, (question.a, question.b), (engine, engine_options(recipe)), path)
    if found.part is not None:
        return answer
    return msgspec.structs.replace(answer, notes=(_of_the_whole(recipe, workload), *answer.notes))


def _of_the_whole(recipe: Recipe, workload: Workload) -> str:
    """What was found right, where a whole program was."""
    if isinstance(recipe.engine, recipes.Inductor) and recipe.engine.module:
        return "compiled from the captured program; torch.compile captures the module by itself"
    sizes = "with the sizes of this case fixed" if workload.dims else "as a whole"
    return f"{recipe} compiles the captured program rightly {sizes}"


def engine_options(recipe: Recipe) -> dict[str, Any]:
    """The engine's own options, as its reproduction writes them."""
    from torchstone.backends import compiler

    if isinstance(recipe.engine, recipes.Inductor | recipes.AOTInductor):
        return compiler.options(recipe)
    if isinstance(recipe.engine, recipes.OpenVINO) and recipe.engine.hint != "auto":
        return {"INFERENCE_PRECISION_HINT": recipe.engine.hint}
    return {}


def _rules(recipe: Recipe, policy: Policy) -> budget.Rules:
    return budget.Rules(numerics=recipe.numerics, budget=policy.max_relative_error, usual_rms={})


def _program(question: Question, workload: Workload) -> Any:
    """The exported program, or why there is none."""
    from torchstone.capture import export
    from torchstone.capture import program as programs

    if question.program is not None:
        return programs.load(question.program)
    found: Any | Refused = export.export(workload, workload.module())
    return found.reason if isinstance(found, export.Refused) else found


def _functional(program: Any) -> fx.GraphModule:
    """The program's graph without in-place operations."""
    from torchstone import compat
    from torchstone.compat import differ as doors

    if any(doors.written_positions(doors.name_of(n.target)) for n in program.graph.nodes):
        program = program.run_decompositions({})
    return compat.flat_module(program)


def compile_part(recipe: Recipe, directory: Path) -> CompilePart:
    """How an engine compiles parts of a program.

    :param recipe: the engine and its number format.
    :param directory: where its files go; each part has a folder of its own.
    :returns: ``f(graph_module, example_inputs) -> callable``, None where the engine refuses the part.
    """
    numbers = itertools.count()

    def make(
        part: fx.GraphModule, given: tuple[torch.Tensor, ...]
    ) -> Callable[..., Sequence[Any]] | None:
        return _compiled(recipe, directory / f"part{next(numbers)}", part, given)

    return make


def _compiled(
    recipe: Recipe, directory: Path, part: nn.Module, given: tuple[torch.Tensor, ...]
) -> Callable[..., Sequence[Any]] | None:
    import torch

    from torchstone import compat
    from torchstone.capture import program as programs
    from torchstone.verify.tensors import copies

    if not given:
        return part  # nothing goes in: a constant, which an engine has no door for
    directory.mkdir(parents=True)
    path = directory / "program.pt2"
    try:
        with torch.no_grad():
            programs.save(torch.export.export(part, given), path)
        built = backends.of(recipe).build(
            backends.Context(
                workload=workloads.from_objects(part, given, name="part"),
                recipe=recipe,
                program=path,
                directory=directory,
            )
        )
        if not isinstance(built, backends.Built):
            return None
        built.call(*copies(given))  # lazy engines compile only now
    except compat.capture_errors():  # compile_errors() are among them
        return None
    return built.call


def _unknown(question: Question, text: str) -> Divergence:
    return Divergence(a=question.a, b=question.b, kind="UNKNOWN", text=text)
