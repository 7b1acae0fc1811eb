"""Sizes that remember where they come from, and the questions that Python asked of them. Pure: no torch.

A tracer that hands Python plain integers for sizes bakes in whatever Python does with them. Here a size
is an ``int`` of its own class: arithmetic gives another one with its expression, and every comparison,
which is where control flow begins, is written down with its outcome. So a branch on a size is known
without having been taken both ways, and ``x.view(B * S, -1)`` is known to be ``B * S`` and not 14.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["OPERATORS", "Axis", "Expression", "Ledger", "Operation", "Question", "Site", "Size", "axes"]


class Site(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Axis:
    """The size of one axis of a traced value."""

    value: int
    """Number of the value: inputs first, then results in the order that they were made."""
    axis: int
    """Which of its axes."""


@dataclass(frozen=True)
class Operation:
    """An operation on sizes; ``name`` is one of :data:`OPERATORS`."""

    name: str
    left: Expression
    right: Expression


Expression = int | Axis | Operation

OPERATORS: dict[str, tuple[Callable[[int, int], int], str]] = {
    "add": (operator.add, "+"),
    "sub": (operator.sub, "-"),
    "mul": (operator.mul, "*"),
    "floordiv": (operator.floordiv, "//"),
    "mod": (operator.mod, "%"),
}
"""Name, as in :mod:`operator`, to function and sign."""

_COMPARISONS: dict[str, tuple[Callable[[int, int], bool], str]] = {
    "eq": (operator.eq, "=="),
    "ne": (operator.ne, "!="),
    "lt": (operator.lt, "<"),
    "le": (operator.le, "<="),
    "gt": (operator.gt, ">"),
    "ge": (operator.ge, ">="),
}


@dataclass(frozen=True)
class Question:
    """A comparison of sizes that Python made, and so may have branched on."""

    name: str
    """Which, as in :mod:`operator`."""
    left: Expression
    right: Expression
    outcome: bool
    site: Site | None

    def answer(self, sizes: Mapping[Axis, int]) -> bool | None:
        """The outcome at other sizes; None where it cannot be computed (a division by zero)."""
        try:
            return _COMPARISONS[self.name][0](evaluate(self.left, sizes), evaluate(self.right, sizes))
        except ZeroDivisionError:
            return None

    def text(self, names: Mapping[Axis, str]) -> str:
        """As it is written: ``S % 8 == 0``."""
        sign = _COMPARISONS[self.name][1]
        return f"{render(self.left, names)} {sign} {render(self.right, names)}"


@dataclass
class Ledger:
    """What was asked of the sizes of one trace, and which expressions were made of them."""

    locate: Callable[[], Site | None]
    """Finds the line of the user's code that is running."""
    questions: list[Question] = field(default_factory=list)
    """In order."""
    expressions: dict[Expression, None] = field(default_factory=dict)
    """Every expression that was computed, oldest first."""
    listening: bool = True
    """Whether questions count: not while an operation computes its own result."""

    def size(self, value: int, expression: Expression) -> Size:
        """A size with its expression."""
        self.expressions.setdefault(expression)
        return Size._of(value, expression, self)

    def ask(self, name: str, size: Size, other: int) -> bool:
        """Compare, and write it down."""
        outcome = _COMPARISONS[name][0](int(size), int(other))
        if self.listening:
            question = Question(name, size.expression, expression_of(other), outcome, self.locate())
            if not self.questions or self.questions[-1] != question:
                self.questions.append(question)
        return outcome


class Size(int):
    """An integer that knows its expression. Whatever is not arithmetic or comparison sees an ``int``."""

    expression: Expression
    ledger: Ledger

    @classmethod
    def _of(cls, value: int, expression: Expression, ledger: Ledger) -> Size:
        size = cls(value)
        size.expression = expression
        size.ledger = ledger
        return size

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return self.ledger.ask("ne", self, 0)

    def __neg__(self) -> int:
        return _combined("mul", self, -1)

    def __copy__(self) -> Size:
        return self

    def __deepcopy__(self, _memo: object) -> Size:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _combined(name: str, left: int, right: int) -> int:
    value = OPERATORS[name][0](int(left), int(right))
    owner = left if isinstance(left, Size) else right
    assert isinstance(owner, Size)
    return owner.ledger.size(value, Operation(name, expression_of(left), expression_of(right)))


def _install() -> None:
    """Give :class:`Size` its operators: both sides of the arithmetic ones, and the comparisons."""

    def arithmetic(name: str) -> None:
        def forward(self: Size, other: object) -> int:
            return _combined(name, self, other) if type(other) in (int, bool, Size) else NotImplemented  # type: ignore[arg-type]

        def backward(self: Size, other: object) -> int:
            return _combined(name, other, self) if type(other) in (int, bool, Size) else NotImplemented  # type: ignore[arg-type]

        setattr(Size, f"__{name}__", forward)
        setattr(Size, f"__r{name}__", backward)

    def comparison(name: str) -> None:
        def compare(self: Size, other: object) -> bool:
            if type(other) not in (int, bool, Size):
                return getattr(int, f"__{name}__")(int(self), other)  # type: ignore[no-any-return]
            return self.ledger.ask(name, self, other)  # type: ignore[arg-type]

        setattr(Size, f"__{name}__", compare)

    for name in OPERATORS:
        arithmetic(name)
    for name in _COMPARISONS:
        comparison(name)


_install()


def expression_of(value: int) -> Expression:
    """The expression of a size; a plain integer is its own."""
    return value.expression if isinstance(value, Size) else int(value)


def evaluate(expression: Expression, sizes: Mapping[Axis, int]) -> int:
    """The value at given sizes.

    :raises KeyError: for an axis that has no size there.
    :raises ZeroDivisionError: where it divides by zero.
    """
    if isinstance(expression, int):
        return expression
    if isinstance(expression, Axis):
        return sizes[expression]
    function = OPERATORS[expression.name][0]
    return function(evaluate(expression.left, sizes), evaluate(expression.right, sizes))


def axes(expression: Expression) -> Iterator[Axis]:
    """The axes that an expression speaks of."""
    if isinstance(expression, Axis):
        yield expression
    elif isinstance(expression, Operation):
        yield from axes(expression.left)
        yield from axes(expression.right)


def render(expression: Expression, names: Mapping[Axis, str]) -> str:
    """As Python writes it: ``(B * S) // 8``."""
    if isinstance(expression, int):
        return str(expression)
    if isinstance(expression, Axis):
        return names.get(expression, f"size({expression.value}, {expression.axis})")
    left, right = (
        f"({render(side, names)})" if isinstance(side, Operation) else render(side, names)
        for side in (expression.left, expression.right)
    )
    return f"{left} {OPERATORS[expression.name][1]} {right}"
