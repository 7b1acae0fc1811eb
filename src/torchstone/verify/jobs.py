"""What verification runs in workers; every public function is a job.

Results travel between workers as files: the reference writes ``DIRECTORY/CASE.pt``, the candidate a
file of its own, and :func:`judge`, in the reference's worker, reads both. Problems are told as
``"CODE: sentence"``: a candidate's with the codes of :class:`~torchstone.records.Wrong`, a reference's
with ``RAISES``, ``NOT_DETERMINISTIC``, ``NO_REFERENCE`` or ``NOT_APPLICABLE``.
What a model or a candidate raises is not caught here: the worker makes a value of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchstone.errors import WorkloadError
from torchstone.records import Case, CaseErrors, OutputErrors, ReferenceErrors
from torchstone.verify import compare, labelled, tensors
from torchstone.verify.compare import Leaf
from torchstone.verify.drive import (
    Call,
    Driven,
    digest,
    drive,
    float64_call,
    leaves,
    names_of,
    poison,
    same,
    widened,
    widened_inputs,
)
from torchstone.worker import workload_of

__all__ = ["candidate", "judge", "metric", "predict", "reference"]

State = dict[str, Any]
_ONCE = Case(name="once", kind="example", sizes={})
predict = labelled.predict
metric = labelled.metric


@torch.no_grad()
def reference(state: State, case: Case, directory: str) -> ReferenceErrors:
    """Run the user's model on a case, as it is and in float64; keep both results in ``directory``.

    :returns: eager's errors, or the problem: it is not deterministic, cannot run in float64, or gives
        what cannot be compared. Where the model itself raises, so does this.
    :raises WorkloadError: where the user's functions fail.
    """
    if tensors.probes_nothing(workload_of(state), case):
        return _problem(case, "NOT_APPLICABLE", "the workload's generate() decides on values")
    inputs, other = _inputs(state, case), _other_inputs(state, case)
    module = labelled.module_of(state)
    if case.protocol == "perturb":
        module = copy.deepcopy(module)
    names: list[str] = []

    def call(*given: Any) -> list[Any]:
        result = module(*given)
        names[:] = names_of(result)
        return leaves(result)

    if case.kind in ("example", "protocol"):
        first, again = drive(call, _ONCE, inputs).outputs, drive(call, _ONCE, inputs).outputs
        unlike = [n for n, a, b in zip(names, first, again, strict=True) if not same(a, b)]
        if unlike:
            text = f"two calls of the model on the same input give different results in {unlike[0]}"
            return _problem(case, "NOT_DETERMINISTIC", f"{text} (is it in training mode?)")
    eager = drive(call, case, inputs, other=other, change=lambda: _disturbed(state, module, call))
    for name, leaf in zip(names, eager.outputs, strict=True):
        if isinstance(leaf, str) and leaf.startswith("<"):
            return _problem(case, "NO_REFERENCE", f"output {name} is a {leaf}, no tensor or number")
    try:
        wide = _drive_float64(state, case, inputs, other)
    except (RuntimeError, TypeError) as error:
        return _problem(case, "NO_REFERENCE", f"the model does not run in float64: {error}")
    return _kept(case, directory, names, (inputs, other), (eager, wide))


@torch.no_grad()
def candidate(state: State, case: Case, path: str) -> None:
    """Run ``state["call"]`` on a case and keep what it gave in file ``path``.

    Memory of the sizes of the latest outputs is poisoned first, so that what it leaves unwritten shows.
    """
    inputs, other = _inputs(state, case), _other_inputs(state, case)
    call: Call = state["call"]
    poison(state.get("verify.outputs", ()))

    def change() -> Call:
        # An exported program has no module to change: it can only answer as before, which is the point.
        module = state.get("module")  # None: the candidate has no module that could change
        return call if module is None else _disturbed(state, module, call)

    driven = drive(call, case, inputs, other=other, change=change)
    state.setdefault("served", set()).add(case.name)  # bench's season need not repeat it
    state["verify.outputs"] = driven.outputs
    torch.save({"inputs": digest((*inputs, *other)), "driven": vars(driven)}, path)


@torch.no_grad()
def judge(state: State, case: Case, path: str, directory: str) -> CaseErrors:
    """Errors of what a candidate kept in ``path`` against what :func:`reference` kept in ``directory``.

    :raises WorkloadError: where the two workers were given different inputs.
    """
    kept = torch.load(_file(directory, case), weights_only=True)
    found = torch.load(path, weights_only=True)
    if kept["inputs"] != found["inputs"]:
        raise WorkloadError(
            f"the inputs of case {case.name} differ between two processes",
            where=workload_of(state).origin,
            hint="inputs and generate must give the same values every time: seed what is random in them",
        )
    eager, wide, own = Driven(**kept["eager"]), Driven(**kept["wide"]), Driven(**found["driven"])
    if len(own.outputs) != len(eager.outputs):
        text = f"it gives {len(own.outputs)} outputs where eager gives {len(eager.outputs)}"
        return CaseErrors(case=case.name, errors=(), problem=f"SHAPE_OR_DTYPE: {text}")
    errors = _errors(kept["names"], kept["mutated"], own, wide, eager)
    return CaseErrors(case=case.name, errors=errors, problem=_protocol_problem(case, kept, own, eager))


def _protocol_problem(case: Case, kept: dict[str, Any], own: Driven, eager: Driven) -> str | None:
    for position, (after, right) in enumerate(zip(own.after, eager.after, strict=True)):
        if position not in kept["mutated"] and not same(after, right):
            return f"MUTATION_DIFFERS: it changes input[{position}], which eager leaves as it was"
    moved = zip(kept["names"], own.moved or (), eager.moved or (), strict=True) if own.moved else ()
    wrong = [name for name, moves, eager_moves in moved if moves and not eager_moves]
    if not wrong:
        return None
    if case.protocol == "hold":
        return f"RESULT_OVERWRITTEN: a second call changes result {wrong[0]} of the first"
    return f"ALIASES_INPUT: writing to the input after the call changes result {wrong[0]}"


def _errors(
    names: list[str], mutated: list[int], own: Driven, wide: Driven, eager: Driven
) -> tuple[OutputErrors, ...]:
    """Errors of the outputs, of the second call's, and of the inputs that the model writes to."""
    rows: list[tuple[str, Leaf, Leaf, Leaf]] = []
    rows += zip(names, own.outputs, wide.outputs, eager.outputs, strict=True)
    if own.second is not None and wide.second is not None and eager.second is not None:
        second = [f"second call {name}" for name in names]
        rows += zip(second, own.second, wide.second, eager.second, strict=True)
    rows += [(f"input[{i}]", own.after[i], wide.after[i], eager.after[i]) for i in mutated]
    return tuple(compare.errors(*row) for row in rows)


