"""The public suite's files: which problems there are, which are chosen, and how they are loaded."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstone.errors import InputError
from torchstone.kernelbench import load, suite
from torchstone.kernelbench.suite import Problem, Selection

SAMPLES = Path(__file__).parent / "kernelbench_samples"


def made_up(level: int, numbers: list[int]) -> list[Problem]:
    names = [f"{n}_problem_{level}.py" for n in numbers]
    return [
        Problem(level, n, name, Path(name), hashlib.sha256(name.encode()).hexdigest())
        for n, name in zip(numbers, names, strict=True)
    ]


SUITE = (
    made_up(1, list(range(1, 101))) + made_up(2, list(range(1, 101))) + made_up(3, list(range(1, 51)))
)


def test_the_repository_and_its_folder_of_problems_are_the_same_suite(tmp_path: Path) -> None:
    (tmp_path / "KernelBench").symlink_to(SAMPLES)
    inside, outside = suite.find(SAMPLES), suite.find(tmp_path)
    assert [p.key for p in inside] == [p.key for p in outside]
    assert [p.key for p in inside][:3] == ["1/1", "1/2", "1/3"]
    file = SAMPLES / "level1" / "1_add_scaled.py"
    assert inside[0].digest == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("made", ["nothing", "file", "empty", "levels alone"])
def test_what_is_no_suite_says_what_is_wrong_with_it(tmp_path: Path, made: str) -> None:
    path = tmp_path / "suite"
    if made == "file":
        path.write_text("")
    elif made != "nothing":
        path.mkdir()
        if made == "levels alone":
            (path / "level1").mkdir()
    with pytest.raises(InputError) as caught:
        suite.find(path)
    assert str(path) in str(caught.value)


def test_two_files_of_one_number_are_refused(tmp_path: Path) -> None:
    (tmp_path / "level1").mkdir()
    for name in ("7_a.py", "7_b.py"):
        (tmp_path / "level1" / name).write_text("")
    with pytest.raises(InputError, match=r"both 7_a\.py and 7_b\.py"):
        suite.find(tmp_path)


@given(st.integers(1, 9), st.sampled_from([None, "even", "odd"]), st.booleans())
def test_shards_are_disjoint_and_make_up_the_whole(parts: int, half: str | None, sample: bool) -> None:
    chosen = {"half": half, "sample": sample}
    whole = Selection(**chosen).of(SUITE)
    shards = [Selection(**chosen, shard=(i + 1, parts)).of(SUITE) for i in range(parts)]
    assert sorted(p for shard in shards for p in shard) == list(whole)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(st.randoms(use_true_random=False))
def test_the_sample_does_not_depend_on_the_order_of_files(rng: random.Random) -> None:
    shuffled = list(SUITE)
    rng.shuffle(shuffled)
    sample = Selection(sample=True).of(shuffled)
    assert sample == Selection(sample=True).of(SUITE)
    assert [sum(p.level == level for p in sample) for level in (1, 2, 3)] == [24, 24, 12]


def test_the_sample_stays_when_other_files_come_to_a_level() -> None:
    before = set(Selection(sample=True, levels=(3,)).of(SUITE))
    after = set(Selection(sample=True, levels=(3,)).of([*SUITE, *made_up(3, [51, 52])]))
    assert len(after - before) <= 2


def test_a_sample_is_chosen_before_a_half_is() -> None:
    sample = Selection(sample=True).of(SUITE)
    halves = [Selection(sample=True, half=half).of(SUITE) for half in ("even", "odd")]
    assert sorted(p for half in halves for p in half) == list(sample)


def test_even_numbers_are_one_half_and_odd_ones_the_other() -> None:
    assert {p.number % 2 for p in Selection(half="even").of(SUITE)} == {0}
    assert {p.number % 2 for p in Selection(half="odd").of(SUITE)} == {1}


@pytest.mark.parametrize(
    "wanted",
    [Selection(levels=(4,)), Selection(problems=((1, 101),)), Selection(problems=((1, 2),), half="odd")],
)
def test_what_is_not_there_is_an_error_and_not_an_empty_run(wanted: Selection) -> None:
    with pytest.raises(InputError):
        wanted.of(SUITE)


def test_options_are_parsed_or_refused_with_an_example() -> None:
    assert suite.parse_levels("1, 3") == (1, 3)
    assert suite.parse_problems("1/23,2/12") == ((1, 23), (2, 12))
    assert suite.parse_shard("2/4") == (2, 4)
    for parse, text in (
        (suite.parse_levels, "one"),
        (suite.parse_problems, "1"),
        (suite.parse_problems, "1/x"),
        (suite.parse_shard, "0/4"),
        (suite.parse_shard, "5/4"),
        (suite.parse_shard, "2"),
    ):
        with pytest.raises(InputError) as caught:
            parse(text)
        assert caught.value.hint


def of(name: str, **setup: str) -> load.Loaded:
    (path,) = SAMPLES.glob(f"level*/{name}")
    return load.load(path, load.Setup(device="cpu", **setup))


def test_inputs_and_parameters_come_from_the_suites_seeds() -> None:
    loaded = of("3_linear_gelu.py")
    (inputs,) = loaded.inputs()
    torch.manual_seed(42)
    assert torch.equal(inputs, torch.rand(24, 48))
    torch.manual_seed(42)
    assert torch.equal(loaded.module.linear.weight, torch.nn.Linear(48, 32).weight)
    assert loaded.module.training


def test_trials_have_the_seeds_that_the_suite_draws() -> None:
    torch.manual_seed(42)
    drawn = [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(5)]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert list(load.trial_seeds(5)) == drawn
    assert torch.equal(torch.get_rng_state(), state)


def test_only_floating_point_tensors_take_the_dtype(tmp_path: Path) -> None:
    file = tmp_path / "1_labels.py"
    file.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x, y, n): return torch.nn.functional.cross_entropy(x, y) * n\n"
        "def get_inputs(): return [torch.rand(4, 3), torch.randint(0, 3, (4,)), 2]\n"
        "def get_init_inputs(): return []\n"
    )
    inputs = load.load(file, load.Setup(device="cpu", dtype="bfloat16")).inputs()
    assert [getattr(v, "dtype", v) for v in inputs] == [torch.bfloat16, torch.int64, 2]


def test_a_model_made_again_has_the_same_values_and_code_of_its_own() -> None:
    loaded = of("2_batch_norm.py")
    loaded.module.norm.running_mean.fill_(3.0)
    again = loaded.again()
    assert torch.equal(again.norm.running_mean, loaded.module.norm.running_mean)
    assert again.norm.running_mean.data_ptr() != loaded.module.norm.running_mean.data_ptr()
    assert type(again).forward.__code__ is not type(loaded.module).forward.__code__


def test_a_file_that_is_no_problem_says_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "1_nothing.py"
    file.write_text("def get_inputs(): return []\n")
    with pytest.raises(InputError, match="does not define Model, get_init_inputs"):
        load.load(file, load.Setup(device="cpu"))
