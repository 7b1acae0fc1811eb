"""Planted faults are caught, all of them; honest variants are accepted, all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchstone.records import Dim, Verified, Wrong
from torchstone.workload import Workload
from verify_desk import EXACT, LOSSY, REASSOCIATES, Bench, Identity, block_workload

Make = Callable[[nn.Module], Callable[..., Any]]
Pair = tuple[torch.Tensor, torch.Tensor]


def perturb(module: nn.Module) -> None:
    module.out.weight.data.mul_(2)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(block_workload(perturb=perturb), tmp_path_factory.mktemp("block"))


# --- faults on the block -------------------------------------------------------------------------


def edits(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Make:
    """A right model whose float output is then changed: ``change(y, x)``."""

    def make(module: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, labels = module(x)
            return change(y.clone(), x), labels

        return call

    return make


def edits_input(change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    return lambda module: lambda x: module(change(x))


def one_element(
    y: torch.Tensor, by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    flat = y.view(-1)
    if flat.numel():
        position = flat.abs().argmax()
        flat[position] = by(flat[position], y.square().mean().sqrt())
    return y


def zero_row(y: torch.Tensor, row: int) -> torch.Tensor:
    y[:, row] = 0
    return y


def zero_column(y: torch.Tensor) -> torch.Tensor:
    y[..., -1] = 0
    return y


def stale_previous(module: nn.Module) -> Callable[..., Any]:
    last: list[Pair] = []

    def call(x: torch.Tensor) -> Pair:
        last.append(module(x))
        before = last[-2] if len(last) > 1 and last[-2][0].shape == last[-1][0].shape else last[-1]
        return before[0].clone(), before[1].clone()

    return call


def right_only_first(module: nn.Module) -> Callable[..., Any]:
    calls: list[int] = []

    def call(x: torch.Tensor) -> Pair:
        calls.append(1)
        y, labels = module(x)
        return (y if len(calls) == 1 else y * 1.1), labels

    return call


def cached_constant(module: nn.Module) -> Callable[..., Any]:
    known: dict[Any, Pair] = {}
    return lambda x: tuple(t.clone() for t in known.setdefault(x.shape, module(x)))


def shared_result(module: nn.Module) -> Callable[..., Any]:
    buffers: dict[Any, torch.Tensor] = {}

    def call(x: torch.Tensor) -> Pair:
        y, labels = module(x)
        return buffers.setdefault(y.shape, torch.empty_like(y)).copy_(y), labels

    return call


def result_in_input(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Pair:
        y, labels = module(x)
        return x.copy_(y), labels

    return call


def mutates_input(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Pair:
        result = module(x)
        x.mul_(2)
        return result

    return call


def ignores_offset(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided(x.shape, x.stride(), 0) if x.storage_offset() else x


def assumes_contiguity(x: torch.Tensor) -> torch.Tensor:
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def swapped(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    if y.shape[1] > 1:
        y[:, [0, 1]] = y[:, [1, 0]]
    return y


def leaves_unwritten(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Pair:
        y, labels = module(x)
        out = torch.empty_like(y)
        out[..., :-1] = y[..., :-1]
        return out, labels

    return call


def changed(change: Callable[[nn.Module], None]) -> Make:
    """A right kernel with the wrong constant in it."""

    def make(module: nn.Module) -> Callable[..., Any]:
        other = copy.deepcopy(module)
        change(other)
        return other

    return make


def set_attribute(name: str, value: Any) -> Make:
    return changed(lambda module: setattr(module, name, value))


def drops_bias(module: nn.Module) -> None:
    module.out.bias.data.zero_()


def half_inside(dtype: torch.dtype) -> Make:
    def make(module: nn.Module) -> Callable[..., Any]:
        narrow = copy.deepcopy(module).to(dtype)

        def call(x: torch.Tensor) -> Pair:
            y, labels = narrow(x.to(dtype))
            return y.float(), labels

        return call

    return make


def frozen_weights(module: nn.Module) -> Callable[..., Any]:
    return copy.deepcopy(module)


def raises_at_one(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Pair:
        if x.shape[1] == 1:
            raise ValueError("no kernel for a length of 1")
        return module(x)

    return call


def noisy(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return y + 0.05 * torch.randn_like(y) * y.square().mean().sqrt()


def drifts(module: nn.Module) -> Callable[..., Any]:
    calls: list[int] = []

    def call(x: torch.Tensor) -> Pair:
        calls.append(1)
        y, labels = module(x)
        return y * (1 + 1e-6 * 4 ** len(calls)), labels

    return call


def int_edits(change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    def make(module: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> Pair:
            y, labels = module(x)
            return y, change(labels)

        return call

    return make


def one_label(labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels.view(-1)[0] += 1
    return labels


ERROR = {"ERROR_ABOVE_BOUND"}
EITHER = {"ELEMENT_ABOVE_BOUND", "ERROR_ABOVE_BOUND"}

VISIBLE: dict[str, tuple[Make, set[str]]] = {
    "one sign flipped": (
        edits(lambda y, x: one_element(y, lambda v, rms: -v)),
        EITHER,
    ),
    "one element a third of rms off": (
        edits(lambda y, x: one_element(y, lambda v, rms: v + rms)),
        EITHER,
    ),
    "one element NaN": (
        edits(lambda y, x: one_element(y, lambda v, rms: v * float("nan"))),
        {"NON_FINITE"},
    ),
    "one element infinite": (edits(lambda y, x: one_element(y, lambda v, rms: v / 0)), {"NON_FINITE"}),
    "stale result of the previous call": (stale_previous, ERROR),
    "a row missing at odd lengths": (
        edits(lambda y, x: zero_row(y, -1) if x.shape[1] % 2 else y),
        ERROR,
    ),
    "last column missing unless S % 8 == 0": (
        edits(lambda y, x: zero_column(y) if x.shape[1] % 8 else y),
        ERROR,
    ),
    "NaN at one size": (edits(lambda y, x: y * float("nan") if x.shape[1] == 24 else y), {"NON_FINITE"}),
    "right only for the first call": (right_only_first, ERROR),
    "all zero": (edits(lambda y, x: torch.zeros_like(y)), ERROR),
    "a cached constant": (cached_constant, ERROR),
    "result buffer shared between calls": (shared_result, {"RESULT_OVERWRITTEN"}),
    "result written into the input": (result_in_input, {"MUTATION_DIFFERS"}),
    "input changed": (mutates_input, {"MUTATION_DIFFERS"}),
    "storage offset ignored": (edits_input(ignores_offset), {"NON_FINITE"}),
    "contiguity assumed": (edits_input(assumes_contiguity), {"NON_FINITE"}),
    "two rows swapped": (edits(swapped), ERROR),
    "transposed": (edits(lambda y, x: y.transpose(1, 2).reshape(y.shape)), ERROR),
    "mask off by one": (set_attribute("causal", 2), ERROR),
    "no mask": (set_attribute("causal", 1000), ERROR),
    "wrong at B = 1": (edits(lambda y, x: y * 1.1 if x.shape[0] == 1 else y), ERROR),
    "wrong at S = 1": (edits(lambda y, x: y * 1.1 if x.shape[1] == 1 else y), ERROR),
    "wrong only at the largest size": (
        edits(lambda y, x: y * 1.1 if x.shape[:2] == (6, 24) else y),
        ERROR,
    ),
    "wrong beyond 16 rows": (
        edits(lambda y, x: torch.cat([y[:, :16], y[:, 16:] * 1.1], 1)),
        ERROR,
    ),
    "first sequence for the whole batch": (
        edits(lambda y, x: y[:1].expand_as(y)),
        ERROR,
    ),
    "every integer off by one": (int_edits(lambda labels: labels + 1), {"INTEGER_MISMATCH"}),
    "integers of int32": (int_edits(lambda labels: labels.int()), {"SHAPE_OR_DTYPE"}),
    "wrong dtype": (edits(lambda y, x: y.double()), {"SHAPE_OR_DTYPE"}),
    "an extra dimension": (edits(lambda y, x: y[None]), {"SHAPE_OR_DTYPE"}),
    "one output missing": (lambda module: lambda x: module(x)[0], {"SHAPE_OR_DTYPE"}),
    "bias dropped": (changed(drops_bias), ERROR),
    "epsilon a hundred times larger": (
        changed(lambda m: setattr(m.norm, "eps", 1e-3)),
        ERROR,
    ),
    "tiny values flushed to zero": (
        edits_input(lambda x: x.masked_fill(x.abs() < 2e-3, 0)),
        ERROR,
    ),
    "memory left unwritten": (leaves_unwritten, {"NON_FINITE", "ERROR_ABOVE_BOUND"}),
    "module state frozen": (frozen_weights, {"STALE_STATE"}),
    "not repeatable": (edits(noisy), EITHER),
    "raises at S = 1": (raises_at_one, {"RAISES"}),
}
"""Wrong under every numerics class, with the reasons that may be given."""

FINE: dict[str, tuple[Make, set[str]]] = {
    "one element 1% off": (
        edits(lambda y, x: one_element(y, lambda v, rms: v * 1.01)),
        EITHER,
    ),
    "one element 1e-3 of rms off": (
        edits(lambda y, x: one_element(y, lambda v, rms: v + 1e-3 * rms)),
        EITHER,
    ),
    "everything 1e-4 off": (edits(lambda y, x: y * 1.0001), ERROR),
    "float16 inside": (half_inside(torch.float16), ERROR),
    "bfloat16 inside": (half_inside(torch.bfloat16), ERROR),
    "one integer off by one": (int_edits(one_label), {"INTEGER_MISMATCH"}),
    "large values clamped": (edits_input(lambda x: x.clamp(-8, 8)), ERROR),
    "epsilon ten times larger": (changed(lambda m: setattr(m.norm, "eps", 1e-4)), ERROR),
    "drifts from call to call": (drifts, ERROR),
}
"""Wrong for a recipe that claims the model's own precision; within the budget of a lossy one."""


