"""Llama whose attention outputs pass a bottleneck adapter, as in parameter-efficient tuning."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel


class Adapter(nn.Module):
    def __init__(self, width: int, bottleneck: int = 8) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, width)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


class Adapted(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        for layer in self.model.layers:
            layer.mlp = nn.Sequential(layer.mlp, Adapter(config.hidden_size))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.lm_head(hidden)


def build_adapted():
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return Adapted(config)


def example_adapted():
    return (torch.randint(0, 96, (2, 9)), torch.ones(2, 9, dtype=torch.long))
