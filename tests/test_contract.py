"""Contracts of captured programs: every range that export narrows is found, with its line and proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shapes_samples
from backends_samples import Attention, Stateful
from shapes_samples import (
    ONE,
    TWO,
    B,
    Shapes,
    added,
    checked,
    eights,
    equal,
    integer,
    joined,
    length_from_item,
    loop,
    odd,
    on_length,
    on_nothing,
    on_single,
    on_value,
    workload,
)
from torchstone.capture import export
from torchstone.capture.shapes import sweep
from torchstone.capture.shapes.clauses import from_guards
from torchstone.capture.shapes.contract import contract
from torchstone.compat import shapes
from torchstone.records import Clause, Dim, ShapeContract, SourceLine
from torchstone.workload import Workload


def found(
    forward: Callable[..., Any],
    shaped: Shapes = ONE,
    inputs: Sequence[torch.Tensor] = (),
    **options: Any,
) -> ShapeContract:
    """The contract of a model, captured as a run would."""
    inputs = inputs or [torch.randn(8, 4) for _ in shaped]
    loaded = workload(forward, inputs, shaped, **options)
    module = loaded.module()
    made = contract(loaded, module, export.export(loaded, module))
    assert msgspec.json.decode(msgspec.json.encode(made), type=ShapeContract) == made
    return made


def only(made: ShapeContract) -> Clause:
    """Its one clause, which says where it comes from."""
    clauses = [*(c for d in made.dims for c in d.clauses), *made.ties]
    assert len(clauses) == 1, clauses
    assert not made.sound
    return clauses[0]


def at(where: SourceLine | None, line: str) -> None:
    assert where is not None
    assert where.file == shapes_samples.__file__
    assert line in where.text


def test_a_branch_on_size_one_is_silent() -> None:
    made = found(on_single)
    clause = only(made)
    assert clause.text == "B >= 2"
    assert clause.proof == "both"
    assert clause.silent
    assert not clause.model
    at(clause.where, "if x.shape[0] == 1:")
    assert made.dims[0].low == 2
    assert made.narrowed == ("B: 1..256 -> 2..256, B >= 2",)
    assert "needed by shapes_samples.py" in made.dims[0].text


def test_a_branch_on_length() -> None:
    made = found(on_length)
    clause = only(made)
    assert clause.text == "B <= 128"
    assert clause.proof == "both"
    assert clause.silent, "without its guards the program answers as if it were short"
    at(clause.where, "if x.shape[0] > 128:")
    assert (made.dims[0].low, made.dims[0].high) == (1, 128)
    refused = [p for p in made.probes if p.outcome == "REFUSES"]
    assert {129, 256} <= {p.sizes["B"] for p in refused}
    assert all(p.unguarded == "WRONG" for p in refused)
    assert made.refusals["declared"].code == "RANGE_NARROWED"
    assert "dynamic" not in made.refusals, "Dim.DYNAMIC narrows it without a word"


@pytest.mark.slow
def test_rows_of_eight() -> None:
    """Traced at 8 rows, export takes 8 // 8 for the constant 1; so it is traced at 16 as well."""
    made = found(eights)
    clauses = {clause.text: clause for clause in made.dims[0].clauses}
    assert clauses.keys() == {"B % 8 == 0", "B >= 16"}
    assert clauses["B % 8 == 0"].model
    assert clauses["B % 8 == 0"].proof == "both"
    assert not clauses["B >= 16"].model
    assert clauses["B >= 16"].needless
    for clause in clauses.values():
        at(clause.where, "x.view(x.shape[0] // 8, 8, 4)")
    assert (made.dims[0].low, made.dims[0].high) == (16, 256)
    assert [p.sizes["B"] for p in made.probes if p.outcome == "AGREES"]


def test_an_assert_is_the_models_own_condition() -> None:
    made = found(odd, inputs=[torch.randn(7, 4)])
    clause = only(made)
    assert clause.text == "B % 2 == 1"
    assert clause.model
    at(clause.where, "assert x.shape[0] % 2 == 1")
    raised = next(p for p in made.probes if p.outcome == "EAGER_RAISES")
    assert raised.refusal is not None
    assert raised.refusal.code == "CHECK_FAILED"
    assert "odd please" in raised.refusal.text


