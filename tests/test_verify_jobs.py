"""References, problems, labelled data, and the same through spawned workers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchstone.errors import WorkloadError
from torchstone.policy import Policy
from torchstone.records import Crashed, Dim, TimedOut, Unverifiable, Verified, Wrong
from torchstone.verify import inputs, jobs, run
from torchstone.worker import Limits, Worker
from torchstone.workload import Workload, dump
from verify_desk import (
    LOSSY,
    REASSOCIATES,
    Bench,
    Here,
    Identity,
    block_inputs,
    block_workload,
    of_module,
)

# --- references ----------------------------------------------------------------------------------


class Drops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class Refuses(nn.Module):
    """Raises for a single row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("one row is not enough")
        return x / x.std(0)


class CastsInside(nn.Module):
    """Rounds to float32 and then multiplies by a parameter: float64 and float32 would meet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float() + torch.zeros(4, dtype=torch.float32))


class Opaque(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x, "shape": x.shape.__class__}


class Structured(nn.Module):
    """Tensors, a number, a string and nothing, nested."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"x": [x * 2, (x.abs().sum(), 3)], "kind": "double", "none": None}


class Constant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3) + 0 * x.nan_to_num(0.0).clamp(-1, 1).sum()


def ones() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_model_that_is_not_deterministic_is_unverifiable(tmp_path: Path) -> None:
    bench = Bench(of_module(Drops(), ones()), tmp_path)
    verdict = bench.verdict(lambda module: module)
    assert isinstance(verdict, Unverifiable)
    assert "different results" in verdict.text


def test_a_size_that_the_model_refuses_is_not_the_candidates_fault(tmp_path: Path) -> None:
    dims = {"dims": (Dim(name="B", low=1, high=5),), "shapes": {"x": ("B", 4)}}
    bench = Bench(of_module(Refuses(), ones(), **dims), tmp_path)
    verdict = bench.verdict(lambda module: lambda x: x / x.std(0))
    assert isinstance(verdict, Verified), verdict
    assert any("ValueError: one row is not enough" in note for note in verdict.notes)


def test_explicit_casts_do_not_stop_the_reference(tmp_path: Path) -> None:
    bench = Bench(of_module(CastsInside(), ones()), tmp_path)
    assert [r.problem for r in bench.known] == [None] * len(bench.known)
    assert 0 < bench.known[0].errors[0].relative < 1e-6  # type: ignore[operator] # it is finite
    assert isinstance(bench.verdict(lambda module: module), Verified)


def test_an_output_that_cannot_be_compared_is_said(tmp_path: Path) -> None:
    verdict = Bench(of_module(Opaque(), ones()), tmp_path).verdict(lambda module: module)
    assert isinstance(verdict, Unverifiable)
    assert "['shape']" in verdict.text


def test_nested_outputs_have_their_paths(tmp_path: Path) -> None:
    bench = Bench(of_module(Structured(), ones()), tmp_path)
    names = [e.output for e in bench.known[0].errors]
    assert names == ["['x'][0]", "['x'][1][0]", "['x'][1][1]", "['kind']", "['none']"]
    assert isinstance(bench.verdict(lambda module: module), Verified)

    def other_string(module: nn.Module) -> Callable[..., Any]:
        return lambda x: module(x) | {"kind": "triple"}

    verdict = bench.verdict(other_string)
    assert isinstance(verdict, Wrong)
    assert verdict.reason == "SHAPE_OR_DTYPE"


def test_constant_and_zero_outputs_are_said(tmp_path: Path) -> None:
    verdict = Bench(of_module(Constant(), ones()), tmp_path).verdict(lambda module: module)
    assert isinstance(verdict, Verified)
    assert "the output does not depend on the input" in verdict.notes
    assert "the output is all zeros on the example" in verdict.notes


def test_inputs_that_differ_between_workers_are_the_users_to_mend(tmp_path: Path) -> None:
    bench = Bench(of_module(Identity(), ones()), tmp_path)
    unseeded = Workload(name="case", model=Identity, inputs=lambda: (torch.rand(3, 4),))
    own = Here({"workload": unseeded, "call": lambda x: [x * 1.0]})
    desk = run.Desk(own, bench.reference, tmp_path / "reference", tmp_path / "results")
    with pytest.raises(WorkloadError, match="differ between two processes"):
        run.verify(REASSOCIATES, desk, bench.known, Policy())


def test_stops_after_three_failures(tmp_path: Path) -> None:
    bench = Bench(block_workload(), tmp_path)
    entry = bench.entry(lambda module: lambda x: [t * 0 for t in module(x)])
    assert isinstance(entry.verdict, Wrong)
    assert len(entry.cases) == len(entry.verdict.failed) == 3
    assert not list((tmp_path / "results").iterdir())


def test_the_reference_does_not_change_the_users_module(tmp_path: Path) -> None:
    bench = Bench(block_workload(perturb=lambda m: m.out.weight.data.mul_(2)), tmp_path)
    module = bench.reference.state["verify.module"]
    expected = block_workload().module().state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in module.state_dict().items())
    assert torch.get_default_dtype() is torch.float32


# --- labelled data -------------------------------------------------------------------------------


