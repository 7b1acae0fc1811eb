"""Spaces of configs: whatever they give is valid, written and read back, and told apart."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.errors import InputError
from torchstone.tuner.space import Boolean, Choice, Integer, Only, Permutation, PowerOfTwo, Space, key_of
from tune_samples import SPACE, rare, spaces

seeds = st.integers(0, 1_000)


@given(spaces(), seeds, st.integers(1, 3))
def test_all_that_a_space_gives_is_valid(space: Space, seed: int, knobs: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = space.sample(rng), space.sample(rng)
    changed = [space.mutate(a, rng, knobs), space.mix(a, b, rng)]
    for config in [a, b, space.default(), *space.neighbours(a), *(c for c in changed if c is not None)]:
        assert space.why_not(config) is None
        assert list(config) == list(space.knobs)
        assert space.settled(config) == config


@given(spaces(), seeds)
def test_what_is_written_is_read(space: Space, seed: int) -> None:
    config = space.sample(np.random.default_rng(seed))
    read = space.read(json.loads(json.dumps(config)))
    assert read == config
    assert key_of(read) == key_of(config)


@given(spaces(constrained=False, conditional=False), seeds)
def test_a_neighbour_of_a_neighbour(space: Space, seed: int) -> None:
    config = space.sample(np.random.default_rng(seed))
    for near in space.neighbours(config):
        assert config in space.neighbours(near)
        assert near != config
        assert space.distance(config, near) == space.distance(near, config) > 0


@given(spaces(), seeds)
def test_neighbours_are_different_and_each_given_once(space: Space, seed: int) -> None:
    config = space.sample(np.random.default_rng(seed))
    keys = [key_of(c) for c in space.neighbours(config)]
    assert len({*keys, key_of(config)}) == len(keys) + 1


@given(spaces())
@settings(deadline=None)
def test_a_model_tells_configs_apart_as_keys_do(space: Space) -> None:
    configs = list((space.all or ())[:200])
    rows = space.encode(configs)
    assert rows.shape == (len(configs), space.encode([space.default()]).shape[1])
    assert np.isfinite(rows).all()
    assert (
        len({key_of(c) for c in configs}) == len(configs) == len({row.tobytes() for row in rows + 0.0})
    )
    again = space.encode([dict(reversed(c.items())) for c in configs])
    assert np.array_equal(rows, again)


@given(spaces())
def test_an_order_is_seen_as_one(space: Space) -> None:
    for name, knob in space.knobs.items():
        if space.ordered(name):
            alone = Space({name: knob.knob if isinstance(knob, Only) else knob})
            column = alone.encode([{name: v} for v in sorted(knob.values)])[:, 0]
            assert (np.diff(column) > 0).all()


@given(spaces(constrained=True), seeds)
def test_a_constraint_is_kept(space: Space, seed: int) -> None:
    tight = space.restricted(rare)
    if tight.all:
        config = tight.sample(np.random.default_rng(seed))
        assert rare(config) is None
        assert config in (space.all or ())
    assert set(map(key_of, tight.all or ())) <= set(map(key_of, space.all or ()))


def test_a_default_that_is_refused_gives_the_nearest() -> None:
    space = Space({"a": Integer(0, 9, 5), "b": Boolean()}, valid=(lambda c: c["a"] not in (4, 5, 6),))
    assert space.default()["a"] in (3, 7)
    assert space.default()["b"] is False


def test_a_knob_that_does_not_matter_has_one_value() -> None:
    assert {c["k"] for c in SPACE.all or () if not c["split"]} == {1}
    config = {**SPACE.default(), "split": True, "k": 8}
    assert SPACE.read({**config, "split": False})["k"] == 1
    assert "does not matter" in (SPACE.why_not({**config, "split": False}) or "")


def test_large_spaces_are_sampled_and_default_like_small_ones() -> None:
    space = Space(
        {f"k{i}": Integer(0, 9) for i in range(8)}, valid=(lambda c: sum(c.values()) % 7 == 1,)
    )
    rng = np.random.default_rng(0)
    assert space.all is None
    drawn = [space.sample(rng) for _ in range(50)]
    assert all(space.why_not(c) is None for c in [*drawn, space.default()])
    assert len({key_of(c) for c in drawn}) > 45


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Space({}), "needs a knob"),
        (lambda: PowerOfTwo(3, 8), "power of two"),
        (lambda: Integer(4, 3), "from 4 to 3"),
        (lambda: Choice((1, 1.0)), "each once"),
        (lambda: Choice((1, True)), "each once"),
        (lambda: Choice(()), "each once"),
        (lambda: Permutation(9), "from 1 to 7"),
        (lambda: Space({"a": Integer(0, 3, 7)}), "its default 7"),
        (lambda: Space({"a": Only(Boolean(), "b", (True,)), "b": Boolean()}), "no knob before it"),
        (lambda: Space({"b": Boolean(), "a": Only(Boolean(), "b", (1,))}), "not all its values"),
        (lambda: Space({"a": Boolean()}, valid=(lambda _: False,)).default(), "no config"),
        (lambda: SPACE.read({"M": 16}), "a config has the knobs"),
        (lambda: SPACE.read({**SPACE.default(), "M": 17}), "M cannot be 17"),
        (lambda: SPACE.read({**SPACE.default(), "order": {"a": [1]}}), "order cannot be"),
    ],
)
def test_misuse_is_told(make, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()
