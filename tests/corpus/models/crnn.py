"""CRNN for reading text lines: convolution, columns as time steps, bidirectional LSTM, CTC logits."""

# torchstone: check CRNN(), image=f32[B, 1, 32, W], W="4*k, 16..256"

from __future__ import annotations

import torch
from torch import nn


class BidirectionalLSTM(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(inputs, hidden, bidirectional=True)
        self.out = nn.Linear(2 * hidden, outputs)

    def forward(self, x):
        recurrent, _ = self.rnn(x)
        steps, batch, width = recurrent.size()
        out = self.out(recurrent.view(steps * batch, width))
        return out.view(steps, batch, -1)


class CRNN(nn.Module):
    def __init__(self, height: int = 32, classes: int = 37, hidden: int = 24) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d((2, 1), (2, 1)),
        )
        rows = height // 8
        self.rnn = nn.Sequential(
            BidirectionalLSTM(24 * rows, hidden, hidden), BidirectionalLSTM(hidden, hidden, classes)
        )

    def forward(self, image):
        features = self.cnn(image)
        b, c, h, w = features.size()
        columns = features.reshape(b, c * h, w).permute(2, 0, 1)
        return torch.log_softmax(self.rnn(columns), dim=2)
