"""Walks through B's operations in order and holds each against what A does there.

A *pair* is a value of B and the value of A that it stands for. Pairs are proposed by structure (value
numbering, then alignment) and by value; a proposal counts only when B's value is, within rounding, what
A's operations give in float64 **on B's own earlier pairs**. So an error is seen where it arises, however
small it is in the end, and what was merely carried along is not held against anyone. How much rounding
explains is what the same operations of A show in B's number format (:mod:`torchstone.verify.budget`).

A value without a pair is harmless as long as all that is made from it finds pairs again. What counts is
a result of the model that has none: the first operation on the way to it that fails is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from torchstone.compat import differ as doors
from torchstone.verify.differ import align
from torchstone.verify.differ.measure import Held, between_records, held, kept
from torchstone.verify.differ.replay import replay
from torchstone.verify.differ.trace import Op, Trace, Value, refs

__all__ = ["Failed", "Search"]

_CANDIDATES = 3
_FLOOR = 64
_FADED = 4
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Failed:
    """A place where B is not what A's operations give."""

    b: int
    """B's value."""
    a: int
    """The value of A that it stands for."""
    held: Held
    """How they compare."""
    output: str | None = None
    """Path of the model's result, where nothing before it is to blame by itself."""


class Search:
    """Compares two traces; :meth:`run` gives the first failure, or None."""

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self.pairs: dict[int, int] = align.leaves_paired(a, b)
        """B's values -> A's, as far as they were found right."""
        self.stand_in: dict[int, int] = {}
        """A's values -> B's."""
        self.compared = 0
        """Operations of B that were found right."""
        self.sampled = False
        """Whether a judgement rests on samples of values only."""
        self.failed: dict[int, Failed] = {}
        """B's operations that fail, by position."""
        self._elsewhere: set[int] = set()  # of the failed ones, those whose result stands elsewhere in A
        self._exact: set[int] = set()
        self._results: dict[int, tuple[list[Any] | None, list[Any] | None]] = {}
        for y, x in self.pairs.items():
            self._accept(y, x)

    @cached_property
    def makes_a(self) -> dict[int, int]:
        """Which operation of A made a value."""
        return self.a.maker()

    @cached_property
    def makes_b(self) -> dict[int, int]:
        """Which operation of B made a value."""
        return self.b.maker()

    @cached_property
    def numbered(self) -> dict[int, int]:
        """B's operations -> A's, by value numbering."""
        return align.numbered(self.a, self.b, self.pairs)

    @cached_property
    def aligned(self) -> dict[int, int]:
        """The others, aligned like texts."""
        taken = set(self.numbered.values())
        left_a = [i for i in self.a.live() if i not in taken]
        left_b = [j for j in self.b.live() if j not in self.numbered]
        return align.aligned(self.a, self.b, left_a, left_b)

    def run(self) -> Failed | None:
        """Look at every operation of B, then at the results.

        :returns: the first failure on the way to a result that is not what A's operations give.
        """
        for j in self.b.live():
            self._operation(j)
        wrong = [f for f in map(self._output, range(len(self.a.outputs))) if f is not None]
        if not wrong:
            return None
        firm = {y: x for y, x in self.pairs.items() if self.makes_b.get(y) not in self._elsewhere}
        behind = _cone([f.b for f in wrong], self.b, self.makes_b, firm)
        first = next((j for j in sorted(behind) if j in self.failed), None)
        return wrong[0] if first is None else self.failed[first]

    def behind(self, values: Iterable[int]) -> set[int]:
        """B's operations that made these values from ones that have pairs."""
        return _cone(values, self.b, self.makes_b, self.pairs)

    def behind_a(self, values: Iterable[int]) -> set[int]:
        """A's operations that made these values from ones that B has."""
        return _cone(values, self.a, self.makes_a, self.stand_in)

    # --- one operation ----------------------------------------------------------------------------

    def _operation(self, j: int) -> None:
        """Find the pairs of an operation's results, or note that it fails."""
        op = self.b.ops[j]
        wanted = [p for p, n in enumerate(op.outs) if n in self._used]
        structural = self.numbered.get(j)
        if structural is not None and self._all_right(j, structural, wanted, note=True):
            return
        if structural is None:
            structural = self.aligned.get(j)
            if structural is not None and self._all_right(
                j, structural, wanted, note=self._is_same_place(j, structural)
            ):
                return
        paired = [self._by_value(op.outs[p]) for p in wanted]  # each, not only up to the first without
        found = all(paired)
        self.compared += found
        if found and j in self.failed:
            self._elsewhere.add(j)

    def _all_right(self, j: int, i: int, wanted: Sequence[int], *, note: bool) -> bool:
        """Whether the results of B's operation are those of A's; a failure is noted if asked to."""
        mine, theirs = self.b.ops[j].outs, self.a.ops[i].outs
        matching = [(mine[p], theirs[p]) for p in wanted if p < len(theirs)]
        pairs = [(y, x) for y, x in matching if y is not None and x is not None]
        if len(pairs) < len(wanted):
            return False
        for y, x in pairs:
            judged = self.judge(y, x)
            if not judged.right:
                if note:
                    self.failed[j] = Failed(y, x, judged)
                return False
        for y, x in pairs:
            self._accept(y, x)
        self._results.pop(i, None)  # what follows reads B's values instead
        self.compared += 1
        return True

    def _is_same_place(self, j: int, i: int) -> bool:
        """Whether two aligned operations are the same one in two versions: name and surroundings."""
        mine, theirs = self.b.ops[j], self.a.ops[i]
        if mine.target.rstrip("_") != theirs.target.rstrip("_"):
            return False
        around_b = {self.pairs.get(n, self._namesake(n)) for n in self.cut(refs(mine))} - {None}
        around_a = set(self.cut_a(refs(theirs)))
        return bool(around_a & around_b) or not (around_a or around_b)

    def _namesake(self, y: int) -> int | None:
        """A's parameter of the same name, though it holds other numbers."""
        return self.a.parameters.get(self.b.values[y].name)

    def cut(self, values: Iterable[int]) -> list[int]:
        """The paired values, and leaves, that B makes these values from."""
        return _frontier(values, self.b, self.makes_b, self.pairs)

    def cut_a(self, values: Iterable[int]) -> list[int]:
        """The values that B has, and leaves, that A makes these values from."""
        return _frontier(values, self.a, self.makes_a, self.stand_in)

    def _by_value(self, number: int | None) -> bool:
        """Whether some value of A is what this one of B stands for."""
        if number is None:
            return True
        mine = self.b.values[number]
        theirs, prints = self._by_shape.get(mine.shape, ((), np.empty((0, 1))))
        if not theirs:
            return False
        near = align.close(align.fingerprint(mine)[None, :], prints)[0].nonzero()[0]
        apart = np.abs(prints[near] - align.fingerprint(mine)).sum(axis=1)
        for at in near[np.argsort(apart, kind="stable")][:_CANDIDATES]:
            if self.judge(number, theirs[at]).right:
                self._accept(number, theirs[at])
                self._results.pop(self.makes_a.get(theirs[at], -1), None)
                return True
        return False

    def _output(self, position: int) -> Failed | None:
        """How a result of the model fails, if it does."""
        name, x = self.a.outputs[position]
        y = self.b.outputs[position][1] if position < len(self.b.outputs) else None
        if x is None or y is None or self.pairs.get(y) == x:
            return None
        judged = self.judge(y, x)
        return None if judged.right else Failed(y, x, judged, output=name)

    # --- values -----------------------------------------------------------------------------------

    def _accept(self, y: int, x: int) -> None:
        self.pairs[y] = x
        self.stand_in.setdefault(x, y)
        one, other = self.b.values[y].tensor, self.a.values[x].tensor
        if (
            one is not None
            and other is not None
            and one.dtype == other.dtype
            and torch.equal(one, other)
        ):
            self._exact.add(y)

    def judge(self, y: int, x: int) -> Held:
        """Hold B's value against A's operations on B's earlier values."""
        if self._is_repeated(y, x):
            return Held(True, 0.0, 0.0)
        i = self.makes_a.get(x)
        got = self.b.values[y].tensor
        if i is not None and doors.is_unwritten(self.a.ops[i].target):
            return Held(True)
        truth, plain = self.expected(x)
        if got is not None and truth is not None:
            return self._unless_faded(y, x, held(got, truth, plain), got.dtype)
        return self._judge_by_samples(y, x, refs(self.a.ops[i]) if i is not None else [])

    def _unless_faded(self, y: int, x: int, judged: Held, dtype: torch.dtype) -> Held:
        """Hold what follows a failure to what its own rounding explains, without the usual floor.

        A fault that later operations make small is still one; what rejoins after another decomposition
        is as close as any other result.
        """
        behind = self.behind([y]) - self._elsewhere
        if not judged.right or not dtype.is_floating_point or not behind.intersection(self.failed):
            return judged
        bound = max(_FADED * torch.finfo(dtype).eps, 16 * (judged.eager_error or 0.0))
        if judged.error is None or judged.error <= bound:
            return judged
        text = "it is further off than its own rounding explains"
        return Held(False, judged.error, judged.eager_error, bound, text)

    def _is_repeated(self, y: int, x: int) -> bool:
        """Whether both sides have the same bits, from operands of the same bits: no need to compute."""
        i, j = self.makes_a.get(x), self.makes_b.get(y)
        one, other = self.b.values[y].tensor, self.a.values[x].tensor
        if i is None or j is None or one is None or other is None or self.numbered.get(j) != i:
            return False
        if any(n not in self._exact for n in refs(self.b.ops[j])):
            return False
        return one.dtype == other.dtype and torch.equal(one, other)

    def expected(self, x: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What A's value would be on B's earlier values: in float64, and in B's number format."""
        i = self.makes_a.get(x)
        if i is None:
            leaf = self._operand(x, float64=False)
            return leaf, leaf
        truth, plain = self.results(i)
        at = self.a.ops[i].outs.index(x)
        found = [
            None if r is None or not isinstance(r[at], torch.Tensor) else r[at] for r in (truth, plain)
        ]
        return found[0] if found[0] is not None else found[1], found[1]

    def results(self, i: int) -> tuple[list[Any] | None, list[Any] | None]:
        """The results of A's operation ``i`` on B's values, in float64 and in B's number format."""
        for k in sorted(_cone(self.a.ops[i].outs, self.a, self.makes_a, self.stand_in, through={i})):
            if k not in self._results:
                op = self.a.ops[k]
                self._results[k] = self._computed(op, float64=True), self._computed(op, float64=False)
        return self._results[i]

    def _computed(self, op: Op, *, float64: bool) -> list[Any] | None:
        function = doors.named_operator(op.target)
        if doors.is_random(function) or doors.is_unwritten(op.target):
            kept = [None if n is None else self.a.values[n].tensor for n in op.outs]
            return None if None in kept else kept
        operands = {n: self._operand(n, float64=float64) for n in refs(op)}
        if any(t is None for t in operands.values()):
            return None
        return replay(op, {n: t for n, t in operands.items() if t is not None}, float64=float64)

    def _operand(self, x: int, *, float64: bool) -> torch.Tensor | None:
        mine = self.stand_in.get(x)
        theirs = self.a.values[x].tensor
        if mine is not None:
            tensor = self.b.values[mine].tensor
            return tensor if float64 or tensor is None else self._usual(tensor, self.a.values[x])
        i = self.makes_a.get(x)
        if i is None:
            return theirs if float64 or theirs is None else self.narrow(theirs)
        results = self._results[i][0 if float64 else 1]
        if results is None and float64:
            results = self._results[i][1]
        found = None if results is None else results[self.a.ops[i].outs.index(x)]
        return found if isinstance(found, torch.Tensor) else None

    def _usual(self, tensor: torch.Tensor, like: Value) -> torch.Tensor:
        """B's value in A's number format, or as it is where A was widened."""
        dtype: torch.dtype = getattr(torch, like.dtype)
        if self.a.widened or not (tensor.is_floating_point() and dtype.is_floating_point):
            return tensor
        return tensor.to(dtype)

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf that only A has, in B's number format where A was widened."""
        return tensor.to(self._format) if self.a.widened and tensor.dtype == torch.float64 else tensor

    @cached_property
    def _format(self) -> torch.dtype:
        """The number format that most of B's parameters, else inputs, are in."""
        for numbers in (list(self.b.parameters.values()), self.b.inputs):
            named = [self.b.values[n].dtype for n in numbers if "float" in self.b.values[n].dtype]
            if named:
                dtype: torch.dtype = getattr(torch, max(set(named), key=named.count))
                return dtype
        return torch.float32

    def _judge_by_samples(self, y: int, x: int, operands: Sequence[int]) -> Held:
        """Hold recorded values against each other: no operation can be repeated on samples.

        An operation may be as far off as the worst of its operands was, with the usual room for luck.
        """
        errors = between_records(self.b.values[y], self.a.values[x])
        if errors is None:
            unknown = kept(self.b.values[y]) is None and kept(self.a.values[x]) is None
            return Held(unknown, text="its value is not known")
        self.sampled = self.sampled or self.b.values[y].tensor is None or self.a.values[x].tensor is None
        epsilon = _EPSILON.get(self.b.values[y].dtype, 0.0)
        bound = max(_FLOOR * epsilon, 16 * max(map(self._apart, operands), default=0.0))
        right = errors.relative is not None and errors.relative <= bound and not errors.mismatched
        return Held(right, errors.relative, None, bound, "" if right else "it differs from A's value")

    def _apart(self, x: int) -> float:
        """How far B's value is from A's, as recorded."""
        y = self.stand_in.get(x)
        found = None if y is None else between_records(self.b.values[y], self.a.values[x])
        return 0.0 if found is None else found.relative or 0.0

    @cached_property
    def _used(self) -> set[int]:
        """B's values that something reads."""
        read = {n for j in self.b.live() for n in refs(self.b.ops[j])}
        return read | {n for _, n in self.b.outputs if n is not None}

    @cached_property
    def _by_shape(self) -> dict[tuple[int, ...], tuple[list[int], np.ndarray[Any, Any]]]:
        """A's values and their fingerprints, by shape."""
        made = [n for i in self.a.live() for n in self.a.ops[i].outs if n is not None]
        leaves = (*self.a.inputs, *self.a.parameters.values())
        groups: dict[tuple[int, ...], list[int]] = {}
        for n in dict.fromkeys((*leaves, *made)):
            groups.setdefault(self.a.values[n].shape, []).append(n)
        return {
            shape: (found, np.stack([align.fingerprint(self.a.values[n]) for n in found]))
            for shape, found in groups.items()
        }


def _cone(
    values: Iterable[int | None],
    trace: Trace,
    makers: dict[int, int],
    known: dict[int, int],
    through: Iterable[int] = (),
) -> set[int]:
    """Operations that made these values, back to known ones and leaves.

    :param through: operations to go through although their results are known.
    """
    forced = set(through)
    found: set[int] = set()
    waiting = [n for n in values if n is not None]
    while waiting:
        n = waiting.pop()
        i = makers.get(n)
        if i is None or i in found or (n in known and i not in forced):
            continue
        found.add(i)
        waiting += refs(trace.ops[i])
    return found


def _frontier(
    values: Iterable[int], trace: Trace, makers: dict[int, int], known: dict[int, int]
) -> list[int]:
    """Known values and leaves that these values are made from."""
    found: dict[int, None] = {}
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        n = waiting.pop()
        i = makers.get(n)
        if i is None or n in known:
            found[n] = None
        elif i not in seen:
            seen.add(i)
            waiting += refs(trace.ops[i])
    return list(found)
