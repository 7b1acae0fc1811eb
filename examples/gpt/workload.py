"""A GPT-2 style decoder from transformers, random weights, logits of every position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 2000


class Logits(nn.Module):
    """Token ids (B, S) int64 to logits (B, S, vocabulary) float32, without a key-value cache."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        """Score the next token at every position."""
        logits: Tensor = self.decoder(input_ids=input_ids, use_cache=False, return_dict=False)[0]
        return logits


def decoder() -> Logits:
    """Four layers of width 192; the weights come from a fixed seed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=192,
        n_layer=4,
        n_head=6,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Logits(GPT2LMHeadModel(config)).eval().requires_grad_(False)


def example() -> tuple[Tensor]:
    """Two sequences of 24 tokens."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, VOCABULARY, (2, 24), generator=generator),)
