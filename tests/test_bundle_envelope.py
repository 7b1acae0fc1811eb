from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bundle_samples import ATTENTION, BATCH, inputs, judged, spec_of, tensor
from torchstone.bundle import Envelope, compile_check
from torchstone.bundle import envelope as envelopes
from torchstone.errors import EnvelopeError
from torchstone.records import Case, Dim, ScalarSpec

SIZES = Dim(name="S", low=2, high=64, multiple=2)
SPEC = spec_of("pair", (tensor("x", "B", "S", 3), tensor("y", "S", dtype="int64")), (BATCH, SIZES))
NUMBER = spec_of(
    "number",
    (tensor("x", "B"), ScalarSpec(name="k", kind="int", low=0, high=9)),
    (BATCH,),
)


def case(name: str, sizes: dict[str, int], **fields: Any) -> Case:
    return Case(name=name, kind="dims", sizes=sizes, **fields)


def pair(b: int = 3, s: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(b, s, 3), torch.zeros(s, dtype=torch.int64)


@pytest.fixture(scope="module")
def envelope() -> Envelope:
    cases = (case("low", {"B": 1, "S": 4}), case("high", {"B": 8, "S": 32}))
    return envelopes.measure(SPEC, cases)


def test_envelope_is_what_was_judged(envelope: Envelope) -> None:
    assert {d.name: (d.low, d.high, d.multiple) for d in envelope.dims} == {
        "B": (1, 8, 1),
        "S": (4, 32, 2),
    }
    assert envelope.layouts == ("contiguous",)


def test_zero_without_one_is_not_proven() -> None:
    gap = envelopes.measure(SPEC, (case("0", {"B": 0}), case("5", {"B": 5}), case("8", {"B": 8})))
    assert [(d.low, d.high) for d in gap.dims] == [(5, 8)]
    whole = envelopes.measure(SPEC, (case("0", {"B": 0}), case("1", {"B": 1}), case("8", {"B": 8})))
    assert [(d.low, d.high) for d in whole.dims] == [(0, 8)]


@pytest.mark.parametrize(
    ("args", "outcome"),
    [
        (pair(), "hit"),
        (pair(1, 4), "hit"),
        (pair(8, 32), "hit"),
        (pair(9, 4), "size"),
        (pair(3, 2), "size"),  # declared, but below what was judged
        (pair(3, 5), "size"),  # not a multiple
        (pair(3, 34), "size"),
        ((torch.zeros(4, 3, 3).transpose(0, 1), pair()[1]), "layout"),
        ((torch.zeros(1, 4, 3).expand(3, 4, 3), pair()[1]), "layout"),
        ((pair()[0], torch.zeros(5, dtype=torch.int64)[1:]), "layout"),
        ((pair()[0], torch.zeros((), dtype=torch.int64).expand(4)), "layout"),
        ((torch.nn.Parameter(pair()[0]), pair()[1]), "hit"),
    ],
)
def test_outcomes(envelope: Envelope, args: tuple[Any, ...], outcome: str) -> None:
    check = compile_check(envelope)
    assert [check(args), check(args)] == [outcome, outcome]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((pair()[0].double(), pair()[1]), r"'x': expected float32 \(B, S, 3\), got float64"),
        ((pair()[0].half(), pair()[1]), "float16"),
        ((pair()[0], pair()[1].int()), r"'y': expected int64 \(S,\), got int32"),
        ((pair()[0][0], pair()[1]), "rank 2"),
        ((pair()[0][..., None], pair()[1]), "rank 4"),
        ((torch.zeros(3, 4, 2), pair()[1]), "size 2 is fixed at 3"),
        ((pair(3, 6)[0], pair(3, 4)[1]), "S is 4"),
        (pair(0, 4), "B = 0 was not proven"),
        ((pair()[0].to("meta"), pair()[1]), "on meta"),
        ((pair()[0].to_sparse(), pair()[1]), "sparse"),
        ((pair()[0], pair()[1].numpy()), "ndarray"),
        ((pair()[0], None), "NoneType"),
        ((pair()[0], [1, 2, 3, 4]), "list"),
    ],
)
def test_what_no_program_could_answer_raises(
    envelope: Envelope, args: tuple[Any, ...], says: str
) -> None:
    check = compile_check(envelope)
    check(pair())
    for _ in range(2):  # nothing of it is remembered
        with pytest.raises(EnvelopeError, match=says) as caught:
            check(args)
        assert caught.value.hint
    assert check(pair()) == "hit"


