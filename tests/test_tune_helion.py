"""Helion's kernels as tunables, on a CPU through Triton's interpreter."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from torchstone.adapters import helion as adapter
from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.measure import prove
from torchstone.tuner.driver import Budget
from torchstone.tuner.space import key_of
from torchstone.tuning import tune

pytest.importorskip("triton", reason="Triton is not installed")
helion = pytest.importorskip("helion", reason="Helion is not installed")
hl = pytest.importorskip("helion.language")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@helion.kernel(static_shapes=True)
def weighted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size()):
        out[tile] = x[tile] * 2 + y[tile]
    return out


def inputs(seed, m, n):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(m, n, generator=generator).to(DEVICE) for _ in range(2))


@pytest.fixture
def tunable(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return made()


def made(m=32, n=64):
    return adapter.tunable(weighted, inputs, sizes={"m": m, "n": n}, odd=({"m": 7, "n": 3},))


def test_the_space_is_what_helion_says(tunable):
    space, spec = tunable.space, weighted.bind(inputs(0, 32, 64)).config_spec
    assert space.knobs["block_sizes[0]"].values == (1, 2, 4, 8, 16, 32)
    assert space.knobs["loop_orders[0]"].values == ((0, 1), (1, 0))
    assert space.knobs["indexing[0]"].values[0] == "pointer"
    assert space.knobs["range_flattens[0]"].values == ("None", False, True)
    assert {"num_warps", "num_stages", "pid_type"} <= space.knobs.keys()
    default = tunable.space._kernel.generation.unflatten(space._kernel.flat(space.default()))
    assert dict(default) == dict(spec.default_config())


def test_configs_are_helions_and_none_is_there_twice(tunable):
    space, rng = tunable.space, np.random.default_rng(0)
    kernel, made = space._kernel, {}
    for _ in range(60):
        config = space.sample(rng)
        assert space.why_not(config) is None
        assert space.read(config) == config
        assert kernel.config(kernel.flat(config)) == config
        written = str(dict(kernel.generation.unflatten(kernel.flat(config))))
        assert made.setdefault(written, key_of(config)) == key_of(config)
        assert all(space.why_not(near) is None for near in space.neighbours(config)[:3])
    assert len(made) > 50
    default = space.default()
    assert default["pid_type"] == "flat"
    twin = {**default, "num_sm_multiplier": 8}  # says nothing unless programs are persistent
    assert space.why_not(twin) == "Helion would write it otherwise"
    assert space.settled(twin) == default
    assert space.encode([default, twin]).shape[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("check", ["compiled", "travelled", "tuned"])
def test_in_a_process_that_interprets(check, tmp_path):
    """Triton's own functions are interpreted only where it is imported so."""
    environment = {**os.environ, "TORCHSTONE_HOME": str(tmp_path)}
    if DEVICE == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, __file__, check]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def compiled(tunable):
    truths = [prove.truth(tunable, case) for case in prove.searched(tunable)]
    prover, rng = prove.Prover(tunable, *truths), np.random.default_rng(1)
    for config in (tunable.space.default(), *(here(tunable.space.sample(rng)) for _ in range(3))):
        call = tunable.build(config)
        proof = prover.prove(call)
        assert proof.status is None, proof.text
        x, y = inputs(0, 7, 33)
        assert torch.allclose(call(x, y), x * 2 + y)


def travelled(tunable):
    again = pickle.loads(pickle.dumps(tunable))
    assert again.space.knobs == tunable.space.knobs
    x, y = inputs(0, 32, 64)
    assert torch.allclose(again.build(again.space.default())(x, y), x * 2 + y)


def tuned(tunable):
    space = tunable.space.restricted(lambda c: here(c) == c)
    done = tune(replace(tunable, space=space), budget=Budget(measurements=3), searcher="random")
    found = [(m.status, m.text) for m in done.record.measurements]
    assert len(found) == 3
    assert {status for status, _ in found} <= {"timed", "dropped"}, found
    assert done.record.decision in ("PROMOTE", "KEEP_BASELINE")
    x, y = inputs(3, 32, 64)
    assert torch.allclose(done(x, y), x * 2 + y)


def here(config):
    """A config that this device can run: programs that persist ask a GPU for its size."""
    persists = str(config["pid_type"]).startswith("persistent")
    return (
        {**config, "pid_type": "flat", "num_sm_multiplier": 1}
        if persists and DEVICE == "cpu"
        else config
    )


def test_the_reference_is_helions_eager_mode_and_runs_in_float64(tunable):
    x, y = inputs(0, 5, 9)
    assert torch.equal(tunable.reference(x.double(), y.double()), x.double() * 2 + y.double())


def test_a_kernel_without_a_name_cannot_travel():
    with pytest.raises(InputError, match="has no name in"):
        adapter.tunable(helion.kernel(weighted.fn), inputs, sizes={"m": 4, "n": 4})


def test_what_cannot_be_read_is_told(monkeypatch):
    fragment = type("StrangeFragment", (), {"search_values": lambda self: None})()
    with pytest.raises(EnvironmentLacksError, match="a StrangeFragment that does not list its values"):
        adapter._knob(fragment, None)
    with pytest.raises(EnvironmentLacksError, match=r"no helion\.absent"):
        adapter._helion("absent")
    kinds = pytest.importorskip("helion.autotuner.config_spec")
    monkeypatch.delattr(kinds.ConfigSpec, "flat_key_layout")
    with pytest.raises(EnvironmentLacksError, match="Helion as installed has no flat_key_layout"):
        adapter.tunable(weighted, inputs, sizes={"m": 4, "n": 4})


if __name__ == "__main__":
    globals()[sys.argv[1]](made(8, 16))
