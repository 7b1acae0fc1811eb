"""Measuring live: times follow causes, races drop, finals pair, builds come ahead."""

import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tune_faults
import tune_triton
from torchstone.bench.timer import Timed
from torchstone.errors import InputError
from torchstone.measure import prove
from torchstone.measure.live import LiveMeasurer
from torchstone.measure.prove import Prover, Truth
from torchstone.records.tuning import Config, Measurement, MeasurePolicy
from torchstone.tuner.search.base import Proposal
from torchstone.tuner.space import Choice, Space
from torchstone.tuner.tunable import Tunable
from torchstone.worker import Limits

pytestmark = pytest.mark.slow  # workers, compilers or the interpreter in most of them

POLICY = MeasurePolicy(samples=5, race=2, build_s=60, call_s=60, rounds=4, finalists=2)
LIMITS = Limits(memory_bytes=2 << 30, threads=1)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here")


def config(how: str) -> Config:
    return {"how": how, "block": 32}


def measured(measurer: LiveMeasurer, *hows: str, best_s: float | None = None) -> dict[str, Measurement]:
    wanted = [Proposal(config(how), f"by-{how}") for how in hows]
    return {str(m.config["how"]): m for m in measurer.measure(wanted, best_s)}


@pytest.fixture(scope="module")
def measurer(tmp_path_factory: pytest.TempPathFactory) -> LiveMeasurer:
    tunable = tune_faults.tunable("right", "slow", "slower", "jitter")
    with LiveMeasurer(tunable, POLICY, tmp_path_factory.mktemp("live"), 0, LIMITS) as made:
        yield made


def test_what_takes_longer_is_measured_longer(measurer: LiveMeasurer) -> None:
    slow = measured(measurer, "slow")["slow"]
    slower = measured(measurer, "slower")["slower"]
    assert slow.status == slower.status == "timed"
    assert len(slow.seconds) == POLICY.samples
    assert slow.time is not None
    assert slower.time is not None
    assert slower.time > 3 * slow.time  # it sleeps four times as long
    assert slow.measure_s > 8 * 0.02  # it was called at least so often
    assert slow.proposer == "by-slow"


def test_what_is_clearly_slower_than_the_best_is_dropped(measurer: LiveMeasurer) -> None:
    found = measured(measurer, "slow", "slower")  # the first sets the pace
    assert found["slow"].status == "timed"
    assert found["slower"].status == "dropped"
    assert len(found["slower"].seconds) == POLICY.race
    assert measured(measurer, "slow", best_s=1e-6)["slow"].status == "dropped"


def test_the_limit_of_a_call_bounds_the_samples(tmp_path: Path) -> None:
    policy = MeasurePolicy(samples=1000, race=2, call_s=4)
    with LiveMeasurer(tune_faults.tunable("slow"), policy, tmp_path, 0, LIMITS) as one:
        found = measured(one, "slow")["slow"]
    assert found.status == "timed"
    assert 2 <= len(found.seconds) <= 100


def test_finals_are_paired_and_have_a_control(measurer: LiveMeasurer) -> None:
    found = measurer.finals([config("jitter"), config("slow")], config("right"), seed=0)
    assert [(e.label, e.config["how"]) for e in found.entries] == [
        ("default", "right"),
        ("finalist", "jitter"),
        ("finalist", "slow"),
        ("control", "jitter"),
    ]
    assert {e.status for e in found.entries} == {"timed"}
    assert {len(e.seconds) for e in found.entries} == {POLICY.rounds}
    assert min(found.entries[2].seconds) >= 0.02
    assert found.cases == ("held-out-0", "held-out-1", "values-tiny", "values-large", "odd-0")


def test_a_default_that_leads_has_a_control_of_its_own(measurer: LiveMeasurer) -> None:
    found = measurer.finals([config("right")], config("right"), seed=0)
    assert [e.label for e in found.entries] == ["default", "control"]
    assert len(found.entries[1].seconds) == POLICY.rounds


def test_a_measurer_that_is_closed_measures_nothing(tmp_path: Path) -> None:
    one = LiveMeasurer(tune_faults.tunable("right"), POLICY, tmp_path, 0, LIMITS)
    one.close()
    assert measured(one, "right")["right"].status == "crashed"
    one.close()


def waits(chosen: Config) -> Callable[..., object]:
    time.sleep(float(chosen["seconds"]))
    return tune_faults.right


