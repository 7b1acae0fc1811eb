"""The inventory: the traffic's mix by hand, times and places, coverage, and whole pages."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bench_fakes import FakeClock
from torchstone.bench import roofline
from torchstone.errors import WorkloadError
from torchstone.inspection import latency, mix, profile, tables
from torchstone.inspection.coverage import coverage
from torchstone.inspection.inventory import Plan, inventory
from torchstone.inspection.trace import trace
from torchstone.policy import Policy
from torchstone.records import Arrival, Dim, Inventory
from torchstone.workload import Workload


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# traffic


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        return self.linear(x)


def arrivals(*sizes: tuple[int, int], step_s: float | None = None) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(sizes={"B": b, "S": s}, at_s=None if step_s is None else i * step_s)
        for i, (b, s) in enumerate(sizes)
    )


def rows(traffic: tuple[Arrival, ...] = (), **changes) -> Workload:
    given = {
        "name": "rows",
        "model": Rows,
        "inputs": lambda: (torch.randn(2, 4, 6),),
        "dims": (Dim(name="B", low=1, high=8), Dim(name="S", low=1, high=100)),
        "shapes": {"x": ("B", "S", 6)},
        "traffic": traffic,
    }
    return Workload(**{**given, **changes})


def test_the_mix_by_hand():
    spec = rows(arrivals((1, 10), (1, 10), (1, 20), (2, 40), step_s=0.5)).spec()
    found = mix.traffic_mix(spec, recorded=True)
    assert (found.requests, found.shapes) == (4, 3)
    assert (found.frequent[0].sizes, found.frequent[0].share) == ({"B": 1, "S": 10}, 0.5)
    batch, length = found.dims
    assert length.quantiles == {"p50": 10, "p90": 40, "p99": 40, "max": 40}
    assert [(b.low, b.high, b.requests) for b in length.histogram] == [
        (10, 10, 2),
        (20, 20, 1),
        (40, 40, 1),
    ]
    assert batch.padding_waste == pytest.approx(1 - 1.25 / 2)
    assert length.padding_waste == pytest.approx(1 - 20 / 40)
    assert found.padding_waste == pytest.approx(1 - (10 + 10 + 20 + 80) / (4 * 80))
    assert found.rate == pytest.approx(2.0)
    assert found.peak_rate == 2.0


def test_many_sizes_make_bars_that_hold_all_requests():
    spec = rows(arrivals(*((1, s) for s in range(1, 101)))).spec()
    bars = mix.traffic_mix(spec, recorded=True).dims[1].histogram
    assert sum(b.requests for b in bars) == 100
    assert (bars[0].low, bars[-1].high) == (1, 100)
    assert all(a.high + 1 == b.low for a, b in pairwise(bars))


def test_scalars_have_their_values_counted():
    class Scale(nn.Module):
        def forward(self, x, scale):
            return x * scale

    traffic = tuple(Arrival(sizes={}, scalars={"scale": v}) for v in (1.0, 2.0, 1.0))
    workload = Workload(name="scale", model=Scale, inputs=lambda: (torch.randn(3), 1.0), traffic=traffic)
    found = mix.traffic_mix(workload.spec(), recorded=True)
    assert found.scalars[0].frequent == ((1.0, 2), (2.0, 1))
    assert found.shapes == 2
    assert (found.rate, found.padding_waste) == (None, 0)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 100)), min_size=1, max_size=60),
    st.integers(1, 9),
)
def test_the_requests_that_are_run_stand_for_all(sizes, most):
    spec = msgspec.structs.replace(SPEC, traffic=arrivals(*sizes))
    found = mix.sampled(spec, most)
    assert 1 <= len(found) <= most
    assert sum(s.requests for s in found) == len(sizes)
    assert {(s.arrival.sizes["B"], s.arrival.sizes["S"]) for s in found} <= set(sizes)
    volumes = [s.arrival.sizes["B"] * s.arrival.sizes["S"] for s in found]
    assert volumes == sorted(volumes)
    if len(set(sizes)) <= most:
        assert {(*s.arrival.sizes.values(), s.requests) for s in found} == {
            (*size, count) for size, count in Counter(sizes).items()
        }


SPEC = rows().spec()


# times


def test_times_are_taken_after_warm_up_by_the_clock():
    clock = FakeClock()
    seconds = iter([5.0, 2.0, *[1.0] * 1000])

    def run():
        clock.time += next(seconds)

    found = latency.times(run, clock, 100.0)
    assert found.median_s == found.p90_s == 1.0
    assert found.warmup_calls == 4  # the first alone, then until three passes show no fall
    assert found.calls == 200 or clock.now() >= 100
    assert found.steady


def test_few_calls_are_timed_where_each_takes_long():
    clock = FakeClock()

    def run():
        clock.time += 100.0

    found = latency.times(run, clock, 1.0)
    assert (found.warmup_calls, found.calls) == (1, 1)


def test_memory_of_a_call_is_seen():
    before = latency.resident_bytes()
    peak = latency.peak_during(lambda: torch.ones(50_000_000).sum())
    assert peak >= before + 150_000_000


def test_time_is_placed_by_module_and_source_line():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            x = self.linear(x)
            return torch.relu(x) + 1

    module, x = Two(), torch.randn(32, 64)
    found = profile.profile(module, (x,), torch.device("cpu"), call_s=1e-4, budget_s=0.01)
    seen = tables.profile(found)
    assert 0 < seen.operations_s <= seen.seconds
    assert 0 <= seen.outside < 1
    assert {Path(line.file).name for line in seen.lines} == {"test_inventory.py"}
    lines = {line.text: line for line in seen.lines}
    assert set(lines) == {"x = self.linear(x)", "return torch.relu(x) + 1"}
    assert lines["return torch.relu(x) + 1"].calls == 2
    assert sum(line.share for line in seen.lines) == pytest.approx(1)
    listed = tables.modules(module, trace(module, (x,)), [], found)
    assert sum(m.seconds for m in listed) == pytest.approx(listed[0].total_seconds)
    assert listed[1].seconds > 0


# coverage


class Decomposes(nn.Module):
    def forward(self, x):
        pooled = torch.nn.functional.max_pool2d(x[None], 1)[0]  # Inductor looks at it to decompose it
        return torch.linalg.svd(torch.relu(pooled))[1].sum()


@pytest.mark.slow
def test_an_operation_that_an_engine_lacks_is_named():
    pytest.importorskip("openvino")
    program = torch.export.export(Decomposes(), (torch.randn(4, 4),))
    found = {c.engine: c for c in coverage(program, {})}
    assert list(found) == ["inductor", "aotinductor", "onnxruntime", "openvino"]
    svd = "aten._linalg_svd.default"
    assert [o.op for o in found["onnxruntime"].missing] == [svd]
    assert [o.op for o in found["openvino"].missing] == [svd]
    assert [o.op for o in found["inductor"].fallbacks] == [svd]
    assert found["inductor"].missing == ()
    for one in found.values():
        assert one.source == "program"
        assert one.translated == one.operations - 1 > 0


@pytest.mark.slow
def test_without_a_program_the_calls_are_counted():
    pytest.importorskip("openvino")
    found = {
        c.engine: c
        for c in coverage(None, {torch.ops.aten.mm.default: 3, torch.ops.aten._linalg_svd.default: 1})
    }
    assert found["onnxruntime"].source == "calls"
    assert (found["onnxruntime"].operations, found["onnxruntime"].translated) == (4, 3)
    assert (found["openvino"].translated, found["aotinductor"].translated) == (None, None)
    assert "export refused" in found["openvino"].text
    assert found["inductor"].translated == 3
    assert [o.op for o in found["inductor"].fallbacks] == ["aten._linalg_svd.default"]


@pytest.mark.slow
def test_operations_in_place_count_as_those_that_capture_makes_of_them():
    pytest.importorskip("onnxscript")
    called = {
        torch.ops.aten.add_.Tensor: 2,
        torch.ops.aten.add.Tensor: 1,
        torch.ops.aten.lift_fresh.default: 1,
    }
    found = {c.engine: c for c in coverage(None, called)}
    assert (found["onnxruntime"].operations, found["onnxruntime"].translated) == (3, 3)
    assert (found["inductor"].operations, found["inductor"].translated) == (3, 3)


def test_an_engine_that_is_absent_is_said_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = coverage(None, {})
    assert [c.absent.engine for c in found] == ["inductor", "aotinductor", "onnxruntime", "openvino"]
    assert found[3].absent.hint == "pip install 'torchstone[openvino]'"


# whole pages


def consistent(found: Inventory) -> None:
    """What holds for any model."""
    assert msgspec.json.decode(msgspec.json.encode(found), type=Inventory) == found
    assert found.first_call_s > 0
    assert found.memory.peak_bytes >= found.memory.resident_bytes > 0
    assert 0 < found.least_bytes <= found.modules[0].total.bytes
    listed = sum(o.work.bytes for o in found.ops)
    assert listed == found.modules[0].total.bytes
    assert sum(s.requests for s in found.sizes) == found.traffic.requests
    assert found.roofline is not None
    bounds = found.roofline.example
    each = sum(o.bound_s for o in found.ops)
    assert max(each, bounds.fused_s) == pytest.approx(bounds.operations_s)
    if bounds.operations_s:
        assert bounds.eager_over_operations == pytest.approx(bounds.eager_s / bounds.operations_s)


QUICK = Plan(budget_s=0.2, refused="not asked")


measured = cache(roofline.measure)


@pytest.fixture
def quick(monkeypatch):
    """The peaks are measured once; no compilers are loaded: their coverage is tested apart."""
    monkeypatch.setattr(
        "torchstone.bench.roofline.measure", lambda device, _: measured(device, ("float64",))
    )
    monkeypatch.setattr("torchstone.backends.BACKENDS", ())


@pytest.mark.usefixtures("quick")
def test_a_page_of_a_model_with_traffic():
    traffic = arrivals((1, 3), (1, 3), (4, 3))
    found = inventory(rows(traffic, policy=Policy(dollars_per_hour=3.6)), plan=QUICK)
    consistent(found)
    assert [(s.sizes["B"], s.requests) for s in found.sizes] == [(1, 2), (4, 1)]
    assert [s.work.flops for s in found.sizes] == [2 * b * 3 * 6 * 5 for b in (1, 4)]
    assert found.modules[0].mix.flops == 2 * 2 * 3 * 6 * 5  # two rows a request
    assert found.ops[0].mix is not None
    one, four = (s.times.median_s for s in found.sizes)
    assert found.mean_s == pytest.approx((2 * one + four) / 3)
    assert found.dollars_per_million == pytest.approx(1000 * found.mean_s)
    assert found.requests_per_s == pytest.approx(1 / found.mean_s)
    assert found.roofline.mix is not None
    assert not any("recorded traffic" in note or "dollars" in note for note in found.notes)


@pytest.mark.usefixtures("quick")
def test_a_page_without_traffic_parameters_or_price_whose_outputs_are_a_dict():
    class Count(nn.Module):
        def forward(self, ids, scale):
            return {"doubled": ids * 2, "sorted": torch.sort(ids.float() * scale)[0], "n": len(ids)}

    workload = Workload(name="count", model=Count, inputs=lambda: {"ids": torch.arange(6), "scale": 2.0})
    found = inventory(workload, plan=QUICK)
    consistent(found)
    assert found.weights.parameters == 0
    assert found.modules[0].kind == "Count"
    assert {o.op: o.counted for o in found.ops}["aten.sort"] == "uncounted"
    assert found.dollars_per_million is None
    said = " ".join(found.notes)
    for part in (
        "aten.sort are not counted",
        "no parameters",
        "no recorded traffic",
        "dollars_per_hour",
    ):
        assert part in said


@pytest.mark.usefixtures("quick")
def test_what_is_odd_about_a_model_is_noted():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, dtype=torch.float64)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.table.weight
            self.norm = nn.BatchNorm1d(4).double()
            self.drop = nn.Dropout(0.5)

        def forward(self, ids):
            return self.out(self.drop(self.norm(self.table(ids))))

    found = inventory(Workload(name="odd", model=Odd, inputs=lambda: torch.arange(6)), plan=QUICK)
    said = " ".join(found.notes)
    for part in (
        "table.weight, out.weight are one tensor",
        "float64",
        "dropout is active in drop",
        "the statistics of norm",
    ):
        assert part in said


def test_a_model_that_fails_is_told_at_its_line():
    class Fails(nn.Module):
        def forward(self, x):
            return x @ torch.ones(3)

    workload = Workload(name="fails", model=Fails, inputs=lambda: torch.randn(2, 4))
    with pytest.raises(WorkloadError, match="forward on its example inputs failed") as raised:
        inventory(workload, plan=QUICK)
    line = Path(__file__).read_text().splitlines()[raised.value.line - 1]
    assert line.strip() == "return x @ torch.ones(3)"


@pytest.mark.usefixtures("quick")
def test_a_size_that_fails_has_no_figures_and_is_told():
    class Small(Rows):
        def forward(self, x):
            if x.shape[1] > 50:
                raise ValueError("too long")
            return super().forward(x)

    found = inventory(rows(arrivals((1, 3), (1, 60)), model=Small), plan=QUICK)
    consistent(found)
    assert found.sizes[0].times is not None
    assert found.sizes[1].times is None
    assert "too long" in found.sizes[1].text
    assert (found.mean_s, found.requests_per_s, found.roofline.mix) == (None, None, None)
    assert any("too long" in note for note in found.notes)


@pytest.mark.usefixtures("quick")
def test_a_model_that_no_mode_can_watch_still_has_a_page():
    class Shy(Rows):
        def forward(self, x):
            if torch.utils._python_dispatch._len_torch_dispatch_stack():
                raise RuntimeError("I am watched")
            return super().forward(x)

    found = inventory(rows(arrivals((1, 3)), model=Shy), plan=QUICK)
    assert (found.ops, found.roofline, found.profile) == ((), None, None)
    assert found.mean_s is not None
    assert [m.path for m in found.modules] == ["", "linear"]
    assert sum("I am watched" in note for note in found.notes) >= 2


@pytest.mark.slow
def test_a_page_with_coverage_of_a_model_that_export_takes():
    pytest.importorskip("openvino")
    found = inventory(rows(arrivals((1, 3), (2, 9))), plan=Plan(budget_s=0.3))
    consistent(found)
    assert {c.engine: c.translated == c.operations for c in found.coverage} == {
        "inductor": True,
        "aotinductor": True,
        "onnxruntime": True,
        "openvino": True,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_page_of_a_model_on_a_device():
    workload = rows(
        arrivals((1, 3), (4, 3)),
        model=lambda: Rows().cuda(),
        inputs=lambda: (torch.randn(2, 4, 6, device="cuda"),),
        policy=Policy(dollars_per_hour=1.0),
    )
    found = inventory(workload, plan=QUICK)
    consistent(found)
    assert found.device == "cuda:0"
    assert found.memory.device_peak_bytes > 0
    assert all(s.times is not None for s in found.sizes)
    assert found.roofline.peaks.device == torch.cuda.get_device_name()
    assert found.ops[0].seconds > 0
    assert found.dollars_per_million > 0
