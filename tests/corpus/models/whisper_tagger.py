"""Whisper's encoder with a frame tagger whose labels come at half the rate of the frames."""

# torchstone: check FrameTagger(), mel=f32[B, 16, 60], weights=f32[B, 30]

from __future__ import annotations

from torch import nn
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder


class FrameTagger(nn.Module):
    def __init__(self, mels: int = 16, width: int = 32) -> None:
        super().__init__()
        config = WhisperConfig(
            num_mel_bins=mels,
            d_model=width,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            max_source_positions=30,
        )
        self.encoder = WhisperEncoder(config)
        self.smooth = nn.Conv1d(width, width, kernel_size=3, padding=1, groups=width)
        self.tags = nn.Linear(width, 7)

    def forward(self, mel, weights):
        frames = self.encoder(mel).last_hidden_state
        smoothed = self.smooth(frames.transpose(1, 2)).transpose(1, 2)
        weighted = (frames + smoothed) * weights.unsqueeze(-1)
        return self.tags(weighted)
