"""Searchers: what they propose is valid and new, a seed decides it all, the default is beaten."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.records.tuning import Config, Measurement
from torchstone.tuner import search as searchers
from torchstone.tuner.driver import Budget, Found, search
from torchstone.tuner.replay import ReplayMeasurer, problem_of
from torchstone.tuner.search.base import AnySearcher, Problem, Proposal
from torchstone.tuner.search.evolution import Evolution
from torchstone.tuner.search.exhaustive import Exhaustive
from torchstone.tuner.search.guided import Guided
from torchstone.tuner.search.lfbo import LFBO
from torchstone.tuner.search.llm import LLM
from torchstone.tuner.search.pattern import Pattern
from torchstone.tuner.search.random import Random
from torchstone.tuner.space import Integer, Space, key_of
from tune_samples import SPACE, Fixed, seconds_of, spaces, table

pytestmark = pytest.mark.slow  # whole searches

ANSWER = json.dumps([{**SPACE.default(), "M": 128, "N": 64, "stages": s} for s in (2, 3, 9, 4, 3)])
SEARCHERS = {**dict(searchers.SEARCHERS), "llm": lambda: LLM(Fixed(ANSWER), Pattern())}
SMALL = {
    "guided": {"trees": 5, "pool": 64},
    "lfbo": {"start": 6, "trees": 5, "changes": 10},
    "evolution": {"size": 5},
    "pattern": {"starts": 4},
}
"""Hyperparameters that reach every phase of a search within a few batches."""


def small(name: str) -> AnySearcher:
    return replace(SEARCHERS[name](), **SMALL.get(name, {}))


def answered(proposals: Sequence[Proposal]) -> list[Measurement]:
    """A time, or a failure, that the config's text decides."""
    found = []
    for proposal in proposals:
        figure = sum(map(ord, key_of(proposal.config))) % 97
        if figure % 5 == 0:
            found.append(
                Measurement(config=proposal.config, status="invalid", text="too much shared memory")
            )
        else:
            times = (1e-5 * figure,) * 3
            found.append(Measurement(config=proposal.config, status="timed", seconds=times))
    return found


def walked(searcher: AnySearcher, space: Space, seed: int, batches: int) -> list[Proposal]:
    """What it proposes in some batches; what it is told arrives in another order, and one is lost."""
    state, made = searcher.init(Problem(space, lanes=4), seed), []
    for _ in range(batches):
        proposals, after = searcher.ask(state, 4)
        assert searcher.ask(state, 4)[0] == proposals, "a state is a value"
        assert len(proposals) <= 4
        made += proposals
        state = searcher.tell(
            after, answered(proposals)[:0:-1] if len(made) > 8 else answered(proposals)
        )
    return made


@pytest.mark.parametrize("name", SEARCHERS)
@given(data=st.data(), seed=st.integers(0, 100))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_proposals_are_valid_new_and_led_by_the_default(
    name: str, data: st.DataObject, seed: int
) -> None:
    space = data.draw(spaces())
    made = walked(small(name), space, seed, batches=7)
    assert key_of(made[0].config) == key_of(space.default())
    assert len({key_of(p.config) for p in made}) == len(made)
    for proposal in made:
        assert space.why_not(proposal.config) is None
        assert proposal.by


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_small_space_is_visited_whole(name: str) -> None:
    space = Space({"a": Integer(0, 4), "b": Integer(0, 4)}, valid=(lambda c: c["a"] != c["b"],))
    searcher = small(name)
    state, made = searcher.init(Problem(space), 3), list[Proposal]()
    while True:
        proposals, state = searcher.ask(state, 3)
        if not proposals:
            break
        made += proposals
        state = searcher.tell(state, answered(proposals))
    assert sorted(key_of(p.config) for p in made) == sorted(map(key_of, space.all or ()))
    if name != "guided":  # it leaves that to the loop, which sees that nothing was asked for
        stop = searcher.done(state)
        assert stop is not None
        assert stop.code == "EXHAUSTED"


@pytest.mark.parametrize("name", SEARCHERS)
def test_what_is_told_is_not_proposed(name: str) -> None:
    known = [*(SPACE.all or ())[::2], SPACE.default()]
    searcher = small(name)
    state = searcher.init(Problem(SPACE), 0)
    state = searcher.tell(state, answered([Proposal(c, "known") for c in known]))
    assert searcher.done(state) is None
    made = []
    for _ in range(6):
        proposals, state = searcher.ask(state, 8)
        made += proposals
        state = searcher.tell(state, answered(proposals))
    assert 24 <= len(made) <= 48  # at most what is asked for
    assert not {key_of(p.config) for p in made} & set(map(key_of, known))


def told_after(name: str, seed: int) -> str:
    return json.dumps([[p.by, p.config] for p in walked(small(name), SPACE, seed, batches=12)])


@pytest.mark.parametrize("name", SEARCHERS)
def test_the_same_seed_proposes_the_same(name: str) -> None:
    assert told_after(name, 5) == told_after(name, 5)
    if name != "exhaustive":
        assert told_after(name, 5) != told_after(name, 6)


def test_the_same_seed_proposes_the_same_in_another_process() -> None:
    here = {name: told_after(name, 1) for name in SEARCHERS}
    told = "{name: t.told_after(name, 1) for name in t.SEARCHERS}"
    code = f"import json, test_tune_search as t; print(json.dumps({told}))"
    there = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert [json.loads(text) for text in there] == [here, here]


