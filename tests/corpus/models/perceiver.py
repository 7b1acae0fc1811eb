"""Perceiver IO: latents read a long input, output queries read the latents."""

# torchstone: check Perceiver(), data=f32[B, N, 13], queries=f32[B, M, 9], mask=bool[B, N]

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attend(nn.Module):
    def __init__(self, query: int, source: int, heads: int = 2, head: int = 12) -> None:
        super().__init__()
        self.heads, self.head = heads, head
        self.norm_q, self.norm_kv = nn.LayerNorm(query), nn.LayerNorm(source)
        self.to_q = nn.Linear(query, heads * head)
        self.to_kv = nn.Linear(source, 2 * heads * head)
        self.to_out = nn.Linear(heads * head, query)

    def forward(self, x, source, mask=None):
        q = self.to_q(self.norm_q(x))
        k, v = self.to_kv(self.norm_kv(source)).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, self.head)).transpose(1, 2) for t in (q, k, v))
        if mask is not None:
            mask = mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Perceiver(nn.Module):
    def __init__(self, inputs: int = 13, queries: int = 9, latents: int = 16, width: int = 24) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width) * 0.02)
        self.read = Attend(width, inputs)
        self.think = nn.ModuleList(Attend(width, width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)
        )
        self.answer = Attend(queries, width)

    def forward(self, data, queries, mask=None):
        x = self.latents.expand(data.shape[0], -1, -1)
        x = x + self.read(x, data, mask)
        for layer in self.think:
            x = x + layer(x, x)
            x = x + self.mlp(x)
        return queries + self.answer(queries, x)
