"""Judging, deciding and adding up, without processes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.bench.stats import CONFIDENCE
from torchstone.kernelbench import decide, gate, judge, load, ours, summary
from torchstone.kernelbench.columns import COLUMNS, Unfit, allowing_tf32
from torchstone.kernelbench.decide import CONTROL, Verdict
from torchstone.kernelbench.judge import Desk, Finding, Judged, trials
from torchstone.records.kernelbench import (
    BenchColumn,
    BenchOurs,
    BenchProblem,
    BenchProof,
    BenchRoofline,
)
from torchstone.verify import compare

SAMPLES = Path(__file__).parent / "kernelbench_samples"
CONTRACTS = ours.CONTRACTS


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    """As in a worker."""
    with torch.no_grad():
        yield


def desk_of(source: str, folder: Path, dtype: str = "float32") -> Desk:
    file = folder / "1_problem.py"
    file.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(source))
    return Desk(load.load(file, load.Setup(device="cpu", dtype=dtype)), CONTRACTS)


def judged(desk: Desk, change: Callable[[Any], Any], which: int = 0) -> Judged:
    desk.prepare(trials()[which])
    module = desk.loaded.again()
    return desk.judge(lambda *given: change(module(*given)), module, hold=False)


PLAIN = """
class Model(nn.Module):
    def forward(self, x): return x * 2 + 1
def get_inputs(): return [torch.rand(40, 50)]
def get_init_inputs(): return []
"""


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 1e-2)]
)
def test_the_suites_tolerance_is_absolute_and_relative_by_dtype(
    tmp_path: Path, dtype: str, tolerance: float
) -> None:
    desk = desk_of(PLAIN, tmp_path, dtype)

    def off(share: float) -> Callable[[Any], Any]:
        # outputs are between 1 and 3, so |output| bounds are between 2 and 4 tolerances
        return lambda y: (y.double() + share * tolerance * (1 + y.double())).to(y.dtype)

    assert judged(desk, off(0.0)).suite
    assert judged(desk, off(0.4)).suite
    assert not judged(desk, off(2.0)).suite
    assert judged(desk, off(0.4), which=5).suite is None  # scaled inputs are none of the suite's


def test_seven_trials_of_which_five_are_the_suites_and_five_have_float64() -> None:
    made = trials()
    assert [t.case.name for t in made if t.suite] == [f"trial-{i}" for i in range(1, 6)]
    assert [t.case.name for t in made if t.wide] == [
        *(f"trial-{i}" for i in range(1, 4)),
        "values-tiny",
        "values-large",
    ]
    assert len({t.case.seed for t in made if t.suite}) == 5


def test_a_single_element_beyond_the_tolerance_breaks_a_contract(tmp_path: Path) -> None:
    desk = desk_of(PLAIN, tmp_path)

    def one_off(y: torch.Tensor) -> torch.Tensor:
        y.view(-1)[7] *= 1 + 5e-4
        return y

    found = judged(desk, one_off)
    assert found.relative is not None
    assert found.relative < 1e-4  # the norm does not see it
    assert found.findings[1e-4].kept == "broken"
    assert found.findings[1e-3].kept == "bound"


ROUNDED = """
class Model(nn.Module):
    # eager rounds to 10 bits, as TF32 does; float64 says what is meant
    def forward(self, x):
        if x.dtype == torch.float64: return x * 3
        bits = (x * 3).view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