def _kept(
    case: Case,
    directory: str,
    names: list[str],
    given: tuple[tuple[Any, ...], tuple[Any, ...]],
    results: tuple[Driven, Driven],
) -> ReferenceErrors:
    """Write the reference's file; ``given`` are the inputs and those of the second call."""
    (inputs, other), (eager, wide) = given, results
    mutated = [
        i
        for i, (before, after) in enumerate(zip(inputs, eager.after, strict=True))
        if isinstance(before, torch.Tensor) and not same(before, after)
    ]
    Path(directory).mkdir(parents=True, exist_ok=True)
    kept = {
        "names": names,
        "mutated": mutated,
        "inputs": digest((*inputs, *other)),
        "eager": vars(eager),
        "wide": vars(wide),
    }
    torch.save(kept, _file(directory, case))
    independent: tuple[str, ...] = ()
    if case.protocol == "hold" and digest(inputs) != digest(other) and eager.second is not None:
        pairs = zip(names, eager.outputs, eager.second, strict=True)
        independent = tuple(name for name, first, second in pairs if same(first, second))
    errors = _errors(names, mutated, eager, wide, eager)
    return ReferenceErrors(case=case, errors=errors, independent=independent)


def _drive_float64(state: State, case: Case, inputs: tuple[Any, ...], other: tuple[Any, ...]) -> Driven:
    if "verify.module64" not in state:
        state["verify.module64"] = widened(labelled.module_of(state))

    def change() -> Call:
        # changed in its own precision first: random state must be the same as eager's
        module = copy.deepcopy(labelled.module_of(state))
        _disturbed(state, module, module)
        return float64_call(widened(module))

    call = float64_call(state["verify.module64"])
    wide, wide_other = widened_inputs(inputs), widened_inputs(other)
    return drive(call, case, wide, other=wide_other, change=change)


def _disturbed(state: State, module: nn.Module, call: Callable[..., Any]) -> Call:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        workload_of(state).disturb(module)
    return call


def _inputs(state: State, case: Case) -> tuple[Any, ...]:
    workload = workload_of(state)
    if "verify.source" not in state:
        state["verify.source"] = tensors.Source(workload.spec(), workload.example())
    return tensors.make(workload, state["verify.source"], case)


def _other_inputs(state: State, case: Case) -> tuple[Any, ...]:
    """Different inputs of the same sizes, where the protocol needs them."""
    if case.protocol != "hold":
        return ()
    other = Case(name=case.name, kind="protocol", sizes=case.sizes, seed=case.seed + 500)
    return _inputs(state, other)


def _problem(case: Case, code: str, text: str) -> ReferenceErrors:
    return ReferenceErrors(case=case, errors=(), problem=f"{code}: {text}")


def _file(directory: str, case: Case) -> Path:
    return Path(directory) / f"{case.name}.pt"