@pytest.mark.slow
def test_builds_run_ahead_and_come_as_they_are_ready(tmp_path: Path) -> None:
    tunable = Tunable(
        name="waits",
        build=waits,
        space=Space({"seconds": Choice((6.0, 0.0, 0.1))}),
        inputs=tune_faults.inputs,
        reference=tune_faults.reference,
        sizes={"n": 512},
    )
    wanted = [Proposal({"seconds": s}, "test") for s in (6.0, 0.0, 0.1)]
    with LiveMeasurer(tunable, POLICY, tmp_path, 2, LIMITS) as one:
        list(one.measure(wanted[1:2], None))
        found = list(one.measure(wanted, None))
    assert found[-1].config == {"seconds": 6.0}
    assert found[-1].compile_s >= 6.0
    assert {m.status for m in found} <= {"timed", "dropped"}


@needs_triton
@pytest.mark.parametrize("lanes", [0, 2])
def test_a_triton_kernel_is_compiled_without_a_launch_and_proved_with_one(
    tmp_path: Path, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(tune_triton.LAUNCHES, str(tmp_path / "launches"))
    tunable = tune_triton.tunable()
    wanted = [Proposal(dict(c), "test") for c in tunable.space.all or ()]
    with LiveMeasurer(tunable, POLICY, tmp_path, lanes, LIMITS) as one:
        found = list(one.measure(wanted, None))
    assert {m.status for m in found} <= {"timed", "dropped"}, found
    calls = [line.split() for line in (tmp_path / "launches").read_text().splitlines()]
    idle = [pid for pid, untouched in calls if untouched == "1"]
    assert len(idle) == len(wanted) * (2 if lanes else 1)  # one call a build wrote nothing
    workers = {pid for pid, untouched in calls if untouched == "0"}
    assert len(workers) == 1  # and only the process that times has ever launched


def test_a_module_that_workers_cannot_import_travels_by_value(tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(
        "def build(config):\n    return twice\ndef twice(x):\n    return x + x\n"
        "def inputs(seed):\n    import torch\n    return (torch.arange(8.0) + seed,)\n"
    )
    spec = importlib.util.spec_from_file_location("stranger", tmp_path / "stranger.py")
    assert spec is not None
    assert spec.loader is not None
    stranger = importlib.util.module_from_spec(spec)
    sys.modules["stranger"] = stranger
    spec.loader.exec_module(stranger)
    space = Space({"n": Choice((1, 2))})
    tunable = Tunable(
        name="stranger", build=stranger.build, space=space, inputs=stranger.inputs, reference=twice
    )
    with LiveMeasurer(tunable, POLICY, tmp_path / "work", 0, LIMITS) as one:
        (found,) = one.measure([Proposal({"n": 1}, "test")], None)
    assert found.status == "timed"


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_what_cannot_travel_is_refused_with_advice(tmp_path: Path) -> None:
    lock = threading.Lock()
    space = Space({"n": Choice((1, 2))})
    tunable = Tunable(
        name="lock", build=lambda c: lock, space=space, inputs=tune_faults.inputs, reference=twice
    )
    with pytest.raises(InputError, match=r"cannot be sent to a worker.*lock"):
        LiveMeasurer(tunable, POLICY, tmp_path, 0, LIMITS)


def test_a_reference_that_fails_is_misuse(tmp_path: Path) -> None:
    tunable = Tunable(
        name="fails",
        build=tune_faults.build,
        space=Space({"n": Choice((1, 2))}),
        inputs=tune_faults.inputs,
        reference=lambda x: x @ x.reshape(2, -1),
        sizes={"n": 8},
    )
    with (
        LiveMeasurer(tunable, POLICY, tmp_path, 0, LIMITS) as one,
        pytest.raises(InputError, match="the reference of fails fail"),
    ):
        list(one.measure([Proposal({"n": 1}, "test")], None))


def test_a_measurer_describes_where_it_measures(measurer: LiveMeasurer) -> None:
    found = measurer.describe()
    assert found.signature == ("float32 (4096,) (1,)",)
    assert found.dtype == "float32"
    assert found.floor(tune_faults.tunable("right"), {"n": 1}) is None  # it does not say its work


def prover(reference: Callable[..., object], *inputs: Callable[..., torch.Tensor]) -> Prover:
    tunable = Tunable(
        name="local",
        build=lambda c: reference,
        space=Space({"n": Choice((1, 2))}),
        inputs=lambda seed: tuple(make(torch.Generator().manual_seed(seed)) for make in inputs),
        reference=reference,
    )
    return Prover(tunable, *(prove.truth(tunable, case) for case in prove.searched(tunable)))


def normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(33, 65, generator=generator)


def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


def test_a_function_that_means_to_write_to_its_input_is_right_if_it_does() -> None:
    known = prover(adds, normal, normal)
    assert known.first.mutated == [0]
    assert known.prove(adds).status is None
    told = known.prove(lambda x, y: x + y)  # the right output, but nothing written
    assert (told.status, "input[0]" in told.text) == ("wrong", True)


def test_timing_what_writes_to_its_input_gives_it_the_same_each_time() -> None:
    given = (torch.ones(8), torch.ones(8))
    seen = []

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0]))
        return adds(x, y)

    def reset() -> None:
        given[0].fill_(1)

    timed = Timed(call, given, reset, None)
    assert len(timed.samples(3, flush=True)) == 3
    assert set(seen) == {1.0}
    assert float(timed.last[0][0]) == 2.0


