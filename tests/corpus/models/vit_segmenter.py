"""ViT as a segmenter: patch tokens are folded back into a map and upsampled."""

# torchstone: check Segmenter(), image=f32[B, 3, 32, 32]

from __future__ import annotations

import torch.nn.functional as F
from torch import nn
from transformers import ViTConfig, ViTModel


class Segmenter(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            image_size=32,
            patch_size=4,
        )
        self.side = config.image_size // config.patch_size
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.classify = nn.Conv2d(config.hidden_size, classes, 1)

    def forward(self, image):
        tokens = self.vit(image).last_hidden_state[:, 1:]
        batch, _, width = tokens.shape
        grid = tokens.transpose(1, 2).reshape(batch, width, self.side, self.side)
        logits = self.classify(grid)
        return F.interpolate(logits, size=image.shape[-2:], mode="bilinear", align_corners=False)