@pytest.mark.parametrize("recipe", [EXACT, REASSOCIATES, LOSSY], ids=["exact", "reassociates", "lossy"])
@pytest.mark.parametrize("fault", VISIBLE)
def test_fault_is_caught(bench: Bench, fault: str, recipe: Any) -> None:
    make, reasons = VISIBLE[fault]
    verdict = bench.verdict(make, recipe)
    assert isinstance(verdict, Wrong)
    assert verdict.reason in reasons or recipe is EXACT
    assert verdict.case in verdict.text
    assert verdict.case in verdict.failed


@pytest.mark.parametrize("recipe", [EXACT, REASSOCIATES], ids=["exact", "reassociates"])
@pytest.mark.parametrize("fault", FINE)
def test_fine_fault_is_caught_where_precision_is_claimed(bench: Bench, fault: str, recipe: Any) -> None:
    make, reasons = FINE[fault]
    verdict = bench.verdict(make, recipe)
    assert isinstance(verdict, Wrong)
    assert verdict.reason in reasons or recipe is EXACT


def test_the_text_says_what_happened(bench: Bench) -> None:
    make, _ = VISIBLE["a row missing at odd lengths"]
    verdict = bench.verdict(make, REASSOCIATES)
    assert isinstance(verdict, Wrong)
    assert verdict.text.startswith("case dims-low (B=1, S=1): output [0] is 1.0e+00 from float64")
    assert "an output of zeros has this error" in verdict.text


