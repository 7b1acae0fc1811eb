"""Says what the difference is: which operations, and how B's differ from A's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchstone.compat import differ as doors
from torchstone.verify.differ.measure import held
from torchstone.verify.differ.replay import replay, wide
from torchstone.verify.differ.search import Failed, Search
from torchstone.verify.differ.trace import ALIAS, Op, Ref, Trace, refs

__all__ = ["Answer", "explain", "relation"]

_TRIED = 1 << 20
"""Elements beyond which no simple change is tried: each try reads all of them."""
_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Answer:
    """What is at fault, as positions of operations in the two traces."""

    kind: Literal["OP", "MODULE", "STRUCTURE"]
    """As in :class:`~torchstone.records.Divergence`."""
    text: str
    """One sentence."""
    b_named: tuple[int, ...]
    """B's operations that are to blame."""
    a_named: tuple[int, ...]
    """A's operations that they stand for."""
    b_ops: tuple[int, ...]
    """All of B's operations from values that are right to the first result that is not."""
    a_ops: tuple[int, ...]
    """A's operations to the same result."""
    failed: Failed
    """The result."""


def explain(search: Search, failed: Failed) -> Answer:
    """Tell what is at fault from what merely stands near it."""
    j, i = search.makes_b.get(failed.b), search.makes_a.get(failed.a)
    inserted = search.behind([failed.b])
    removed = search.behind_a([failed.a])
    if failed.output is None and j is not None and i is not None:
        inserted |= {j}
        removed |= {i}
        before = _that_change_something(search.b, sorted(inserted - {j}))
        if not _is_right_on_its_operands(search, (j, i), narrower=bool(before)):
            return _operation_itself(search, failed, sorted(inserted), sorted(removed))
        others = before, sorted(removed - {i})
    else:
        others = _that_change_something(search.b, sorted(inserted)), sorted(removed)
        inserted = inserted or ({j} if j is not None else set())
        removed = removed or ({i} if i is not None else set())
    mine, theirs = _on_the_way(search, failed, others)
    kind, text = _between(search, failed, mine, theirs)
    at = () if j is None else (j,)
    return Answer(
        kind=kind,
        text=text,
        b_named=tuple(mine) or at,
        a_named=tuple(theirs) or (() if mine or i is None else (i,)),
        b_ops=tuple(sorted(inserted)),
        a_ops=tuple(sorted(removed)),
        failed=failed,
    )


def _is_right_on_its_operands(search: Search, pair: tuple[int, int], *, narrower: bool) -> bool:
    """Whether A's operation on the operands that B's really had gives what B's gave.

    :param narrower: whether it may give fewer bits than A's, its operands having lost them before.
    """
    mine, theirs = search.b.ops[pair[0]], search.a.ops[pair[1]]
    reads, instead = refs(mine), refs(theirs)
    if len(reads) != len(instead):
        return False
    tensors = [search.b.values[n].tensor for n in reads]
    if any(t is None for t in tensors):
        return True  # only samples were kept: it cannot be told from what comes before it
    operands = {x: t for x, t in zip(instead, tensors, strict=True) if t is not None}
    truth, plain = replay(theirs, operands, float64=True), replay(theirs, operands, float64=False)
    results = truth or plain
    if results is None:
        return False
    for position, y in enumerate(mine.outs):
        got = None if y is None else search.b.values[y].tensor
        if y not in search.pairs and got is not None and position < len(results):
            usual = None if plain is None else plain[position]
            if not narrower and _is_narrower(search, got, theirs, position):
                return False
            usual = got if usual is not None and got.dtype != usual.dtype and narrower else usual
            if not held(got, results[position], usual).right:
                return False
    return True


def _is_narrower(search: Search, got: torch.Tensor, theirs: Op, position: int) -> bool:
    """Whether B gives 16 bits where A gives more."""
    x = theirs.outs[position] if position < len(theirs.outs) else None
    kind = "" if x is None else search.a.values[x].dtype
    return str(got.dtype).removeprefix("torch.") in _NARROW and kind not in _NARROW


