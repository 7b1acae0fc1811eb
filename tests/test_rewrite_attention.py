"""Attention written out becomes the fused operation: masks, rows without keys, what is no attention."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rewrite_samples import agrees, captured, fired, forced, named, refuted, rewritten, targets
from torchstone.rewrite import constants, proof
from torchstone.rewrite.families import attention, simplify, structured
from torchstone.rewrite.families.attention import RULES, settle
from torchstone.rewrite.rule import Rule

aten = torch.ops.aten
FUSED = aten.scaled_dot_product_attention.default
BOTH = forced(*RULES, *simplify.RULES)
SEEN = torch.tensor(
    [[1, 0, 0, 1, 1], [1, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool
)
WITHOUT_KEYS = SEEN & torch.tensor([[1], [0], [1], [1]], dtype=torch.bool)


def tensors(batch: int, *heads: int) -> list[torch.Tensor]:
    """Query of 4 rows, keys and values of 5."""
    torch.manual_seed(batch)
    return [torch.randn(batch, *heads, n, 6) for n in (4, 5, 5)]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_each_rule_is_an_identity(rule: Rule) -> None:
    found = [proof.prove(rule, seed) for seed in range(2)]
    assert [f.counterexample for f in found] == [None] * 2
    assert sum(f.held for f in found) >= 20


def _unscaled(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "scale": 1.0} if "scale" in given else {**given, "q": given["q"] * 1.001}


def _unmasked(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["mask"]
    return {**given, "mask": torch.zeros_like(mask) if mask.dtype == torch.bool else mask * 0.5}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_a_wrong_scale_is_refuted(rule: Rule) -> None:
    assert refuted(rule, lambda **given: rule.replacement(**_unscaled(given)))


@pytest.mark.parametrize("rule", [r for r in RULES if "mask" in r.constants], ids=lambda r: r.name)
def test_a_lost_or_reversed_mask_is_refuted(rule: Rule) -> None:
    assert refuted(rule, lambda **given: rule.replacement(**_unmasked(given)))
    if "fill" in rule.constants:
        assert refuted(rule, lambda **given: rule.replacement(**{**given, "mask": ~given["mask"]}))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.mT) / math.sqrt(q.size(-1))
    return F.dropout(F.softmax(scores, dim=q.dim() - 1), 0.1, training=False) @ v


def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT * 0.3).masked_fill(~SEEN, -math.inf)
    return torch.matmul(scores.softmax(-1), v)


def lowest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT * 0.3).masked_fill(~WITHOUT_KEYS, torch.finfo(torch.float32).min)
    return torch.matmul(scores.softmax(-1), v)


def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.where(SEEN, q @ k.mT, -math.inf).softmax(-1) @ v


def added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bias = torch.linspace(-1, 1, 20, dtype=q.dtype).reshape(4, 5)
    return torch.softmax(bias + q @ k.mT / 2, -1) @ v


def without_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).masked_fill(~WITHOUT_KEYS, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("function", [plain, scaled, filled, lowest, chosen, without_keys])
@pytest.mark.parametrize("heads", [(), (3,)], ids=["3d", "4d"])
def test_attention_written_out_is_fused(function: Any, heads: tuple[int, ...]) -> None:
    found = rewritten(function, BOTH, *tensors(3, *heads))
    assert sum(name.startswith("attention") for name in fired(found)) == 1, found.declined
    assert FUSED in targets(found.module)
    assert not {aten.softmax.int, aten.dropout.default} & set(targets(found.module))
    for batch in (3, 7):
        agrees(function, found.module, *tensors(batch, *heads))


class Biased(nn.Module):
    """Scores with a learned bias for each head, and the values in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.permute(0, 2, 1, 3)
        out = torch.softmax(q @ k.transpose(2, 3) * 0.5 + self.bias, -1) @ v
        return out.transpose(1, 2)


def test_a_bias_is_an_additive_mask_and_layouts_stay() -> None:
    module = Biased()
    shapes = (4, 5, 5)
    found = rewritten(module, BOTH, *(torch.randn(2, n, 3, 6) for n in shapes))
    assert "attention_times_added" in fired(found)
    assert found.module(*(torch.randn(4, n, 3, 6) for n in shapes)).shape == (4, 4, 3, 6)
    agrees(module, found.module, *(torch.randn(5, n, 3, 6) for n in shapes))