def get_inputs(): return [torch.rand(64, 64)]
def get_init_inputs(): return []
"""


def test_where_eager_is_beyond_the_contract_no_worse_will_do_and_is_said(tmp_path: Path) -> None:
    desk = desk_of(ROUNDED, tmp_path)
    same = judged(desk, lambda y: y)
    assert same.findings[1e-4].kept == "eager"
    assert same.findings[1e-3].kept == "bound"
    worse = judged(desk, lambda y: y * (1 + 4e-4))
    assert worse.findings[1e-4].kept != "eager"
    truth = desk.truth
    assert truth is not None
    (exact,) = truth.wide
    assert isinstance(exact, torch.Tensor)
    better = judged(desk, lambda y: exact.float())
    assert better.findings[1e-4].kept == "bound"
    assert (
        better.suite is False or better.suite is True
    )  # eager is the outlier of the suite's comparison


def test_integers_and_non_finite_values_count(tmp_path: Path) -> None:
    desk = desk_of(PLAIN.replace("x * 2 + 1", "(x * 2, x.argmax(1))"), tmp_path)
    assert judged(desk, lambda y: y).findings[1e-4].kept == "bound"
    assert judged(desk, lambda y: (y[0], y[1] ^ 1)).findings[1e-3].kept == "broken"

    def poisoned(y: Any) -> Any:
        y[0][0, 0] = float("nan")
        return y

    found = judged(desk, poisoned)
    assert found.relative is None
    assert found.findings[1e-3].kept == "broken"


def test_memory_that_is_never_written_shows(tmp_path: Path) -> None:
    desk = desk_of(PLAIN, tmp_path)
    found = [judged(desk, torch.empty_like) for _ in range(3)]
    assert all(f.findings[1e-3].kept == "broken" for f in found)


def test_an_output_that_moves_by_rounding_alone_is_constant(tmp_path: Path) -> None:
    cases = {
        PLAIN: False,
        PLAIN.replace("x * 2 + 1", "(x - x.mean(1, keepdim=True)).mean(1)"): True,
        PLAIN.replace("x * 2 + 1", "x.clamp(2, 2)"): True,
        PLAIN.replace("x * 2 + 1", "x.mean() * 1e-6 + 1"): False,  # small, and it depends
        PLAIN.replace("torch.rand", "torch.ones"): False,  # the inputs do not move either
    }
    for source, constant in cases.items():
        desk = desk_of(source, tmp_path)
        said = []
        for trial in trials()[:2]:
            desk.prepare(trial)
            said.append(desk.constant())
        assert said == [None, constant], source


def test_state_that_eager_keeps_outside_of_buffers_is_no_reference(tmp_path: Path) -> None:
    source = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            return x * self.calls
    def get_inputs(): return [torch.rand(4, 5)]
    def get_init_inputs(): return []
    """
    truth = desk_of(source, tmp_path).prepare(trials()[0])
    assert "keeps state" in truth.problem


def test_large_outputs_are_judged_in_pieces_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    wide = torch.randn(37, 19, dtype=torch.float64)
    plain = wide.float()
    own = plain * (1 + 1e-4 * torch.randn_like(plain))
    own[5, 3] = float("inf")
    for candidate in (plain, own, own.nan_to_num(posinf=0.0)):
        whole = compare.errors("y", candidate, wide, plain)
        monkeypatch.setattr(judge, "_PIECE", 64)
        pieces = judge._errors("y", candidate, wide, plain)
        monkeypatch.undo()
        assert (whole.relative is None) == (pieces.relative is None)
        for name in ("relative", "rms", "error_rms") if whole.relative is not None else ():
            assert getattr(whole, name) == pytest.approx(getattr(pieces, name), rel=1e-6)
        assert (whole.non_finite, whole.differing, whole.elements) == (
            pieces.non_finite,
            pieces.differing,
            pieces.elements,
        )
        if whole.worst:
            assert pieces.worst == pytest.approx(whole.worst, rel=0.5)


bounds = st.sampled_from(["bound", "eager", "not judged", "unverifiable", "broken"])


@given(st.lists(st.tuples(bounds, bounds), min_size=1, max_size=6), st.booleans())
def test_a_contract_is_proved_only_if_kept_somewhere_and_broken_nowhere(
    kept: list[tuple[Any, Any]], breach: bool
) -> None:
    verdict = Verdict()
    for pair in kept:
        findings = {c: Finding(k, "why") for c, k in zip(CONTRACTS, pair, strict=True)}
        verdict.add(Judged(True, 1e-6, findings))
    if breach:
        verdict.add(Judged(True, 1e-6, {}, "it changes input[0]"))
    for position, proof in enumerate(verdict.proofs()):
        each = [pair[position] for pair in kept]
        bad = breach or "broken" in each or "unverifiable" in each
        assert proof.proved == (not bad and ("bound" in each or "eager" in each))
        assert bool(proof.text) == bad
        assert proof.by == ("" if bad else "eager" if "eager" in each else "bound")


