"""Whole-model recipes in the tuner's loop: their space, their order by experience, what runs keep."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchstone
from torchstone import Policy, recipe_search, workload
from torchstone.recipe import default_recipes, parse
from torchstone.recipe_search import Ordered, config_of, space_of
from torchstone.records import Build, NotTried, VerdictEntry, Verified, Wrong
from torchstone.records.tuning import Config, Measurement
from torchstone.report.progress import QuietProgress
from torchstone.run import Request, Run, execute
from torchstone.tuner.cache import Cache
from torchstone.tuner.search.base import History, Problem
from torchstone.tuner.space import key_of

SOURCE = Path(torchstone.__file__).parent
LISTED = (
    *default_recipes(),
    *map(parse, ("custom(mine)", "inductor(module, nested)", "openvino(bf16)")),
)
A, B, C, D = map(parse, ("eager(program)", "openvino", "inductor", "onnxruntime"))


def test_the_candidates_are_the_valid_configs_and_read_back() -> None:
    space = space_of(LISTED)
    configs = [config_of(recipe) for recipe in LISTED]
    assert len(set(map(key_of, configs))) == len(LISTED)
    assert space.all is not None
    assert set(map(key_of, space.all)) == set(map(key_of, configs))
    for config in configs:
        assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    assert space.why_not(config_of(parse("inductor(module)"))) is not None


def test_engines_share_the_knobs_of_options_that_they_share() -> None:
    a, b = config_of(parse("inductor(freezing)")), config_of(parse("aotinductor(freezing)"))
    assert {name for name in a if a[name] != b[name]} == {"engine"}


def told(recipe: Any, speedup: float | None) -> Measurement:
    if speedup is None:
        return Measurement(config=config_of(recipe), status="crashed")
    facts = {"speedup": speedup}
    return Measurement(config=config_of(recipe), status="timed", seconds=(1e-3,), facts=facts)


def order(*workloads: dict[Any, float | None]) -> list[Any]:
    recipes = (A, B, C, D)
    histories = tuple(History(tuple(told(r, s) for r, s in w.items())) for w in workloads)
    problem = Problem(space_of(recipes), histories=histories)
    searcher = Ordered(tuple(map(config_of, recipes)), lead=1)
    state, found = searcher.init(problem, 0), []
    while searcher.done(state) is None:
        proposals, state = searcher.ask(state, 1)
        found += [r for p in proposals for r in recipes if config_of(r) == p.config]
    return found


def test_experience_orders_and_no_more() -> None:
    assert order() == [A, B, C, D]
    assert order({D: 1.3}) == [A, D, B, C], "what was fast elsewhere comes first"
    assert order({C: 1.2, D: 1.3}) == [A, D, C, B], "the faster the sooner"
    assert order({B: None}) == [A, C, D, B], "what failed comes last"
    assert order({B: 0.5}) == [A, C, D, B], "what was slow comes after what is unknown"
    assert order({B: None, C: 0.5}) == [A, D, C, B], "but before what failed"
    assert order({D: 1.02}) == [A, B, C, D], "a difference that is no difference changes nothing"
    assert order({D: 1.5}, {D: 1.5}, {D: None}) == [A, D, B, C], "one failure of three"
    assert order({A: None, D: 2.0}) == [A, D, B, C], "the fallback stays first"


@settings(deadline=None)  # a loaded machine is no failure
@given(st.lists(st.dictionaries(st.sampled_from([A, B, C, D]), st.none() | st.floats(0.01, 100.0))))
def test_whatever_is_known_each_is_tried_once(workloads: list[dict[Any, float | None]]) -> None:
    found = order(*workloads)
    assert found[0] == A
    assert sorted(map(str, found)) == sorted(map(str, (A, B, C, D)))


def test_there_is_one_search_loop() -> None:
    calls: dict[str, set[str]] = {"done": set(), "settle": set(), "measure": set()}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if (node.func.attr, owner) in (
                ("done", "searcher"),
                ("settle", "stages"),
                ("measure", "measurer"),
            ):
                calls[node.func.attr].add(str(path.relative_to(SOURCE)))
    assert calls["done"] == calls["measure"] == {"tuner/driver.py"}
    assert calls["settle"] == {"pipeline.py", "recipe_search.py"}  # the baseline; the measurer


class Wasteful(nn.Module):
    """A layer, then the same constant sixty times: easily beaten."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        for _ in range(60):
            y = y + 1.0
        return y


def fast(module: Wasteful) -> Callable[..., Any]:
    return lambda x: module.layer(x) + 60.0


def slow(module: Wasteful) -> Callable[..., Any]:
    return lambda x: [module(x) for _ in range(3)][-1]


def wrong(module: Wasteful) -> Callable[..., Any]:
    return lambda x: module.layer(x) + 59.0


CUSTOM = ("custom(wrong)", "custom(slow)", "custom(fast)")


class Watched(QuietProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.built: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, text: str) -> None:
        if text.startswith("building "):
            self.built.append(text.removeprefix("building "))


