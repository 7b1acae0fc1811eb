"""torch's errors about shapes, provoked by real models on this torch, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shapes_samples
from shapes_samples import (
    ONE,
    TWO,
    Shapes,
    added,
    checked,
    equal,
    integer,
    joined,
    loop,
    loop_of_value,
    odd,
    on_found,
    on_length,
    on_nothing,
    on_single,
    on_value,
    widened,
    workload,
)
from torchstone import compat
from torchstone.capture import export
from torchstone.capture.shapes.refusals import explain
from torchstone.compat import shapes
from torchstone.records import Axis, Refusal

WORDED = pytest.mark.skipif(
    shapes.bounds_unavailable() is not None, reason="older versions of torch say this in other words"
)


def exported(forward: Callable[..., Any], shaped: Shapes = ONE, *, auto: bool = False) -> Refusal:
    """What is said of export's error."""
    given = tuple(torch.ones(3 + i, 4) for i in range(len(shaped)))
    loaded = workload(forward, given, shaped)
    spec, module = loaded.spec(), loaded.module()
    made = export.dynamic_shapes(spec, export.automatic if auto else export.declared)
    try:
        with shapes.watch() as seen:
            asked = export.by_parameter(module, made)
            torch.export.export(module, given, dynamic_shapes=asked, strict=False)
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the subject
        return explain(error, spec, seen)
    raise AssertionError("export did not refuse")


def compiled(
    forward: Callable[..., Any],
    marks: Sequence[tuple[int, int, dict[str, Any] | None]],
    *calls: Sequence[torch.Tensor],
    shaped: Shapes = ONE,
    backend: str = "eager",
) -> Refusal:
    """What is said of the error of one of the calls; None as options marks an axis as backed."""
    loaded = workload(forward, calls[0], shaped)
    module = loaded.module()
    torch._dynamo.reset()
    call = torch.compile(module, backend=backend, fullgraph=True)
    try:
        with shapes.watch() as seen:
            for args in calls:
                for position, axis, options in marks:
                    if options is None:
                        torch._dynamo.mark_dynamic(args[position], axis)
                    else:
                        torch._dynamo.decorators.mark_unbacked(args[position], axis, **options)
                call(*args)
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the subject
        return explain(error, loaded.spec(), seen)
    raise AssertionError("torch.compile did not refuse")


def faked(function: Callable[..., Any], *sizes: tuple[int, ...]) -> Refusal:
    """What is said of an operation's error on fake tensors."""
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(torch.ones(size)) for size in sizes]
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - whatever torch raises is the subject
            return explain(error)
    raise AssertionError("it did not refuse")


def at(refusal: Refusal, line: str) -> None:
    """It names this line of the model's file."""
    assert refusal.where is not None
    assert refusal.where.file in (shapes_samples.__file__, __file__)
    assert line in refusal.where.text


def said(refusal: Refusal) -> None:
    """It can be read without knowing torch's symbols."""
    for text in (refusal.text, refusal.fix, refusal.expression or "", refusal.bound or ""):
        assert "L['" not in text
        assert "u0" not in text
        assert "s77" not in text
    assert refusal.fix
    assert refusal.raw


# --- branches -------------------------------------------------------------------------------------


def test_a_branch_on_a_value() -> None:
    for refusal in (exported(on_value), compiled(on_value, [], [torch.ones(3, 4)])):
        assert refusal.code == "VALUE_BRANCH"
        at(refusal, "if x.sum() > 0:")
        said(refusal)


def test_a_branch_on_the_size_of_a_result() -> None:
    for refusal in (exported(on_found), compiled(on_found, [], [torch.ones(3, 4)])):
        assert refusal.code == "OUTPUT_SIZE_BRANCH"
        at(refusal, "if found.shape[0] > 3:")
        assert refusal.fix


