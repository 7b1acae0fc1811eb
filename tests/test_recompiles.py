"""Recompiles over traffic, explained: the true cause in known failures, and what helps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recompile_models import OfClass, Optimizer, Stepped, Switch, advance, raise_factor, workload
from torchstone import compat
from torchstone.capture.compiled import guards
from torchstone.capture.compiled.recompiles import study_recompiles
from torchstone.capture.compiled.stale import study_staleness
from torchstone.compat import dynamo as doors
from torchstone.compat import shapes
from torchstone.policy import Policy
from torchstone.records import Arrival, Cause, Dim, RecompileStudy, ScalarSpec, Storm, TensorSpec

B = Dim(name="B", low=1, high=64)
S = Dim(name="S", low=1, high=512)


def study(module: nn.Module, inputs: Any, **options: Any) -> RecompileStudy:
    made = workload(module, inputs, **options)
    return study_recompiles(made, made.module())


def sized(*sizes: tuple[int, int]) -> dict[str, Any]:
    """A traffic of (B, S)."""
    traffic = tuple(Arrival(sizes={"B": b, "S": s}) for b, s in sizes)
    return {"dims": (B, S), "shapes": {"x": ("B", "S")}, "traffic": traffic}


def storm(found: RecompileStudy, cause: Cause) -> Storm:
    return next(s for s in found.storms if s.cause == cause)


# --- integers ------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Runs its first ``n`` layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(10)])

    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        x = self.first(x)
        for i in range(n):
            x = self.layers[i](x)
        return x


def test_an_integer_argument_over_batch_sizes_hits_the_limit() -> None:
    """TensorRT-LLM#6142: an integer argument 0..9 with batch sizes, eight graphs, the rest eager."""
    batches = (2, 3, 4, 8, 2, 16, 5, 32, 2, 9)
    traffic = tuple(Arrival(sizes={"B": b}, scalars={"n": n}) for n, b in enumerate(batches))
    found = study(
        Layers(),
        (torch.randn(2, 8), 0),
        dims=(B,),
        shapes={"x": ("B", 8)},
        traffic=traffic,
        policy=Policy(max_recompiles=4),
    )
    assert found.limit == compat.recompile_limit() == 8
    assert found.graphs == 8
    assert found.eager_calls == (8, 9)
    assert [name.rpartition(" in ")[2] for name in found.limited] == ["forward"]
    assert (found.allowed, found.exceeds) == (4, True)
    (only,) = found.storms
    assert (only.cause, only.guarded, only.count) == ("INTEGER_ARGUMENT", "n", 8)
    assert only.calls == (1, 2, 3, 4, 5, 6, 7, 8)
    assert "torch.tensor(n)" in str(only.code)
    last = found.recompiles[-1]
    assert last.at_limit
    assert last.failure.source == "for i in range(n):"
    assert last.failure.file == __file__
    assert "it was 7, is 8 now" in last.failure.sentence
    assert len(last.others) == 7


def test_within_the_policy_nothing_exceeds() -> None:
    found = study(nn.Linear(8, 8), (torch.randn(2, 8),), policy=Policy(max_recompiles=1))
    assert (found.graphs, found.recompiles, found.exceeds) == (1, (), False)
    assert found.tried == ()