def test_a_reference_that_is_random_proves_nothing() -> None:
    calls = itertools.count(1)
    told = prover(lambda x: x * next(calls), normal).prove(lambda x: x)
    assert told.status == "unverifiable"
    assert "different results" in told.text


def test_a_reference_without_float64_proves_nothing() -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("not implemented for 'Double'")
        return x

    told = prover(narrow, normal).prove(narrow)
    assert told.status == "unverifiable"
    assert "not implemented for 'Double'" in told.text


def test_several_outputs_integers_and_numbers_are_compared() -> None:
    def top(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        values, at = x.max(dim=1)
        return values, at, x.shape[0]

    known = prover(top, normal)
    assert known.prove(top).status is None
    assert known.prove(lambda x: (top(x)[0], top(x)[1] ^ 1, 33)).status == "wrong"
    assert known.prove(lambda x: (*top(x)[:2], 34)).status == "wrong"


def test_a_change_of_one_bit_of_what_is_kept_is_seen() -> None:
    known = prover(twice, normal)
    before = known.digest()
    truth: Truth = known.second
    assert isinstance(truth.wide[0], torch.Tensor)
    truth.wide[0].view(torch.int64)[3, 4] ^= 1
    assert known.digest() != before


def large(generator: torch.Generator) -> torch.Tensor:
    return 100 * torch.randn(33, 200, generator=generator)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


def by_exp2(x: torch.Tensor) -> torch.Tensor:
    """As fused kernels do: rounds ``x * log2(e)``, which is as large as x."""
    powers = x * 1.4426950408889634
    powers = torch.exp2(powers - powers.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def test_nobody_is_asked_for_more_than_a_rounding_of_the_inputs_leaves() -> None:
    known = prover(softmax, large)
    assert known.prove(by_exp2).status is None
    assert known.prove(lambda x: by_exp2(x.half().float())).status == "wrong"
    wide = prover(softmax, lambda generator: large(generator).double())
    assert wide.prove(by_exp2).status is None
    assert wide.prove(lambda x: by_exp2(x.float()).double()).status == "wrong"


def matrix(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(64, 64, generator=generator)


def short(x: torch.Tensor) -> torch.Tensor:
    """With ten bits of mantissa, as TF32 has."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_tuning_cannot_change_the_precision() -> None:
    known = prover(torch.matmul, matrix, matrix)
    assert known.prove(lambda x, y: (y.T @ x.T).T).status is None  # sums in another order
    assert known.prove(lambda x, y: short(x) @ short(y)).status == "wrong"
    assert known.prove(lambda x, y: (x.bfloat16() @ y.bfloat16()).float()).status == "wrong"


def test_without_a_reference_the_default_config_is_taken_for_right() -> None:
    """Here ``n`` is how often the input is added up; 2 is the default."""
    tunable = Tunable(
        name="sums",
        build=lambda c: lambda x: x * c["n"],
        space=Space({"n": Choice((1, 2, 3), default=2)}),
        inputs=lambda seed: (normal(torch.Generator().manual_seed(seed)),),
    )
    known = Prover(tunable, *(prove.truth(tunable, case) for case in prove.searched(tunable)))
    assert known.prove(lambda x: x + x).status is None
    assert known.prove(lambda x: x * 3).status == "wrong"
