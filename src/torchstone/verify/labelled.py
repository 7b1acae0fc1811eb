"""Labelled data: predictions of any worker, and the metric's drop with its interval."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchstone.errors import WorkloadError
from torchstone.records import MetricResult
from torchstone.verify.drive import leaves
from torchstone.worker import workload_of

__all__ = ["metric", "module_of", "predict"]

_RESAMPLES = 400
_FEWEST = 50
_BUDGET_S = 5.0
State = dict[str, Any]
Outputs = list[list[Any]]


def module_of(state: State) -> nn.Module:
    """The worker's own copy of the user's module, made on first use."""
    if "verify.module" not in state:
        state["verify.module"] = workload_of(state).module()
    module: nn.Module = state["verify.module"]
    return module


@torch.no_grad()
def predict(state: State, path: str) -> int:
    """Answer every labelled example and keep the flat outputs in file ``path``.

    Uses ``state["call"]`` where a candidate is loaded, else the user's module.

    :returns: the number of examples.
    """
    call = state.get("call") or (lambda *inputs: leaves(module_of(state)(*inputs)))
    labelled = workload_of(state).labelled()
    outputs: Outputs = [[_copied(leaf) for leaf in call(*inputs)] for inputs, _ in labelled]
    torch.save(outputs, path)
    return len(outputs)


def _copied(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf


def metric(state: State, recipe: str, candidate: str, baseline: str, seed: int) -> MetricResult:
    """The user's metric on two files of :func:`predict`, and the drop's 95% bootstrap interval.

    Paired: examples are drawn with replacement, the same ones for both, 400 times or as often as 5
    seconds allow (at least 50 times); percentile interval (Efron and Tibshirani 1993, chapter 13). A
    resample on which the metric is undefined (it raises, or gives NaN) is left out.

    :raises WorkloadError: where the metric fails on all the examples, or there are none.
    """
    workload = workload_of(state)
    targets = [target for _, target in workload.labelled()]
    own: Outputs = torch.load(candidate, weights_only=True)
    eager: Outputs = torch.load(baseline, weights_only=True)
    if not targets or not len(targets) == len(own) == len(eager):
        raise WorkloadError(
            f"holdout gave {len(targets)} labelled examples, after {len(own)} and {len(eager)}",
            where=workload.origin,
            hint="holdout must give the same examples, at least one, every time that it is called",
        )
    started = time.monotonic()
    everything = range(len(targets))
    value = _score(state, own, targets, everything)
    reference = _score(state, eager, targets, everything)
    if not (math.isfinite(value) and math.isfinite(reference)):
        raise WorkloadError(
            f"the metric is {value} for {recipe} and {reference} for eager",
            where=workload.origin,
            hint="it must be a finite number on the whole holdout",
        )
    each_s = max(time.monotonic() - started, 1e-6)
    resamples = int(min(_RESAMPLES, max(_FEWEST, _BUDGET_S / each_s)))
    drops = _drops(state, (own, eager, targets), resamples, seed)
    spec_name = getattr(workload.metric, "__name__", type(workload.metric).__name__)
    return MetricResult(
        recipe=recipe,
        name=str(spec_name),
        value=value,
        baseline=reference,
        drop=reference - value,
        drop_low=_quantile(drops, 0.025, reference - value),
        drop_high=_quantile(drops, 0.975, reference - value),
        examples=len(targets),
    )


def _drops(
    state: State, data: tuple[Outputs, Outputs, list[Any]], resamples: int, seed: int
) -> list[float]:
    own, eager, targets = data
    generator = random.Random(seed)
    drops = []
    for _ in range(resamples):
        chosen = generator.choices(range(len(targets)), k=len(targets))
        try:
            drop = _score(state, eager, targets, chosen) - _score(state, own, targets, chosen)
        except WorkloadError:
            continue
        if math.isfinite(drop):
            drops.append(drop)
    return sorted(drops)


def _score(state: State, outputs: Outputs, targets: list[Any], chosen: Sequence[int]) -> float:
    return workload_of(state).score([tuple(outputs[i]) for i in chosen], [targets[i] for i in chosen])


def _quantile(ordered: list[float], q: float, fallback: float) -> float:
    """By linear interpolation; ``fallback`` where no resample could be scored."""
    if not ordered:
        return fallback
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