# --- sizes ---------------------------------------------------------------------------------------


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Long(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= 128:
            return x * 2
        return x + 1


class Exactly(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 256:
            return x * 2
        return x + 1


def test_first_size_then_zero_one_and_what_helps() -> None:
    found = study(Plain(), (torch.randn(2, 16),), **sized((2, 16), (3, 16), (1, 16), (4, 16)))
    causes = [r.failure.cause for r in found.recompiles]
    assert causes == ["FIRST_SIZE", "ZERO_ONE"]
    assert found.graphs == 3
    for recompile in found.recompiles:
        assert (recompile.failure.argument, recompile.failure.axis, recompile.failure.dim) == (
            "x",
            0,
            "B",
        )
    assert storm(found, "FIRST_SIZE").code == "torch._dynamo.mark_dynamic(x, 0)"
    assert storm(found, "ZERO_ONE").code == "torch._dynamo.decorators.mark_unbacked(x, 0, min=1)"
    tried = {t.name: t for t in found.tried}
    if shapes.bounds_unavailable() is None:
        assert tried["mark_unbacked(min=1)"].graphs == 1
        assert tried["mark_unbacked(min=1)"].agrees
    assert tried["mark_dynamic"].graphs == 2
    assert tried["dynamic=True"].graphs == 2


@pytest.mark.slow
def test_a_branch_on_a_size_is_told_from_zero_one() -> None:
    found = study(Long(), (torch.randn(2, 16),), **sized((2, 16), (2, 32), (2, 200), (2, 1)))
    assert [r.failure.cause for r in found.recompiles] == ["FIRST_SIZE", "SIZE_BRANCH", "ZERO_ONE"]
    branch = found.recompiles[1].failure
    assert branch.dim == "S"
    assert branch.source == "if x.shape[1] <= 128:"
    assert branch.file == __file__
    assert "holds for 2 <= x.size()[1] <= 128, and it is 200" in branch.sentence


@pytest.mark.slow
def test_a_size_that_the_code_asks_for_is_specialized() -> None:
    found = study(Exactly(), (torch.randn(2, 16),), **sized((2, 16), (2, 256), (2, 17), (2, 40)))
    assert [r.failure.cause for r in found.recompiles] == ["FIRST_SIZE", "SIZE_SPECIALIZED"]
    assert "exactly 256" in found.recompiles[1].failure.sentence
    marked = next(t for t in found.tried if t.name == "mark_dynamic")
    assert marked.graphs is None
    assert "(256)" in str(marked.failed)
    assert __file__ in str(marked.failed)


def test_keyword_inputs_are_named_as_the_user_names_them() -> None:
    class Named(nn.Module):
        def forward(self, *, ids: torch.Tensor) -> torch.Tensor:
            return ids * 2

    traffic = tuple(Arrival(sizes={"B": n}) for n in (2, 3))
    found = study(
        Named(), {"ids": torch.randn(2, 4)}, dims=(B,), shapes={"ids": ("B", 4)}, traffic=traffic
    )
    (only,) = found.recompiles
    assert (only.failure.argument, only.failure.dim) == ("ids", "B")


def test_a_decorator_that_takes_everything_hides_no_name() -> None:
    class Wrapped(nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y

    traffic = tuple(Arrival(sizes={"B": n}) for n in (2, 3))
    found = study(
        Wrapped(),
        (torch.randn(2, 4), torch.randn(2, 4)),
        dims=(B,),
        shapes={"x": ("B", 4), "y": ("B", 4)},
        traffic=traffic,
    )
    failure = found.recompiles[0].failure
    assert (failure.cause, failure.argument, failure.dim) == ("FIRST_SIZE", "x", "B")


# --- values and state ----------------------------------------------------------------------------


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


def test_a_class_attribute_changed_between_calls() -> None:
    """pytorch#176851. Where no guard covers it, the answer is wrong instead: either is told."""
    made = workload(OfClass(), (torch.randn(2, 4),), perturb=raise_factor)
    found = study_recompiles(made, made.module())
    stale = study_staleness(made, made.module(), backend="eager")
    if found.recompiles:
        assert found.recompiles[0].failure.cause == "CLASS_ATTRIBUTE"
        assert "Switch" in found.recompiles[0].failure.guarded
        assert stale is None
    else:
        assert stale is not None
        assert stale.cause == "UNGUARDED_STATE"
        assert stale.what == ("Switch.factor",)


def test_a_module_attribute_changed_between_calls() -> None:
    found = study(Stepped(), (torch.randn(2, 4),), perturb=advance)
    attribute = storm(found, "MODULE_ATTRIBUTE")
    assert attribute.guarded == "self.step"
    assert attribute.count == found.graphs - 1 == 3
    assert "register_buffer" in str(attribute.code)
    (tried,) = found.tried
    assert tried.agrees
    assert tried.graphs == 2


def test_a_float_argument_compiles_twice_and_is_then_open() -> None:
    traffic = tuple(Arrival(sizes={}, scalars={"scale": v}) for v in (0.5, 1.0, 1.5, 2.5))
    found = study(Scaled(), (torch.randn(2, 4), 0.5), traffic=traffic)
    (only,) = found.recompiles
    assert (only.call, only.failure.cause, only.failure.argument) == (1, "FLOAT_ARGUMENT", "scale")


@pytest.mark.slow
def test_a_number_out_of_a_break_makes_recompiles() -> None:
    """pytorch#185382: what aot_eager compiles again for, Inductor silently bakes in."""
    found = study(Optimizer(), (torch.randn(16), torch.randn(16)))
    values = storm(found, "BREAK_VALUE")
    assert "graph break" in values.sentence
    assert ".item()" in values.fix


def test_a_model_that_dynamo_cannot_run_is_a_record() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

    found = study(Broken(), (torch.randn(2),))
    assert "not today" in str(found.refused)
    assert found.graphs == 0


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Globals and classes that the models change."""
    before = (Switch.factor, mode, holder.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        yield
    Switch.factor = before[0]
    globals().update(mode=before[1])
    holder.value = before[2]


# --- one guard -----------------------------------------------------------------------------------


class Held:
    """Something that is no tensor and no number."""

    def __init__(self, value: int) -> None:
        self.value = value


mode = "a"
holder = Held(1)


def of_global(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if mode == "a" else x


def of_object(x: torch.Tensor) -> torch.Tensor:
    return x * holder.value


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.add_(1)
    return x + y


def valued(x: torch.Tensor, way: str) -> torch.Tensor:
    return x * 2 if way == "up" else x + 1


def _enclosing() -> tuple[Callable[..., Any], Callable[[], None]]:
    level = "low"

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if level == "low" else x

    def change() -> None:
        nonlocal level
        level = "high"

    return inner, change


def failure(
    function: Callable[..., Any], first: tuple[Any, ...], second: tuple[Any, ...], change: Any = None
) -> Any:
    """Explain the guard that really fails at the second call."""
    failed: list[doors.Failed] = []
    doors.reset()
    compiled = doors.compiled(function, doors.backend("eager"), on_fail=failed.append)
    compiled(*first)
    if change is not None:
        change()
    compiled(*second)
    doors.reset()
    code = failed[0].code
    named = zip(code.co_varnames, second, strict=False)
    inputs = {n: TensorSpec(name=n, dtype="float32", shape=tuple(v.shape)) for n, v in named
              if isinstance(v, torch.Tensor)}  # fmt: skip
    context = guards.Context(
        inputs=inputs,
        now={n: tuple(v.shape) for n, v in zip(inputs, second, strict=False)},
        seen={},
        parameters=code.co_varnames[: code.co_argcount],
        free=code.co_freevars,
        function=code.co_name,
        resolve=lambda name: doors.resolve(code, name),
    )
    return guards.explain(failed[0].reason, context)


X = torch.randn(4, 4)


def _set_mode() -> None:
    global mode  # noqa: PLW0603  what is tested
    mode = "b"


@pytest.mark.parametrize(
    ("function", "first", "second", "cause", "guarded"),
    [
        (twice, (X,), (X.double(),), "DTYPE", "x"),
        (twice, (X[:3],), (X.t()[:3],), "LAYOUT", "x"),
        (twice, (X,), (X[0],), "RANK", "x"),
        (twice, (X,), (X.clone().requires_grad_(),), "REQUIRES_GRAD", "x"),
        (valued, (X, "up"), (X, "down"), "ARGUMENT_VALUE", "way"),
        (both, (X.clone(), X.clone()), (X, X), "ALIASING", None),
    ],
)
def test_what_changed_in_the_arguments(
    function: Any, first: Any, second: Any, cause: str, guarded: str | None
) -> None:
    found = failure(function, first, second)
    assert found.cause == cause
    assert guarded is None or found.guarded == guarded
    assert found.sentence
    assert found.fix


def test_what_changed_around_it() -> None:
    found = failure(of_global, (X,), (X,), _set_mode)
    assert (found.cause, found.guarded) == ("GLOBAL_VALUE", "G['mode']")
    assert found.source == 'return x * 2 if mode == "a" else x'
    found = failure(of_object, (X,), (X,), lambda: setattr(holder, "value", 5))
    assert (found.cause, found.guarded) == ("GLOBAL_VALUE", "G['holder'].value")
    inner, change = _enclosing()
    found = failure(inner, (X,), (X,), change)
    assert (found.cause, found.guarded) == ("CLOSURE_VALUE", "level")


def test_gradients_switched_between_calls() -> None:
    failed: list[doors.Failed] = []
    doors.reset()
    compiled = doors.compiled(twice, doors.backend("eager"), on_fail=failed.append)
    with torch.no_grad():
        compiled(X)
    compiled(X)
    doors.reset()
    found = guards.explain(failed[0].reason, guards.Context(inputs={}, now={}, seen={}))
    assert found.cause == "GRAD_MODE"


def test_a_version_for_another_value_says_nothing_where_this_value_has_one() -> None:
    """Two versions fail: one was made for another n, the one for this n does not take size 1."""
    inputs = {
        "x": TensorSpec(name="x", dtype="float32", shape=("B", 8)),
        "n": ScalarSpec(name="n", kind="int", low=0, high=9),
    }
    context = guards.Context(
        inputs=inputs, now={"x": (1, 8), "n": 3}, seen={("x", 0): [4, 2], ("x", 1): [8], "n": [3, 4]}
    )
    found, others = guards.principal(["0/1: n == 4", "0/0: 2 <= x.size()[0]"], context)
    assert (found.cause, found.dim) == ("ZERO_ONE", "B")
    assert others == ("n == 4",)


PIECES = (
    *("0/1: ", "tensor 'x' ", "size mismatch at index 0. ", "expected s0, ", "actual 3", "expected 4, "),
    *("x.size()[0]", "x.size()[9]", " == ", "2 <= ", "1", " % 8", "n", "G['Config'].a", "type(self)"),
    *(
        "  # if n:  # a/b.py:3 in f (0/1 specialization)",
        "\nUser stack trace:\n",
        "___stack0",
        "(",
        "[0]",
    ),
)


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_no_mixture_of_known_words_is_too_much(text: str) -> None:
    inputs = {
        "x": TensorSpec(name="x", dtype="float32", shape=("B", 8)),
        "n": ScalarSpec(name="n", kind="int", low=0, high=9),
    }
    context = guards.Context(inputs=inputs, now={"x": (1, 8), "n": 3}, seen={("x", 0): [4], "n": [3]})
    found = guards.explain(text, context)
    assert found.text == text
    assert "{" not in found.sentence
    assert found.fix


@pytest.mark.parametrize(
    "text", ["", "0/0: ", "nonsense", "0/0: ___some_new_guard(x)", "0/3: " + "x" * 5000]
)
def test_any_text_is_explained_somehow(text: str) -> None:
    found = guards.explain(text, guards.Context(inputs={}, now={}, seen={}))
    assert found.cause in ("OTHER", "ARGUMENT_VALUE")
    assert found.sentence
