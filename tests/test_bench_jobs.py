"""The benchmark's jobs, on a small model."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from torchstone.bench import jobs
from torchstone.errors import InputError
from torchstone.records import Dim
from torchstone.verify.inputs import largest
from torchstone.verify.jobs import candidate
from torchstone.workload import Workload


class Scale(nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


WORKLOAD = Workload(
    name="rows",
    model=Scale,
    inputs=lambda: (torch.arange(6.0).reshape(2, 3), 2.0),
    dims=(Dim(name="B", low=1, high=8),),
    shapes={"x": ("B", 3)},
)


@pytest.fixture
def state():
    """A loaded candidate that notes what it is called with, and takes 2 ms a row."""
    seen = []

    def call(x, scale):
        seen.append((x, scale))
        time.sleep(0.002 * len(x))
        return (x * scale,)

    return {"call": call, "workload": WORKLOAD, "seen": seen}


def request(rows, scale=2.0):
    return {"sizes": {"B": rows}, "scalars": {"scale": scale}}


def test_the_largest_case_is_answered_once_in_the_life_of_a_process(state):
    case = largest(WORKLOAD.spec())
    jobs.season(state, case)
    jobs.season(state, case)
    assert [tuple(x.shape) for x, _ in state["seen"]] == [(8, 3)]


def test_a_process_that_verified_has_had_its_largest_case(state, tmp_path):
    case = largest(WORKLOAD.spec())
    candidate(state, case, str(tmp_path / "answers.pt"))
    before = len(state["seen"])
    jobs.season(state, case)
    assert len(state["seen"]) == before


def test_a_round_times_each_request_in_order_and_makes_its_inputs_once(state):
    requests = [request(1), request(8), request(1), request(1, 3.0)]
    seconds = jobs.round(state, requests, 0)
    assert len(seconds) == 4
    assert seconds[1] >= 0.016
    assert all(s >= 0.002 for s in seconds)
    assert [(tuple(x.shape), scale) for x, scale in state["seen"]] == [
        ((1, 3), 2.0),
        ((8, 3), 2.0),
        ((1, 3), 2.0),
        ((1, 3), 3.0),
    ]
    again = len(state["seen"])
    jobs.round(state, requests, 0)
    assert all(state["seen"][i][0] is state["seen"][again + i][0] for i in range(4))
    assert state["seen"][0][0] is state["seen"][2][0]


def test_inputs_are_the_seeds(state):
    for seed in (0, 1):
        jobs.round(state, [request(2)], seed)
    other = {**state, "seen": []}
    other.pop("bench_inputs")
    jobs.round(other, [request(2)], 0)
    first, second, third = (x for x, _ in state["seen"])
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_load_serves_the_schedule(state):
    served = jobs.load(state, 100.0, 0.5, [request(1), request(2)], 0)
    assert served.errors == 0
    assert len(served.latencies_s) == len(state["seen"])
    assert min(served.latencies_s) >= 0.002
    assert {len(x) for x, _ in state["seen"]} == {1, 2}


def test_an_overload_ends_by_itself(state):
    served = jobs.load(state, 1000.0, 0.3, [request(8)], 0)
    assert served.errors > 0
    assert served.elapsed_s >= 0.6
    assert len(served.latencies_s) < 0.7 / 0.016
    assert max(served.latencies_s) > 0.1


def test_what_cannot_be_run_is_refused(state):
    with pytest.raises(InputError, match="no requests"):
        jobs.round(state, [], 0)
    with pytest.raises(InputError, match="no candidate"):
        jobs.round({}, [request(1)], 0)


def test_what_a_candidate_raises_passes_through(state):
    def call(*_):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        jobs.load({**state, "call": call}, 100.0, 0.5, [request(1)], 0)