@pytest.mark.parametrize(
    ("forward", "line", "expression", "bound", "option"),
    [
        (on_nothing, "x.shape[0] == 0", "B == 0", "B >= 1", "min=1"),
        (on_single, "if x.shape[0] == 1:", "B == 1", "B >= 2", "min=2"),
        (on_length, "if x.shape[0] > 128:", "B > 128", "B <= 128", "max=128"),
    ],
)
def test_a_branch_on_an_unbacked_size_says_which_bound_to_state(
    forward: Callable[..., Any], line: str, expression: str, bound: str, option: str
) -> None:
    refusal = compiled(forward, [(0, 0, {})], [torch.ones(3, 4)])
    assert refusal.code == "SIZE_BRANCH"
    at(refusal, line)
    assert refusal.axes == (Axis(input="x", axis=0, dim="B"),)
    assert refusal.expression == expression
    assert refusal.bound == bound
    assert option in refusal.code_to_write
    said(refusal)


def test_a_branch_on_emptiness_states_a_bound_for_every_factor() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.numel() == 0 else x

    marks: list[tuple[int, int, dict[str, Any] | None]] = [(0, 0, {}), (0, 1, {})]
    refusal = compiled(forward, marks, [torch.ones(3, 4)], shaped={"x": ("B", "S")})
    assert refusal.code == "SIZE_BRANCH"
    assert refusal.bound == "B >= 1 and S >= 1"
    at(refusal, "x.numel() == 0")


@WORDED
def test_the_bound_that_is_said_is_enough() -> None:
    """Followed to the letter, the same model compiles."""
    for forward, options in (
        (on_nothing, {"min": 1}),
        (on_single, {"min": 2}),
        (on_length, {"max": 128}),
    ):
        with pytest.raises(AssertionError, match="did not refuse"):
            compiled(forward, [(0, 0, options)], [torch.ones(3, 4)])


# --- integers -------------------------------------------------------------------------------------


@WORDED
def test_a_loop_over_an_unbacked_size() -> None:
    refusal = compiled(loop, [(0, 0, {"min": 1})], [torch.ones(3, 4)])
    assert refusal.code == "SIZE_AS_INTEGER"
    at(refusal, "for i in range(x.shape[0]):")
    assert refusal.axes[0].dim == "B"
    said(refusal)


def test_a_loop_over_a_value() -> None:
    refusal = exported(loop_of_value)
    assert refusal.code == "VALUE_AS_INTEGER"
    at(refusal, "n = int(x[0, 0].item())")
    assert refusal.fix


@pytest.mark.parametrize(
    ("forward", "line"), [(loop, "range(x.shape[0])"), (integer, "int(x.shape[0])")]
)
def test_a_size_that_export_fixes_has_the_line_that_does_it(
    forward: Callable[..., Any], line: str
) -> None:
    refusal = exported(forward)
    assert refusal.code == "SIZE_FIXED"
    at(refusal, line)
    assert refusal.axes == (Axis(input="x", axis=0, dim="B"),)
    assert "to 3" in refusal.text
    said(refusal)


def test_an_example_of_one_row() -> None:
    loaded = workload(lambda self, x: x + 1, [torch.ones(1, 4)], ONE)
    spec, module = loaded.spec(), loaded.module()
    made = export.dynamic_shapes(spec, export.declared)
    with pytest.raises(torch._dynamo.exc.UserError) as caught:
        torch.export.export(module, (torch.ones(1, 4),), dynamic_shapes=made, strict=False)
    refusal = explain(caught.value, spec)
    assert refusal.code == "SIZE_FIXED"
    assert "is 1 in the example" in refusal.text
    said(refusal)


# --- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "line", "expression"),
    [
        (on_length, "if x.shape[0] > 128:", "B <= 128"),
        (odd, "assert x.shape[0] % 2 == 1", "(B % 2) == 1"),
        (checked, "torch._check(x.shape[0] <= 16", "B <= 16"),
    ],
)
def test_a_range_that_export_narrows(forward: Callable[..., Any], line: str, expression: str) -> None:
    refusal = exported(forward)
    assert refusal.code == "RANGE_NARROWED"
    at(refusal, line)
    assert refusal.expression is not None
    assert expression in refusal.expression
    said(refusal)


def test_dims_that_must_be_equal() -> None:
    loaded = workload(added, [torch.ones(3, 4), torch.ones(3, 4)], TWO)
    spec, module = loaded.spec(), loaded.module()
    made = export.dynamic_shapes(spec, export.declared)
    try:
        with shapes.watch() as seen:
            torch.export.export(
                module, (torch.ones(3, 4), torch.ones(3, 4)), dynamic_shapes=made, strict=False
            )
    except torch._dynamo.exc.UserError as error:
        refusal = explain(error, spec, seen)
    assert refusal.code == "SIZES_TIED"
    assert refusal.expression == "C == B"
    at(refusal, "return x + y")
    said(refusal)