def request(home: Path, size: int = 16, recipes: tuple[str, ...] = CUSTOM, **options: Any) -> Request:
    policy = Policy(bench_s=3, load_s=0, rounds=5, call_s=20, **options.pop("policy", {}))
    made = workload.from_objects(
        Wasteful(size).eval(),
        (torch.randn(4, size),),
        dims={"B": "1..8"},
        shapes={"x": ("B", size)},
        candidates={"fast": fast, "slow": slow, "wrong": wrong},
        policy=policy,
    )
    return Request(workload=made, recipes=tuple(map(parse, recipes)), home=home, **options)


def done(asked: Request) -> tuple[Run, Watched]:
    watched = Watched()
    return execute(asked, watched), watched


def kept(home: Path) -> dict[str, Measurement]:
    shelves = [s for s in Cache(home / "tuning").shelves() if s.key.kernel == "recipes"]
    return {str(m.config["target"] or m.config["engine"]): m for s in shelves for m in s.latest}


def rows(home: Path) -> int:
    return sum(len(s.rows) for s in Cache(home / "tuning").shelves())


def verdict(run: Run, recipe: str) -> object:
    entry = run.store.get(f"verdict/{recipe}", VerdictEntry)
    assert entry is not None, recipe
    return entry.verdict


@pytest.fixture
def one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the order of beginning is the order of the search."""
    monkeypatch.setattr(recipe_search, "_MOST_LANES", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_lane")
def test_a_second_run_goes_by_the_first_and_repeats_its_work(tmp_path: Path) -> None:
    first, watched = done(request(tmp_path))
    assert watched.built == ["eager", "eager(program)", *CUSTOM], "the order given"
    assert not any(n.startswith("tried") for n in watched.notes)
    rows_of = kept(tmp_path)
    assert {name: m.status for name, m in rows_of.items()} == {
        "wrong": "wrong",
        "slow": "timed",
        "fast": "timed",
        "eager": "timed",
    }
    assert rows_of["fast"].facts["speedup"] > 1.05 > 0.95 > rows_of["slow"].facts["speedup"]

    second, watched = done(request(tmp_path))
    assert second.store.path != first.store.path
    assert watched.built[2:] == ["custom(fast)", "custom(slow)", "custom(wrong)"]
    assert any(
        n.startswith("tried first  custom(fast), ") and n.endswith("x on 1 earlier workload")
        for n in watched.notes
    )
    assert "tried last   custom(wrong), failed on 1 earlier workload" in watched.notes
    assert isinstance(verdict(second, "custom(wrong)"), Wrong)
    assert isinstance(verdict(second, "custom(fast)"), Verified)
    assert second.store.get("build/custom(fast)", Build) is not None, "a prior is no answer"
    assert second.store.header.recipes == first.store.header.recipes

    # another model: what the engines did counts, what functions of the same name did there does not
    cache = Cache(tmp_path / "tuning")
    (key,) = [s.key for s in cache.shelves()]
    elsewhere = msgspec.structs.replace(key, source="another program")
    cache.append(elsewhere, told(parse("openvino"), 1.5))
    cache.append(
        msgspec.structs.replace(elsewhere, device="another machine"), told(parse("openvino"), None)
    )
    cache.close()
    third, watched = done(
        request(tmp_path, size=24, recipes=("custom(wrong)", "custom(fast)", "openvino"), until="verify")
    )
    assert watched.built[1:] == ["eager(program)", "openvino", "custom(wrong)", "custom(fast)"]
    assert "tried first  openvino, 1.50x on 1 earlier workload" in watched.notes
    assert isinstance(verdict(third, "openvino"), Verified)


@pytest.mark.slow
@pytest.mark.usefixtures("one_lane")
def test_what_the_time_does_not_reach_is_not_tried_and_a_resume_adds_nothing(tmp_path: Path) -> None:
    asked = request(tmp_path, policy={"search_s": 0.2}, until="verify")
    run, _ = done(asked)
    assert isinstance(verdict(run, "eager(program)"), Verified), "what is begun is finished"
    why = NotTried(text="the search time of 0.2 s was spent before its turn")
    assert [verdict(run, recipe) for recipe in CUSTOM] == [why] * 3
    before = sorted(os.listdir(run.store.path / "entries"))
    again, watched = done(msgspec.structs.replace(asked, resume=True))
    assert again.store.path == run.store.path
    assert sorted(os.listdir(run.store.path / "entries")) == before
    assert watched.built == []
    assert kept(tmp_path) == {}, "what was not tried, or not timed, is no experience"


@pytest.mark.slow
def test_a_resumed_run_judges_and_keeps_nothing_twice(tmp_path: Path) -> None:
    asked = request(tmp_path, recipes=("custom(wrong)", "custom(fast)"), until="verify")
    run, _ = done(asked)
    assert {name: m.status for name, m in kept(tmp_path).items()} == {"wrong": "wrong"}
    resumed = msgspec.structs.replace(asked, resume=True, until="bench")
    for _ in range(2):
        again, watched = done(resumed)
        assert again.store.path == run.store.path
        assert watched.built == []
        assert not any(n.startswith("tried") for n in watched.notes), "its own rows are no experience"
        assert {name: m.status for name, m in kept(tmp_path).items()} == {
            "wrong": "wrong",
            "fast": "timed",
            "eager": "timed",
        }
        assert rows(tmp_path) == 3
