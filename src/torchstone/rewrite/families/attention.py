"""Attention written out, softmax(s Q Kᵀ + M) V, as the library's fused operation.

The fused operation never stores the scores. Whether it pays depends on the library's kernels, for
dtype, head size and mask, so both ways are timed. Tensors of three dims are given a head of their own:
fused kernels want four. Repeated keys and values stay repeated: told of groups (``enable_gqa``),
PyTorch falls back to storing the scores wherever its Flash kernel does not apply, as in float32.

A row of scores with no key left is NaN in the long form (0/0) and 0 in the fused one, so that case is
computed from the mask and put in. :func:`settle` drops what the mask's values, where they are
constants, show to be needless, and knows a causal mask by its values.
"""

from __future__ import annotations

import math
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchstone.rewrite import graph as graphs
from torchstone.rewrite.families.arguments import ADD, DIV, MUL, known, made, number, same_dtype
from torchstone.rewrite.pattern import Op, V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES", "settle"]

aten = torch.ops.aten
_PRODUCT = (aten.matmul.default, aten.bmm.default)
_LOWEST = -1e30
"""A score that is filled with less is no key's: beside any finite score its exponential is zero."""


def _attention(call: SimpleNamespace, scale: float, mask: Any = None) -> Any:
    """The fused operation on (.., T, D), (.., D, S) and (.., S, E); NotImplemented where it is none."""
    q, k, v = call.q, call.kt.transpose(-2, -1), call.v
    if not same_dtype(q, k, v) or q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim():
        return NotImplemented
    batch = zip(q.shape[:-2], k.shape[:-2], v.shape[:-2], strict=True)
    if not all(_equal(a, b) and _equal(a, c) for a, b, c in batch):
        return NotImplemented  # shapes that are broadcast are not the fused kernels'
    if not (_last(call.dim, q.dim()) and number(scale) and 0 < scale < math.inf):
        return NotImplemented
    if mask is not None and not _fits(mask, q, k):
        return NotImplemented
    if mask is not None and mask.dim() == 1:
        mask = mask[None]
    if q.dim() == 4:
        mask = (
            mask[None] if mask is not None and mask.dim() == 3 else mask
        )  # kernels know two and four dims
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    q, k, v = (t.unsqueeze(1) for t in (q, k, v))
    mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).squeeze(1)


def _equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _last(dim: Any, dims: int) -> bool:
    return dim in (-1, dims - 1)


def _fits(mask: Any, q: Any, k: Any) -> bool:
    """Whether a mask is one for scores of (.., T, S): all keys there, other dims equal or one."""
    scores = (*q.shape[:-1], k.shape[-2])
    if not 1 <= mask.dim() <= len(scores) or not _equal(mask.shape[-1], scores[-1]):
        return False
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    return all(_equal(size, 1) or _equal(size, wanted) for size, wanted in pairs)


def _masked(call: SimpleNamespace, scale: float, hidden: Any, fill: Any) -> Any:
    """Attention where ``hidden`` scores are replaced by ``fill``."""
    if hidden.dtype != torch.bool or not number(fill) or fill > _LOWEST:
        return NotImplemented
    out = _attention(call, scale, hidden.logical_not())
    if out is NotImplemented:
        return out
    none = hidden.all(-1, keepdim=True)
    if fill == -math.inf:
        return out.masked_fill(none, math.nan)
    if fill < torch.finfo(out.dtype).min:
        return NotImplemented
    return torch.where(none, call.v.mean(-2, keepdim=True), out)  # all keys alike


def _filled(call: SimpleNamespace, scale: float) -> Any:
    """Softmax(s Q Kᵀ where seen, -inf elsewhere) V = fused attention with that mask."""
    return _masked(call, scale, call.mask, call.fill)


def _chosen(call: SimpleNamespace, scale: float) -> Any:
    """Softmax(s Q Kᵀ where seen, -inf elsewhere) V = fused attention with that mask."""
    if call.mask.dtype != torch.bool:
        return NotImplemented
    return _masked(call, scale, call.mask.logical_not(), call.fill)


def _added(call: SimpleNamespace, scale: float) -> Any:
    """Softmax(s Q Kᵀ + M) V = fused attention with M added."""
    if not isinstance(call.mask, torch.Tensor) or not same_dtype(call.q, call.mask):
        return NotImplemented
    out = _attention(call, scale, call.mask)
    if out is NotImplemented:
        return out
    return out.masked_fill(torch.isneginf(call.mask).all(-1, keepdim=True), math.nan)


def _plain(call: SimpleNamespace, scale: float) -> Any:
    """Softmax(s Q Kᵀ) V = fused attention."""
    return _attention(call, scale)


_SEEN = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
_HIDDEN = (_SEEN.logical_not(), _SEEN.logical_not()[1], _SEEN.logical_not()[None])
_BIAS = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4)
_MASKS: dict[str, dict[str, Any]] = {
    "": {},
    "filled": {"mask": _HIDDEN, "fill": (-math.inf, -math.inf, -1e33, -1e9)},
    "chosen": {"mask": [m.logical_not() for m in _HIDDEN], "fill": (-math.inf, -1e33)},
    "added": {"mask": (_BIAS, _BIAS[0], _BIAS[None], _BIAS.masked_fill(_SEEN.logical_not(), -math.inf))},
}
_FUNCTIONS = {"": _plain, "filled": _filled, "chosen": _chosen, "added": _added}
_PLAIN = op(_PRODUCT, V("q"), V("kt"))