@pytest.mark.parametrize(
    ("hint", "forward", "rows", "said"),
    [
        (torch.export.Dim.DYNAMIC(min=1, max=64), lambda self, x: x + 1, 1, "due to hint of 1"),
        (torch.export.Dim.AUTO(min=200, max=256), on_length, 3, "min/max range of [2, 128]"),
    ],
)
def test_hints_that_contradict_the_trace(
    hint: Any, forward: Callable[..., Any], rows: int, said: str
) -> None:
    loaded = workload(forward, [torch.ones(rows, 4)], ONE)
    module, args = loaded.module(), (torch.ones(rows, 4),)
    with pytest.raises(ValueError, match="conflicts between") as caught, shapes.watch() as seen:
        torch.export.export(module, args, dynamic_shapes=({0: hint},), strict=False)
    refusal = explain(caught.value, loaded.spec(), seen)
    assert refusal.code == "RANGES_CONFLICT"
    assert refusal.axes == (Axis(input="x", axis=0, dim="B"),)
    assert said in refusal.text
    if forward is on_length:
        at(refusal, "if x.shape[0] > 128:")


# --- "This is a bug" ------------------------------------------------------------------------------


@WORDED
def test_a_call_outside_the_bounds() -> None:
    bounds = {"min": 1, "max": 64}
    refusal = compiled(lambda self, x: x + 1, [(0, 0, bounds)], [torch.ones(65, 4)])
    assert refusal.code == "SIZE_OUT_OF_BOUNDS"
    assert refusal.bound == "B in 1..64"
    assert "This is a bug" in refusal.raw
    said(refusal)


def test_cat_that_specializes_an_unbacked_size() -> None:
    """pytorch#145775: the second axis was marked, and is 5 all the same; (5, 6) is then "a bug"."""
    marks: list[tuple[int, int, dict[str, Any] | None]] = [(0, 0, {}), (0, 1, {})]
    calls = [torch.ones(5, 5)], [torch.ones(5, 6)]
    refusal = compiled(joined, marks, *calls, shaped={"x": ("B", "S")})
    assert refusal.code == "SIZE_FIXED"
    at(refusal, "torch.cat([x, torch.ones(5, 5)])")
    assert refusal.axes == (Axis(input="x", axis=1, dim="S"),)
    assert refusal.expression == "S == 5"
    assert "This is a bug" in refusal.raw
    said(refusal)


def test_unbacked_sizes_added_are_taken_for_equal() -> None:
    """pytorch#152656: of two unbacked sizes the tracer takes the path without broadcasting."""
    marks: list[tuple[int, int, dict[str, Any] | None]] = [(0, 0, {}), (1, 0, {})]
    calls = [torch.ones(4, 4), torch.ones(4, 4)], [torch.ones(4, 4), torch.ones(1, 4)]
    refusal = compiled(added, marks, *calls, shaped=TWO)
    assert refusal.code == "SIZES_ASSUMED_EQUAL"
    at(refusal, "return x + y")
    assert {axis.dim for axis in refusal.axes} == {"B", "C"}
    assert "a size of 1 is not broadcast" in refusal.text
    assert "shape_id" in refusal.code_to_write
    said(refusal)


def test_a_checked_equality_that_a_call_breaks() -> None:
    """pytorch#153923: torch._check of a marked size against an unmarked one, broken by a call."""
    calls = [torch.ones(4, 4), torch.ones(4, 4)], [torch.ones(4, 4), torch.ones(7, 4)]
    refusal = compiled(equal, [(0, 0, {})], *calls, shaped=TWO)
    assert refusal.code == "SIZES_ASSUMED_EQUAL"
    at(refusal, "torch._check(y.size()[0] == x.size()[0])")
    assert refusal.expression in ("B == C", "C == B")
    assert "This is a bug" in refusal.raw
    said(refusal)