times = st.floats(1e-6, 1.0)


@given(
    st.lists(st.tuples(times, times, times), min_size=5, max_size=12),
    st.floats(0.2, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_ours_is_never_below_the_baseline(rows: list[tuple[float, float, float]], scale: float) -> None:
    session = {
        "compile": [r[0] for r in rows],
        CONTROL: [r[1] for r in rows],
        "mine": [r[2] * scale for r in rows],
    }
    found, noise = decide.compare(session, "compile", ["mine"])
    one = decide.ours(1e-4, "mine", found["mine"])
    assert noise >= 0.01
    assert one.ratio >= 1
    assert one.promoted == (found["mine"].relation == "FASTER")
    assert one.promoted or (one.ratio == one.low == one.high == 1 and one.reason)


def test_two_finalists_share_the_confidence() -> None:
    session = {n: [1.0 + 0.01 * i for i in range(8)] for n in ("compile", CONTROL, "a", "b")}
    found, _ = decide.compare(session, "compile", ["a", "b"])
    assert {c.confidence for c in found.values()} == {1 - (1 - CONFIDENCE) / 2}


def result(number: int, ratio: float | None, outcome: str = "judged", level: int = 1) -> BenchProblem:
    promoted = ratio is not None
    one = BenchOurs(
        contract=1e-4,
        choice="mine" if promoted else "KEEP_BASELINE",
        reason="",
        ratio=ratio or 1.0,
        strong_ratio=0.5 * (ratio or 1.0),
    )
    proof = BenchProof(contract=1e-4, proved=True, by="bound")
    seconds = 1.0 / (ratio or 1.0)
    columns = (
        BenchColumn(name="compile", candidate=False, status="timed", seconds=(1.0,)),
        BenchColumn(name="mine", candidate=True, status="timed", seconds=(seconds,), proofs=(proof,)),
    )
    return BenchProblem(
        level=level,
        number=number,
        name=f"{number}_x.py",
        digest="",
        outcome=outcome,  # type: ignore[arg-type]
        against="compile",
        columns=columns,
        ours=() if outcome == "failed" else (one,),
        roofline=BenchRoofline(bytes=1, flops=1.0, memory_s=0.5, compute_s=0.1),
    )


def test_a_level_is_added_up_as_the_suite_does_it() -> None:
    problems = [
        result(1, 4.0),
        result(2, 1.5),
        result(3, None),
        result(4, None, "unverifiable"),
        result(5, 9.0, "degenerate"),
        result(6, None, "failed"),
    ]
    whole, even, odd = summary.levels(problems, (1e-4,))
    (one,) = whole.contracts
    assert (whole.problems, whole.counted, whole.correct) == (6, 4, 4)
    assert (one.promoted, one.kept) == (2, 2)
    assert one.geomean == pytest.approx(6.0**0.25)
    assert (one.median, one.least) == (1.25, 1.0)
    assert (one.fast_1, one.fast_2) == (0.5, 0.25)
    assert one.strong_geomean == pytest.approx(0.5 * 6.0**0.25)
    assert (whole.degenerate, whole.failed, whole.unverifiable) == (("1/5",), ("1/6",), ("1/4",))
    assert whole.bandwidth_median == pytest.approx(0.625)  # of 2.0, 0.75, 0.5 and 0.5
    assert (even.half, even.problems, odd.half, odd.problems) == ("even", 3, "odd", 3)
    assert summary.worst(problems, 1e-4) == ("1/3", "1/4", "1/2", "1/1")


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=20))
def test_geomean_and_median_lie_within_the_ratios(ratios: list[float]) -> None:
    whole = summary.levels([result(i, r) for i, r in enumerate(ratios)], (1e-4,))[0]
    (one,) = whole.contracts
    for figure in (one.geomean, one.median):
        assert figure is not None
        assert min(ratios) * (1 - 1e-9) <= figure <= max(ratios) * (1 + 1e-9)
    assert math.isclose(one.fast_1 or 0.0, sum(r > 1 for r in ratios) / len(ratios))