def found(searcher: AnySearcher, seed: int, measurements: int) -> Found:
    recorded = table()
    measurer = ReplayMeasurer(recorded, seed)
    return search(problem_of(recorded), searcher, measurer, Budget(measurements=measurements), seed=seed)


@pytest.mark.parametrize("name", [n for n in SEARCHERS if n != "exhaustive"])
@pytest.mark.parametrize("seed", range(3))
def test_the_default_is_beaten(name: str, seed: int) -> None:
    result = found(SEARCHERS[name](), seed, measurements=96)
    default = result.measurements[0]
    assert key_of(default.config) == key_of(SPACE.default())
    assert result.best is not None
    assert default.time is not None
    assert result.best.time is not None
    assert result.best.time < 0.6 * default.time
    assert len(result.measurements) <= 96


def regret(searcher: AnySearcher, seeds: int = 10) -> float:
    """Mean over seeds of how far from the optimum the config chosen in 80 measurements is."""
    optimum = min(map(seconds_of, SPACE.all or ()))
    best = [found(searcher, seed, 80).best for seed in range(seeds)]
    return sum(seconds_of(b.config) / optimum - 1 for b in best if b is not None) / seeds


@pytest.mark.parametrize("searcher", [Pattern(), Evolution(), LFBO(trees=25)], ids=lambda s: s.name)
def test_who_learns_is_better_than_chance(searcher: AnySearcher) -> None:
    assert regret(searcher) < 0.7 * regret(Random())


@pytest.mark.parametrize(
    "searcher", [Pattern(patience=24), Evolution(patience=24), LFBO(patience=24)], ids=lambda s: s.name
)
def test_no_gain_for_long_is_a_reason_to_stop(searcher: AnySearcher) -> None:
    result = found(searcher, 0, measurements=10_000)
    assert result.stop.code == "CONVERGED"
    assert result.best is not None
    assert len(result.measurements) - 1 - result.measurements.index(result.best) >= 24


@pytest.mark.parametrize(("searcher", "says"), [(Guided(trees=5), True), (Random(), False)])
def test_who_can_say_what_may_still_be_gained_says_it(searcher: AnySearcher, says: bool) -> None:
    told: list[tuple[Measurement, float | None]] = []
    asked = table()
    result = search(
        problem_of(asked),
        searcher,
        ReplayMeasurer(asked, 0),
        Budget(measurements=40),
        watch=lambda measurement, _, gain: told.append((measurement, gain)),
    )
    assert tuple(m for m, _ in told) == result.measurements
    gains = [gain for _, gain in told if gain is not None]
    assert bool(gains) == says
    assert told[0][1] is None, "nothing is known yet"
    assert all(gain >= 1 for gain in gains)


def test_descents_start_anew_where_no_step_helps() -> None:
    """Two valleys: the wide one is not the deep one."""
    space = Space({"x": Integer(0, 63), "y": Integer(0, 63)})

    def seconds(config: Config) -> float:
        x, y = int(config["x"]), int(config["y"])
        return 1e-5 * min(10 + abs(x - 50) + abs(y - 50), 1 + 2 * abs(x - 9) + 2 * abs(y - 9))

    searcher = Pattern(patience=1_000)
    state, best, starts = searcher.init(Problem(space), 1), 1.0, 0
    while len(state.seen.told) < 1_000:
        proposals, state = searcher.ask(state, 8)
        starts += state.since == len(state.seen.told)
        told = [
            Measurement(config=p.config, status="timed", seconds=(seconds(p.config),)) for p in proposals
        ]
        best = min(best, *(m.seconds[0] for m in told))
        state = searcher.tell(state, told)
    assert starts > 2
    assert best == pytest.approx(1e-5)


def test_failures_are_never_members_or_centres() -> None:
    searcher = Evolution(size=4)
    state = searcher.init(Problem(SPACE), 0)
    for _ in range(6):
        proposals, state = searcher.ask(state, 8)
        failed = [Measurement(config=p.config, status="wrong", text="3% of elements") for p in proposals]
        state = searcher.tell(state, failed)
    assert state.members == ()
    assert len(state.seen.told) == 48


def test_a_space_too_large_to_list() -> None:
    space = Space({f"k{i}": Integer(0, 9) for i in range(8)})
    with pytest.raises(InputError, match="100000000 combinations"):
        Exhaustive().init(Problem(space), 0)
    for name in SEARCHERS:
        if name != "exhaustive":
            made = walked(small(name), space, 0, batches=5)
            assert len({key_of(p.config) for p in made}) == 20
            assert key_of(made[0].config) == key_of(space.default())


def test_valid_configs_may_be_rare() -> None:
    """One in 10,000, and they cannot be listed."""
    space = Space(
        {f"k{i}": Integer(0, 9) for i in range(5)}, valid=(lambda c: c["k0"] == c["k1"] == c["k2"],)
    )
    rare = space.restricted(lambda c: c["k3"] == c["k4"])
    assert space.product > 65_536
    proposals, _ = Random().ask(Random().init(Problem(rare), 0), 4)
    assert all(rare.why_not(p.config) is None for p in proposals)


def test_lfbo_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(EnvironmentLacksError, match="pip install"):
        LFBO().init(Problem(SPACE), 0)