@WORDED
@pytest.mark.slow
def test_inductor_takes_an_unbacked_size_for_one(tmp_path: Path) -> None:
    """Multi-head attention traces from 1; a reshape in Inductor then decides for 1: "a bug"."""
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x, need_weights=False)[0]

    marks: list[tuple[int, int, dict[str, Any] | None]] = [
        (0, 0, {"min": 1, "max": 16}),
        (0, 1, {"min": 1, "max": 64}),
    ]
    with torch.no_grad(), compat.cache_in(tmp_path):  # what comes from a cache is not decided anew
        refusal = compiled(
            forward, marks, [torch.randn(4, 7, 16)], shaped={"x": ("B", "S", 16)}, backend="inductor"
        )
    assert refusal.code == "RANGE_NARROWED"
    assert "took B in 1..2 for granted" in refusal.text
    assert refusal.bound == "B >= 2"
    assert "This is a bug" in refusal.raw
    said(refusal)


def test_a_check_that_a_call_breaks_as_it_runs() -> None:
    refusal = compiled(odd, [(0, 0, {})], [torch.ones(3, 4)], [torch.ones(4, 4)])
    assert refusal.code == "CHECK_FAILED"
    at(refusal, "assert x.shape[0] % 2 == 1")
    assert refusal.expression == "B % 2 == 1"
    said(refusal)


def test_an_assert_on_a_backed_size() -> None:
    refusal = compiled(odd, [(0, 0, None)], [torch.ones(3, 4)], [torch.ones(4, 4)])
    assert refusal.code == "CHECK_FAILED"
    at(refusal, "assert x.shape[0] % 2 == 1")
    assert refusal.expression == "B % 2 == 1"
    said(refusal)


def test_a_mark_that_the_code_contradicts() -> None:
    refusal = compiled(
        lambda self, x: x if x.shape[0] == 3 else x + 1, [(0, 0, None)], [torch.ones(3, 4)]
    )
    assert refusal.code == "SIZE_FIXED"
    at(refusal, "x.shape[0] == 3")
    said(refusal)


# --- programs -------------------------------------------------------------------------------------


def test_what_a_program_refuses() -> None:
    loaded = workload(on_length, [torch.ones(3, 4)], ONE)
    spec, module = loaded.spec(), loaded.module()
    made = export.dynamic_shapes(spec, export.automatic)
    with shapes.watch() as seen:
        program = torch.export.export(module, (torch.ones(3, 4),), dynamic_shapes=made, strict=False)
    with pytest.raises(AssertionError) as caught:
        program.module()(torch.ones(200, 4))
    refusal = explain(caught.value, spec, seen)
    assert refusal.code == "PROGRAM_REFUSES"
    assert refusal.expression == "B <= 128"
    at(refusal, "if x.shape[0] > 128:")
    said(refusal)


# --- shapes that do not go together ---------------------------------------------------------------


def recurrent(x: torch.Tensor) -> Any:
    return nn.GRU(4, 4)(x)  # made in fake mode, as its parameters must be


def normalized(x: torch.Tensor) -> Any:
    return nn.BatchNorm1d(4).eval()(x)


@WORDED
@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x, y: x @ y, ((3, 3), (4, 4))),
        (torch.bmm, ((2, 3, 3), (3, 3, 4))),
        (lambda x, y: x + y, ((3, 3), (4, 4))),
        (lambda x, y: torch.cat([x, y]), ((3, 3), (4, 4))),
        (lambda x, y: torch.stack([x, y]), ((3, 3), (4, 4))),
        (lambda x: x.view(2, 5), ((3, 3),)),
        (lambda x: x.expand(4, 4), ((3, 3),)),
        (lambda x: x.split([1, 1], 1), ((3, 3),)),
        (lambda x: x.unflatten(0, (2, 2)), ((3, 3),)),
        (lambda x: x.select(0, 5), ((3, 3),)),
        (lambda x: nn.functional.conv2d(x, torch.ones(4, 4, 3, 3)), ((1, 3, 8, 8),)),
        (lambda x: nn.functional.layer_norm(x, (4,)), ((3, 3),)),
        (recurrent, ((3, 3),)),
        (normalized, ((3, 3),)),
        (lambda x, y: torch.einsum("ij,jk->ik", x, y), ((3, 3), (4, 4))),
    ],
)
def test_shapes_that_disagree(function: Callable[..., Any], sizes: tuple[tuple[int, ...], ...]) -> None:
    refusal = faked(function, *sizes)
    assert refusal.code == "SHAPES_DISAGREE", refusal
    assert refusal.where is None or refusal.where.file == __file__


