"""What a set of graph nodes would take, by the roofline, with fusion as a compiler does it.

Pointwise operations and reductions that feed each other are one kernel: what passes between them is
never stored. Matrix products, convolutions and attention are kernels of their own, as the library's are.
A kernel takes its launch and the larger of FLOPs over the peak and bytes over the bandwidth. What
depends on constants alone is computed once, ahead of time, and costs nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from torchstone.bench import roofline, timer
from torchstone.ops import flops, moved
from torchstone.records.inventory import Peaks
from torchstone.rewrite import graph as graphs

__all__ = ["Weigher", "concrete", "random_like", "stopwatch"]

_LAUNCH_S = {"cpu": 4e-6, "cuda": 2.5e-6}
_ROUNDS = 7
_MOST_S = 0.5


@dataclass(frozen=True)
class Weigher:
    """Seconds of nodes on one device."""

    peaks: Peaks
    """What the device does at best."""
    device: torch.device
    """The device."""

    def seconds(self, nodes: Iterable[fx.Node], constant: Callable[[fx.Node], bool]) -> float:
        """What the nodes take together.

        :param nodes: of one graph, with fake values.
        :param constant: whether a node depends on constants alone.
        """
        called = [n for n in nodes if n.op == "call_function" and not graphs.is_view(n)]
        todo = [n for n in called if not constant(n) and n.meta.get("val") is not None]
        return sum(self._kernel(kernel) for kernel in _kernels(todo))

    def _kernel(self, kernel: Sequence[fx.Node]) -> float:
        inside = set(kernel)
        given = {graphs.origin(n) for node in kernel for n in node.all_input_nodes} - inside
        kept = [n for n in kernel if not n.users or any(u not in inside for u in _readers(n))]
        bytes_ = sum(moved.touched(t) for n in {*given, *kept} for t in _tensors(n))
        work, dtype = 0, "float32"
        for node in kernel:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: concrete(n.meta["val"]))
            out = concrete(node.meta["val"])
            found = flops.count(node.target, args, kwargs, out)
            work += found.products + found.other
            dtype = next((str(t.dtype).removeprefix("torch.") for t in _tensors(node)), dtype)
        launch = _LAUNCH_S.get(self.device.type, _LAUNCH_S["cuda"])
        return launch + roofline.least_s(self.peaks, work, bytes_, dtype)


def _kernels(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Nodes that a compiler would put into one kernel."""
    group = {n: [n] for n in nodes}
    for node in nodes:
        if not _fusible(node):
            continue
        for source in {graphs.origin(n) for n in node.all_input_nodes}:
            if source in group and _fusible(source) and group[source] is not group[node]:
                merged = group[source] + group[node]
                for one in merged:
                    group[one] = merged
    return list({id(kernel): kernel for kernel in group.values()}.values())


def _fusible(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags or _sweeps(target)
    )


def _sweeps(target: Any) -> bool:
    return target._schema.name.partition("::")[2] in _SWEEPS


_SWEEPS = frozenset(
    """
    sum mean prod amax amin max min argmax argmin var std var_mean logsumexp softmax log_softmax
    layer_norm rms_norm group_norm batch_norm instance_norm gelu leaky_relu elu silu mish hardtanh
    hardswish hardsigmoid softplus relu6 relu clamp cat pad masked_fill where
    """.split()  # noqa: SIM905  one name a line would be a page
)
"""Composite operations that a compiler fuses like their parts."""


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads it, through views as well."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if user.op == "call_function" and graphs.is_view(user) else [user]
    return found or [*node.users]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    leaves = _pytree.tree_leaves(concrete(node.meta.get("val")))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def concrete(value: Any) -> Any:
    """Fake tensors as meta tensors of the sizes that the program was captured at."""
    return _pytree.tree_map(_concrete, value)


def _concrete(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = ([_concrete(n) for n in ns] for ns in (value.shape, value.stride()))
    return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")


def random_like(value: Any, device: torch.device) -> Any:
    """Something of the shape, strides and dtype of a fake value, to time with."""
    if not isinstance(value, torch.Tensor):
        return _concrete(value)
    meta = _concrete(value)
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
    return made.normal_() if made.is_floating_point() else made.fill_(1)


def stopwatch(
    calls: Sequence[Callable[..., Any]], given: tuple[Any, ...], device: torch.device
) -> list[float]:
    """Median seconds of each function on the same inputs, timed in turns.

    On a GPU the cache is emptied before each call. Calls of more than half a second are timed twice.
    """
    flusher = timer.Flusher(device) if device.type == "cuda" else None
    with torch.no_grad():
        timed = [timer.Timed(call, given, None, flusher) for call in calls]
        rounds = _ROUNDS if max(t.seconds for t in timed) < _MOST_S else 2
        found = [[t.samples(1, True)[0] for t in timed] for _ in range(rounds)]
    return [statistics.median(samples) for samples in zip(*found, strict=True)]