# --- faults on other models ----------------------------------------------------------------------


class Accumulates(nn.Module):
    """Writes to its second input, as a key-value cache is written to."""

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 2


class Wide(nn.Module):
    """Two hundred thousand outputs, so that one wrong element is nothing in the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid()


class Pool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(0)


def one_of_many(relative: float) -> Make:
    def make(module: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            y = module(x)
            y[333, 77] += relative * y.square().mean().sqrt()
            return y

        return call

    return make


def small(module: Callable[[], nn.Module], *shapes: tuple[int, ...], **more: Any) -> Workload:
    def inputs() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(3)
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)

    return Workload(name="small", model=module, inputs=inputs, **more)


def forgets_to_write(module: nn.Module) -> Callable[..., Any]:
    return lambda x, total: (total + x) * 2


def writes_twice(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        result = module(x, total)
        total.add_(x)
        return result

    return call


def zero_at_zero(module: nn.Module) -> Callable[..., Any]:
    """Gives zeros for an empty batch, whose mean is NaN."""
    return lambda x: module(x) if x.shape[0] else x.new_zeros(x.shape[1:])


def aliases(module: nn.Module) -> Callable[..., Any]:
    return lambda x: x


IDENTITY = small(Identity, (4, 8))
WIDE = small(Wide, (400, 500))
ACCUMULATES = small(Accumulates, (8,), (8,))
POOL = small(Pool, (3, 5), dims=(Dim(name="B", low=0, high=4),), shapes={"x": ("B", 5)})

ELSEWHERE: dict[str, tuple[Workload, Make, Any, str]] = {
    "output aliases the input": (IDENTITY, aliases, REASSOCIATES, "ALIASES_INPUT"),
    "output aliases the input, lossy": (IDENTITY, aliases, LOSSY, "ALIASES_INPUT"),
    "a write is forgotten": (ACCUMULATES, forgets_to_write, REASSOCIATES, "MUTATION_DIFFERS"),
    "a write is made twice": (ACCUMULATES, writes_twice, LOSSY, "MUTATION_DIFFERS"),
    "one of 200,000 1e-3 off": (WIDE, one_of_many(1e-3), REASSOCIATES, "ELEMENT_ABOVE_BOUND"),
    "one of 200,000 5% off, lossy": (WIDE, one_of_many(5e-2), LOSSY, "ELEMENT_ABOVE_BOUND"),
    "wrong for an empty batch": (POOL, zero_at_zero, REASSOCIATES, "NON_FINITE"),
}


@pytest.mark.parametrize("fault", ELSEWHERE)
def test_fault_on_another_model_is_caught(fault: str, tmp_path: Any) -> None:
    workload, make, recipe, reason = ELSEWHERE[fault]
    bench = Bench(workload, tmp_path)
    assert isinstance(bench.verdict(lambda module: module, REASSOCIATES), Verified)
    verdict = bench.verdict(make, recipe)
    assert isinstance(verdict, Wrong)
    assert verdict.reason == reason


# --- honest variants -----------------------------------------------------------------------------


def weights(module: nn.Module) -> tuple[torch.Tensor, ...]:
    return module.qkv.weight, module.qkv.bias, module.out.weight, module.out.bias


def labelled(y: torch.Tensor) -> Pair:
    return y, y.argmax(-1)


def in_float64(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Pair:
        return labelled(copy.deepcopy(module).double()(x.double())[0].float())

    return call


def split_sums(module: nn.Module) -> Callable[..., Any]:
    """Every matrix product in halves of the contraction, added up in the other order."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        half = a.shape[-1] // 2
        return a[..., half:] @ b[..., half:, :] + a[..., :half] @ b[..., :half, :]

    def call(x: torch.Tensor) -> Pair:
        wqkv, bqkv, wout, bout = weights(module)
        q, k, v = (product(module.norm(x), wqkv.T) + bqkv).chunk(3, -1)
        scores = product(q, k.transpose(-1, -2)) / 4
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return labelled(product(scores.masked_fill(mask, -1e4).softmax(-1) @ v, wout.T) + bout)

    return call


