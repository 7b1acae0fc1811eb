"""Columns and candidates of the tests: quick to build, and some of them wrong on purpose."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchstone.kernelbench.columns import Column, Unfit
from torchstone.kernelbench.ours import Candidate

Call = Callable[..., Any]


def _as_is(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    return module


def _slow(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    """A baseline that anything beats: it works for a while first."""

    def call(*given: Any) -> Any:
        until = time.perf_counter() + 2e-3
        while time.perf_counter() < until:
            pass
        return module(*given)

    return call


def _changed(change: Callable[[Any], Any]) -> Callable[[nn.Module, tuple[Any, ...]], Call]:
    def build(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
        def call(*given: Any) -> Any:
            result = module(*given)
            if isinstance(result, tuple):
                return (change(result[0]), *result[1:])
            return change(result)

        return call

    return build


def _one_element(tensor: torch.Tensor) -> torch.Tensor:
    wrong = tensor.clone()
    wrong.view(-1)[-1] += 1.0
    return wrong


def _same_storage(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    """Each call overwrites the result of the one before."""
    kept: list[torch.Tensor] = []

    def call(*given: Any) -> Any:
        result = module(*given)
        if not isinstance(result, torch.Tensor):
            return result
        if not kept:
            kept.append(result.clone())
        return kept[0].copy_(result)

    return call


def _writes_input(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    def call(*given: Any) -> Any:
        result = module(*given)
        given[0].add_(1)
        return result

    return call


def _frozen_buffers(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    """Right outputs, and buffers that are left alone."""

    def call(*given: Any) -> Any:
        before = [b.clone() for b in module.buffers()]
        result = module(*given)
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.copy_(old)
        return result

    return call


def _remembers(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    """Quick on the inputs of the call before, and after many calls on any: it gives what it gave."""
    count, kept, seen = [0], [], []

    def call(*given: Any) -> Any:
        count[0] += 1
        same = len(seen) == len(given) and all(map(operator.is_, seen, given))
        if count[0] <= 20 and not same:
            kept[:], seen[:] = [module(*given)], given
        return kept[-1].clone() if isinstance(kept[-1], torch.Tensor) else kept[-1]

    return call


def _only_scaled(build: Callable[[nn.Module, tuple[Any, ...]], Call]) -> Any:
    """For the problem with a scale alone: what dies takes a process with it, which takes seconds."""

    def fitting(module: nn.Module, inputs: tuple[Any, ...]) -> Call | Unfit:
        return build(module, inputs) if hasattr(module, "scale") else Unfit("has no scale")

    return fitting


def _crashes(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    def call(*given: Any) -> Any:
        os._exit(3)

    return call


def _crashes_later(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    """It is built and proved, and ends the process while it is timed."""
    count = [0]

    def call(*given: Any) -> Any:
        count[0] += 1
        if count[0] > 11:
            os._exit(4)
        return module(*given)

    return call


def _hangs(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    def call(*given: Any) -> Any:
        while True:
            time.sleep(1)

    return call


def _raises(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    raise RuntimeError("no such kernel")


def _not_for_this(module: nn.Module, inputs: tuple[Any, ...]) -> Call | Unfit:
    return Unfit("made for something else")


COLUMNS = (Column("eager", _as_is), Column("compile", _slow), Column("other", _slow, strong=True))

RIGHT = (Candidate("right", 1e-4, _as_is),)

ALL = (
    Candidate("one element", 1e-4, _changed(_one_element)),
    Candidate("three thousandths", 1e-4, _changed(lambda t: t * 1.003)),
    Candidate("five ten-thousandths", 1e-3, _changed(lambda t: t * 1.0005)),
    Candidate("other strides", 1e-4, _changed(lambda t: t.t().contiguous().t())),
    Candidate("half", 1e-4, _changed(lambda t: t.half())),
    Candidate("same storage", 1e-4, _same_storage),
    Candidate("writes input", 1e-4, _writes_input),
    Candidate("frozen buffers", 1e-4, _frozen_buffers),
    Candidate("remembers", 1e-4, _remembers),
    Candidate("unfit", 1e-4, _not_for_this),
    Candidate("raises", 1e-4, _only_scaled(_raises)),
    Candidate("crashes", 1e-4, _only_scaled(_crashes)),
    Candidate("crashes later", 1e-4, _only_scaled(_crashes_later)),
    Candidate("hangs", 1e-4, _only_scaled(_hangs)),
    *RIGHT,
)
