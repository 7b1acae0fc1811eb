"""Four small models of different families, and a generator that plants faults in their graphs.

Every node of a graph is given a line of its own in a file named ``graph``, so that a test can tell which
node an answer speaks of.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchstone import compat
from torchstone.records import Divergence

aten = torch.ops.aten


class Attention(nn.Module):
    """Masked multi-head attention, written out or fused."""

    def __init__(self, width: int, heads: int, *, fused: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.fused = heads, fused

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, context), (self.v, context))
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5)
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Norm(nn.Module):
    """Layer norm written out, or fused."""

    def __init__(self, width: int, *, fused: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * self.weight + self.bias


class Decoder(nn.Module):
    """A causal transformer with rotary positions and gated feed-forward layers."""

    def __init__(self, *, fused: bool = False, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.attend = nn.ModuleList(Attention(width, 4, fused=fused) for _ in range(layers))
        self.norms = nn.ModuleList(Norm(width, fused=fused) for _ in range(2 * layers + 1))
        self.gate = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[1])[:, None] * 100.0 ** -torch.linspace(0, 1, x.shape[2] // 2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.rotate(self.embed(tokens))
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        for layer in range(len(self.attend)):
            h = self.norms[2 * layer](x)
            x = x + self.attend[layer](h, h, mask)
            a, b = self.gate[layer](self.norms[2 * layer + 1](x)).chunk(2, -1)
            x = x + self.down[layer](F.silu(a) * b)
        return self.head(self.norms[-1](x))


class Convnet(nn.Module):
    """Residual convolutions with batch norm, squeeze and excitation, and a padding mask."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        for norm in self.norms:
            assert isinstance(norm.running_mean, torch.Tensor)
            assert isinstance(norm.running_var, torch.Tensor)
            norm.running_mean.copy_(torch.randn(channels) * 0.1)
            norm.running_var.copy_(torch.rand(channels) + 0.5)
        self.squeeze = nn.Linear(channels, 4)
        self.excite = nn.Linear(4, channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.stem((image - 0.45) / 0.225)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = F.relu(norm(conv(x))).masked_fill(~mask, 0.0)
            scale = self.excite(F.relu(self.squeeze(y.mean((2, 3))))).sigmoid()
            x = x + y * scale[:, :, None, None]
        return self.head(F.avg_pool2d(x, 2).flatten(2).amax(-1))


class Recommender(nn.Module):
    """Embeddings, an LSTM over a masked history, pairwise interactions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.items = nn.Embedding(100, width)
        self.user = nn.Linear(6, width)
        self.history = nn.LSTM(width, width, batch_first=True)
        self.top = nn.Sequential(nn.Linear(3 * width + 3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, history: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        states, _ = self.history(self.items(history) / 0.5)
        weight = states.sum(-1).masked_fill(~seen, -30.0).softmax(-1)
        recent = (states * weight[..., None]).sum(1)
        mean = torch.where(seen[..., None], states, 0.0).sum(1) / seen.sum(1, keepdim=True)
        who = self.user(torch.log1p(user.abs()) - 0.5)
        fields = torch.stack([who, recent, mean], 1)
        pairs = fields @ fields.transpose(1, 2)
        crossed = torch.cat([pairs[:, 0, 1:], pairs[:, 1, 2:]], 1)
        return self.top(torch.cat([who, recent - mean, mean, crossed], 1)).sigmoid()


class Diffusion(nn.Module):
    """One level of a U-Net: group norms, time embedding, masked cross-attention, skip connection."""

    def __init__(self, channels: int = 16, *, fused: bool = False) -> None:
        super().__init__()
        self.time = nn.Linear(channels, 2 * channels)
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.attend = Attention(channels, 2, fused=fused)
        self.text = nn.Linear(12, channels)
        self.up = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(3))
        self.last = nn.Conv2d(channels, 4, 1)

    def forward(
        self, noisy: torch.Tensor, step: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        angle = step[:, None] * 100.0 ** -torch.linspace(0, 1, self.first.out_channels // 2)
        scale, shift = self.time(torch.cat([angle.sin(), angle.cos()], -1)).chunk(2, -1)
        skip = self.first(noisy)
        x = F.silu(self.norms[0](skip)) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        x = self.down(x)
        tokens = self.norms[1](x).flatten(2).transpose(1, 2)
        tokens = self.attend(tokens, self.text(text), mask[:, None, None, :])
        x = x + tokens.transpose(1, 2).unflatten(-1, x.shape[-2:])
        x = self.up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return noisy - self.last(F.silu(self.norms[2](x))) * 0.1


def _seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoder(**options: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _made(Decoder, **options), (torch.randint(0, 50, (2, 7), generator=_seeded()),)


def convnet(**options: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    image = torch.randn(2, 3, 12, 12, generator=_seeded())
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[1, :, 7:] = False
    return _made(Convnet, **options), (image, mask)


def recommender(**options: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    history = torch.randint(0, 100, (3, 6), generator=_seeded())
    seen = torch.arange(6)[None] < torch.tensor([6, 4, 2])[:, None]
    return _made(Recommender, **options), (torch.randn(3, 6, generator=_seeded()), history, seen)


def diffusion(**options: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    noisy = torch.randn(2, 4, 8, 8, generator=_seeded())
    text = torch.randn(2, 5, 12, generator=_seeded(4))
    mask = torch.arange(5)[None] < torch.tensor([5, 3])[:, None]
    return _made(Diffusion, **options), (noisy, torch.tensor([3.0, 40.0]), text, mask)


def _made(kind: type[nn.Module], **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return kind(**options).eval()


MODELS: dict[str, Callable[..., tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "decoder": decoder,
    "convnet": convnet,
    "recommender": recommender,
    "diffusion": diffusion,
}


# --- planting -------------------------------------------------------------------------------------


@dataclass
class Planted:
    """Two graphs that differ in one place."""

    right: fx.GraphModule
    wrong: fx.GraphModule
    lines: set[int]
    """Lines of the nodes that were changed or put in; of those taken out, where nothing was."""
    removed: bool = False
    """Whether nodes were taken out of ``wrong``."""
    what: str = ""


Plant = Callable[[fx.GraphModule, random.Random], Planted | None]


def graph_of(module: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    with torch.no_grad():
        program = torch.export.export(module, tuple(inputs))
    graph = compat.flat_module(program)
    for line, node in enumerate(graph.graph.nodes, start=1):
        mark(node, line)
    return graph


def mark(node: fx.Node, line: int) -> None:
    node.meta["stack_trace"] = f'File "graph", line {line}, in forward\n    {node.name}\n'


def line_of(node: fx.Node) -> int:
    return int(str(node.meta["stack_trace"]).partition("line ")[2].partition(",")[0])


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def _floats(graph: fx.GraphModule) -> list[fx.Node]:
    """Calls whose result is a float tensor that varies, and is used."""
    values = [(n, n.meta.get("val")) for n in _calls(graph) if n.users]
    return [
        n
        for n, v in values
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() >= 2 and v.numel() > 8
    ]


def _after(
    graph: fx.GraphModule, node: fx.Node, *steps: Callable[[fx.Graph, fx.Node], fx.Node]
) -> set[int]:
    """Put operations between a node and its users."""
    users, last, lines = list(node.users), node, set()
    for step in steps:
        with graph.graph.inserting_after(last):
            last = step(graph.graph, last)
        line = 1000 + len(lines)
        mark(last, line)
        last.meta["val"] = node.meta.get("val")
        lines.add(line)
    for user in users:
        user.replace_input_with(node, last)
    graph.recompile()
    return lines


def _cast(dtype: torch.dtype) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda graph, x: graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})


def _same(graph: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The node of that name in a copy."""
    return next(n for n in graph.graph.nodes if n.name == node.name)


def wrong_constant(graph: fx.GraphModule, dice: random.Random) -> Planted | None:
    found = [
        (n, k)
        for n in _calls(graph)
        for k, a in enumerate(n.args)
        if isinstance(a, float) and a not in (0.0, float("-inf"))
    ]
    if not found:
        return None
    node, at = dice.choice(found)
    wrong = copy.deepcopy(graph)
    changed = _same(wrong, node)
    old = changed.args[at]
    assert isinstance(old, float)
    changed.update_arg(at, old * 1.05 + 0.003)
    wrong.recompile()
    return Planted(graph, wrong, {line_of(changed)}, what=f"{node.target} {old}")


def dropped_cast(graph: fx.GraphModule, dice: random.Random) -> Planted | None:
    """The right graph rounds to bfloat16 on purpose; the wrong one has these casts folded away."""
    right = copy.deepcopy(graph)
    node = dice.choice(_floats(right))
    lines = _after(right, node, _cast(torch.bfloat16), _cast(torch.float32))
    return Planted(right, graph, lines, removed=True, what=f"after {node.target}")


def swapped_operands(graph: fx.GraphModule, dice: random.Random) -> Planted | None:
    found = [n for n in _calls(graph) if _swappable(n)]
    if not found:
        return None
    node = dice.choice(found)
    wrong = copy.deepcopy(graph)
    changed = _same(wrong, node)
    first = changed.args[0]
    if isinstance(first, list | tuple):
        changed.args = ([first[1], first[0], *first[2:]], *changed.args[1:])
    elif node.target == aten.where.self:
        changed.args = (first, changed.args[2], changed.args[1])
    else:
        changed.args = (changed.args[1], first, *changed.args[2:])
    wrong.recompile()
    return Planted(graph, wrong, {line_of(changed)}, what=str(node.target))


def _swappable(node: fx.Node) -> bool:
    first = node.args[0] if node.args else None
    if node.target in (aten.cat.default, aten.stack.default):
        assert isinstance(first, list | tuple)
        return first[0] is not first[1] and _shape(first[0]) == _shape(first[1])
    if node.target in (aten.sub.Tensor, aten.div.Tensor):
        return isinstance(node.args[1], fx.Node) and isinstance(first, fx.Node)
    return False


def _shape(node: Any) -> Any:
    return tuple(node.meta["val"].shape)


def permuted_output(graph: fx.GraphModule, dice: random.Random) -> Planted | None:
    wrong = copy.deepcopy(graph)
    node = dice.choice([n for n in _floats(wrong) if max(_shape(n)) > 2])
    dims = [d for d, n in enumerate(_shape(node)) if n > 2]
    if dice.random() < 0.5:
        how = (aten.flip.default, [dice.choice(dims)])
    else:
        how = (aten.roll.default, [1], [dice.choice(dims)])
    lines = _after(wrong, node, lambda g, x: g.call_function(how[0], (x, *how[1:])))
    return Planted(graph, wrong, lines, what=f"{how} after {node.target}")


def missing_mask(graph: fx.GraphModule, dice: random.Random) -> Planted | None:
    found = [n for n in _calls(graph) if n.target in (aten.masked_fill.Scalar, aten.where.self)]
    if not found:
        return None
    node = dice.choice(found)
    wrong = copy.deepcopy(graph)
    gone = _same(wrong, node)
    kept = gone.args[1] if node.target == aten.where.self else gone.args[0]
    assert isinstance(kept, fx.Node)
    gone.replace_all_uses_with(kept)
    wrong.graph.erase_node(gone)
    wrong.recompile()
    return Planted(graph, wrong, {line_of(node)}, removed=True, what=str(node.target))


def precision_drop(graph: fx.GraphModule, dice: random.Random) -> Planted | None:
    wrong = copy.deepcopy(graph)
    node = dice.choice(_floats(wrong))
    narrow = dice.choice((torch.bfloat16, torch.float16))
    lines = _after(wrong, node, _cast(narrow), _cast(torch.float32))
    return Planted(graph, wrong, lines, what=f"{narrow} after {node.target}")


PLANTS: dict[str, Plant] = {
    "wrong constant": wrong_constant,
    "dropped cast": dropped_cast,
    "swapped operands": swapped_operands,
    "permuted output": permuted_output,
    "missing mask": missing_mask,
    "precision drop": precision_drop,
}


def plant(graph: fx.GraphModule, inputs: Sequence[Any], kind: str, seed: str) -> Planted | None:
    """Plant a fault of a kind at a place that the seed chooses, where it changes the result at all.

    A flip before a sum, or a cast before a ReLU that gives zeros, is no fault.
    """
    dice = random.Random(f"{kind} {seed}")
    for _ in range(20):
        planted = PLANTS[kind](graph, dice)
        if planted is None:
            return None
        with torch.no_grad():
            pairs = zip(planted.right(*inputs), planted.wrong(*inputs), strict=True)
            if any(float((x - y).norm()) > 1e-6 * float(x.norm()) for x, y in pairs):
                return planted
    return None


def named(found: Divergence, planted: Planted) -> bool:
    """Whether an answer names what was planted, and nothing else."""
    sites = found.instead_of if planted.removed else found.ops
    lines = {site.origin.line for site in sites}
    return found.kind in ("OP", "STRUCTURE") and bool(lines) and lines <= planted.lines


# --- clean pairs ----------------------------------------------------------------------------------


class SplitSum(nn.Module):
    """A linear layer whose products are added up in another order: in parts, from the last."""

    def __init__(self, linear: nn.Linear, parts: int = 4) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = linear.weight, linear.bias, parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(x.chunk(self.parts, -1), self.weight.chunk(self.parts, -1), strict=True)
        total = sum(a @ b.T for a, b in reversed(list(pairs)))
        return total + self.bias


def with_split_sums(module: nn.Module) -> nn.Module:
    """A copy of a model with every linear layer that divides evenly summed in another order."""
    changed = copy.deepcopy(module)
    for parent in list(changed.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.in_features % 4 == 0:
                setattr(parent, name, SplitSum(child))
    return changed


def with_folded_norms(module: Convnet) -> nn.Module:
    """A copy of the convnet with batch norms folded into the convolutions' weights."""
    changed = copy.deepcopy(module)
    for k, (conv, norm) in enumerate(zip(module.convs, module.norms, strict=True)):
        folded = torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)  # type: ignore[type-var]
        changed.convs[k], changed.norms[k] = folded, nn.Identity()
    return changed


class WrittenOut(nn.Module):
    """The recommender's LSTM, cell by cell."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        state = cell = x.new_zeros(len(x), self.lstm.hidden_size)
        states = []
        for step in x.unbind(1):
            gates = F.linear(step, self.lstm.weight_ih_l0, self.lstm.bias_ih_l0)
            gates = gates + F.linear(state, self.lstm.weight_hh_l0, self.lstm.bias_hh_l0)
            i, f, g, o = gates.chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1), None


def with_cells(module: Recommender) -> nn.Module:
    changed = copy.deepcopy(module)
    changed.history = WrittenOut(changed.history)  # type: ignore[assignment]
    return changed


def decomposed(module: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule:
    """The model as core ATen operations: norms, attention and activations in their parts."""
    with torch.no_grad():
        program = torch.export.export(module, tuple(inputs))
        return compat.flat_module(program.run_decompositions())
