"""An MLP on the Wisconsin breast cancer data; Polars scales and encodes the columns before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl
import torch
from torch import Tensor, nn

SIZE_CLASSES = 4
"""Quartiles of the nuclei's mean area, an embedding each."""
ROWS_A_CALL = 4


class Net(nn.Module):
    """Features (B, 30) float32 and size class (B,) int64 to the logit (B,) of a benign tumour."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Embedding(SIZE_CLASSES, 8)
        self.layers = nn.Sequential(
            nn.Linear(38, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
        )

    def forward(self, features: Tensor, size_class: Tensor) -> Tensor:
        """Score."""
        return self.layers(torch.cat([features, self.size(size_class)], dim=1)).squeeze(1)


def table() -> pl.DataFrame:
    """The 569 rows in a fixed random order: 30 columns, ``benign`` and ``held_out``."""
    from sklearn.datasets import load_breast_cancer

    cancer = load_breast_cancer()
    order = torch.randperm(len(cancer.target), generator=torch.Generator().manual_seed(0)).numpy()
    frame = pl.DataFrame(cancer.data[order], schema=list(cancer.feature_names), orient="row")
    return frame.with_columns(
        benign=pl.Series(cancer.target[order]), held_out=pl.int_range(pl.len()) >= 0.7 * pl.len()
    )


def preprocess(frame: pl.DataFrame) -> pl.DataFrame:
    """Scale every column by the training rows' mean and deviation; encode the size as its quartile."""
    features = [name for name in frame.columns if name not in ("benign", "held_out")]
    training = frame.filter(~pl.col("held_out"))
    edges = [training["mean area"].quantile(q / SIZE_CLASSES) for q in range(1, SIZE_CLASSES)]
    size = pl.sum_horizontal((pl.col("mean area") > edge).cast(pl.Int64) for edge in edges)
    scaled = [
        ((pl.col(name) - training[name].mean()) / training[name].std()).clip(-8, 8).cast(pl.Float32)
        for name in features
    ]
    return frame.select(*scaled, size.alias("size_class"), "benign", "held_out")


def tensors(rows: pl.DataFrame) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The model's inputs and the labels of preprocessed rows."""
    features = rows.drop("size_class", "benign", "held_out").to_torch()
    return (features, rows["size_class"].to_torch()), rows["benign"].to_torch()


def trained() -> Net:
    """Train; the same weights in every process of a machine: one thread, and a seed of its own."""
    (features, size_class), benign = tensors(preprocess(table()).filter(~pl.col("held_out")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        for _ in range(60):
            logits = net(features, size_class)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, benign.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.set_num_threads(threads)
    return net.eval().requires_grad_(False)


def example() -> tuple[Tensor, Tensor]:
    """Sixteen preprocessed rows."""
    return tensors(preprocess(table()).head(16))[0]


def unseen() -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """The rows held out, a few a call, with their labels."""
    rows = preprocess(table()).filter(pl.col("held_out"))
    for start in range(0, len(rows), ROWS_A_CALL):
        yield tensors(rows.slice(start, ROWS_A_CALL))


def auc(logits: Sequence[Tensor], benign: Sequence[Tensor]) -> float:
    """Area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(torch.cat(list(benign)).numpy(), torch.cat(list(logits)).float().numpy()))
