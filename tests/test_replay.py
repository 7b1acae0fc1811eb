"""The replay benchmark: its metrics by hand, equal costs for both sides, proposals that repeat."""

import gzip
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import replay as benchmark  # noqa: E402  lies in benchmarks
import replay_report as metrics  # noqa: E402
from replay_helion import Costs, Found, Setup, Step, _Answers  # noqa: E402
from torchstone.errors import InputError  # noqa: E402
from torchstone.records.tuning import MeasurePolicy  # noqa: E402
from torchstone.tuner.replay import ReplayMeasurer, Row, Table, write  # noqa: E402
from torchstone.tuner.search.base import Proposal  # noqa: E402

SMALL = ROOT / "benchmarks" / "tables" / "dequant_gemv-8192x28672.json.gz"


def trace(excess: list[float], who: str = "guided", table: str = "a", seed: int = 0) -> metrics.Trace:
    """A search of which each measurement takes two seconds, half a second of them its own."""
    hit = next((n for n, e in enumerate(excess, 1) if e <= metrics.SHARE), None)
    n = hit or len(excess)
    at = [2.0 * k for k in range(1, len(excess) + 1)]
    return metrics.Trace(
        table=table,
        who=who,
        seed=seed,
        excess=excess,
        at_s=at,
        spent=(n, 2.0 * n, 1.5 * n),
        hit=hit is not None,
    )


def table(**times: float | None) -> Table:
    """One knob; each value's time, constant, or none where it crashed; compiled in 1, 2, ... seconds."""
    rows = tuple(
        Row(values=(name,), compile_s=1.0 + k, **({"seconds": (t,) * 5} if t else {"status": "crashed"}))
        for k, (name, t) in enumerate(times.items())
    )
    return Table(kernel="k", device="D", sizes={"n": 1}, knobs={"x": tuple(times)}, rows=rows)


def test_a_success_costs_all_that_was_spent_over_the_successes() -> None:
    found = [trace([0.5, 0.01]), trace([0.5, 0.4, 0.3, 0.2]), trace([0.02])]
    assert [metrics.expected(found, unit) for unit in range(3)] == [7 / 2, 14 / 2, 10.5 / 2]
    assert math.isinf(metrics.expected([trace([0.5])], 0))
    picks = np.array([[0, 0, 2], [1, 1, 1]])
    assert metrics.expected(found, 0, picks).tolist() == [5 / 3, 12], "no success: one at the end"


def test_a_ratio_leaves_no_failure_unsaid() -> None:
    theirs = {"a": [trace([0.5] * 7 + [0.0])], "b": [trace([0.5])], "c": [trace([0.0])]}
    mine = {"a": [trace([0.5, 0.0])], "b": [trace([0.0])], "c": [trace([0.5])]}
    text = metrics.ratio(mine, theirs, 0)
    assert "geometric mean 0.250 [0.250, 0.250] of 1 tables" in text
    assert "at most a half on 2, a quarter on 2 of 3; we never on c; they never on b" in text


def test_after_a_stop_the_config_stays_and_tables_count_alike() -> None:
    searches = {
        "a": [trace([99.0, 0.5, 0.01]), trace([0.5])],
        "b": [trace([0.0], table="b"), trace([0.0], table="b")],
    }
    (share, share_error), (regret, _) = metrics.curves(searches)
    assert (share[0], share[1], share[2], share[-1]) == (0.5, 0.5, 0.75, 0.75)
    assert regret[0] == pytest.approx((2.0 + math.log(1.5)) / 2 / 2), "a log beyond 2 counts as 2"
    assert regret[-1] == pytest.approx((math.log(1.01) + math.log(1.5)) / 4)
    assert share_error[-1] == pytest.approx(0.25 / 1 / 2 / 2), "variance of the mean over tables"


def test_where_we_are_worse_than_helion_is_said() -> None:
    late = metrics.curves({"a": [trace([0.5] * 9 + [0.0])]})
    early = metrics.curves({"a": [trace([0.5] * 7 + [0.01])]})
    text = metrics.compared(late, early)
    assert "share: as good or better after 247 of the 249 from 8 on, at worst by -1.0000" in text
    assert "(standard error 0.0000) after 8" in text
    assert "log regret: as good or better after 247 of the 249" in text
    assert text.endswith("reaches the share that Helion ends with after 10")
    assert "share: as good or better after 249 of" in metrics.compared(early, early)


def test_a_report_needs_the_same_searches_of_all() -> None:
    both = [trace([0.0], who) for who in ("helion", "guided")]
    assert "guided over Helion" in metrics.report(both)
    assert "over Helion" not in metrics.report(both[1:]), "ours alone can be reported"
    with pytest.raises(InputError, match=r"helion and guided .*'b'"):
        metrics.report([*both, trace([0.0], table="b")])


def test_helions_timings_again_change_what_it_names(tmp_path: Path) -> None:
    write(table(slow=2.0, best=1.0, failed=None), tmp_path / "t.json.gz")
    steps = [
        Step(("failed",), None, 1.0, again=False),
        Step(("best",), 1.0, 4.0, again=False),
        Step(("slow",), 1.5, 6.0, again=False),
        Step(("best",), 1.6, 8.0, again=True),
    ]
    found = Found(
        table="k/1/D",
        seed=3,
        setup=Setup(),
        steps=steps,
        chosen=("slow",),
        end_s=10.0,
        own_s=5.0,
        refused=0,
    )
    (made,) = benchmark.helions([found], {"k/1/D": tmp_path / "t.json.gz"})
    assert made.excess == [99.0, 0.0, 1.0]
    assert made.at_s == [1.5, 6.0, 9.0], "its own computing is spread over its seconds"
    assert (made.spent, made.hit) == ((2, 6.0, 4.0), True)
    slow = Found(**{f: getattr(found, f) for f in found.__struct_fields__} | {"steps": steps[::2]})
    (made,) = benchmark.helions([slow], {"k/1/D": tmp_path / "t.json.gz"})
    assert (made.spent, made.hit) == ((2, 15.0, 10.0), False)


