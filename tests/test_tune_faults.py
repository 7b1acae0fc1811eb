"""Everything that may go wrong with a config, caused for real: none wins, none stops the search."""

from pathlib import Path

import psutil
import pytest

import tune_faults
from torchstone.measure.live import LiveMeasurer
from torchstone.records.tuning import Final, Finals, Measurement, MeasurePolicy
from torchstone.tuner.driver import Budget, Found, search
from torchstone.tuner.search.base import Problem, Proposal
from torchstone.tuner.search.exhaustive import Exhaustive
from torchstone.worker import Limits

POLICY = MeasurePolicy(samples=4, race=2, build_s=20, call_s=5, rounds=3, finalists=9)
LIMITS = Limits(memory_bytes=1 << 30, threads=1)

QUICK = {
    "changes_inputs": ("wrong", "changes input[0]"),
    "half": ("wrong", "infinite or NaN"),
    "fast_and_wrong": ("wrong", "from float64"),
    "first_call_only": ("wrong", "second-inputs"),
    "tires": ("wrong", "after many calls"),
    "remembers": ("wrong", "after many calls: case second-inputs"),
    "overwrites": ("wrong", "a later call changes"),
    "fills": ("timed", ""),
    "shares": ("wrong", "second-inputs"),  # what `fills` has left is right for the first
    "noise": ("wrong", "from float64"),
    "wrong_dtype": ("wrong", "float64[4096]"),
    "wrong_shape": ("wrong", "[1, 4096]"),
    "two_outputs": ("wrong", "gives 2 outputs"),
    "no_build": ("invalid", "no kernel with a block of 32"),
    "raises": ("crashed", "device-side assert"),
    "jitter": ("timed", ""),
}
"""Faults that leave the process as it was."""

SLOW = {
    "exits": ("crashed", "exited with code 3"),
    "segfault": ("crashed", "SIGSEGV"),
    "endless": ("timed_out", "no answer within 10 s"),
    "hog": ("crashed", "the limit is"),
    "sticky": ("crashed", "illegal memory access"),
    "sticky_later": ("timed", ""),
    "trespasses": ("wrong", "memory that is not its own"),
    "build_exits": ("crashed", "exited with code 4"),
    "build_hangs": ("timed_out", "no answer within 5 s (build)"),
}
"""Faults after which another process must be used."""


def searched(folder: Path, *hows: str, lanes: int = 0, policy: MeasurePolicy = POLICY) -> Found:
    tunable = tune_faults.tunable("right", *hows)
    with LiveMeasurer(tunable, policy, folder, lanes, LIMITS) as measurer:
        problem = Problem(tunable.space, lanes=max(lanes, 1))
        return search(problem, Exhaustive(), measurer, Budget(measurements=99))


def by_how(found: Found) -> dict[str, Measurement]:
    return {str(m.config["how"]): m for m in found.measurements}


def check(found: Found, wanted: dict[str, tuple[str, str]]) -> None:
    assert found.stop.code == "EXHAUSTED"
    told = by_how(found)
    assert {how: m.status for how, m in told.items()} == {
        "right": "timed",
        **{how: status for how, (status, _) in wanted.items()},
    }
    for how, (status, text) in wanted.items():
        assert text in told[how].text, how
        assert (told[how].time is not None) == (status == "timed")
    assert found.best is not None
    assert found.best.status == "timed"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Found:
    # a factor that drops nothing: these calls take microseconds, and differ by chance
    policy = MeasurePolicy(samples=4, race=2, race_factor=1e6, build_s=20, call_s=20)
    return searched(tmp_path_factory.mktemp("quick"), *QUICK, policy=policy)


def test_faults_that_spare_the_process_have_their_status(quick: Found) -> None:
    check(quick, QUICK)


def test_a_config_that_varies_within_the_bound_is_right_and_told(quick: Found) -> None:
    told = by_how(quick)
    assert told["jitter"].facts == {"deterministic": 0.0}
    assert told["right"].facts == {"deterministic": 1.0}


def test_errors_are_told_for_right_and_for_wrong(quick: Found) -> None:
    told = by_how(quick)
    assert 0 < (told["right"].relative or 0) < 1e-6
    assert (told["fast_and_wrong"].relative or 0) > 0.1
    assert told["half"].relative is None  # not finite


