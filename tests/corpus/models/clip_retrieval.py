"""CLIP with learned temperature and a re-ranking head over image-text pairs."""

from __future__ import annotations

import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "eos_token_id": 98,
    "bos_token_id": 97,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


class Retrieval(nn.Module):
    def __init__(self, projection: int = 24) -> None:
        super().__init__()
        self.clip = CLIPModel(
            CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=projection)
        )
        self.rerank = nn.Bilinear(projection, projection, 1)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, pixel_values):
        out = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        text, image = out.text_embeds, out.image_embeds
        scores = image @ text.t() * self.temperature.exp()
        texts, images = text.size(0), image.size(0)
        a = image.unsqueeze(1).expand(images, texts, -1).contiguous()
        b = text.unsqueeze(0).expand(images, texts, -1).contiguous()
        return scores + self.rerank(a, b).squeeze(-1)


def build():
    return Retrieval().eval()


def example():
    return {
        "input_ids": torch.randint(0, 97, (3, 12)),
        "pixel_values": torch.randn(5, 3, 32, 32),
    }
