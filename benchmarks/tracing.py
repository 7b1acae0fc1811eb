"""What a capture costs: the light tracer against Dynamo, make_fx and torch.export.

python benchmarks/tracing.py [--layers 12] [--width 256] [--rounds 7]

CPU seconds of this process on one thread, each way in turn, in one run; all keep batch and length
symbolic where they can. Dynamo's own capture stands for ``torch.compile(dynamic=True)`` without a
compiler behind it. Afterwards each graph answers at a size that it was not captured at.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import torchstone.errors

Capture = Callable[[], tuple[int, Callable[[torch.Tensor], torch.Tensor]]]


class Block(nn.Module):
    """A transformer block with attention written out."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.before(x)).view(split).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.between(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = nn.Sequential(*[Block(options.width) for _ in range(options.layers)]).eval()
    x, other = torch.randn(2, 16, options.width), torch.randn(5, 33, options.width)
    captures = ways(model, x)
    times: dict[str, list[float]] = {name: [] for name in captures}
    for round_ in range(options.rounds + 1):
        for name, capture in captures.items():
            torch._dynamo.reset()
            started = time.process_time()
            nodes, graph = capture()
            if round_:  # the first pays for imports
                times[name].append(time.process_time() - started)
            else:
                print(f"{name:<28} {nodes:>5} nodes, at another size: {at(graph, model, other)}")
    dynamo = statistics.median(times["Dynamo, dynamic"])
    for name, seconds in times.items():
        ratios = sorted(d / s for d, s in zip(times["Dynamo, dynamic"], seconds, strict=True))
        print(
            f"{name:<28} {1e3 * statistics.median(seconds):7.0f} ms of CPU time, "
            f"{dynamo / statistics.median(seconds):5.2f}x cheaper than Dynamo "
            f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        )


def ways(model: nn.Module, x: torch.Tensor) -> dict[str, Capture]:
    """Each way to capture: gives the number of nodes and a callable."""
    parameters = dict(model.named_parameters())
    axes = {0: Dim("B", min=1, max=64), 1: Dim("S", min=1, max=512)}

    def lifted(state: dict[str, torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(model, state, (value,))
        return result

    def light() -> tuple[int, Any]:
        ranges = {"B": (1, 64), "S": (1, 512)}
        program = torchstone.trace(model, x, dims=({0: "B", 1: "S"},), ranges=ranges)
        return len(program.module.graph.nodes), program

    def dynamo() -> tuple[int, Any]:
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(model, backend=keep, dynamic=True)
        compiled(x)
        return sum(len(graph.graph.nodes) for graph in graphs), compiled

    def symbolic(*, pre_dispatch: bool) -> tuple[int, Any]:
        graph = make_fx(lifted, tracing_mode="symbolic", pre_dispatch=pre_dispatch)(parameters, x)
        return len(graph.graph.nodes), lambda value: graph(parameters, value)

    def export() -> tuple[int, Any]:
        program = torch.export.export(model, (x,), dynamic_shapes=(axes,))
        return len(program.graph.nodes), program.module()

    return {
        "torchstone.trace": light,
        "Dynamo, dynamic": dynamo,
        "make_fx, symbolic": lambda: symbolic(pre_dispatch=False),
        "make_fx, symbolic, early": lambda: symbolic(pre_dispatch=True),
        "torch.export": export,
    }


def at(graph: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor) -> str:
    """Whether the graph answers as the model at a size that it was not captured at."""
    try:
        error = float((graph(x) - model(x)).abs().max())
    except (RuntimeError, AssertionError, torchstone.errors.TorchstoneError) as refused:
        return f"refuses ({type(refused).__name__})"
    return f"largest difference {error:.1e}"


if __name__ == "__main__":
    main()