@pytest.mark.slow
def test_faults_that_spoil_the_process_spoil_no_other_config(tmp_path: Path) -> None:
    policy = MeasurePolicy(samples=4, race=2, race_factor=1e6, build_s=5, call_s=10)
    check(searched(tmp_path, *SLOW, policy=policy), SLOW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kept"), [("sticky", True), ("sticky", False), ("sticky_later", True), ("trespasses", True)]
)
def test_the_next_config_finds_a_process_that_works(tmp_path: Path, how: str, kept: bool) -> None:
    wanted = [Proposal({"how": h, "block": 32}, "test") for h in (how, "right")]
    with LiveMeasurer(tune_faults.tunable("right", how), POLICY, tmp_path, 0, LIMITS) as measurer:
        measurements = measurer.measure(wanted, None)
        bad = next(measurements)
        if not kept:  # truths that are too large for a file are made anew
            (tmp_path / "truths.pt").unlink()
        right = next(measurements)
    assert bad.status == SLOW[how][0]
    assert right.status in ("timed", "dropped")


@pytest.mark.slow
def test_what_kills_a_builder_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    policy = MeasurePolicy(samples=4, race=2, race_factor=1e6, build_s=5, call_s=5)
    hows = ("build_exits", "build_hangs", "no_build", "half", "jitter")
    found = searched(tmp_path, *hows, lanes=2, policy=policy)
    check(found, {h: {**QUICK, **SLOW}[h] for h in hows})


def test_one_bad_block_size_does_not_taint_the_others(tmp_path: Path) -> None:
    tunable = tune_faults.tunable("one_block", blocks=(32, 64, 128))
    with LiveMeasurer(tunable, POLICY, tmp_path, 0, LIMITS) as measurer:
        found = search(Problem(tunable.space), Exhaustive(), measurer, Budget(measurements=9))
    status = {m.config["block"]: m.status for m in found.measurements}
    assert status.pop(64) == "wrong"
    assert "wrong" not in status.values()


@pytest.fixture(scope="module")
def finals(tmp_path_factory: pytest.TempPathFactory) -> Finals:
    hows = ("jitter", "narrow", "odd_sizes", "tires", "exits", "endless", "no_build")
    folder = tmp_path_factory.mktemp("finals")
    policy = MeasurePolicy(samples=4, race=2, build_s=5, call_s=5, rounds=3, finalists=len(hows))
    with LiveMeasurer(tune_faults.tunable("right", *hows), policy, folder, 0, LIMITS) as measurer:
        configs = [{"how": how, "block": 32} for how in hows]
        return measurer.finals(configs, {"how": "right", "block": 32}, seed=1)


@pytest.mark.slow
def test_finals_refuse_what_is_wrong_on_what_was_held_out(finals: Finals) -> None:
    told = {str(e.config["how"]): e for e in finals.entries if e.label == "finalist"}
    assert {how: e.status for how, e in told.items()} == {
        "jitter": "timed",
        "narrow": "wrong",
        "odd_sizes": "wrong",
        "tires": "wrong",
        "exits": "crashed",
        "endless": "timed_out",
        "no_build": "invalid",
    }
    assert "values-large" in told["narrow"].text
    assert "n=1000" in told["odd_sizes"].text
    assert "after many calls" in told["tires"].text
    assert all(bool(e.text) != (e.status == "timed") for e in told.values())


@pytest.mark.slow
def test_finals_go_on_without_those_that_fail(finals: Finals) -> None:
    timed = {e.label: e for e in finals.entries if e.status == "timed"}
    assert timed.keys() == {"default", "finalist", "control"}
    assert timed["control"].config == timed["finalist"].config == {"how": "jitter", "block": 32}
    assert {len(e.seconds) for e in timed.values()} == {3}


@pytest.mark.slow
def test_who_dies_while_it_is_timed_is_out_and_rounds_stay_paired(tmp_path: Path) -> None:
    policy = MeasurePolicy(samples=4, race=2, build_s=20, call_s=5, rounds=4, finalists=3)
    tunable = tune_faults.tunable("right", "jitter", "dies_later")
    with LiveMeasurer(tunable, policy, tmp_path, 0, LIMITS) as measurer:
        configs = [{"how": how, "block": 32} for how in ("dies_later", "jitter")]
        found = measurer.finals(configs, {"how": "right", "block": 32}, seed=0)
    told: dict[str, Final] = {f"{e.label} {e.config['how']}": e for e in found.entries}
    assert told["finalist dies_later"].status == "crashed"
    assert told["control dies_later"].status == "crashed"
    assert len(told["default right"].seconds) == len(told["finalist jitter"].seconds) == 4


@pytest.mark.slow
def test_closing_leaves_no_process(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    tunable = tune_faults.tunable("right", "build_hangs")
    with LiveMeasurer(tunable, POLICY, tmp_path, 2, LIMITS) as measurer:
        wanted = [Proposal({"how": how, "block": 32}, "test") for how in ("right", "build_hangs")]
        first = next(iter(measurer.measure(wanted, None)))  # the other is being built
        assert first.config["how"] == "right"
        assert {p.pid for p in psutil.Process().children(recursive=True)} - before
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before
