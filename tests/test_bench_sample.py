"""Interleaved sampling, on a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_fakes import FakeClock
from torchstone.bench.clock import MonotonicClock
from torchstone.bench.sample import BASELINE_AGAIN, Plan, interleave, steady
from torchstone.errors import InputError
from torchstone.records import Crashed, TimedOut

SIZES = ({"B": 1}, {"B": 8})
CRASH = Crashed(stage="bench", kind="signal", text="killed by SIGSEGV", log="")


class Machine:
    """Runners that take a set time on a fake clock, and keep a diary of who ran when."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.diary: list[str] = []

    def runner(self, name, seconds=0.01, *, first=(), fails_at=None, failure=CRASH):
        calls = [0]

        def run(part):
            calls[0] += 1
            self.diary.append(name)
            if fails_at is not None and calls[0] >= fails_at:
                return failure
            took = first[calls[0] - 1] if calls[0] <= len(first) else seconds
            count = part.stop - part.start
            self.clock.sleep(count * took)
            return (took,) * count

        return run

    def runners(self, *names, **options):
        return {name: self.runner(name, **options) for name in names}

    def go(self, runners, on_round=None, **changes):
        plan = {
            "session": "s",
            "baseline": "eager",
            "sizes": SIZES,
            "rounds": 20,
            "budget_s": 60,
            "seed": 0,
        }
        return interleave(runners, Plan(**(plan | changes)), self.clock, on_round)


def test_every_label_runs_once_a_round_in_an_order_that_changes():
    machine = Machine()
    names = ("eager", BASELINE_AGAIN, "inductor", "openvino")
    session = machine.go(machine.runners(*names))
    assert session.failures == {}
    warm = len(machine.diary) - 20 * 4
    rounds = [machine.diary[i : i + 4] for i in range(warm, len(machine.diary), 4)]
    assert all(sorted(r) == sorted(names) for r in rounds)
    assert len({tuple(r) for r in rounds}) > 5
    for samples, name in zip(session.samples, names, strict=True):
        assert samples.order == tuple(r.index(name) for r in rounds)
        assert samples.rounds == ((0.01, 0.01),) * 20
        assert samples.steady


def test_labels_and_recipes():
    machine = Machine()
    session = machine.go(machine.runners("eager", BASELINE_AGAIN, "inductor"))
    assert [(s.label, s.recipe) for s in session.samples] == [
        ("baseline", "eager"),
        ("baseline-again", "eager"),
        ("candidate", "inductor"),
    ]
    assert all(s.session == "s" and s.sizes == SIZES for s in session.samples)


def test_the_order_is_the_seeds():
    diaries = []
    for seed in (1, 1, 2):
        machine = Machine()
        machine.go(machine.runners("eager", "inductor", "openvino"), seed=seed)
        diaries.append(machine.diary)
    assert diaries[0] == diaries[1] != diaries[2]


@pytest.mark.parametrize("fails_at", [1, 3, 4, 10])
@pytest.mark.parametrize("failure", [CRASH, TimedOut(stage="bench", limit_s=1, log="")])
def test_who_fails_is_dropped_and_the_others_go_on(fails_at, failure):
    machine = Machine()
    runners = machine.runners("eager", "inductor")
    runners["openvino"] = machine.runner("openvino", fails_at=fails_at, failure=failure)
    session = machine.go(runners)
    assert session.failures == {"openvino": failure}
    assert [s.recipe for s in session.samples] == ["eager", "inductor"]
    assert {len(s.rounds) for s in session.samples} == {20}
    assert machine.diary.count("openvino") == fails_at


def test_when_all_fail_it_ends():
    machine = Machine()
    session = machine.go(machine.runners("eager", "inductor", fails_at=5))
    assert session.samples == ()
    assert set(session.failures) == {"eager", "inductor"}


def test_warm_up_goes_on_until_passes_stop_getting_faster():
    machine = Machine()
    first = (5.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.05)
    runners = {"eager": machine.runner("eager"), "inductor": machine.runner("inductor", first=first)}
    eager, inductor = machine.go(runners, budget_s=1000).samples
    assert len(eager.warmup) == 2 * 3
    assert len(inductor.warmup) > 2 * len(first)
    assert inductor.steady
    assert set(inductor.rounds) == {(0.01, 0.01)}


def test_a_warm_up_that_never_settles_is_cut_and_said_so():
    machine = Machine()
    first = tuple(0.9**i for i in range(100))
    runners = {"eager": machine.runner("eager"), "inductor": machine.runner("inductor", first=first)}
    _, inductor = machine.go(runners, budget_s=1000).samples
    assert len(inductor.warmup) == 2 * 30
    assert not inductor.steady