def holdout() -> Iterator[tuple[tuple[torch.Tensor], int]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        x = torch.randn(4, generator=generator)
        noisy = x + 0.3 * torch.randn(4, generator=generator)
        yield (x,), int(noisy.argmax())


def accuracy(outputs: Any, targets: Any) -> float:
    return sum(int(o.argmax()) == t for o, t in zip(outputs, targets, strict=True)) / len(targets)


def labelled_workload(**more: Any) -> Workload:
    facts = {"holdout": holdout, "metric": accuracy} | more
    return Workload(name="labelled", model=Identity, inputs=lambda: (ones()[0],), **facts)


def predicted(path: Path, call: Callable[..., Any] | None, **more: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"workload": labelled_workload(**more)}
    if call is not None:
        state["call"] = call
    assert jobs.predict(state, str(path)) == 200
    return state


def test_a_candidate_that_answers_alike_drops_nothing(tmp_path: Path) -> None:
    state = predicted(tmp_path / "eager", None)
    predicted(tmp_path / "own", lambda x: [x * 3])
    result = jobs.metric(state, "r", str(tmp_path / "own"), str(tmp_path / "eager"), 0)
    assert (result.drop, result.drop_low, result.drop_high) == (0.0, 0.0, 0.0)
    assert result.value == result.baseline > 0.7
    assert (result.name, result.examples) == ("accuracy", 200)


def test_a_drop_is_measured_with_its_interval(tmp_path: Path) -> None:
    state = predicted(tmp_path / "eager", None)
    predicted(tmp_path / "own", lambda x: [torch.where(x.sum() > 1.5, -x, x)])
    found = [
        jobs.metric(state, "r", str(tmp_path / "own"), str(tmp_path / "eager"), 5) for _ in range(2)
    ]
    assert found[0] == found[1]
    result = found[0]
    assert result.drop == pytest.approx(result.baseline - result.value)
    assert 0 < result.drop_low < result.drop < result.drop_high
    # close to what theory gives for a mean of paired differences
    spread = math.sqrt(result.drop * (1 - result.drop) / 200)
    assert result.drop_high - result.drop_low == pytest.approx(2 * 1.96 * spread, rel=0.35)


def test_a_resample_without_a_metric_is_left_out(tmp_path: Path) -> None:
    calls: list[int] = []

    def sometimes(outputs: Any, targets: Any) -> float:
        calls.append(1)
        if len(calls) % 7 == 0:
            raise ZeroDivisionError("only one class")
        return float("nan") if len(calls) % 5 == 0 else accuracy(outputs, targets)

    state = predicted(tmp_path / "eager", None, metric=sometimes)
    result = jobs.metric(state, "r", str(tmp_path / "eager"), str(tmp_path / "eager"), 0)
    assert result.drop_low == result.drop_high == 0.0


def test_labelled_data_must_be_the_same_every_time(tmp_path: Path) -> None:
    state = predicted(tmp_path / "eager", None)
    state["workload"] = labelled_workload(holdout=lambda: list(holdout())[:50])
    with pytest.raises(WorkloadError, match="50 labelled examples"):
        jobs.metric(state, "r", str(tmp_path / "eager"), str(tmp_path / "eager"), 0)


def test_a_metric_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    state = predicted(tmp_path / "eager", None, metric=lambda outputs, targets: float("nan"))
    with pytest.raises(WorkloadError, match="metric is nan"):
        jobs.metric(state, "r", str(tmp_path / "eager"), str(tmp_path / "eager"), 0)


# --- through workers -----------------------------------------------------------------------------


def load(state: dict[str, Any], kind: str) -> None:
    """A job that leaves a candidate in its worker."""
    from torchstone.worker import workload_of as loaded

    module = loaded(state).module()

    def crashes(x: torch.Tensor) -> Any:
        if x.shape[1] == 24:
            os._exit(3)
        return tree_leaves(module(x))

    def raises(x: torch.Tensor) -> Any:
        raise IndexError(f"no kernel for {tuple(x.shape)}")

    def hangs(x: torch.Tensor) -> Any:
        if x.shape[1] == 24:
            time.sleep(60)
        return tree_leaves(module(x))

    state["module"] = module
    state["call"] = {
        "right": lambda x: tree_leaves(module(x)),
        "zero": lambda x: [t * 0 for t in tree_leaves(module(x))],
        "raises": raises,
        "crashes": crashes,
        "hangs": hangs,
    }[kind]


@pytest.mark.slow
def test_verdicts_through_workers(tmp_path: Path) -> None:
    workload = block_workload(inputs=block_inputs)
    file = tmp_path / "workload"
    dump(workload, file)
    limits = Limits(memory_bytes=4 * 2**30, threads=1)

    def worker(name: str) -> Worker:
        return Worker(name, directory=tmp_path / "work", workload=file, limits=limits)

    policy = Policy(call_s=30.0)
    with worker("reference") as reference:
        listed = [
            c for c in inputs.cases(workload.spec(), 0) if c.kind in ("example", "dims", "protocol")
        ]
        known = run.references(reference, listed, tmp_path / "reference", 60.0)
        assert not any(r.problem for r in known)
        verdicts: dict[str, Any] = {}
        for kind in ("right", "zero", "raises", "crashes", "hangs"):
            with worker(kind) as own:
                assert own.call("test_verify_jobs:load", stage="build", limit_s=60, kind=kind) is None
                desk = run.Desk(own, reference, tmp_path / "reference", tmp_path / kind)
                held = policy if kind != "hangs" else Policy(call_s=5.0)
                verdicts[kind] = run.verify(LOSSY, desk, known, held).verdict
    assert isinstance(verdicts["right"], Verified)
    assert isinstance(verdicts["zero"], Wrong)
    assert isinstance(verdicts["raises"], Wrong)
    assert verdicts["raises"].reason == "RAISES"
    assert "IndexError: no kernel for (3, 10, 16)" in verdicts["raises"].text
    assert isinstance(verdicts["crashes"], Crashed)
    assert verdicts["crashes"].stage == "verify:dims-B-low"
    assert isinstance(verdicts["hangs"], TimedOut)
    assert verdicts["hangs"].stage == "verify:dims-B-low"
