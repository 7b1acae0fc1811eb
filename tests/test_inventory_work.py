"""What a call computes, moves and holds, against closed formulas; sums over modules; weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchstone.inspection import tables, weights, work
from torchstone.inspection.trace import Trace, trace
from torchstone.inspection.work import Weighted
from torchstone.records import Work

F32 = 4


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Does(nn.Module):
    """A module of one function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def traced(module, *args: torch.Tensor) -> Trace:
    return trace(module if isinstance(module, nn.Module) else Does(module), args)


def total(found: Trace) -> Work:
    return work.tally([Weighted(found, 1)], work.total)[""]


def ops(found: Trace) -> set[str]:
    return {place.op for place, _ in found.calls}


def how(found: Trace, op: str) -> set[str]:
    return {cost.how for (place, cost) in found.calls if place.op == op}


# FLOPs


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (8,)])
def test_flops_of_a_linear_layer(shape):
    rows = math.prod(shape[:-1])
    for bias in (True, False):
        found = total(traced(nn.Linear(8, 6, bias=bias), torch.randn(shape)))
        assert found.flops == 2 * rows * 8 * 6


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_of_a_convolution(groups):
    found = total(traced(nn.Conv2d(4, 6, 3, padding=1, groups=groups), torch.randn(2, 4, 9, 7)))
    assert found.flops == 2 * 2 * 9 * 7 * 6 * (4 // groups) * 3 * 3


@pytest.mark.parametrize("key_heads", [4, 2])
def test_flops_of_attention_with_as_many_or_fewer_key_heads(key_heads):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, key_heads, 7, 8)
    call = nn.functional.scaled_dot_product_attention
    found = traced(lambda q, k, v: call(q, k, v, enable_gqa=True), q, k, k)
    assert total(found).flops == 2 * 2 * 4 * 5 * 7 * (8 + 8)
    assert "aten._scaled_dot_product_flash_attention_for_cpu" in ops(found)


