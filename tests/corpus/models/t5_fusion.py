"""Fusion-in-decoder on T5: passages are encoded one by one and read together by the decoder."""

# torchstone: check FusionInDecoder(), passages=i64[B, P, S],
# mask=bool[B, P, S], answer=i64[B, T]

from __future__ import annotations

from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput


class FusionInDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
        )
        self.t5 = T5ForConditionalGeneration(config)

    def forward(self, passages, mask, answer):
        batch, count, length = passages.shape
        flat = passages.reshape(batch * count, length)
        encoded = self.t5.encoder(
            input_ids=flat, attention_mask=mask.reshape(batch * count, length).long()
        ).last_hidden_state
        joined = encoded.reshape(batch, count * length, -1)
        out = self.t5(
            encoder_outputs=BaseModelOutput(last_hidden_state=joined),
            attention_mask=mask.reshape(batch, -1).long(),
            decoder_input_ids=answer,
        )
        return out.logits
