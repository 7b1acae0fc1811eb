"""BERT with a pooled classification head over the concatenation of its last two layers."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, BertModel

CONFIG = BertConfig(
    vocab_size=128,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=64,
)


class Classifier(nn.Module):
    def __init__(self, config: BertConfig, labels: int = 5) -> None:
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.norm = nn.LayerNorm(2 * config.hidden_size)
        self.head = nn.Sequential(
            nn.Linear(2 * config.hidden_size, config.hidden_size),
            nn.Tanh(),
            nn.Linear(config.hidden_size, labels),
        )

    def forward(self, input_ids, attention_mask=None):
        states = self.bert(
            input_ids, attention_mask=attention_mask, output_hidden_states=True
        ).hidden_states
        both = torch.cat([states[-1], states[-2]], dim=-1)
        if attention_mask is None:
            pooled = both.mean(1)
        else:
            weight = attention_mask.unsqueeze(-1).to(both.dtype)
            pooled = (both * weight).sum(1) / weight.sum(1).clamp(min=1)
        return self.head(self.norm(pooled))


def build() -> nn.Module:
    return Classifier(CONFIG).eval()


def example():
    return {
        "input_ids": torch.randint(0, 128, (2, 11)),
        "attention_mask": torch.ones(2, 11, dtype=torch.long),
    }