def test_a_fused_encoder_layer_counts_as_its_parts():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(3, 7, 16)
    fused = traced(layer, x)
    assert "aten._transformer_encoder_layer_fwd" in ops(fused)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        parts = traced(layer, x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert "aten.addmm" in ops(parts)
    assert total(fused).flops == total(parts).flops > 0


def test_flops_of_recurrent_layers():
    x = torch.randn(2, 7, 16)
    lstm = total(traced(nn.LSTM(16, 8, batch_first=True), x))
    assert lstm.flops == 2 * 2 * 7 * (4 * 8) * (16 + 8)
    gru = total(traced(nn.GRU(16, 8, batch_first=True), x))
    assert gru.flops == 2 * 2 * 7 * (3 * 8) * (16 + 8)


def test_elements_are_counted_apart_and_integers_are_not_floating_point():
    x = torch.randn(4, 8)
    for call in (torch.relu, torch.sum, lambda x: torch.softmax(x, -1), lambda x: x + 1):
        found = traced(call, x)
        assert (total(found).flops, total(found).other_flops) == (0, 32)
    assert total(traced(lambda x: x[:1] + x, x)).other_flops == 32
    assert total(traced(lambda n: n + 1, torch.arange(5))).other_flops == 0
    assert total(traced(lambda x: x.clone(), x)).other_flops == 0


def test_what_cannot_be_counted_is_named():
    found = traced(lambda x: torch.linalg.svdvals(torch.sort(x)[0] @ x), torch.randn(4, 4))
    assert how(found, "aten.sort") == how(found, "aten._linalg_svd") == {"uncounted"}
    assert how(found, "aten.mm") == {"formula"}


def test_a_fourier_transform_counts_by_convention():
    found = total(traced(torch.fft.fft, torch.randn(2, 8, dtype=torch.complex64)))
    assert found.flops == 5 * 16 * 3


# bytes


def test_bytes_of_an_operation_are_its_inputs_and_outputs():
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    assert total(traced(lambda a, b: a + b, a, b)).bytes == 3 * 30 * F32
    assert total(traced(lambda a, b: torch.cat([a, b]), a, b)).bytes == 4 * 30 * F32
    assert total(traced(torch.zeros_like, a)).bytes == 30 * F32
    assert total(traced(torch.empty_like, a)).bytes == 0


def test_views_move_nothing():
    def views(x):
        y = x.view(5, 6).t()[1:].unsqueeze(0).expand(3, -1, -1)
        return y.detach(), x.reshape(2, 15), x.contiguous()

    found = traced(views, torch.randn(6, 5))
    assert total(found).bytes == 0
    assert total(found).calls >= 5
    assert total(traced(lambda x: x.t_(), torch.randn(6, 5))).bytes == 0


def test_a_copy_that_a_view_could_not_be_is_counted():
    found = traced(lambda x: x.t().reshape(30), torch.randn(6, 5))
    assert total(found).bytes == 2 * 30 * F32


def test_broadcast_elements_are_read_once():
    found = traced(lambda x: x.expand(100, 5) + 1, torch.randn(1, 5))
    assert total(found).bytes == (5 + 500) * F32


def test_in_place_operations_read_and_write_what_they_change():
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    assert total(traced(lambda a, b: a.add_(b), a, b)).bytes == 3 * 30 * F32
    assert total(traced(lambda a, b: a.copy_(b), a, b)).bytes == 2 * 30 * F32
    assert total(traced(lambda a, b: a.zero_(), a, b)).bytes == 30 * F32
    assert total(traced(lambda a, b: torch.mul(a, 2, out=b), a, b)).bytes == 2 * 30 * F32


def test_of_a_table_only_the_rows_asked_for_are_read():
    rows = torch.tensor([3, 5, 5])
    found = traced(nn.Embedding(1000, 8), rows)
    assert total(found).bytes == 3 * 8 + 2 * 3 * 8 * F32
    assert found.least_bytes == 3 * 8 + 2 * 3 * 8 * F32  # indices, rows, output
    table = torch.randn(1000, 8)
    placed = traced(lambda t, i, v: t.index_put_((i,), v), table, rows, torch.randn(3, 8))
    assert total(placed).bytes == 3 * 8 + 2 * 3 * 8 * F32


def test_least_bytes_are_used_weights_inputs_and_outputs_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(self.used(x))

    found = traced(Twice(), torch.randn(3, 8))
    assert found.least_bytes == (3 * 8 + 8 * 8 + 8 + 3 * 8) * F32
    assert total(found).bytes == 2 * (3 * 8 + 8 * 8 + 8 + 3 * 8) * F32


def test_live_bytes_are_the_most_that_intermediate_tensors_take_at_once():
    x = torch.randn(100)
    assert traced(lambda x: x + 1, x).live_bytes == 400
    assert traced(lambda x: ((x + 1) * 2) * 3, x).live_bytes == 800  # one is read, one is written
    assert traced(lambda x: [x + i for i in range(5)], x).live_bytes == 2000
    assert traced(lambda x: x.view(10, 10).t(), x).live_bytes == 0
    assert traced(lambda x: x.add_(1), x).live_bytes == 0


# by module


class Block(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width * (2 if wide else 1))
        self.second = nn.Linear(self.first.out_features, width)

    def forward(self, x):
        return x + torch.relu(self.second(torch.relu(self.first(x))))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 9), st.booleans()
)
def test_sums_over_modules_are_the_totals(blocks, width, rows, shared):
    module = nn.Sequential(*(Block(width, wide) for wide in blocks))
    if shared:
        module.append(module[0])  # one module at two places runs twice and has its weights once
    with torch.no_grad():
        found = trace(module, (torch.randn(rows, width),))
    whole = total(found)
    listed = tables.modules(module, found, [], None)
    for figure in ("calls", "flops", "other_flops", "bytes"):
        assert sum(getattr(m.work, figure) for m in listed) == getattr(whole, figure)
    assert listed[0].total == whole
    by_op = work.tally([Weighted(found, 1)], work.by_op)
    assert sum(w.bytes for w in by_op.values()) == whole.bytes
    count = sum(p.numel() for p in module.parameters())
    assert sum(m.parameters for m in listed) == listed[0].total_parameters == count
    top = [m for m in listed if m.depth == 1]
    assert sum(m.total.flops for m in top) == whole.flops
    assert all(m.total.calls >= m.work.calls for m in listed)


def test_modules_have_their_paths_and_what_they_call():
    module = nn.Sequential(Block(4, wide=True), nn.ReLU())
    found = {m.path: m for m in tables.modules(module, traced(module, torch.randn(3, 4)), [], None)}
    assert list(found) == ["", "0", "0.first", "0.second", "1"]
    assert [m.depth for m in found.values()] == [0, 1, 2, 2, 1]
    assert found["0"].kind == "Block"
    assert found["0"].work.other_flops == 3 * 8 + 3 * 4 + 3 * 4  # two relus and the sum
    assert found["0.first"].work.flops == found["0.first"].total.flops == 2 * 3 * 4 * 8
    assert found["0"].total_parameters == 4 * 8 + 8 + 8 * 4 + 4


# weights


def test_tied_weights_count_once_and_are_named():
    module = nn.ModuleDict({"table": nn.Embedding(10, 4), "out": nn.Linear(4, 10, bias=False)})
    assert weights.weights(module).tied == ()
    module["out"].weight.data = module["table"].weight.data  # by memory, not as one object
    found = weights.weights(module)
    assert found.tied == (("table.weight", "out.weight"),)
    assert (found.parameters, found.parameter_bytes) == (40, 160)
    assert weights.by_path(module) == {"table": weights.Held(40, 160)}


def test_weights_are_told_by_dtype():
    module = nn.Sequential(nn.Linear(4, 4).double(), nn.BatchNorm1d(4), nn.Linear(4, 4).bfloat16())
    found = weights.weights(module)
    assert [(c.dtype, c.tensors, c.elements, c.bytes) for c in found.by_dtype] == [
        ("float64", 2, 20, 160),
        ("float32", 4, 16, 64),
        ("bfloat16", 2, 20, 40),
        ("int64", 1, 1, 8),  # how many batches it has seen
    ]
    assert (found.parameters, found.buffers) == (48, 9)
