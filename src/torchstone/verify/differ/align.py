"""Aligns two sequences of operations: which of A's stands for which of B's. Pure NumPy.

First by *value numbering*: an operation with the same name and literals, on operands that correspond, is
the same operation, wherever it stands. What is left is aligned like two texts (Needleman and Wunsch,
1970, without a penalty for gaps), where a pair is worth more the more it has in common: name, literals,
shapes, the submodule, and values that are close at a few fixed places.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchstone.verify.differ.trace import Op, Trace, Value, literals, refs, sample

__all__ = ["aligned", "close", "fingerprint", "leaves_paired", "numbered"]

_PLACES = 8
_LONGEST = 4000
_CLOSE = 1e-2


def leaves_paired(a: Trace, b: Trace) -> dict[int, int]:
    """B's inputs, parameters and constants -> A's.

    Inputs by position; parameters by name where they hold the same numbers; what is left by value.
    """
    pairs = dict(zip(b.inputs, a.inputs, strict=False))
    for name, number in b.parameters.items():
        if name in a.parameters and _equal(a.values[a.parameters[name]], b.values[number]):
            pairs[number] = a.parameters[name]
    free = [n for n in _leaves(a) if n not in pairs.values()]
    for number in _leaves(b):
        if number in pairs:
            continue
        match = next((n for n in free if _equal(a.values[n], b.values[number])), None)
        if match is not None:
            pairs[number] = match
    return pairs


def _leaves(trace: Trace) -> list[int]:
    """Values that no operation made."""
    made = trace.maker()
    return [n for n in range(len(trace.values)) if n not in made]


def _equal(a: Value, b: Value) -> bool:
    """The same numbers, to the precision of the narrower format."""
    if a.shape != b.shape or a.tensor is None or b.tensor is None:
        return False
    x, y = a.tensor, b.tensor
    if x.dtype == y.dtype:
        return torch.equal(x, y)
    if not (x.is_floating_point() and y.is_floating_point()):
        return False
    narrow = x.dtype if torch.finfo(x.dtype).eps > torch.finfo(y.dtype).eps else y.dtype
    return torch.equal(x.to(narrow), y.to(narrow))


def numbered(a: Trace, b: Trace, pairs: dict[int, int]) -> dict[int, int]:
    """Value numbering: positions of B's operations -> positions of the same ones in A.

    :param pairs: B's leaves -> A's, see :func:`leaves_paired`.
    """
    known = dict(pairs)
    waiting: dict[Hashable, list[int]] = {}
    for i in a.live():
        waiting.setdefault(_numbering_key(a.ops[i], {n: n for n in refs(a.ops[i])}), []).append(i)
    found: dict[int, int] = {}
    for j in b.live():
        op = b.ops[j]
        if any(n not in known for n in refs(op)):
            continue
        same = waiting.get(_numbering_key(op, known))
        if not same:
            continue
        # the last one stands for all further repeats: an engine may compute once what another does twice
        i = same.pop(0) if len(same) > 1 else same[0]
        found[j] = i
        pairs_made = zip(a.ops[i].outs, op.outs, strict=False)
        known.update((y, x) for x, y in pairs_made if x is not None and y is not None)
    return found


def _numbering_key(op: Op, names: dict[int, int]) -> Hashable:
    return op.target, tuple(names[n] for n in refs(op)), _literal_key(op)


def _literal_key(op: Op) -> Hashable:
    return tuple(_text(leaf) for leaf in literals(op))


def _text(leaf: Any) -> str:
    # float64 stands for float32 where one side was widened
    return "float" if leaf in (torch.float32, torch.float64) else repr(leaf)


def aligned(a: Trace, b: Trace, left_a: Sequence[int], left_b: Sequence[int]) -> dict[int, int]:
    """Align the operations that numbering left over: positions in B -> positions in A.

    At most the first 4000 of each are looked at.
    """
    rows, columns = list(left_b[:_LONGEST]), list(left_a[:_LONGEST])
    if not rows or not columns:
        return {}
    worth = _worth(_faces(b, rows), _faces(a, columns))
    best = np.zeros((len(rows) + 1, len(columns) + 1), dtype=np.float32)
    for r in range(len(rows)):
        taken = np.maximum(best[r, 1:], best[r, :-1] + worth[r])
        best[r + 1, 1:] = np.maximum.accumulate(taken)
    found: dict[int, int] = {}
    r, c = len(rows), len(columns)
    while r and c:
        if best[r, c] == best[r - 1, c]:
            r -= 1
        elif best[r, c] == best[r, c - 1]:
            c -= 1
        else:
            r, c = r - 1, c - 1
            found[rows[r]] = columns[c]
    return found


@dataclass
class _Faces:
    """What can be seen of operations at a glance, as arrays with a row for each."""

    names: np.ndarray[Any, Any]
    literals: np.ndarray[Any, Any]
    shapes: np.ndarray[Any, Any]
    modules: np.ndarray[Any, Any]
    prints: np.ndarray[Any, Any]


def _faces(trace: Trace, positions: Sequence[int]) -> _Faces:
    ops = [trace.ops[i] for i in positions]
    first = [next((trace.values[n] for n in op.outs if n is not None), None) for op in ops]

    def coded(texts: list[Any]) -> np.ndarray[Any, Any]:
        return np.array([hash(text) for text in texts], dtype=np.int64)

    return _Faces(
        names=coded([op.target.rstrip("_") for op in ops]),
        literals=coded([_literal_key(op) for op in ops]),
        shapes=coded([None if value is None else value.shape for value in first]),
        modules=coded([op.origin.module for op in ops]),
        prints=np.stack([fingerprint(value) for value in first]),
    )


def _worth(b: _Faces, a: _Faces) -> np.ndarray[Any, Any]:
    """How much each pair is worth; 0 for operations that have nothing to do with each other."""

    def same(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        equal: np.ndarray[Any, Any] = x[:, None] == y[None, :]
        return equal

    shapes = same(b.shapes, a.shapes)
    near = shapes & close(b.prints, a.prints)
    worth = 3.0 * same(b.names, a.names)
    worth += same(b.literals, a.literals) * (worth > 0)
    worth += shapes * (worth > 0) + same(b.modules, a.modules) * (worth > 0)
    worth += 3.0 * near
    worth[(worth > 0) & ~same(b.names, a.names) & ~near] = 0.0
    result: np.ndarray[Any, Any] = worth.astype(np.float32)
    return result


def fingerprint(value: Value | None) -> np.ndarray[Any, Any]:
    """A few of a value's elements, at fixed places, in float64; NaN where there are none."""
    print_ = np.full(_PLACES, np.nan)
    kept = None if value is None else value.tensor if value.tensor is not None else value.sample
    if kept is None or kept.numel() == 0 or kept.is_complex():
        return print_
    few = sample(kept, _PLACES).to(torch.float64).cpu().numpy()
    print_[:] = np.resize(few, _PLACES)
    return print_


def close(b: np.ndarray[Any, Any], a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which fingerprints (rows of ``b`` by rows of ``a``) are within one per cent of each other."""
    found = np.zeros((len(b), len(a)), dtype=bool)
    with np.errstate(invalid="ignore"):
        scale = np.sqrt((np.where(np.isfinite(a), a, 0.0) ** 2).mean(axis=1))
        for r, row in enumerate(b):
            apart = np.abs(a - row[None, :])
            apart[a == row[None, :]] = 0.0  # infinities too
            found[r] = (apart <= _CLOSE * scale[:, None]).all(axis=1)
    return found