def test_a_scale_for_each_head_moves_out_of_the_way() -> None:
    class Cosine(Biased):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            return torch.softmax(scores * self.bias[:, :1, :1] + self.bias, -1) @ v

    module = Cosine()
    found = rewritten(module, (*BOTH, *forced(*named(structured.RULES, "scale_left"))), *tensors(2, 3))
    assert {"scale_left", "attention_added"} <= set(fired(found))
    agrees(module, found.module, *tensors(5, 3))


def test_a_row_without_keys_is_nan_as_in_eager() -> None:
    found = rewritten(without_keys, BOTH, *tensors(3, 2))
    settle(found.module)
    out = found.module(*tensors(3, 2))
    assert out[:, :, 1].isnan().all()
    assert not out[:, :, [0, 2, 3]].isnan().any()


def test_a_mask_that_comes_with_the_call_is_taken_with_rows_without_keys_in_it() -> None:
    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).masked_fill(seen.logical_not()[:, None], -math.inf).softmax(-1) @ v

    given = [*tensors(3, 2), SEEN.expand(3, 4, 5)]
    found = rewritten(masked, BOTH, *given)
    assert "attention_filled" in fired(found)
    other = torch.rand(3, 4, 5) > 0.7
    other[0, 0], other[1, 1, 2] = False, True
    agrees(masked, found.module, *given)
    agrees(masked, found.module, *tensors(3, 2), other)


