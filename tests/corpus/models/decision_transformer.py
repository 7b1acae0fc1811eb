"""Decision Transformer: returns, states and actions interleaved, read by a causal encoder."""

# torchstone: check DecisionTransformer(), returns=f32[B, T, 1], states=f32[B, T, 17],
# actions=f32[B, T, 6], steps=i64[B, T], mask=bool[B, T], T=2..20

from __future__ import annotations

import torch
from torch import nn


class DecisionTransformer(nn.Module):
    def __init__(self, states: int = 17, actions: int = 6, width: int = 32, horizon: int = 100) -> None:
        super().__init__()
        self.embed_return = nn.Linear(1, width)
        self.embed_state = nn.Linear(states, width)
        self.embed_action = nn.Linear(actions, width)
        self.embed_step = nn.Embedding(horizon, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.predict_action = nn.Sequential(nn.Linear(width, actions), nn.Tanh())

    def forward(self, returns, states, actions, steps, mask=None):
        batch, length = steps.shape
        when = self.embed_step(steps)
        tokens = torch.stack(
            [
                self.embed_return(returns) + when,
                self.embed_state(states) + when,
                self.embed_action(actions) + when,
            ],
            dim=2,
        )
        tokens = self.norm(tokens.reshape(batch, 3 * length, -1))
        causal = torch.ones(3 * length, 3 * length, dtype=torch.bool, device=tokens.device).triu(1)
        padding = None
        if mask is not None:
            padding = ~mask.repeat_interleave(3, dim=1)
        out = self.encoder(tokens, mask=causal, src_key_padding_mask=padding)
        out = out.reshape(batch, length, 3, -1).permute(0, 2, 1, 3)
        return self.predict_action(out[:, 1])