def fused_attention(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Pair:
        q, k, v = module.qkv(module.norm(x)).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return labelled(module.out(attended[:, 0]))

    return call


def by_hand(module: nn.Module) -> Callable[..., Any]:
    """Norm and softmax written out, the scale folded into the query."""

    def call(x: torch.Tensor) -> Pair:
        wqkv, bqkv, wout, bout = weights(module)
        centred = x - x.mean(-1, keepdim=True)
        h = centred / (centred.square().mean(-1, keepdim=True) + module.norm.eps).sqrt()
        q, k, v = (
            torch.einsum("bsd,ed->bse", h * module.norm.weight + module.norm.bias, wqkv)
            .add(bqkv)
            .chunk(3, -1)
        )
        scores = torch.einsum("bsd,btd->bst", q / 4, k)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        raised = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(mask, 0)
        return labelled((raised / raised.sum(-1, keepdim=True)) @ v @ wout.T + bout)

    return call


def row_by_row(module: nn.Module) -> Callable[..., Any]:
    return lambda x: tuple(
        torch.cat(parts) for parts in zip(*(module(row[None]) for row in x), strict=True)
    )


def folded_weights(module: nn.Module) -> Callable[..., Any]:
    """Value and output projections multiplied beforehand."""
    wqkv, bqkv, wout, bout = weights(module)
    w = (wout.double() @ wqkv[32:].double()).float()
    b = (wout.double() @ bqkv[32:].double() + bout.double()).float()

    def call(x: torch.Tensor) -> Pair:
        h = module.norm(x)
        q, k = F.linear(h, wqkv[:32], bqkv[:32]).chunk(2, -1)
        scores = q @ k.transpose(-1, -2) / 4
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return labelled(scores.masked_fill(mask, float("-inf")).softmax(-1) @ F.linear(h, w) + b)

    return call


def other_strides(module: nn.Module) -> Callable[..., Any]:
    """Gives the same values in another order of memory, which is no fault."""

    def call(x: torch.Tensor) -> Pair:
        y, labels = module(x)
        return y.transpose(0, 1).contiguous().transpose(0, 1), labels

    return call


def summed_backwards(module: nn.Module) -> Callable[..., Any]:
    order = torch.arange(15, -1, -1)
    mirrored = copy.deepcopy(module)
    mirrored.qkv.weight.data = module.qkv.weight.data[:, order]

    def call(x: torch.Tensor) -> Pair:
        mirrored.norm = nn.Identity()
        return mirrored(module.norm(x)[..., order])

    return call


def autocast(module: nn.Module) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Pair:
        with torch.autocast("cpu", torch.bfloat16):
            y, labels = module(x)
        return y.float(), labels

    return call


def int8_weights(module: nn.Module) -> Callable[..., Any]:
    other = copy.deepcopy(module)
    for linear in (other.qkv, other.out):
        scale = linear.weight.data.abs().amax(1, keepdim=True) / 127
        linear.weight.data = (linear.weight.data / scale).round() * scale
    return other


def with_perturb(make: Make) -> Make:
    """Rebuilds the variant for every call, so that a change of module state reaches it."""
    return lambda module: lambda x: make(module)(x)  # noqa: PLW0108 # made anew for each call, on purpose


HONEST: dict[str, tuple[Make, Any]] = {
    "eager": (lambda module: module, REASSOCIATES),
    "eager, exact": (lambda module: module, EXACT),
    "float64 inside": (in_float64, REASSOCIATES),
    "float64 inside, lossy": (in_float64, LOSSY),
    "sums split": (split_sums, REASSOCIATES),
    "sums backwards": (summed_backwards, REASSOCIATES),
    "fused attention": (fused_attention, REASSOCIATES),
    "norm and softmax by hand": (by_hand, REASSOCIATES),
    "row by row": (row_by_row, REASSOCIATES),
    "weights folded": (folded_weights, REASSOCIATES),
    "other strides": (other_strides, REASSOCIATES),
    "other strides, exact": (other_strides, EXACT),
    "bfloat16": (half_inside(torch.bfloat16), LOSSY),
    "float16": (half_inside(torch.float16), LOSSY),
    "autocast": (autocast, LOSSY),
    "int8 weights": (int8_weights, LOSSY),
}


@pytest.mark.parametrize("variant", HONEST)
def test_honest_variant_is_accepted(bench: Bench, variant: str) -> None:
    make, recipe = HONEST[variant]
    verdict = bench.verdict(with_perturb(make), recipe)
    assert isinstance(verdict, Verified), verdict
    assert verdict.cases >= 20
    assert verdict.relative <= max(verdict.bound, verdict.eager_relative)


@pytest.mark.slow
def test_compiled_variant_is_accepted(tmp_path: Any) -> None:
    bench = Bench(block_workload(dims=(), shapes={}), tmp_path)
    verdict = bench.verdict(torch.compile, REASSOCIATES)
    assert isinstance(verdict, Verified), verdict