def test_a_check_is_the_models_own_condition() -> None:
    clause = only(found(checked))
    assert (clause.text, clause.model, clause.proof) == ("B <= 16", True, "both")
    at(clause.where, "torch._check(x.shape[0] <= 16")


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (loop, "for i in range(x.shape[0]):"),
        (integer, "int(x.shape[0])"),
        (length_from_item, ".item() + 1"),
    ],
)
def test_a_size_baked_in(forward: Callable[..., Any], line: str) -> None:
    made = found(forward)
    clause = only(made)
    assert clause.text == "B == 8"
    assert clause.silent
    assert not clause.model
    at(clause.where, line)
    assert (made.dims[0].low, made.dims[0].high) == (8, 8)
    assert made.refusals["dynamic"].code == "SIZE_FIXED"


def test_two_dims_tied_by_an_addition() -> None:
    """pytorch#152656: added, two sizes are taken for equal; that one may be 1 is lost."""
    made = found(added, TWO)
    clause = only(made)
    assert clause.text == "B == C"
    assert set(clause.dims) == {"B", "C"}
    assert clause.proof == "both"
    assert not clause.model, "eager broadcasts a size of 1"
    at(clause.where, "return x + y")
    broadcast = [
        p for p in made.probes if sorted(p.sizes.values())[0] == 1 and len({*p.sizes.values()}) == 2
    ]
    assert [p.outcome for p in broadcast] == ["REFUSES", "REFUSES"]
    assert made.refusals["declared"].code == "SIZES_TIED"


def test_two_dims_tied_by_a_check() -> None:
    """pytorch#153923: here the model itself refuses what breaks it."""
    clause = only(found(equal, TWO))
    assert (clause.text, clause.model) == ("B == C", True)
    at(clause.where, "torch._check(y.size()[0] == x.size()[0])")


@pytest.mark.slow
def test_cat_with_a_fixed_width() -> None:
    """pytorch#145775: joined with a width of 5, the dim has one size."""
    made = found(joined, {"x": ("B", "S")}, [torch.randn(5, 5)])
    clause = only(made)
    assert (clause.text, clause.model, clause.proof) == ("S == 5", True, "both")
    at(clause.where, "torch.cat([x, torch.ones(5, 5)])")
    rows = next(d for d in made.dims if d.dim == "B")
    assert (rows.low, rows.high, rows.clauses) == (1, 256, ())


def test_a_sound_program_has_no_clauses() -> None:
    for forward in (on_nothing, lambda self, x: x @ torch.ones(4, 3)):
        made = found(forward)
        assert made.sound
        assert made.subject == "program"
        assert {p.outcome for p in made.probes} == {"AGREES"}
        assert made.dims[0].text == "B in 1..256"


@pytest.mark.slow
def test_attention_from_an_example_of_one() -> None:
    module = Attention().eval()
    dims = (Dim(name="B", low=1, high=8), Dim(name="S", low=1, high=64))
    loaded = Workload(
        name="attention",
        model=lambda: module,
        inputs=lambda: (torch.randn(1, 1, 16),),
        dims=dims,
        shapes={"x": ("B", "S", 16)},
    )
    made = contract(loaded, module, export.export(loaded, module))
    assert made.sound, made
    tried = {tuple(p.sizes.values()) for p in made.probes}
    assert {(1, 1), (8, 8)} <= tried
    assert {1, 2, 64, 63} <= {s for _, s in tried}


def test_a_program_that_was_narrowed_by_someone_else() -> None:
    """What is swept is the program given; its own guards are read even where nothing was watched."""
    loaded = workload(on_length, [torch.randn(8, 4)], ONE)
    module = loaded.module()
    hint = torch.export.Dim.AUTO(min=1, max=32)
    program = torch.export.export(module, (torch.randn(8, 4),), dynamic_shapes=({0: hint},))
    made = contract(loaded, module, program)
    assert made.subject == "program"
    assert made.dims[0].high == 32
    assert any(clause.text == "B <= 32" and clause.proof == "both" for clause in made.dims[0].clauses)