def _masked_scores(scores: Op, mask: str) -> Op:
    if mask == "filled":
        return op(aten.masked_fill.Scalar, scores, V("mask"), V("fill"))
    if mask == "chosen":
        return op(aten.where.ScalarOther, V("mask"), scores, V("fill"))
    return op(ADD, scores, V("mask")) if mask == "added" else scores


def _rule(scale: str, mask: str, scores: Op | None = None) -> Rule:
    """For scores that are scaled (``times``, ``over`` or not), then masked in one of the ways."""
    function = _FUNCTIONS[mask]

    def replacement(call: SimpleNamespace) -> Any:
        given = call.scale if scale else 1.0
        if not number(given) or not given:
            return NotImplemented
        return function(call, 1 / given if scale == "over" else float(given))

    replacement.__doc__ = function.__doc__
    scaled = op(MUL if scale == "times" else DIV, _PLAIN, V("scale")) if scale else _PLAIN
    inside = _masked_scores(scaled, mask) if scores is None else scores
    domain = {"dim": (-1, 3, 2), **_MASKS[mask], **({"scale": (0.5, 3, -1.0)} if scale else {})}
    words = ["attention", scale, mask, "" if scores is None else "baddbmm"]
    batch = "*b" if scores is None else "b"
    return made(
        "_".join(word for word in words if word),
        op(_PRODUCT, op(aten.softmax.int, inside, V("dim")), V("v")),
        family="attention",
        shapes={"q": f"{batch} 3 d", "kt": f"{batch} d 4", "v": f"{batch} 4 e"},
        constants=domain,
        measured=True,
    )(replacement)


RULES: tuple[Rule, ...] = (
    *(_rule(scale, mask) for scale in ("", "times", "over") for mask in _FUNCTIONS),
    _rule("", "added", op(aten.baddbmm.default, V("mask"), V("q"), V("kt"))),
)
"""Ways to write attention."""


def settle(module: fx.GraphModule) -> int:
    """What the values of constant masks show, in a graph whose rules have fired.

    Fused attention with a mask that hides nothing needs none; one that hides what comes after, with as
    many keys as queries, is causal, so that half of the work is skipped; what is done for rows without
    keys goes where there is none. Equal for every input.

    :param module: normalized; it is changed.
    :returns: how many operations were simplified.
    """
    values, count = _Values(module), 0
    for node in list(module.graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            count += _settled(node, values)
        elif node.target is aten.masked_fill.Scalar and values.all_false(node.args[1]):
            count += _replaced(node, node.args[0])
        elif node.target is aten.where.self and values.all_false(node.args[0]):
            count += _replaced(node, node.args[2])
    if count:
        graphs.sweep(module.graph)
        module.recompile()
    return count


class _Values:
    """Values of nodes that depend on constants alone, as they are asked for."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._changed = graphs.changed_state(module.graph)
        self._known: dict[fx.Node, torch.Tensor | None] = {}

    def of(self, node: Any) -> torch.Tensor | None:
        """The node's value; None where it depends on more, or is no tensor."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "get_attr" and str(node.target) not in self._changed:
            held: Any = reduce(getattr, str(node.target).split("."), self._module)
            return held if isinstance(held, torch.Tensor) else None
        if node.op != "call_function" or not graphs.pure(node):
            return None
        given = {n: self.of(n) for n in node.all_input_nodes}
        if any(v is None for v in given.values()):
            return None
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        assert callable(node.target)
        with torch.no_grad():
            found = node.target(*args, **kwargs)
        return found if isinstance(found, torch.Tensor) else None

    def all_false(self, node: Any) -> bool:
        """Whether it is a constant of no true element."""
        value = self.of(node)
        return value is not None and value.dtype == torch.bool and not bool(value.any())


def _replaced(node: fx.Node, by: Any) -> bool:
    if not isinstance(by, fx.Node) or str(graphs.values(by)) != str(graphs.values(node)):
        return False
    node.replace_all_uses_with(by)
    return True


def _settled(node: fx.Node, values: _Values) -> bool:
    """Take the mask from a fused attention where its value shows what it does."""
    query, key, _, mask, dropout, causal = node.args
    value = values.of(mask)
    if value is None or causal or not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
        return False
    seen = value if value.dtype == torch.bool else value == 0
    if value.dtype != torch.bool and not bool((seen | torch.isneginf(value)).all()):
        return False
    if bool(seen.all()):
        node.args = (*node.args[:3], None, dropout, False)
        return True
    sizes = [query.meta["val"].shape[-2], key.meta["val"].shape[-2]]
    if not known(sizes) or sizes[0] != sizes[1] or list(seen.shape[-2:]) != sizes:
        return False
    if not torch.equal(seen, torch.ones_like(seen).tril()):
        return False  # of several masks, all must be the same
    node.args = (*node.args[:3], None, dropout, True)
    return True