class SelfAttention(nn.Module):
    """With a triangular buffer that is cut to length, as it is mostly written."""

    def __init__(self, hidden: torch.Tensor, longest: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.register_buffer("hidden", hidden.view(1, 1, longest, longest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (p.view(b, t, 3, 4).transpose(1, 2) for p in self.qkv(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.hidden[:, :, :t, :t] == 0, -math.inf)
        y = F.dropout(F.softmax(scores, dim=-1), 0.0, self.training) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


def fused(module: torch.fx.GraphModule) -> tuple[Any, ...]:
    (call,) = [n for n in module.graph.nodes if n.target is FUSED]
    return call.args


def test_a_triangular_buffer_is_a_causal_mask_by_its_values() -> None:
    module = SelfAttention(torch.tril(torch.ones(8, 8))).eval()
    found = rewritten(module, BOTH, torch.randn(3, 5, 12))
    assert fused(found.module)[3] is not None
    assert settle(found.module) == 2  # the mask, and what was done for rows without keys
    assert fused(found.module)[3:6] == (None, 0.0, True)
    constants.fold(found.module)
    assert not list(found.module.buffers())
    for batch in (2, 6):
        agrees(module, found.module, torch.randn(batch, 5, 12))


@pytest.mark.parametrize("diagonal", [-1, 1])
def test_other_triangles_are_not_causal(diagonal: int) -> None:
    module = SelfAttention(torch.tril(torch.ones(8, 8), diagonal)).eval()
    found = rewritten(module, BOTH, torch.randn(3, 5, 12))
    settle(found.module)
    assert fused(found.module)[3] is not None
    assert fused(found.module)[5] is False
    agrees(
        module, found.module, torch.randn(4, 5, 12)
    )  # with a first row without keys where diagonal is -1


def test_a_buffer_that_calls_change_is_no_constant() -> None:
    class Changing(SelfAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden.mul_(1)
            return super().forward(x)

    found = rewritten(Changing(torch.tril(torch.ones(8, 8))).eval(), BOTH, torch.randn(3, 5, 12))
    assert settle(found.module) == 0
    assert fused(found.module)[5] is False


def test_masks_made_in_the_program_are_known_by_their_values_too() -> None:
    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        later = torch.triu(torch.full((5, 5), -math.inf, dtype=q.dtype), diagonal=1)
        return torch.softmax(q @ k.mT + later, -1) @ v

    def everything(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        none = torch.zeros(5, 5, dtype=torch.bool)
        return torch.softmax((q @ k.mT).masked_fill(none, -math.inf), -1) @ v

    _, k, v = tensors(3, 2)
    for function, causally in ((causal, True), (everything, False)):
        found = rewritten(function, BOTH, k + 1, k, v)
        settle(found.module)
        assert fused(found.module)[3:6] == (None, 0.0, causally)
        assert targets(found.module).count(FUSED) == 1
        got = found.module(k + 1, k, v)
        torch.testing.assert_close(got, function(k + 1, k, v))


def test_a_causal_mask_of_fewer_queries_than_keys_stays_a_mask() -> None:
    def part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(4, 5, dtype=torch.bool).tril()
        return (q @ k.mT).masked_fill(~seen, -math.inf).softmax(-1) @ v

    found = rewritten(part, BOTH, *tensors(3, 2))
    settle(found.module)
    assert fused(found.module)[5] is False
    agrees(part, found.module, *tensors(5, 2))


class Weightless(nn.Module):
    """Attention whose weights are asked for and dropped."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, **options)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=True, attn_mask=mask)[0]


def test_weights_that_nobody_uses_are_dropped_and_attention_is_fused() -> None:
    module = Weightless(batch_first=True, dropout=0.1).eval()
    found = rewritten(module, BOTH, torch.randn(3, 5, 12))
    assert "attention" in fired(found)
    assert aten.mean.dim not in targets(found.module)
    agrees(module, found.module, torch.randn(7, 5, 12))


def test_weights_that_are_returned_keep_the_long_form() -> None:
    class Weighed(Weightless):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            del mask
            return self.attention(x, x, x)

    found = rewritten(Weighed(batch_first=True).eval(), BOTH, torch.randn(3, 5, 12))
    assert not any(name.startswith("attention") for name in fired(found))


def test_a_mask_in_a_batched_product_is_added() -> None:
    module = Weightless(batch_first=True).eval()
    mask = torch.zeros(5, 5).masked_fill(torch.rand(5, 5) > 0.6, -math.inf).fill_diagonal_(0)
    found = rewritten(module, BOTH, torch.randn(3, 5, 12), mask, fixed=1)
    assert "attention_added_baddbmm" in fired(found)
    agrees(module, found.module, torch.randn(4, 5, 12), mask)


def test_an_encoder_layer_keeps_what_is_fused_already() -> None:
    module = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True).eval()
    found = rewritten(module, BOTH, torch.randn(3, 5, 12))
    assert targets(found.module).count(FUSED) == 1
    assert aten.dropout.default not in targets(found.module)
    agrees(module, found.module, torch.randn(6, 5, 12))


def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v, weights.sum()


def other_dim(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.softmax(q @ k.mT, -2) @ v


def live(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return F.dropout(torch.softmax(q @ k.mT, -1), 0.5, training=True) @ v


def negative(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.softmax(q @ k.mT * -0.5, -1) @ v


def nearly_hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.softmax((q @ k.mT).masked_fill(~SEEN, -1e4), -1) @ v


def shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.softmax(q @ k[0].mT, -1) @ v[0]


def doubled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.softmax(q @ k.mT, -1, dtype=torch.float64) @ v.double()


@pytest.mark.parametrize(
    "function",
    [twice, other_dim, live, negative, nearly_hidden, shared, doubled],
    ids=lambda f: f.__name__,
)
def test_what_must_not_fire(function: Any) -> None:
    found = rewritten(function, BOTH, *tensors(3, 2))
    assert not any(name.startswith("attention") for name in fired(found))


def test_what_is_measured_is_right_whichever_way_was_quicker() -> None:
    found = rewritten(scaled, RULES, *tensors(3, 2))
    assert all(one.measured for one in found.fired)
    agrees(scaled, found.module, *tensors(5, 2))
    assert all(rule.measured for rule in named(attention.RULES, "attention"))


def test_settling_a_graph_without_attention_changes_nothing() -> None:
    module = captured(nn.Linear(4, 4), torch.randn(3, 4))
    before = targets(module)
    assert settle(module) == 0
    assert targets(module) == before