def test_a_silent_fault_that_no_guard_tells() -> None:
    """A program that is not the model's at some size, with no condition to show for it."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if _long(x) else x

    made = found(forward)
    clause = only(made)
    assert clause.proof == "sweep"
    assert clause.silent
    assert not clause.model
    failing = {p.sizes["B"] for p in made.probes if p.outcome == "WRONG"}
    assert failing == {n for n in {p.sizes["B"] for p in made.probes} if n > 20}
    assert clause.text.startswith("B <= ")


def test_a_program_that_is_wrong_everywhere() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if _seen(x) else x * 2

    loaded = workload(forward, [torch.randn(8, 4)], ONE)
    module = loaded.module()
    hint = torch.export.Dim.AUTO(min=1, max=256)
    program = torch.export.export(
        module, (torch.randn(8, 4),), dynamic_shapes=({0: hint},), strict=False
    )
    made = contract(loaded, module, program)
    assert not made.sound
    assert "not the model at the sizes that it was traced at" in made.narrowed[0]


def test_a_model_that_always_raises_is_not_sound() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not _seen(x):
            raise RuntimeError("not today")
        return x

    made = found(forward)
    assert not made.sound
    assert "the model itself raises" in made.narrowed[0]


def _seen(x: torch.Tensor) -> bool:
    """Whether it is being traced."""
    return isinstance(x, torch._subclasses.FakeTensor) or torch.compiler.is_compiling()


def _long(x: torch.Tensor) -> bool:
    """Whether there are more than 20 rows, in a way that no trace sees."""
    return not _seen(x) and x.shape[0] > 20


def test_multiples_and_factors() -> None:
    """A dim of multiples is only tried at its multiples; ``2*B`` is twice the dim."""

    def forward(self: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2) + y if y.shape[0] <= 64 else x.view(-1, 2) - y

    wide = Dim(name="B", low=16, high=256, multiple=16)
    made = found(
        forward,
        {"x": ("2*B",), "y": ("B", 1)},
        [torch.randn(64), torch.randn(32, 1)],
        dims=(wide,),
    )
    assert all(p.sizes["B"] % 16 == 0 for p in made.probes)
    clause = only(made)
    assert (clause.text, clause.silent) == ("B <= 64", True)
    assert made.narrowed == ("B: 16*k, 16..256 -> 16..64, B <= 64",)


def test_keyword_inputs_are_named() -> None:
    class Masked(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (ids * mask).sum(1) if ids.shape[1] < 40 else ids.mean(1)

    length = Dim(name="S", low=1, high=64)
    loaded = Workload(
        name="masked",
        model=Masked,
        inputs=lambda: {"mask": torch.ones(2, 5), "ids": torch.randn(2, 5)},
        dims=(B, length),
        shapes={"ids": ("B", "S"), "mask": ("B", "S")},
    )
    module = loaded.module()
    made = contract(loaded, module, export.export(loaded, module))
    clause = only(made)
    assert (clause.text, clause.dims, clause.silent) == ("S <= 39", ("S",), True)
    assert clause.where is not None
    assert "if ids.shape[1] < 40" in clause.where.text


def test_a_model_that_cannot_be_captured() -> None:
    made = found(on_value)
    assert made.subject == "none"
    assert made.dims == ()
    assert made.refusals["automatic"].code == "VALUE_BRANCH"
    assert made.narrowed[0].startswith("no program: the code branches on a value")
    assert not made.sound


def test_a_python_number_is_said() -> None:
    def forward(self: nn.Module, x: torch.Tensor, k: int) -> torch.Tensor:
        return x * k

    loaded = Workload(
        name="scaled",
        model=type("Scaled", (nn.Module,), {"forward": forward}),
        inputs=lambda: (torch.randn(3, 4), 2),
        dims=(B,),
        shapes={"x": ("B", 4)},
    )
    module = loaded.module()
    made = contract(loaded, module, export.export(loaded, module))
    assert made.subject == "none"
    assert any("Python numbers" in text for text in made.not_tried)


@pytest.mark.slow
def test_state_is_as_it_was() -> None:
    module = Stateful().eval()
    loaded = Workload(
        name="stateful",
        model=lambda: module,
        inputs=lambda: (torch.randn(3, 8),),
        dims=(B,),
        shapes={"x": ("B", 8)},
    )
    made = contract(loaded, module, export.export(loaded, module))
    assert made.sound, made.narrowed
    assert torch.equal(module.seen, torch.zeros(8))


def test_what_the_limit_leaves_out_is_listed() -> None:
    loaded = workload(on_single, [torch.randn(8, 4)], ONE)
    module = loaded.module()
    made = contract(loaded, module, export.export(loaded, module), limit_s=0.0)
    assert made.probes == ()
    assert made.not_tried


# --- the parts ------------------------------------------------------------------------------------


def rows(code: str, line: int = 1) -> shapes.Guard:
    where = SourceLine(file="m.py", line=line, text="code")
    return shapes.Guard(code, {"s0": "L['x'].size()[0]"}, where, False)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        (["(s0 % 8) == 0"], ["B % 8 == 0"]),
        (["((5*s0) % (8*(s0//8))) == 0", "(8*(s0//8)) != 0"], ["B % 8 == 0"]),
        (["s0 <= 100", "4 <= s0"], ["B >= 4", "B <= 100"]),
        (["s0 != 7"], ["B != 7"]),
        (["s0 == 3"], ["B == 3"]),
        (["(s0 % 4) == 3"], ["B % 4 == 3"]),
        (["s0 >= 1", "s0 < 1000"], []),
        (["(s0 % 8) != 3", "s0 != 10"], ["B != 10 and (B % 8) != 3"]),
    ],
)
def test_guards_of_one_line_are_said_as_simply_as_can_be(codes: list[str], expected: list[str]) -> None:
    spec = workload(on_single, [torch.randn(8, 4)], ONE).spec()
    made = from_guards(spec, [rows(code) for code in codes])
    assert [condition.clause.text for condition in made] == expected


def test_what_earlier_lines_imply_is_not_repeated() -> None:
    spec = workload(on_single, [torch.randn(8, 4)], ONE).spec()
    guards = [
        rows("(s0 % 8) == 0", 1),
        rows("(s0 % 4) == 0", 2),
        rows("s0 <= 40", 3),
        rows("s0 <= 41", 4),
    ]
    made = from_guards(spec, guards)
    lines = [condition.clause.where.line for condition in made if condition.clause.where is not None]
    assert lines == [1, 3]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_parts_together_hold_where_all_guards_do(data: st.DataObject) -> None:
    spec = workload(on_single, [torch.randn(8, 4)], ONE).spec()
    codes = data.draw(
        st.lists(
            st.sampled_from(
                ["(s0 % 2) == 0", "(s0 % 3) == 1", "s0 <= 99", "s0 >= 12", "s0 != 40", "(s0//4) != 9"]
            ),
            min_size=1,
            max_size=4,
        )
    )
    made = from_guards(spec, [rows(code) for code in codes])
    for size in range(1, 257):
        said = all(condition.holds({"B": size}) for condition in made)
        assert said == all(rows(code).holds({"s0": size}) for code in codes)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 6), st.integers(1, 300), st.sampled_from([1, 1, 4, 16]))
def test_the_sweep_stays_in_the_ranges(low: int, span: int, multiple: int) -> None:
    dim = Dim(name="B", low=low * multiple, high=(low + span) * multiple, multiple=multiple)
    example = torch.zeros((low + span) * multiple, 4)
    spec = workload(on_single, [example], ONE, dims=(dim,)).spec()
    tried = [sizes["B"] for sizes in sweep.sweep(spec, {"B": dim.high})]
    assert len(tried) == len(set(tried))
    assert {dim.low, dim.high} <= set(tried)
    assert all(dim.low <= n <= dim.high and n % multiple == 0 for n in tried)
    assert all(n in tried for n in (0, 1, 2) if dim.low <= n <= dim.high and n % multiple == 0)


def test_a_difference_is_of_the_largest_magnitude() -> None:
    one = torch.tensor([1.0, 100.0])
    assert sweep.difference([one], [one.clone()]) == 0.0
    assert sweep.difference([one], [one + torch.tensor([1.0, 0.0])]) == pytest.approx(0.01)
    infinite = float("inf")
    assert sweep.difference([one], [one[:1]]) == infinite
    assert sweep.difference([one], [one.double()]) == infinite
    assert sweep.difference([one], [torch.tensor([1.0, infinite])]) == infinite
    assert sweep.difference([torch.tensor([1])], [torch.tensor([2])]) == infinite
    assert sweep.difference([one], [one, one]) == infinite
    assert sweep.difference([torch.zeros(0)], [torch.zeros(0)]) == 0.0
