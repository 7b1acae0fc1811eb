"""One planted shape bug for each model of the corpus: the text that is replaced, and what by.

The model and its buggy twin differ in nothing else. Each clean model runs in eager and each twin raises
there: ``test_shapecheck_corpus.py`` sees to it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["MODELS", "PLANTS", "Plant"]

_DIRECTIVE = re.compile(r"^# torchstone: check .*\n(#.*\n)*", re.MULTILINE)
MODELS = Path(__file__).parent / "models"
"""Where the clean files are."""


class Plant(NamedTuple):
    """A bug."""

    model: str
    """The file, without its ending."""
    family: str
    """What kind of model it is in."""
    kind: str
    """What kind of mistake it is."""
    old: str
    """The text, which the file holds once."""
    new: str
    """The mistake."""

    @property
    def clean(self) -> str:
        """The file as it is."""
        return (MODELS / f"{self.model}.py").read_text(encoding="utf-8")

    @property
    def buggy(self) -> str:
        """The file with the mistake."""
        clean = self.clean
        assert clean.count(self.old) == 1, (
            f"{self.model}: {self.old!r} is there {clean.count(self.old)} times"
        )
        return clean.replace(self.old, self.new)

    @property
    def undeclared(self) -> str:
        """The file as it is, without the comment that says how to call the model."""
        return _DIRECTIVE.sub("", self.clean)

    @property
    def buggy_undeclared(self) -> str:
        """The same of the file with the mistake."""
        return _DIRECTIVE.sub("", self.buggy)


PLANTS = (
    Plant(
        "bert_classifier",
        "transformer",
        "concat dim",
        "torch.cat([states[-1], states[-2]], dim=-1)",
        "torch.cat([states[-1], states[-2]], dim=1)",
    ),
    Plant(
        "gpt2_reward",
        "transformer",
        "index rank",
        "index = last.view(-1, 1, 1).expand(-1, 1, hidden.size(-1))",
        "index = last.view(-1, 1).expand(-1, hidden.size(-1))",
    ),
    Plant(
        "llama_adapter",
        "transformer",
        "int-default argument",
        "layer.mlp = nn.Sequential(layer.mlp, Adapter(config.hidden_size))",
        "layer.mlp = nn.Sequential(layer.mlp, Adapter(config.intermediate_size))",
    ),
    Plant(
        "t5_fusion",
        "transformer",
        "wrong reshape",
        "joined = encoded.reshape(batch, count * length, -1)",
        "joined = encoded.reshape(batch, length, -1)",
    ),
    Plant(
        "vit_segmenter",
        "transformer",
        "missing slice",
        "self.vit(image).last_hidden_state[:, 1:]",
        "self.vit(image).last_hidden_state",
    ),
    Plant(
        "whisper_tagger",
        "transformer",
        "missing transpose",
        "smoothed = self.smooth(frames.transpose(1, 2)).transpose(1, 2)",
        "smoothed = self.smooth(frames).transpose(1, 2)",
    ),
    Plant(
        "clip_retrieval",
        "transformer",
        "missing transpose",
        "scores = image @ text.t() * self.temperature.exp()",
        "scores = image @ text * self.temperature.exp()",
    ),
    Plant(
        "decision_transformer",
        "reinforcement learning",
        "mask shape",
        "padding = ~mask.repeat_interleave(3, dim=1)",
        "padding = ~mask",
    ),
    Plant(
        "translator",
        "transformer",
        "mask transposed",
        "src_key_padding_mask=padding,",
        "src_key_padding_mask=padding.t(),",
    ),
    Plant(
        "perceiver",
        "transformer",
        "mask rank",
        "mask = mask[:, None, None, :]",
        "mask = mask[:, None, :]",
    ),
    Plant(
        "resnet",
        "convnet",
        "stride",
        "nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)",
        "nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)",
    ),
    Plant(
        "unet",
        "convnet",
        "channels after concat",
        "self.join = nn.ModuleList(Double(2 * b, b) for b in backwards[1:])",
        "self.join = nn.ModuleList(Double(b, b) for b in backwards[1:])",
    ),
    Plant("mobilenet", "convnet", "reduced dims", "x = x.mean([2, 3])", "x = x.mean([1, 2])"),
    Plant(
        "convnext",
        "convnet",
        "missing permute",
        "x = (self.gamma * x).permute(0, 3, 1, 2)",
        "x = self.gamma * x",
    ),
    Plant(
        "efficientnet",
        "convnet",
        "broadcast",
        "return x * scale[:, :, None, None]",
        "return x * scale",
    ),
    Plant(
        "lenet",
        "convnet",
        "flattened size",
        "self.fc1 = nn.Linear(16 * 5 * 5, 120)",
        "self.fc1 = nn.Linear(16 * 4 * 4, 120)",
    ),
    Plant(
        "swin_block",
        "convnet",
        "head split",
        "reshape(n, t, 3, self.heads, c // self.heads).permute",
        "reshape(n, t, 3, c // self.heads, self.heads).permute",
    ),
    Plant(
        "siamese",
        "convnet",
        "flattened size",
        "nn.Linear(64 * 6 * 6, 128)",
        "nn.Linear(64 * 7 * 7, 128)",
    ),
    Plant(
        "dlrm",
        "recommender",
        "interaction count",
        "self.top = mlp(width + count * (count - 1) // 2, 32, 1)",
        "self.top = mlp(width + count * (count + 1) // 2, 32, 1)",
    ),
    Plant(
        "deepfm",
        "recommender",
        "flattened size",
        "deep = self.deep(vectors.flatten(1))",
        "deep = self.deep(vectors.sum(1))",
    ),
    Plant(
        "two_tower",
        "recommender",
        "missing transpose",
        "logits = users @ items.T * self.log_scale.exp()",
        "logits = users @ items * self.log_scale.exp()",
    ),
    Plant(
        "dqn",
        "reinforcement learning",
        "stride",
        "self.conv3 = nn.Conv2d(64, 64, kernel_size=3, stride=1)",
        "self.conv3 = nn.Conv2d(64, 64, kernel_size=3, stride=2)",
    ),
    Plant(
        "ppo",
        "reinforcement learning",
        "missing reduction",
        "log_prob = log_prob.sum(-1)",
        "log_prob = log_prob.sum(0)",
    ),
    Plant(
        "lstm_tagger",
        "recurrent",
        "bidirectional width",
        "self.out = nn.Linear(2 * hidden, tags)",
        "self.out = nn.Linear(hidden, tags)",
    ),
    Plant(
        "packed_classifier",
        "recurrent",
        "concat dim",
        "both = torch.cat([last[0], last[1]], dim=1)",
        "both = torch.cat([last[0], last[1]], dim=0)",
    ),
    Plant(
        "seq2seq",
        "recurrent",
        "missing unsqueeze",
        "torch.tanh(self.key(memory) + self.query(query).unsqueeze(1))",
        "torch.tanh(self.key(memory) + self.query(query))",
    ),
    Plant(
        "crnn",
        "recurrent",
        "wrong permute",
        "features.reshape(b, c * h, w).permute(2, 0, 1)",
        "features.reshape(b, c * h, w).permute(0, 1, 2)",
    ),
    Plant(
        "tcn",
        "temporal convolution",
        "padding",
        "padding = (kernel - 1) * dilation",
        "padding = kernel * dilation",
    ),
    Plant(
        "wavenet",
        "temporal convolution",
        "unequal lengths",
        "total = sum(s[:, :, -length:] for s in skips)",
        "total = sum(skips)",
    ),
    Plant(
        "mamba",
        "state space",
        "missing slice",
        "u = self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2)",
        "u = self.conv(u.transpose(1, 2)).transpose(1, 2)",
    ),
    Plant(
        "switch_moe",
        "mixture of experts",
        "mask rank",
        "weight[mine].unsqueeze(-1)",
        "weight.unsqueeze(-1)",
    ),
    Plant(
        "topk_moe",
        "mixture of experts",
        "einsum subscripts",
        'torch.einsum("enh,ehd->end", hidden, self.w2)',
        'torch.einsum("enh,edh->end", hidden, self.w2)',
    ),
    Plant(
        "diffusion_unet",
        "diffusion",
        "skip channels",
        "ResBlock(4 * base, base, time), CrossAttention(base, context)",
        "ResBlock(2 * base, base, time), CrossAttention(base, context)",
    ),
    Plant(
        "dit",
        "diffusion",
        "missing unsqueeze",
        "x = x + gate1.unsqueeze(1) * self.attention(h, h, h, need_weights=False)[0]",
        "x = x + gate1 * self.attention(h, h, h, need_weights=False)[0]",
    ),
    Plant(
        "vae",
        "generative",
        "padding",
        "nn.ConvTranspose2d(base, 3, 4, stride=2, padding=1),",
        "nn.ConvTranspose2d(base, 3, 3, stride=2, padding=1),",
    ),
    Plant(
        "pointnet",
        "point cloud",
        "keepdim",
        "whole = self.deep(local).max(dim=2, keepdim=True)[0]",
        "whole = self.deep(local).max(dim=2)[0]",
    ),
    Plant(
        "graphsage",
        "graph",
        "broadcast",
        "mean = total / degree.clamp(min=1).unsqueeze(-1)",
        "mean = total / degree.clamp(min=1)",
    ),
    Plant(
        "nerf",
        "implicit field",
        "skip width",
        "width + (inputs if i == self.skip else 0)",
        "width + (3 if i == self.skip else 0)",
    ),
)
"""Every model once."""