def _on_the_way(
    search: Search, failed: Failed, others: tuple[list[int], list[int]]
) -> tuple[list[int], list[int]]:
    """Of what only one side has, what lies between the values that both go on from and the result.

    A mask that is left out leaves what it was computed by without a use, which is no fault of its own.
    """
    mine, theirs = others
    j, i = search.makes_b.get(failed.b), search.makes_a.get(failed.a)
    if theirs and not mine:
        read = [failed.b] if failed.output is not None or j is None else refs(search.b.ops[j])
        starts = {search.pairs[n] for n in read if n in search.pairs}
        return mine, _downstream(search.a, theirs, starts) or theirs
    if mine and not theirs:
        read = [failed.a] if failed.output is not None or i is None else refs(search.a.ops[i])
        starts = {search.stand_in[n] for n in read if n in search.stand_in}
        return _downstream(search.b, mine, starts) or mine, theirs
    return others


def _downstream(trace: Trace, positions: Sequence[int], starts: set[int]) -> list[int]:
    """Those of the operations that are computed from these values, and change something."""
    reached, kept = set(starts), []
    for k in positions:
        if reached.intersection(refs(trace.ops[k])):
            reached.update(n for n in trace.ops[k].outs if n is not None)
            kept.append(k)
    return _that_change_something(trace, kept)


# --- the operation itself -------------------------------------------------------------------------


def _operation_itself(
    search: Search, failed: Failed, mine: Sequence[int], theirs: Sequence[int]
) -> Answer:
    j, i = search.makes_b[failed.b], search.makes_a[failed.a]
    op, instead = search.b.ops[j], search.a.ops[i]
    casts = [k for k in _that_change_something(search.b, mine) if k != j]
    text = "; ".join(_differences(search, op, instead))
    narrow = search.b.values[failed.b].dtype
    if not text and narrow in _NARROW and search.a.values[failed.a].dtype not in _NARROW:
        text = f"B does {_short(op)} in {narrow}, A in {search.a.values[failed.a].dtype}"
    if not text:
        same = op.target.rstrip("_") == instead.target.rstrip("_")
        text = f"B's {_short(op)} is less precise than A's on the same operands" if same else ""
        text = text or f"B does {_short(op)} where A does {_short(instead)}"
    return Answer("OP", text, (*casts, j), (i,), tuple(mine), tuple(theirs), failed)


def _differences(search: Search, op: Op, instead: Op) -> Iterator[str]:
    """How two versions of an operation differ: order of operands, then literals."""
    mine = [search.pairs.get(n) for n in refs(op)]
    theirs = refs(instead)
    if mine != theirs and None not in mine and sorted(map(str, mine)) == sorted(map(str, theirs)):
        yield f"B swaps the operands of {_short(op)}"
    names = doors.argument_names(op.target)
    pairs = list(itertools.zip_longest(op.args, instead.args))
    pairs += [(op.kwargs.get(k), instead.kwargs.get(k)) for k in sorted({*op.kwargs, *instead.kwargs})]
    labels = [*names[: max(len(op.args), len(instead.args))], *sorted({*op.kwargs, *instead.kwargs})]
    for label, (one, other) in zip(labels, pairs, strict=False):
        if isinstance(one, Ref) or isinstance(other, Ref) or _same_literal(one, other):
            continue
        yield f"{_short(op)} has {label}={one} in B, {other} in A"


def _same_literal(one: Any, other: Any) -> bool:
    floats = (torch.float32, torch.float64)
    if isinstance(one, list | tuple) and any(isinstance(item, Ref) for item in one):
        return True
    return bool(one == other or (one in floats and other in floats) or isinstance(one, torch.device))


# --- what lies between ----------------------------------------------------------------------------


def _that_change_something(trace: Trace, positions: Sequence[int]) -> list[int]:
    """The operations without those that only hand their operand on: views, copies, exact casts."""
    return [k for k in positions if not _hands_on(trace, trace.ops[k])]


def _hands_on(trace: Trace, op: Op) -> bool:
    if op.target == ALIAS:
        return True
    made = next((trace.values[n].tensor for n in op.outs if n is not None), None)
    for n in refs(op)[:1]:
        given = trace.values[n].tensor
        if made is not None and given is not None and made.numel() == given.numel():
            return torch.equal(wide(made).flatten(), wide(given).flatten())
    return False