def test_what_is_promoted_and_not_proved_is_not_correct() -> None:
    good = result(1, 2.0)
    assert summary.levels([good], (1e-4,))[0].correct == 1
    import msgspec

    mine = msgspec.structs.replace(good.columns[1], proofs=())
    bad = msgspec.structs.replace(good, columns=(good.columns[0], mine))
    assert summary.levels([bad], (1e-4,))[0].correct == 0


def module_of(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(*layers)


def candidate(name: str) -> ours.Candidate:
    return next(c for c in ours.CANDIDATES if c.name == name)


def test_names_of_columns_and_candidates_are_unique_and_strong_ones_allow_tf32() -> None:
    names = [c.name for c in (*COLUMNS, *ours.CANDIDATES)]
    assert len(set(names)) == len(names)
    assert [c.name for c in COLUMNS if c.strong] == [
        "compile+tf32",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ]


@pytest.mark.parametrize("name", ["TF32", "compile + CUDA graph"])
def test_what_needs_a_gpu_says_so_on_a_cpu(name: str) -> None:
    found = candidate(name).build(module_of(torch.nn.Linear(4, 4)), (torch.rand(2, 4),))
    assert isinstance(found, Unfit)
    assert "CUDA" in found.why


def test_tf32_is_allowed_within_the_call_alone() -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_tf32

    def fails() -> None:
        assert products.allow_tf32
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        allowing_tf32(fails)()
    assert products.allow_tf32 == before


@pytest.mark.slow
def test_half_products_keep_to_the_wide_contract_alone(tmp_path: Path) -> None:
    source = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(64, 64, 3)
        def forward(self, x): return torch.relu(self.conv(x))
    def get_inputs(): return [torch.rand(4, 64, 16, 16)]
    def get_init_inputs(): return []
    """
    desk = desk_of(source, tmp_path)
    module = desk.loaded.again()
    call = candidate("fp16 products").build(module, desk.loaded.inputs())
    assert not isinstance(call, Unfit)
    verdict = Verdict()
    for i, trial in enumerate(trials()):
        desk.prepare(trial)
        verdict.add(desk.judge(call, module, hold=i == 0))
    kept = {p.contract: p.proved for p in verdict.proofs()}
    assert kept == {1e-4: False, 1e-3: True}


def heeding(path: Path, count: Path) -> subprocess.Popen[bytes]:
    code = f"""
    import time
    from pathlib import Path
    from torchstone.kernelbench import gate
    gate.heed(Path({str(path)!r}))
    n = 0
    while True:
        n += 1
        Path({str(count)!r}).write_text(str(n))
        time.sleep(0.002)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment)


def settled(read: Callable[[], Any], wanted: Callable[[Sequence[Any]], bool]) -> bool:
    """Whether three looks in a row come out as wanted, within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        looks = [(time.sleep(0.15), read())[1] for _ in range(3)]
        if wanted(looks):
            return True
    return False


@pytest.mark.slow
def test_who_heeds_the_gate_stands_still_while_it_is_closed(tmp_path: Path) -> None:
    path, count = tmp_path / "gate", tmp_path / "count"
    process = heeding(path, count)
    try:
        assert settled(lambda: count.exists() and count.read_text(), lambda s: len(set(s)) == 3)
        with gate.closed(path, [process.pid]):
            assert settled(count.read_text, lambda s: len(set(s)) == 1)
        assert settled(count.read_text, lambda s: len(set(s)) == 3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
