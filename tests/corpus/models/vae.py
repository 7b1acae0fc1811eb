"""A convolutional variational autoencoder on 32 x 32 images."""

# torchstone: check VAE(), x=f32[B, 3, 32, 32]

from __future__ import annotations

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self, latent: int = 16, base: int = 8) -> None:
        super().__init__()
        self.base = base
        self.encoder = nn.Sequential(
            nn.Conv2d(3, base, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(base, 2 * base, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * base, 4 * base, 4, stride=2, padding=1),
            nn.Flatten(),
        )
        self.to_latent = nn.Linear(4 * base * 4 * 4, 2 * latent)
        self.from_latent = nn.Linear(latent, 4 * base * 4 * 4)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * base, 2 * base, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * base, base, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(base, 3, 4, stride=2, padding=1),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_var = self.to_latent(self.encoder(x)).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        decoded = self.decoder(self.from_latent(z).view(-1, 4 * self.base, 4, 4))
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(-1)
        error = (decoded - x).pow(2).flatten(1).sum(-1)
        return decoded, (error + kl).mean()