def _between(
    search: Search, failed: Failed, mine: Sequence[int], theirs: Sequence[int]
) -> tuple[Literal["OP", "MODULE", "STRUCTURE"], str]:
    """What B does instead of, beside or without what A does."""
    where = _before(search, failed)
    only_a, only_b = _listed(search.a.ops, theirs), _listed(search.b.ops, mine)
    seen = _provable(search, failed)
    if mine and not theirs:
        return "STRUCTURE", f"only B does {only_b} {where}{seen}"
    if theirs and not mine:
        return "STRUCTURE", f"B lacks {only_a}, which A does {where}{seen}"
    if mine:
        kind: Literal["OP", "MODULE"] = "OP" if len(mine) == 1 == len(theirs) else "MODULE"
        return kind, f"B does {only_b} where A does {only_a} {where}{seen}"
    j = search.makes_b.get(failed.b)
    if failed.output is None and j is not None:
        differences = _differences(search, search.b.ops[j], search.a.ops[search.makes_a[failed.a]])
        text = next(differences, None) or _reads_other(search, j, search.makes_a[failed.a])
        return "OP", f"{text}{seen}"
    return "STRUCTURE", f"B returns another value as {failed.output}{seen}"


def _reads_other(search: Search, j: int, i: int) -> str:
    """Which operand is not the one that A reads."""
    op = search.b.ops[j]
    for position, (y, x) in enumerate(zip(refs(op), refs(search.a.ops[i]), strict=False), start=1):
        if search.pairs.get(y) != x:
            if y not in search.makes_b and search.b.values[y].name == search.a.values[x].name:
                return f"{search.b.values[y].name} holds other values in B than in A"
            mine = _called(search.b, search.makes_b.get(y), y)
            theirs = _called(search.a, search.makes_a.get(x), x)
            return f"operand {position} of {_short(op)} is {mine} in B, {theirs} in A"
    return f"B's {_short(op)} reads other values than A's"


def _called(trace: Trace, maker: int | None, value: int) -> str:
    if maker is None:
        return trace.values[value].name
    return f"the result of {_listed(trace.ops, [maker])}"


def _before(search: Search, failed: Failed) -> str:
    if failed.output is not None:
        return f"before the result {failed.output}"
    return f"before {_short(search.b.ops[search.makes_b[failed.b]])}"


def _listed(ops: Sequence[Op], positions: Sequence[int]) -> str:
    names = [_short(ops[k]) for k in positions]
    for k, name in zip(positions, names, strict=True):
        kind = ops[k].kwargs.get("dtype")
        if name.startswith("aten._to_copy") and kind is not None:
            names[list(positions).index(k)] = f"a cast to {str(kind).removeprefix('torch.')}"
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _short(op: Op) -> str:
    return op.target.rpartition(".")[0]


def _provable(search: Search, failed: Failed) -> str:
    got, truth = search.b.values[failed.b].tensor, search.expected(failed.a)[0]
    found = None if got is None or truth is None else relation(got, truth)
    return "" if found is None else f": B's result is A's {found}"


def relation(got: torch.Tensor, truth: torch.Tensor) -> str | None:
    """What turns the right result into B's, where one simple change does: it is tried, not guessed."""
    if not 2 <= got.numel() <= _TRIED or not truth.is_floating_point() or not got.is_floating_point():
        return None
    usual = truth.to(got.dtype)
    if held(got, truth, usual).right:
        return None
    for text, changed in _changes(truth, got):
        if changed.shape == got.shape and held(got, changed, changed.to(got.dtype)).right:
            return text
    return None


def _changes(truth: torch.Tensor, got: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    dims = range(truth.dim())
    yield "negated", -truth
    if truth.dim() <= 4:
        for order in itertools.permutations(dims):
            yield f"with its dimensions permuted to {order}", truth.permute(order).reshape(got.shape)
    for d in dims:
        yield f"reversed along dimension {d}", truth.flip(d)
        for by in range(1, min(truth.shape[d], 9)):
            yield f"shifted by {by} along dimension {d}", truth.roll(by, d)
    if got.shape == truth.shape:
        size = float(truth.square().sum())
        if size and float(got.abs().max()):
            factor = float((got.to(truth.dtype) * truth).sum()) / size
            yield f"times {factor:.6g}", truth * factor
        offset = float((got.to(truth.dtype) - truth).mean())
        yield f"plus {offset:.6g}", truth + offset
