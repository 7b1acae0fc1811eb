"""Operations that are others in disguise, spelled out so that rules and formats can see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchstone.rewrite import driver
from torchstone.rewrite import graph as graphs

__all__ = ["expand"]

aten = torch.ops.aten
_COMPOSITES = (aten.einsum.default,)


def expand(module: fx.GraphModule) -> int:
    """Spell out composite operations as eager computes them; gives how many there were.

    ``einsum`` becomes permutations and one batched product.
    """
    count = 0
    for node in [n for n in module.graph.nodes if n.target in _COMPOSITES]:
        given = {f"at{i}": value for i, value in enumerate(node.args)}
        call: Any = node.target

        def spelled(call: Any = call, **rest: Any) -> Any:
            return call(*rest.values())

        traced = driver.trace(spelled, given, composite=False)
        assert traced is not None  # it never declines
        driver.inline(traced, node, driver.nodes_of(given))
        count += 1
    if count:
        graphs.sweep(module.graph)
        module.recompile()
    return count