@pytest.mark.parametrize(("budget_s", "rounds"), [(1000, 20), (40, 17), (20, 8), (1, 5)])
def test_rounds_are_cut_to_the_budget_but_not_below_five(budget_s, rounds):
    """A pass takes 1 s: three a label warm it up, or two where time is short."""
    machine = Machine()
    session = machine.go(machine.runners("eager", "inductor", seconds=0.5), budget_s=budget_s)
    assert {len(s.rounds) for s in session.samples} == {rounds}
    assert machine.clock.now() <= max(budget_s, 2 * 2 + 2 * 5)


def test_rounds_that_turn_out_slower_than_warm_up_are_cut_as_they_run():
    machine = Machine()
    runners = machine.runners("eager", "inductor", seconds=5.0, first=(0.1,) * 3)
    session = machine.go(runners, budget_s=60)
    assert {len(s.rounds) for s in session.samples} == {5}


def test_progress():
    machine, seen = Machine(), []
    machine.go(
        machine.runners("eager"), rounds=7, on_round=lambda done, total: seen.append((done, total))
    )
    assert seen == [(i, 7) for i in range(1, 8)]


def test_a_pass_of_another_length_is_refused():
    machine = Machine()
    with pytest.raises(InputError, match="1 times for 2 requests"):
        machine.go({"eager": lambda part: (0.01,)})


def test_labels_take_turns_part_by_part():
    machine = Machine()
    names = ("eager", BASELINE_AGAIN, "inductor")
    sizes = tuple({"B": b} for b in range(1, 6))
    session = machine.go(machine.runners(*names), sizes=sizes, parts=2, rounds=6)
    turns = machine.diary[-6 * 2 * 3 :]
    parts = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert all(sorted(p) == sorted(names) for p in parts)
    for samples, name in zip(session.samples, names, strict=True):
        assert samples.order == tuple(p.index(name) for p in parts)
        assert samples.rounds == ((0.01,) * 5,) * 6


@given(st.integers(1, 70), st.integers(1, 100))
def test_parts_are_the_whole_pass_in_order(requests, parts):
    plan = Plan(
        session="s",
        baseline="eager",
        sizes=({"B": 1},) * requests,
        rounds=5,
        budget_s=1,
        seed=0,
        parts=parts,
    )
    cuts = plan.cuts()
    assert [i for cut in cuts for i in range(requests)[cut]] == list(range(requests))
    lengths = [cut.stop - cut.start for cut in cuts]
    assert len(cuts) == min(parts, requests)
    assert max(lengths) - min(lengths) <= 1


def test_who_fails_within_a_round_leaves_the_others_whole():
    machine = Machine()
    runners = machine.runners("eager", "inductor")
    runners["openvino"] = machine.runner("openvino", fails_at=6)
    session = machine.go(runners, parts=2)
    assert [s.recipe for s in session.samples] == ["eager", "inductor"]
    assert {len(r) for s in session.samples for r in s.rounds} == {2}


def test_a_short_warm_up_is_forgiven_where_the_rounds_do_not_fall():
    machine = Machine()
    (eager,) = machine.go({"eager": machine.runner("eager", first=(0.02, 0.01))}, budget_s=0.3).samples
    assert eager.warmup == (0.02, 0.02, 0.01, 0.01)
    assert eager.steady


def test_rounds_that_fall_are_not_steady_whatever_the_warm_up_showed():
    machine = Machine()
    first = (0.01,) * 3 + (0.03,) * 3
    (eager,) = machine.go({"eager": machine.runner("eager", first=first)}).samples
    assert len(eager.warmup) == 2 * 3
    assert not eager.steady


def test_noise_is_no_trend():
    """The medians fall by more than the tolerance, but the passes overlap."""
    assert steady([1.0, 1.2, 0.95, 1.1, 0.85, 0.9])


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=12))
def test_passes_that_do_not_get_faster_are_steady(totals):
    assert steady(sorted(totals))


@given(st.integers(2, 12), st.floats(0.1, 0.8))
def test_passes_that_keep_getting_faster_are_not(count, factor):
    assert not steady([factor**i for i in range(count)])


def test_one_slow_pass_is_no_trend_and_one_pass_is_no_evidence():
    assert steady([1, 1, 1, 9, 1, 1])
    assert not steady([1])
    assert not steady([])


def test_the_real_clock_wakes_up_no_earlier_than_asked():
    clock = MonotonicClock()
    for seconds in (0.0, -1.0, 0.0002, 0.005):
        start = clock.now()
        clock.sleep(seconds)
        assert clock.now() - start >= seconds
