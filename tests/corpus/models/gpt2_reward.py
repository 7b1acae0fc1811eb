"""GPT-2 with a scalar value head and a head that reads the last real token."""

# torchstone: check Reward(), tokens=i64[B, S], lengths=i64[B], S=4..32

from __future__ import annotations

from torch import nn
from transformers import GPT2Config, GPT2Model


class Reward(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=100, n_positions=64, n_embd=width, n_layer=layers, n_head=heads)
        self.body = GPT2Model(config)
        self.value = nn.Linear(width, 1)
        self.score = nn.Linear(width, 3)

    def forward(self, tokens, lengths):
        hidden = self.body(tokens).last_hidden_state
        values = self.value(hidden).squeeze(-1)
        last = (lengths - 1).clamp(min=0)
        index = last.view(-1, 1, 1).expand(-1, 1, hidden.size(-1))
        summary = hidden.gather(1, index).squeeze(1)
        return values, self.score(summary)