def test_both_sides_pay_alike() -> None:
    one, clock = table(a=0.01, b=0.02, c=None), Costs()
    for row in one.rows:
        ours, theirs = ReplayMeasurer(one, 0, clock.lanes), _Answers(one, 0, clock)
        (measured,) = ours.measure([Proposal(one.config(row), "test")], None)
        theirs.compile([row], math.inf)
        assert theirs.now == row.compile_s
        timed = theirs.first(row, math.inf)
        if row.time is None:
            assert timed is measured.time is None
            assert ours.now() == theirs.now == row.compile_s, "a failure costs its compiling"
            continue
        calls = clock.calls(row.time, MeasurePolicy().samples, ReplayMeasurer.untimed)
        assert ours.now() == pytest.approx(row.compile_s + clock.overhead_s + calls)
        # Helion: one call that proves, five that estimate, and windows of 1 and 50 ms
        repeat = int(0.05 / (row.time + clock.flush_s))
        calls = clock.calls(row.time, timed=5 + repeat, untimed=1 + 1 + 1)
        assert theirs.now == pytest.approx(row.compile_s + clock.overhead_s + calls)


def test_both_sides_compile_on_as_many_lanes() -> None:
    one, clock = table(**dict.fromkeys("abcdefghijk")), Costs(lanes=3)
    ours, theirs = ReplayMeasurer(one, 0, clock.lanes), _Answers(one, 0, clock)
    assert len(list(ours.measure([Proposal(one.config(r), "test") for r in one.rows], None))) == 11
    theirs.compile(one.rows, math.inf)
    assert ours.now() == theirs.now == 26.0, "lanes end at 22 = 1+4+7+10, 26 = 2+5+8+11, 18 = 3+6+9"


def test_a_search_repeats_and_pays_for_its_own_computing() -> None:
    first, again = (benchmark.ours(benchmark.Task(SMALL, ()), 1, "guided", 24) for _ in range(2))
    assert first.excess == again.excess
    assert first.hit == again.hit
    assert first.spent[0] == again.spent[0]
    assert first.spent[2] == pytest.approx(again.spent[2]), "without it, the seconds are the table's"
    assert first.spent[1] > first.spent[2]
    assert len(first.at_s) == len(first.excess) <= 24
    assert sorted(first.at_s) == first.at_s


def test_no_table_is_its_own_sibling_and_held_out_ones_teach_nothing() -> None:
    for split in ("develop", "held_out"):
        made = benchmark.tasks(split, None, Path())
        assert made
        for task in made:
            kernel = task.path.name.split("-")[0]
            assert {p.name.split("-")[0] for p in task.siblings} == {kernel}
            assert len(task.siblings) == 2
            assert task.path not in task.siblings


def test_the_hub_is_read_and_held_out_devices_teach_nothing(tmp_path: Path) -> None:
    for kernel, devices in (
        ("convolution", ("A100", "A4000", "W6600", "A6000", "MI250X", "W7800")),
        ("dedispersion", ("A100", "MI250X", "A4000", "A6000", "W6600", "W7800")),
    ):
        for device in devices:
            file = tmp_path / f"cachefiles/{kernel}_milo/{device}.json.gz"
            file.parent.mkdir(parents=True, exist_ok=True)
            row = {"x": 2, "compile_time": 500.0, "time": 3.0, "times": [2.0, 3.0, 7.0]}
            bad = {"x": 1, "compile_time": 100.0, "time": "RuntimeFailedConfig"}
            found = {"device_name": "", "tune_params_keys": ["x"], "tune_params": {"x": [2, 1]}}
            found |= {"problem_size": [4, 5], "cache": {"2": row, "1": bad}}
            file.write_bytes(gzip.compress(json.dumps(found).encode()))
    made = [t for t in benchmark.tasks("held_out", tmp_path, tmp_path) if t.path.parent == tmp_path]
    assert len(made) == 7
    learnt = {p.stem.removesuffix(".json") for t in made for p in t.siblings}
    assert learnt == {"convolution-A100", "convolution-A4000", "convolution-W6600"} | {
        "dedispersion-A100",
        "dedispersion-MI250X",
    }
    developed = benchmark.tasks("develop", tmp_path, tmp_path)
    assert all(t.path not in t.siblings for t in developed), "a device is left out of its own priors"
    read = benchmark.replay.read(made[0].path)
    assert (read.name, read.knobs) == ("convolution/4x5/A6000", {"x": (1, 2)})
    assert read.best.time == statistics.median([2e-3, 3e-3, 7e-3])
    assert [r.compile_s for r in read.rows] == [0.5, 0.1]
    with pytest.raises(InputError, match="not a cache file"):
        benchmark.read_kernel_tuner(b"{}", "k")


@pytest.mark.slow
def test_proposals_are_the_same_in_another_process() -> None:
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "replay.py"), "--proposals", str(SMALL)]
    for seed in (0, 1):
        here = benchmark.fingerprint(SMALL, seed)
        assert [line.split()[0] for line in here.splitlines()][:2] == ["guided", "guided+prior"]
        assert len(set(here.split())) == 12, "each searcher goes its own way"
    again = subprocess.run(
        [*command, "--seed", "1"],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}", "PYTHONHASHSEED": "7"},
    )
    assert again.stdout.strip() == here
