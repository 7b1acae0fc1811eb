"""Faults of six kinds planted in four model families are named; what only rounds otherwise is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import differ_models as models
from differ_models import MODELS, PLANTS
from torchstone.records import Divergence
from torchstone.verify.differ.between import between
from torchstone.verify.differ.record import record, record_float64

pytestmark = pytest.mark.slow

SEEDS = range(2)


def compared(right: Any, wrong: Any, inputs: Sequence[torch.Tensor]) -> Divergence:
    return between(record(right, inputs, "right"), record(wrong, inputs, "wrong"))


@pytest.mark.parametrize("name", MODELS)
def test_planted_operations_are_named_exactly(name: str) -> None:
    """46 faults in all: six kinds, two places each; the convnet has no operands to swap."""
    module, inputs = MODELS[name]()
    graph = models.graph_of(module, inputs)
    missed, planted = [], 0
    for kind in PLANTS:
        for seed in SEEDS:
            fault = models.plant(graph, inputs, kind, f"{name} {seed}")
            if fault is None:
                continue
            planted += 1
            told = compared(fault.right, fault.wrong, inputs)
            if not models.named(told, fault):
                missed.append(f"{kind} {seed} ({fault.what}): {told.kind} {told.text}")
    assert planted >= 10
    assert not missed


# --- by hand, in the source ------------------------------------------------------------------------


class NoScale(models.Attention):
    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, context), (self.v, context))
        )
        scores = q @ k.transpose(-1, -2) * 0.25  # planted
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class NoMask(models.Attention):
    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, context), (self.v, context))
        )
        y = (q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5)).softmax(-1) @ v  # planted
        return self.out(y.transpose(1, 2).flatten(2))


class SixteenBits(models.Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        square = centred.bfloat16().square().float()  # planted
        return centred / (square.mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias


class WrongTurn(models.Decoder):
    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[1])[:, None] * 100.0 ** -torch.linspace(0, 1, x.shape[2] // 2)
        a, b = x.chunk(2, -1)
        real = a * angle.cos() - b * angle.sin()
        return torch.cat([real, b * angle.sin() + a * angle.cos()], -1)  # planted


class OffByOne(models.Decoder):
    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(1, x.shape[1] + 1)[:, None]  # planted
        angle = angle * 100.0 ** -torch.linspace(0, 1, x.shape[2] // 2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def replaced(module: nn.Module, path: str, kind: type[nn.Module]) -> nn.Module:
    """The same weights under another class's code."""
    module.get_submodule(path).__class__ = kind
    return module


def by_hand() -> Iterator[tuple[str, nn.Module, nn.Module, tuple[torch.Tensor, ...]]]:
    """What is right is fused or written out; what is wrong is another implementation with a fault."""
    for fused in (False, True):
        how = "against fused" if fused else "against its like"
        for kind in (NoScale, NoMask):
            right, inputs = models.decoder(fused=fused)
            wrong, _ = models.decoder()
            yield f"{kind.__name__} {how}", right, replaced(wrong, "attend.1", kind), inputs
            right, inputs = models.diffusion(fused=fused)
            wrong, _ = models.diffusion()
            yield f"{kind.__name__} in a U-Net {how}", right, replaced(wrong, "attend", kind), inputs
        right, inputs = models.decoder(fused=fused)
        wrong, _ = models.decoder()
        yield f"SixteenBits {how}", right, replaced(wrong, "norms.2", SixteenBits), inputs
        wrong, _ = models.decoder()
        yield f"OffByOne {how}", right, replaced(wrong, "", OffByOne), inputs
        wrong, _ = models.decoder()
        yield f"WrongTurn {how}", right, replaced(wrong, "", WrongTurn), inputs


BY_HAND = list(by_hand())


@pytest.mark.parametrize("name", [name for name, *_ in BY_HAND])
def test_faults_in_the_source_are_found_at_their_line(name: str) -> None:
    """Where implementations differ, the answer may be the few operations around, or their module."""
    right, wrong, inputs = next(rest for title, *rest in BY_HAND if title == name)
    for truth in (record(right, inputs, "right"), record_float64(right, inputs)):
        told = between(truth, record(wrong, inputs, "wrong"))
        assert told.kind in ("OP", "STRUCTURE", "MODULE"), told.text
        assert any("# planted" in site.origin.text for site in told.ops), (told.text, told.ops)
        assert len(told.ops) <= 9


# --- clean pairs ----------------------------------------------------------------------------------


def clean_pairs(name: str) -> Iterator[tuple[str, Any, Any, tuple[torch.Tensor, ...]]]:
    module, inputs = MODELS[name]()
    yield "itself", module, module, inputs
    yield "its program", module, models.graph_of(module, inputs), inputs
    yield "sums in another order", module, models.with_split_sums(module), inputs
    parts = models.decomposed(module, inputs)
    yield "core operations", module, parts, inputs
    yield "from core operations", parts, module, inputs
    if name in ("decoder", "diffusion"):
        fused, _ = MODELS[name](fused=True)
        yield "fused attention and norms", module, fused, inputs
        yield "from fused", fused, module, inputs
    if name in ("convnet", "diffusion"):
        moved, _ = MODELS[name]()
        yield "channels last", module, moved.to(memory_format=torch.channels_last), inputs
    if isinstance(module, models.Convnet):
        yield "folded batch norms", module, models.with_folded_norms(module), inputs
    if isinstance(module, models.Recommender):
        yield "an LSTM by cells", module, models.with_cells(module), inputs
        yield "from cells", models.with_cells(module), module, inputs


@pytest.mark.parametrize("name", MODELS)
def test_clean_pairs_have_no_divergence(name: str) -> None:
    """Each against the other implementation, and each of these against float64: 51 pairs in all."""
    told = {}
    module, inputs = MODELS[name]()
    truth = record_float64(module, inputs)
    for title, one, other, given in clean_pairs(name):
        examined = record(other, given, "b")
        told[title] = between(record(one, given, "a"), examined)
        if not title.startswith("from"):
            told[f"float64, {title}"] = between(truth, examined)
    wrong = {title: (d.kind, d.text, d.ops) for title, d in told.items() if d.kind != "NONE"}
    assert len(told) >= 9
    assert not wrong


def test_attention_of_transformers() -> None:
    """BERT and Llama as the library writes them: eager against SDPA, with a padding mask."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    tokens = torch.arange(18).reshape(2, 9) % 60
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0

    class Hidden(nn.Module):
        def __init__(self, config: Any, attention: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            made = transformers.AutoModel.from_config(config, attn_implementation=attention)
            self.model = made.eval()

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.model(tokens, attention_mask=mask)[0]
            return result

    for config in (transformers.BertConfig(**common), transformers.LlamaConfig(**common)):
        eager, fused = Hidden(config, "eager"), Hidden(config, "sdpa")
        assert compared(eager, fused, (tokens, mask)).kind == "NONE"
        assert compared(fused, eager, (tokens, mask)).kind == "NONE"
        changed = Hidden(config, "sdpa")
        norm = next(m for m in reversed(list(changed.modules())) if "Norm" in type(m).__name__)
        name = next(n for n, m in changed.named_modules() if m is norm)
        changed.get_submodule(name).forward = lambda x: F.layer_norm(x, (32,), eps=0.01)  # type: ignore[method-assign]
        told = compared(eager, changed, (tokens, mask))
        assert told.kind != "NONE"
        assert all(site.origin.module == name or "layer_norm" in site.op for site in told.ops)
