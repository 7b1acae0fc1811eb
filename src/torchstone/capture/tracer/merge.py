"""Two traces to one graph: what differs between them is a size, and gets its expression.

The graph is make_fx's, with numbers in it; the recording is of a run at other sizes and says which
expression Python computed each number by. A number that is the same in both is a constant, one that is
not must be an expression of sizes, and anything else that differs is control flow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torchstone.capture.tracer.purity import Refused, values, written
from torchstone.capture.tracer.recorder import Constant, Entry, Recording, Value
from torchstone.capture.tracer.sizes import Axis, Expression, Operation, Question, Site, axes, evaluate
from torchstone.records import Dim

__all__ = ["UNBOUNDED", "Guard", "Layout", "Merged", "merge"]


_GRAD_MODE = torch._C._set_grad_enabled
_SIZE = torch.ops.aten.sym_size.int
_LIFTED = {torch.ops.aten.lift_fresh.default: torch.ops.aten.lift_fresh_copy.default}
"""What make_fx writes for a tensor made of Python values."""
UNBOUNDED = 2**62
"""Upper end of a dim of which nothing is declared."""
_EXACT = 4096
"""Sizes up to which a question is answered for every one of them."""
_TELLING = (0, 1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 127, 1000, 4099)


@dataclass(frozen=True)
class Layout:
    """Where the named dims are."""

    places: Mapping[tuple[int, int], tuple[int, str]]
    """(input, axis) to (factor, dim): ``4*B`` is (4, "B")."""
    dims: tuple[Dim, ...]
    first: Mapping[str, int]
    """Sizes of the graph's trace."""
    second: Mapping[str, int]
    """Sizes of the recording."""

    def samples(self, names: set[str]) -> Iterator[dict[str, int]]:
        """Sizes to answer a question about these dims at: all where there are few, else telling ones."""
        chosen = [dim for dim in self.dims if dim.name in names]
        choices: list[Sequence[int]] = [
            range(-(-d.low // d.multiple) * d.multiple, d.high + 1, d.multiple) for d in chosen
        ]
        for fewer in (_TELLING, ()):
            if math.prod(map(_count, choices)) > _EXACT:
                choices = [_ends_and(dim, fewer) for dim in chosen]
        for sizes in product(*choices):
            yield dict(zip((d.name for d in chosen), sizes, strict=True))


def _count(sizes: Sequence[int]) -> int:
    """Its length, which ``len`` does not say of a range beyond ``sys.maxsize``."""
    return (sizes.stop - sizes.start) // sizes.step if isinstance(sizes, range) else len(sizes)


def _ends_and(dim: Dim, others: Sequence[int]) -> list[int]:
    ends = (dim.low, dim.low + 1, dim.high - 1, dim.high, (dim.low + dim.high) // 2)
    return sorted(
        {size for size in (*ends, *others) if dim.low <= size <= dim.high and size % dim.multiple == 0}
    )


class Guard(NamedTuple):
    """A condition on input sizes under which the graph stands for the function."""

    text: str
    """``S % 8 == 0``."""
    question: Question
    """Of axes of the inputs."""
    site: Site | None
    """Who asked."""


class Merged(NamedTuple):
    """The graph for all sizes."""

    module: fx.GraphModule
    """Functional; inputs are parameters and inputs, sizes are nodes."""
    guards: tuple[Guard, ...]
    """Where no range was declared that could be checked instead."""


def merge(module: fx.GraphModule, recording: Recording, layout: Layout) -> Merged | Refused:
    """The graph with an expression for every number that depends on a size.

    :param module: make_fx's, at ``layout.first``; changed in place.
    :returns: or why there is none, and the line.
    """
    return _Merger(module, recording, layout).run()


class _Unmergeable(Exception):  # noqa: N818  never leaves this module
    def __init__(self, reason: str, site: Site | None, *, by_chance: bool = False) -> None:
        super().__init__(reason)
        self.refused = Refused(reason, site, by_chance)


class _Merger:
    def __init__(self, module: fx.GraphModule, recording: Recording, layout: Layout) -> None:
        self.module = module
        self.recording = recording
        self.layout = layout
        self.nodes: dict[int, fx.Node] = {}
        self.numbers: dict[fx.Node, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Shape of every value in the graph's own trace."""
        self.emitted: dict[Expression, fx.Node] = {}
        self.literals: dict[int, Site | None] = {}
        """Numbers that are the same in both traces, and where the first of each is."""
        self.made: dict[int, int] = {}
        """Value -> position of the operation that makes it; inputs are left out."""
        self.last_use: dict[int, int] = {}
        """Value -> position of the last operation that takes it; results are used at the end."""
        for position, entry in enumerate(recording.entries):
            self.last_use.update({v.number: position for v in values((entry.args, entry.kwargs))})
            for number in entry.results:
                self.made.setdefault(number, position)
        end = len(recording.entries)
        self.last_use.update({v.number: end for v in values(recording.outputs)})

    def run(self) -> Merged | Refused:
        try:
            self._walk()
            self._told_apart()
            guards = tuple(self._guards())
        except _Unmergeable as error:
            return self._cause(error).refused
        self.module.graph.lint()
        self.module.recompile()
        return Merged(self.module, guards)

    def _cause(self, error: _Unmergeable) -> _Unmergeable:
        """The question behind a difference, where Python asked one that is answered differently."""
        try:
            for _ in self._guards():
                pass
        except _Unmergeable as asked:
            return asked
        return error

    def _walk(self) -> None:
        graph = self.module.graph
        entries = iter(enumerate(self.recording.entries))
        for node in list(graph.nodes):
            if node.op == "placeholder":
                self._bind(node, len(self.numbers))
            elif node.op == "call_function" and node.target is _GRAD_MODE:
                graph.erase_node(node)
            elif node.op == "call_function" and node.target is operator.getitem:
                self._item(node)
            elif node.op == "call_function":
                self._operation(node, entries)
            elif node.op == "output":
                _, left = next(entries, (0, None))
                if left is not None:
                    raise self._differs(left, "nothing more")
                self._output(node)

    def _bind(self, node: fx.Node, number: int) -> None:
        self.nodes[number], self.numbers[node] = node, number
        self.shapes.setdefault(number, tuple(node.meta["val"].shape))

    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        leaves = pytree.tree_flatten(source.meta["val"])[0]
        results = iter(source.meta["torchstone_results"])
        places = [next(results) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        if isinstance(node.meta.get("val"), torch.Tensor):
            number = places[index]  # type: ignore[index]  # of a flat tuple or list
            assert number is not None
            self._bind(node, number)

    def _operation(self, node: fx.Node, entries: Iterator[tuple[int, Entry]]) -> None:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise _Unmergeable(f"{getattr(target, '__name__', target)} is no plain operation", None)
        value = node.meta.get("val")
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if not tensors and not target._schema.is_mutable:
            return
        position, entry = next(entries, (0, None))
        same = entry is not None and target in (entry.target, _LIFTED.get(entry.target))
        if entry is None or not same or len(entry.results) != len(tensors):
            raise self._differs(entry, str(target))
        with self.module.graph.inserting_before(node):
            node.args = self._merged(node.args, entry.args, entry)
            node.kwargs = self._merged(node.kwargs, entry.kwargs, entry)
        if target._schema.is_mutable:
            self._functional(node, entry, position)
        node.meta["torchstone_results"] = entry.results
        # as torch.export writes it
        node.meta["nn_module_stack"] = {path: (path, kind) for path, kind in entry.modules}
        if entry.site is not None:  # in the form that torch keeps it in, so that export hands it on
            site = entry.site
            node.meta["stack_trace"] = f'  File "{site.file}", line {site.line}, in {site.function}'
        if isinstance(value, torch.Tensor):
            self._bind(node, entry.results[0])

    def _differs(self, entry: Entry | None, other: str) -> _Unmergeable:
        sizes = ", ".join(f"{k}={v}" for k, v in self.layout.second.items())
        found = "nothing more" if entry is None else str(entry.target)
        text = f"at other sizes ({sizes}) it runs {found} where at the example's it runs {other}"
        last = entry or (self.recording.entries[-1] if self.recording.entries else None)
        return _Unmergeable(f"{text}: a branch or a loop depends on a size", last.site if last else None)

    def _merged(self, first: Any, second: Any, entry: Entry) -> Any:
        """An argument of both traces as the one of the graph."""
        if isinstance(first, fx.Node) or isinstance(second, Value | Constant):
            self._same_tensor(first, second, entry)
            return first
        if isinstance(first, tuple | list) and isinstance(second, tuple | list):
            if len(first) == len(second):
                return type(first)(self._merged(a, b, entry) for a, b in zip(first, second, strict=True))
        elif isinstance(first, Mapping) and isinstance(second, Mapping):
            if first.keys() == second.keys():
                return {key: self._merged(first[key], second[key], entry) for key in first}
        elif type(first) is int and type(second) is int:
            return self._number(first, second, entry)
        elif first == second or (first != first and second != second):
            return first
        what = "a float is computed from a size" if isinstance(first, float) else "an argument"
        text = f"{what}: {first!r} at the example's sizes, {second!r} at others, in {entry.target}"
        raise _Unmergeable(text, entry.site)

    def _same_tensor(self, first: Any, second: Any, entry: Entry) -> None:
        if isinstance(second, Constant):
            held = getattr(self.module, str(first.target), None) if isinstance(first, fx.Node) else None
            if isinstance(held, torch.Tensor) and (
                held is second.tensor
                or (held.shape == second.tensor.shape and torch.equal(held, second.tensor))
            ):
                return
            text = "a tensor that is made from Python values differs from trace to trace"
            raise _Unmergeable(text, entry.site)
        if not isinstance(second, Value) or self.numbers.get(first) != second.number:
            text = f"{entry.target} takes another tensor at other sizes"
            raise _Unmergeable(f"{text}: a branch or a loop depends on a size", entry.site)

    def _number(self, first: int, second: int, entry: Entry) -> Any:
        if first == second:
            self.literals.setdefault(first, entry.site)
            return first
        found = next(self._explanations(first, second, entry), None)
        if found is None:
            text = f"{first} at the example's sizes is {second} at others: a number that depends on"
            raise _Unmergeable(f"{text} sizes in a way that cannot be followed", entry.site)
        return self._emit(found)

    def _explanations(self, first: int, second: int, entry: Entry) -> Iterator[Expression]:
        """Expressions with these two values: dims, what Python computed, operands' sizes, multiples."""
        leaves = [Axis(*place) for place in self.layout.places]
        operands = [
            Axis(v.number, axis)
            for v in values((entry.args, entry.kwargs))
            for axis in range(len(self.shapes[v.number]))
        ]
        computed = list(self.recording.ledger.expressions)
        for expression in (*leaves, *computed, *operands):
            if self._pair(expression) == (first, second):
                yield expression
        for leaf in (*leaves, *operands):
            a, b = self._pair(leaf)  # type: ignore[misc]  # leaves have sizes in both
            if a and b and first % a == 0 and second % b == 0 and first // a == second // b:
                yield Operation("mul", leaf, first // a)

    def _pair(self, expression: Expression) -> tuple[int, int] | None:
        """Its values in the two traces; None where it speaks of what the graph does not have (yet)."""
        leaves = set(axes(expression))
        if not all(leaf.value in self.shapes for leaf in leaves):
            return None
        first = {leaf: self.shapes[leaf.value][leaf.axis] for leaf in leaves}
        second = {leaf: self.recording.shapes[leaf.value][leaf.axis] for leaf in leaves}
        try:
            return evaluate(expression, first), evaluate(expression, second)
        except ZeroDivisionError:
            return None

    def _emit(self, expression: Expression) -> Any:
        if isinstance(expression, int):
            return expression
        if expression not in self.emitted:
            graph = self.module.graph
            if isinstance(expression, Axis):
                args = (self.nodes[expression.value], expression.axis)
                node = graph.call_function(_SIZE, args)
            else:
                sides = (self._emit(expression.left), self._emit(expression.right))
                node = graph.call_function(getattr(operator, expression.name), sides)
            self.emitted[expression] = node
        return self.emitted[expression]

    def _functional(self, node: fx.Node, entry: Entry, position: int) -> None:
        """Make an in-place operation on a value that nobody else sees a plain one."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        changed = list(written(entry))
        packet = getattr(torch.ops.aten, target._opname.removesuffix("_"), None)
        plain = getattr(packet, target._overloadname, None) if target._opname.endswith("_") else None
        if plain is None or len(changed) != 1 or plain._schema.is_mutable:
            raise _Unmergeable(f"{target} writes in place in a way that cannot be undone", entry.site)
        if self._seen_elsewhere(changed[0], position):
            raise _Unmergeable(f"{target} writes to memory that another tensor shows", entry.site)
        node.target = plain

    def _seen_elsewhere(self, number: int, position: int) -> bool:
        """Whether another tensor of the same memory, made before the write, is used after it."""
        memory = self.recording.storages[number]
        return any(
            other != number
            and self.recording.storages[other] == memory
            and self.made.get(other, -1) < position < last
            for other, last in self.last_use.items()
        )

    def _output(self, node: fx.Node) -> None:
        leaves = pytree.tree_leaves(node.args[0], is_leaf=lambda leaf: isinstance(leaf, fx.Node))
        for first, second in zip(leaves, self.recording.outputs, strict=True):
            known = self.numbers.get(first)
            if isinstance(second, Constant):
                held = getattr(self.module, first.target, None)
                if held is None or not torch.equal(held, second.tensor):
                    raise _Unmergeable(
                        "a result made from Python values differs from trace to trace", None
                    )
            elif not isinstance(second, Value) or known != second.number:
                raise _Unmergeable("at other sizes it returns another tensor", None)

    def _told_apart(self) -> None:
        """See that no constant is an expression that happens to have the same value at both sizes."""
        for expression in self.recording.ledger.expressions:
            pair, known = self._pair(expression), self._of_dims(expression)
            if pair is None or known is None or pair[0] != pair[1] or pair[0] not in self.literals:
                continue
            if len(set(islice(self._values_of(known), _EXACT))) > 1:
                text = f"{self._text(known)} is {pair[0]} at both sizes that were traced, not at all"
                where = self.literals[pair[0]]
                raise _Unmergeable(f"{text}: it cannot be told from a constant", where, by_chance=True)

    def _values_of(self, expression: Expression) -> Iterator[int | None]:
        for sizes in self._points(expression):
            try:
                yield evaluate(expression, sizes)
            except ZeroDivisionError:
                yield None

    def _points(self, *expressions: Expression) -> Iterator[dict[Axis, int]]:
        leaves = {leaf for expression in expressions for leaf in axes(expression)}
        place = {leaf: self.layout.places[leaf.value, leaf.axis] for leaf in leaves}
        for sizes in self.layout.samples({dim for _, dim in place.values()}):
            yield {leaf: factor * sizes[dim] for leaf, (factor, dim) in place.items()}

    def _of_dims(self, expression: Expression) -> Expression | None:
        """The expression in terms of the inputs' axes; None where that is not known."""
        if isinstance(expression, int):
            return expression
        if isinstance(expression, Operation):
            left, right = self._of_dims(expression.left), self._of_dims(expression.right)
            if left is None or right is None:
                return None
            if isinstance(left, int) and isinstance(right, int):
                try:
                    return evaluate(Operation(expression.name, left, right), {})
                except ZeroDivisionError:
                    return None
            return Operation(expression.name, left, right)
        pair = self._pair(expression)
        if pair is None:
            return None
        if pair[0] == pair[1] and (expression.value, expression.axis) not in self.layout.places:
            return pair[0]
        return next((Axis(*p) for p in self.layout.places if self._pair(Axis(*p)) == pair), None)

    def _guards(self) -> Iterator[Guard]:
        seen = set()
        for question in self.recording.ledger.questions:
            left, right = self._of_dims(question.left), self._of_dims(question.right)
            if left is None or right is None:
                self._same_in_both(question)
                continue
            asked = Question(question.name, left, right, question.outcome, question.site)
            if isinstance(left, int) and isinstance(right, int):
                continue
            other = next(
                (p for p in self._points(left, right) if asked.answer(p) is not asked.outcome), None
            )
            if other is None:
                continue
            text = asked.text({Axis(*p): _named(f, d) for p, (f, d) in self.layout.places.items()})
            ours = {axis: self.shapes[axis.value][axis.axis] for e in (left, right) for axis in axes(e)}
            if asked.answer(ours) is not asked.outcome:
                other = ours
            declared = [d for d in self.layout.dims if d.name in self._dims_of(left, right)]
            if other is ours or any(d.high < UNBOUNDED for d in declared):
                where = ", ".join(sorted({f"{self._name(a)} = {n}" for a, n in other.items()}))
                raise _Unmergeable(
                    f"Python asks whether {text}, and the answer differs at {where}", question.site
                )
            if text not in seen:
                seen.add(text)
                yield Guard(text if asked.outcome else f"not ({text})", asked, question.site)

    def _same_in_both(self, question: Question) -> None:
        left, right = self._pair(question.left), self._pair(question.right)
        if left is None or right is None:
            return
        ends = [
            Question(question.name, a, b, True, None).answer({})
            for a, b in zip(left, right, strict=True)
        ]
        if ends[0] is not ends[1]:
            raise _Unmergeable("Python branches on the size of an intermediate result", question.site)

    def _dims_of(self, *expressions: Expression) -> set[str]:
        return {self.layout.places[a.value, a.axis][1] for e in expressions for a in axes(e)}

    def _name(self, axis: Axis) -> str:
        return _named(*self.layout.places[axis.value, axis.axis])

    def _text(self, expression: Expression) -> str:
        from torchstone.capture.tracer.sizes import render

        return render(expression, {Axis(*p): _named(f, d) for p, (f, d) in self.layout.places.items()})


def _named(factor: int, dim: str) -> str:
    return dim if factor == 1 else f"{factor}*{dim}"
