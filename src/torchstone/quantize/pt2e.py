"""Int8 of the captured graph: torchao's PT2E flow with the quantizer of Inductor's X86 kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from torchstone.records import Arrival, Case, WorkloadSpec
from torchstone.verify import inputs
from torchstone.workload import Workload

__all__ = ["quantize"]

_RUNS = 6
_BATCHES = 8


def quantize(
    program: ExportedProgram, workload: Workload, *, dynamic: bool, reduce_range: bool
) -> nn.Module:
    """The program with int8 matmuls and convolutions, as a graph module that takes the same inputs.

    :param dynamic: quantize activations by their range in each call; else by the range seen in
        calibration, which uses recorded shapes and the first labelled inputs.
    :param reduce_range: leave the highest bit unused: the 16-bit sums of processors without VNNI
        would overflow.
    """
    from torchao.quantization.pt2e import allow_exported_model_train_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    config = x86.get_default_x86_inductor_quantization_config(
        is_dynamic=dynamic,
        reduce_range=reduce_range,
    )
    quantizer.set_global(config)
    prepared = prepare_pt2e(program.module(check_guards=False), quantizer)
    with torch.no_grad():
        for args in _calibration(workload):
            prepared(*args)
    converted = convert_pt2e(prepared)
    assert isinstance(converted, torch.fx.GraphModule)
    allow_exported_model_train_eval(converted)
    return converted


def _calibration(workload: Workload) -> Iterator[tuple[Any, ...]]:
    spec = workload.spec()
    yield workload.example()
    shapes = _shapes(spec)
    for seed, arrival in zip(range(_RUNS), itertools.cycle(shapes), strict=False):
        case = Case(name="calibration", kind="traffic", sizes=arrival.sizes, seed=1000 + seed)
        yield inputs.materialize(workload, case)
    for args, _ in itertools.islice(workload.labelled(), _BATCHES):
        yield args


def _shapes(spec: WorkloadSpec) -> list[Arrival]:
    """Some of the recorded shapes, from the smallest to the largest."""
    seen = {tuple(sorted(a.sizes.items())): a for a in spec.traffic}
    ordered = sorted(seen.values(), key=lambda a: sum(a.sizes.values()))
    step = max(1, len(ordered) // _RUNS)
    return [*ordered[::step][: _RUNS - 1], *ordered[-1:]]
