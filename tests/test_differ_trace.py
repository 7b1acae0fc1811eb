"""What a trace holds of a run, and that it survives its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from differ_models import convnet, decoder, recommender
from torchstone.errors import InputError
from torchstone.verify.differ import store
from torchstone.verify.differ.between import between
from torchstone.verify.differ.record import record, record_float64
from torchstone.verify.differ.trace import ALIAS, Trace, refs, sample


class Writes(nn.Module):
    """Writes through views, to a buffer, and to its input."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        made = torch.zeros(4, 4)
        row = made[1]
        row += self.linear(x)[0]
        made[:, 2].mul_(3)
        x.clamp_(min=0)
        return made + x


def values(trace: Trace, name: str) -> torch.Tensor:
    number = dict(trace.outputs)[name]
    assert number is not None
    tensor = trace.values[number].tensor
    assert tensor is not None
    return tensor


def targets(trace: Trace) -> list[str]:
    return [trace.ops[i].target for i in trace.live()]


def test_results_are_those_of_the_module() -> None:
    module, x = Writes().eval(), torch.randn(4, 4)
    trace = record(module, (x,), "a")
    expected, given = Writes(), x.clone()
    expected.load_state_dict(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(values(trace, "output"), expected(given), rtol=0, atol=0)
    torch.testing.assert_close(values(trace, "input[0] afterwards"), given, rtol=0, atol=0)
    assert values(trace, "count afterwards") == 1


def test_inputs_and_state_are_as_before() -> None:
    module, x = Writes().eval(), torch.randn(4, 4)
    before = x.clone()
    record(module, (x,), "a")
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    assert module.count == 0


def test_a_value_keeps_what_it_was_when_its_memory_is_written_to() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y * 2
        y.zero_()
        return y + z

    trace = record(run, (torch.ones(3),), "a")
    first = trace.values[trace.ops[0].outs[0] or 0].tensor
    assert first is not None
    assert first.tolist() == [2, 2, 2]
    assert values(trace, "output").tolist() == [4, 4, 4]


def test_who_reads_written_memory_depends_on_the_write() -> None:
    trace = record(Writes().eval(), (torch.randn(4, 4),), "a")
    assert ALIAS in targets(trace)
    assert "aten.mul_.Tensor" in targets(trace)
    assert "aten.clamp_.default" in targets(trace)


def test_what_nothing_depends_on_is_not_live() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        return x.sin()

    assert targets(record(run, (torch.ones(3),), "a")) == ["aten.sin.default"]


def test_operations_know_their_line_and_module() -> None:
    module, inputs = decoder()
    trace = record(module, inputs, "a")
    scores = next(op for op in trace.ops if op.target == "aten.masked_fill.Scalar")
    assert scores.origin.module == "attend.0"
    assert Path(scores.origin.file or "").name == "differ_models.py"
    assert "masked_fill" in scores.origin.text


def test_a_program_has_the_same_lines_as_its_module() -> None:
    module, inputs = decoder()
    program = torch.export.export(module, inputs).module(check_guards=False)
    one, other = record(module, inputs, "a"), record(program, inputs, "b")

    def lines(trace: Trace) -> set[tuple[str, int | None]]:
        return {(op.origin.module, op.origin.line) for op in trace.ops if "masked_fill" in op.target}

    assert lines(one) == lines(other)


def test_beyond_the_budget_samples_are_kept_and_still_compared() -> None:
    module, inputs = convnet()
    whole, few = record(module, inputs, "a"), record(module, inputs, "b", budget_bytes=2000)
    sampled = [v for v in few.values if v.tensor is None]
    assert sampled
    assert all(v.sample is not None for v in sampled)
    found = between(whole, few)
    assert found.kind == "NONE"
    assert "samples" in found.notes[0]
    wrong = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU())
    right = nn.Sequential(*list(wrong)[:1], nn.Sigmoid(), *list(wrong)[2:])
    x = (torch.randn(4, 8),)
    found = between(record(right, x, "a", budget_bytes=0), record(wrong, x, "b", budget_bytes=0))
    assert found.kind != "NONE"
    assert found.reproduction is None


def test_samples_are_taken_at_the_same_places_whatever_the_layout() -> None:
    x = torch.randn(70, 90, 3)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    torch.testing.assert_close(sample(x), sample(turned), rtol=0, atol=0)
    assert len(sample(x)) == 4096


def test_float64_widens_everything_but_the_casts_that_the_model_means() -> None:
    def parts(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float() + torch.full((3,), 0.1)

    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return parts(x)

    trace = record_float64(Parts(), (torch.randn(3),))
    assert trace.widened
    dtypes = {trace.values[n].dtype for op in trace.ops for n in op.outs if n is not None}
    assert dtypes == {"bfloat16", "float32", "float64"}


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Trace, Path]:
    module, inputs = recommender()
    trace, path = record(module, inputs, "eager"), tmp_path / "a.trace"
    store.save(trace, path)
    return trace, path


def test_a_trace_comes_back_as_it_was(saved: tuple[Trace, Path]) -> None:
    trace, path = saved
    again = store.load(path)
    assert (again.label, again.inputs, again.outputs) == (trace.label, trace.inputs, trace.outputs)
    assert [op.target for op in again.ops] == [op.target for op in trace.ops]
    assert [refs(op) for op in again.ops] == [refs(op) for op in trace.ops]
    assert [op.origin for op in again.ops] == [op.origin for op in trace.ops]
    for one, other in zip(trace.values, again.values, strict=True):
        assert one.tensor is not None
        assert other.tensor is not None
        torch.testing.assert_close(one.tensor, other.tensor, rtol=0, atol=0, equal_nan=True)


def test_a_saved_trace_shows_the_same_divergence(saved: tuple[Trace, Path]) -> None:
    module, inputs = recommender()
    top: Any = module.top
    top[1] = nn.LeakyReLU(0.01)
    found = between(store.load(saved[1]), record(module, inputs, "b"))
    assert found.kind == "OP"
    assert [site.op for site in found.ops] == ["aten.leaky_relu.default"]
    assert [site.op for site in found.instead_of] == ["aten.relu.default"]


@pytest.mark.parametrize("at", [40, -3])
def test_a_changed_byte_is_noticed(saved: tuple[Trace, Path], at: int) -> None:
    data = bytearray(saved[1].read_bytes())
    data[at] ^= 1
    saved[1].write_bytes(data)
    with pytest.raises(InputError, match=r"trace|damaged"):
        store.load(saved[1])


def test_a_cut_file_and_a_foreign_one_are_refused(saved: tuple[Trace, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved[1].write_bytes(saved[1].read_bytes()[:-100])
    foreign = tmp_path / "foreign.trace"
    save_file({"x": torch.ones(2)}, str(foreign), metadata={"format": "pt"})
    for path in (saved[1], foreign, Path(__file__), tmp_path / "absent.trace"):
        with pytest.raises(InputError, match="trace"):
            store.load(path)


def test_a_trace_that_speaks_of_values_it_lacks_is_refused(tmp_path: Path) -> None:
    trace = record(lambda x: x + 1, (torch.ones(2),), "a")
    trace.outputs.append(("more", 99))
    store.save(trace, tmp_path / "a.trace")
    with pytest.raises(InputError, match="does not hold"):
        store.load(tmp_path / "a.trace")