def test_shapes_that_disagree_in_a_trace() -> None:
    for refusal in (exported(widened), compiled(widened, [], [torch.ones(3, 4)])):
        assert refusal.code == "SHAPES_DISAGREE"
        at(refusal, "x @ torch.ones(7, 3)")
        said(refusal)


# --- operations that cannot be traced -------------------------------------------------------------


@torch.library.custom_op("torchstone_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_operation_without_a_fake_kernel() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return doubled(x) + 1

    for refusal in (exported(forward), compiled(forward, [], [torch.ones(3, 4)])):
        assert refusal.code == "NO_FAKE_KERNEL"
        at(refusal, "doubled(x) + 1")
        assert 'register_fake("torchstone_test::doubled")' in refusal.code_to_write


def test_an_operation_of_a_library_without_a_fake_kernel() -> None:
    library = torch.library.Library("torchstone_test_raw", "DEF")
    library.define("copied(Tensor x) -> Tensor")
    library.impl("copied", lambda x: x.clone(), "CPU")

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.torchstone_test_raw.copied(x)

    for refusal in (exported(forward), compiled(forward, [], [torch.ones(3, 4)])):
        assert refusal.code == "NO_FAKE_KERNEL"
        assert 'register_fake("torchstone_test_raw::copied")' in refusal.code_to_write
        at(refusal, "torchstone_test_raw.copied(x)")


def test_sizes_and_values_that_only_running_tells() -> None:
    assert faked(lambda x: x.nonzero(), (3, 3)).code == "OUTPUT_SIZE_UNKNOWN"
    assert faked(torch.unique, (3, 3)).code == "OUTPUT_SIZE_UNKNOWN"
    assert faked(lambda x: x.sum().item(), (3, 3)).code == "VALUE_AS_INTEGER"
    assert faked(lambda x: torch.equal(x, x), (3, 3)).code == "VALUE_AS_INTEGER"


def test_a_check_of_the_code_that_the_example_breaks() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 100, lambda: "long please")
        return x + 1

    refusal = exported(forward)
    assert refusal.code == "CHECK_FAILED"
    assert "long please" in refusal.text
    at(refusal, "torch._check(x.shape[0] > 100")


def test_leaving_torch() -> None:
    refusal = exported(lambda self, x: torch.from_numpy(x.numpy() + 1))
    assert refusal.code == "LEAVES_TORCH"
    at(refusal, "x.numpy() + 1")


@pytest.mark.slow
def test_too_many_recompiles() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * len(str(int(x.ndim)))

    calls = [[torch.ones((2,) * n)] for n in range(2, 14)]
    refusal = compiled(forward, [], *calls, shaped={"x": (2, 2)})
    assert refusal.code == "RECOMPILE_LIMIT"
    assert refusal.fix


def test_what_dynamo_does_not_support_keeps_its_own_hint() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    refusal = compiled(forward, [], [torch.ones(3, 4)])
    assert refusal.code == "UNSUPPORTED"
    at(refusal, "torch._dynamo.graph_break()")
    assert "graph_break" in refusal.fix


def test_the_models_own_error() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise LookupError("not today")

    refusal = exported(forward)
    assert refusal.code == "RAISES"
    assert "not today" in refusal.text
    at(refusal, 'raise LookupError("not today")')


def test_without_a_workload_the_input_has_torchs_name() -> None:
    loaded = workload(on_single, [torch.ones(3, 4)], ONE)
    torch._dynamo.reset()
    given = torch.ones(3, 4)
    torch._dynamo.decorators.mark_unbacked(given, 0)
    with pytest.raises(torch._dynamo.exc.UserError) as caught:
        torch.compile(loaded.module(), backend="eager", fullgraph=True)(given)
    refusal = explain(caught.value)
    assert refusal.axes == (Axis(input="x", axis=0),)
    assert refusal.expression == "x.shape[0] == 1"