def test_subclasses_are_not_taken_blindly(envelope: Envelope) -> None:
    class Tagged(torch.Tensor):
        pass

    x, y = pair()
    with pytest.raises(EnvelopeError, match="Tagged"):
        compile_check(envelope)((x.as_subclass(Tagged), y))


def test_lazy_negation_and_conjugation_are_not_taken_for_memory() -> None:
    real = envelopes.measure(spec_of("z", (tensor("x"),), ()), (case("a", {}),))
    z = torch.tensor(1 + 2j)
    check = compile_check(real)
    assert check((torch.zeros(()),)) == "hit"
    negated = z.conj().imag
    assert negated.is_neg()
    assert check((negated,)) == "layout"
    complex_ = envelopes.measure(
        spec_of("z", (tensor("x", 2, dtype="complex64"),), ()), (case("a", {}),)
    )
    check = compile_check(complex_)
    w = torch.zeros(2, dtype=torch.complex64)
    assert [check((w,)), check((w.conj(),)), check((w,))] == ["hit", "layout", "hit"]


def test_layouts_that_were_judged_are_inside() -> None:
    strided = envelopes.measure(SPEC, (*judged(SPEC, "contiguous", "strided"),))
    check = compile_check(strided)
    assert check((torch.zeros(4, 3, 3).transpose(0, 1), pair()[1])) == "hit"
    assert check((torch.zeros(4, 4, 3)[1:], pair()[1])) == "layout"
    offset = compile_check(envelopes.measure(SPEC, judged(SPEC, "offset")))
    assert offset((torch.zeros(4, 4, 3)[1:], pair()[1])) == "hit"


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (2, "hit"),
        (5, "hit"),
        (6, "value"),
        (1, None),
        (10, None),
        (True, None),
        (3.0, None),
        (math.nan, None),
    ],
)
def test_scalars(value: object, outcome: str | None) -> None:
    cases = (case("a", {"B": 3}, scalars={"k": 2}), case("b", {"B": 3}, scalars={"k": 5}))
    check = compile_check(envelopes.measure(NUMBER, cases))
    x = torch.zeros(3)
    assert check((x, 3)) == "hit"
    if outcome is not None:
        assert check((x, value)) == outcome
    else:
        with pytest.raises(EnvelopeError, match="'k': expected a Python int"):
            check((x, value))


@given(data=st.data())
def test_memory_of_outcomes_never_changes_one(data: st.DataObject) -> None:
    """A check that has seen many calls agrees with a fresh one on each."""
    envelope = envelopes.measure(ATTENTION, judged(ATTENTION, "contiguous"))
    used = compile_check(envelope)
    for _ in range(data.draw(st.integers(1, 12))):
        sizes = {"B": data.draw(st.integers(0, 10)), "S": data.draw(st.integers(0, 18))}
        x, mask = inputs(ATTENTION, sizes)
        change = data.draw(st.sampled_from([None, "double", "transpose", "offset", "expand", "flat"]))
        if change == "double":
            x = x.double()
        elif change == "transpose":
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif change == "offset":
            x = torch.cat([x, x])[x.shape[0] :]
        elif change == "expand":
            mask = mask.new_ones(()).expand(mask.shape)
        elif change == "flat":
            mask = mask.flatten()
        assert answer(used, (x, mask)) == answer(compile_check(envelope), (x, mask))


def answer(check: Any, args: tuple[torch.Tensor, ...]) -> str:
    try:
        return str(check(args))
    except EnvelopeError as error:
        return f"raises {error}"


def test_memory_is_bounded(envelope: Envelope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelopes, "_CACHE", 3)
    check = compile_check(envelope)
    for _ in range(2):
        assert [check(pair(b, 4)) for b in range(1, 9)] == ["hit"] * 8
    (cell,) = [c.cell_contents for c in check.__closure__ if isinstance(c.cell_contents, dict)]
    assert len(cell) <= 3
