"""A CNN that learns scikit-learn's 8 x 8 digits in a second or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn

TRAINING = 1437
"""The first images are learnt from, the other 360 are held out."""
IMAGES_A_CALL = 4


class Net(nn.Module):
    """Images (B, 1, 8, 8) float32, pixels of 0 to 16, to logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(64 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Classify."""
        return self.head(self.features(images / 16 - 0.5).flatten(1))


def data() -> tuple[Tensor, Tensor]:
    """All 1,797 images (N, 1, 8, 8) float32 and labels (N,) int64."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)


def trained() -> Net:
    """The network, trained once a process."""
    net = Net()
    net.load_state_dict(learnt())
    return net.eval().requires_grad_(False)


@cache
def learnt() -> dict[str, Tensor]:
    """Train; the same weights in every process of a machine: one thread, and a seed of its own."""
    images, labels = data()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        for _ in range(6):
            for batch in torch.randperm(TRAINING).split(64):
                loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    torch.set_num_threads(threads)
    return net.state_dict()


def example() -> tuple[Tensor]:
    """Sixteen images."""
    return (data()[0][:16],)


def unseen() -> Iterator[tuple[tuple[Tensor], Tensor]]:
    """The images held out, a few a call, with their labels."""
    images, labels = data()
    for batch in torch.arange(TRAINING, len(images)).split(IMAGES_A_CALL):
        yield (images[batch],), labels[batch]


def accuracy(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> float:
    """Share of images whose largest logit is their label's."""
    return float((torch.cat(list(logits)).argmax(1) == torch.cat(list(labels))).double().mean())
