"""Static CUDA graphs: held results stay, other signatures and what cannot be recorded run as before."""

import pytest
import torch
from torch import nn

from torchstone import backends, env
from torchstone.cudagraph.static import Graphed
from torchstone.recipe import parse


@pytest.mark.skipif(bool(env.devices()), reason="there is a CUDA device")
def test_without_a_device_the_recipe_is_refused_and_says_why() -> None:
    absent = backends.probe(parse("inductor + cudagraph"))
    assert absent is not None
    assert "CUDA device" in absent.why


def test_inputs_that_are_not_on_a_device_are_simply_computed() -> None:
    graphed = Graphed(lambda x, n: x * n)
    assert torch.equal(graphed(torch.ones(3), 2), torch.full((3,), 2.0))
    assert not graphed.recorded
    assert graphed.held_bytes == 0


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y, y.sum()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_held_result_is_never_overwritten(compiled: bool) -> None:
    torch.manual_seed(0)
    module = Deep().cuda().eval()
    graphed = Graphed(torch.compile(module) if compiled else module)
    given = [torch.randn(8, 64, device="cuda") for _ in range(4)]
    with torch.no_grad():
        wanted = [module(x) for x in given]
        held = [graphed(x) for x in given]
        again = graphed(held[0][0])  # a result as the next input
    assert len(graphed.recorded) == 1
    for got, want in zip(held, wanted, strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(again, module(wanted[0][0]))
    (one,) = graphed.recorded.values()
    assert one.copied_bytes == 8 * 64 * 4
    assert one.held_bytes >= 2 * one.copied_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_each_signature_has_its_graph_up_to_a_limit() -> None:
    graphed = Graphed(lambda x: x * 2, most=2)
    for rows in (1, 2, 3, 1, 2, 3):
        x = torch.randn(rows, 5, device="cuda")
        assert torch.equal(graphed(x), x * 2)
    x = torch.randn(5, 2, device="cuda").t()
    assert torch.equal(graphed(x), x * 2)  # other strides
    assert len(graphed.recorded) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_cannot_be_recorded_runs_as_before_and_says_why() -> None:
    def looks(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3

    graphed = Graphed(looks)
    for sign in (1.0, -1.0):
        x = torch.full((4,), sign, device="cuda")
        assert torch.equal(graphed(x), looks(x))
    assert not graphed.recorded
    assert len(graphed.refused) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_go_on_from_call_to_call() -> None:
    graphed = Graphed(lambda x: x + torch.rand_like(x))
    x = torch.zeros(1000, device="cuda")
    assert not torch.equal(graphed(x), graphed(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_after_a_refused_recording_random_numbers_are_drawn_and_recorded() -> None:
    x = torch.zeros(1000, device="cuda")
    refused = Graphed(lambda v: v + torch.rand_like(v) * float(v.sum()))
    refused(x)
    assert refused.refused
    assert torch.rand(3, device="cuda").isfinite().all()
    recorded = Graphed(lambda v: v + torch.rand_like(v))
    assert not torch.equal(recorded(x), recorded(x))
    assert not recorded.refused
