"""Rewriting: patterns, the driver, what it must leave alone, and rules that are no identity."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.export import Dim

from torchstone.recipe import FAMILIES, Numerics, Rewrite
from torchstone.records import Unsupported
from torchstone.records.inventory import Bandwidth, Peaks
from torchstone.records.rewrites import Firing
from torchstone.rewrite import constants, driver, families, graph, proof
from torchstone.rewrite.cost import Weigher
from torchstone.rewrite.memory import Memory
from torchstone.rewrite.pattern import V, match, op, variables
from torchstone.rewrite.program import rewrite_module, rules_of
from torchstone.rewrite.rule import Rule, rule

aten = torch.ops.aten
PEAKS = Peaks(
    device="a processor",
    threads=1,
    flops_per_s={"float32": 1e11},
    bandwidth=(Bandwidth(working_set_bytes=2**18, bytes_per_s=1e10),),
    beyond_cache=True,
)
WEIGHER = Weigher(PEAKS, torch.device("cpu"))


def captured(module: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> fx.GraphModule:
    shapes = tuple({0: Dim("B", min=2, max=64)} if dynamic else None for _ in args)
    return graph.of(torch.export.export(module, args, dynamic_shapes=shapes))


def rewritten(module: nn.Module, rules: tuple[Rule, ...], *args: torch.Tensor) -> driver.Rewriter:
    found = driver.Rewriter(captured(module, *args), rules, WEIGHER)
    found.run()
    return found


def targets(module: fx.GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


# ---- patterns

LINEAR = op(aten.linear.default, V("x"), V("weight"), V("bias"))
ADDED = op(aten.add.Tensor, V("a"), op((aten.relu.default, aten.tanh.default), V("a"), bind="f"))


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.linear(x)
        return h.sum(-1), x + torch.tanh(x), x + torch.relu(y), torch.add(x, torch.relu(x), alpha=2)


def test_a_pattern_is_found_where_it_is_and_nowhere_else() -> None:
    module = captured(Calls(), torch.randn(5, 4), torch.randn(5, 4))
    found = [m for n in module.graph.nodes if (m := match(ADDED, n))]
    assert len(found) == 1  # y is not x, and alpha is not its default
    assert found[0].bound["f"] is aten.tanh.default
    assert found[0].bound["a"].name == "x"
    assert variables(ADDED) == ("a", "f")


def test_an_inner_result_that_others_need_is_no_match() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(x)
            return x + h, h

    module = captured(Twice(), torch.randn(5, 4))
    assert not any(match(ADDED, n) for n in module.graph.nodes)


def test_arguments_are_positional_and_complete_and_work_in_place_is_not() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.add(x, other=x)
            return h.relu_().mul_(2.0)

    module = captured(InPlace(), torch.randn(5, 4))
    assert targets(module) == [aten.add.Tensor, aten.relu.default, aten.mul.Tensor]
    x = torch.randn(7, 4)
    assert torch.equal(module(x), InPlace()(x))


def test_what_changes_other_memory_stays_in_place() -> None:
    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = x + 1
            row = h[0]
            h.mul_(2.0)
            x.add_(1.0)
            return row, h

    module = captured(Seen(), torch.randn(5, 4), dynamic=False)
    assert aten.mul_.Tensor in targets(module)
    assert aten.add_.Tensor in targets(module)
    mine, theirs = (torch.ones(5, 4) for _ in range(2))
    for a, b in zip(module(mine), Seen()(theirs), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(mine, theirs)


# ---- rules


def test_a_rule_whose_names_do_not_agree_is_refused() -> None:
    with pytest.raises(TypeError, match="variables"):

        @rule(LINEAR, family="folding", shapes={"x": "b k", "weight": "n k", "bias": "n?"})
        def wrong(x: Any, weight: Any) -> Any:
            """Lacks the bias."""


@pytest.mark.parametrize("one", families.kernels.RULES, ids=lambda r: r.name)
def test_rules_of_kernels_are_proved(one: Rule) -> None:
    """By what the operators compute where Triton does not run; other families have their own tests."""
    found = proof.prove(one, seed=7, draws=90)
    assert found.counterexample is None, found.counterexample
    assert found.held, found
    assert one.identity
    assert one.family in FAMILIES


def test_names_are_unique() -> None:
    names = [r.name for r in families.RULES]
    assert len(set(names)) == len(names)
    assert all(r.identity and r.family in FAMILIES for r in families.RULES)


def test_families_are_switched_on_alone() -> None:
    assert rules_of(Rewrite("all")) == families.RULES
    assert {r.family for r in rules_of(Rewrite("pooling"))} == {"pooling"}


DOMAIN: dict[str, Any] = {
    "shapes": {"x": "*b m k", "weight": "n k", "bias": "n?"},
    "constants": {"dims": ([-1],), "keepdim": (False, True)},
}
SUMMED = op(aten.sum.dim_IntList, LINEAR, V("dims"), V("keepdim"))


@rule(SUMMED, family="pooling", **DOMAIN)
def forgets_the_bias(x: Any, weight: Any, bias: Any, dims: Any, keepdim: bool) -> Any:
    """Not an identity."""
    out = F.linear(x, weight.sum(0, keepdim=True))
    return out if keepdim else out.squeeze(-1)


@rule(SUMMED, family="pooling", **DOMAIN)
def nearly(x: Any, weight: Any, bias: Any, dims: Any, keepdim: bool) -> Any:
    """Right to eight digits: float32 would forgive it."""
    out = F.linear(x, weight.sum(0, keepdim=True), None if bias is None else bias.sum(0, keepdim=True))
    return (out if keepdim else out.squeeze(-1)) * (1 + 1e-8)


@rule(SUMMED, family="pooling", **DOMAIN)
def gives_another_shape(x: Any, weight: Any, bias: Any, dims: Any, keepdim: bool) -> Any:
    """Forgets keepdim."""
    total = None if bias is None else bias.sum(0, keepdim=True)
    return F.linear(x, weight.sum(0, keepdim=True), total).squeeze(-1)


@rule(op(aten.mul.Tensor, V("x"), 0.1), family="simplify", numerics=Numerics.EXACT, shapes={"x": "*b n"})
def rounds_otherwise(x: Any) -> Any:
    """0.1 x = x / 10, but not to the bit."""
    return x / 10.0


@pytest.mark.parametrize("one", [forgets_the_bias, nearly, gives_another_shape])
def test_what_is_no_identity_is_refuted(one: Rule) -> None:
    found = proof.prove(one)
    assert found.counterexample is not None
    assert found.counterexample.text


def test_exact_means_to_the_bit() -> None:
    found = proof.prove(rounds_otherwise)
    assert found.counterexample is not None
    assert "differ" in found.counterexample.text


@given(st.integers(0, 10_000))
def test_draws_stay_in_the_domain(seed: int) -> None:
    import random

    for drawn in proof.draw(gives_another_shape, random.Random(seed), 3):
        x, weight, bias = drawn["x"], drawn["weight"], drawn["bias"]
        assert x.shape[-1] == weight.shape[-1]
        assert bias is None or bias.shape == weight.shape[:1]
        assert drawn["dims"] == [-1]


# ---- the driver


class Summed(nn.Module):
    def __init__(self, wide: int = 512) -> None:
        super().__init__()
        self.linear = nn.Linear(64, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum(-1, keepdim=True)


def test_a_rule_fires_its_constants_are_folded_and_it_holds_for_other_sizes() -> None:
    module = Summed().eval()
    found = rewritten(module, families.RULES, torch.randn(5, 64))
    (fired,) = [f for f in found.fired if f.rule == "sum_of_linear"]
    assert fired.at[-1].startswith("sum")
    assert fired.numerics == "reassociates"
    assert fired.source.startswith("test_rewrite_core.py:")
    assert fired.after_s < fired.before_s
    assert found.folded == 2
    assert {"linear.weight", "linear.bias"}.isdisjoint(dict(found.module.named_parameters()))
    for rows in (1, 5, 40):
        x = torch.randn(rows, 64)
        exact = module.double()(x.double())
        module.float()
        torch.testing.assert_close(found.module(x).double(), exact, rtol=1e-5, atol=1e-4)


def test_what_would_not_pay_is_declined_and_said() -> None:
    @rule(SUMMED, family="pooling", **DOMAIN)
    def dear(x: Any, weight: Any, bias: Any, dims: Any, keepdim: bool) -> Any:
        """The same twice over."""
        out = F.linear(x, weight, bias).sum(dims, keepdim)
        return (out + F.linear(x, weight, bias).sum(dims, keepdim)) / 2

    found = rewritten(Summed(), (dear,), torch.randn(5, 64))
    assert not found.fired
    (declined,) = found.declined.values()
    assert declined.rule == "dear"
    assert "would not pay" in declined.why


def test_a_replacement_of_another_shape_is_declined() -> None:
    found = rewritten(Summed(), (gives_another_shape,), torch.randn(5, 64))
    assert not found.fired
    assert "the replacement gives" in next(iter(found.declined.values())).why


def test_a_rule_that_breaks_the_graph_is_an_error_of_ours() -> None:
    module = captured(Summed(), torch.randn(5, 64))
    outputs = tuple(v for n in graph.results(module.graph) for v in graph.values(n))
    (linear,) = [n for n in module.graph.nodes if n.target is aten.linear.default]
    next(n for n in module.graph.nodes if n.op == "output").args = ((linear,),)
    with pytest.raises(graph.BrokenGraphError, match="changed the results"):
        graph.check(module.graph, outputs)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 512), nn.BatchNorm1d(512)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return self.norm(self.linear(x)).sum(-1), self.linear(x).sum(-1) * self.calls


def test_state_is_changed_as_before_and_never_folded() -> None:
    torch.manual_seed(0)
    mine, theirs = Stateful().train(), Stateful().train()
    theirs.load_state_dict(mine.state_dict())
    found = rewritten(mine, families.RULES, torch.randn(6, 64))
    assert "sum_of_linear" in {f.rule for f in found.fired}
    for _ in range(3):
        x = torch.randn(9, 64)
        for a, b in zip(found.module(x), theirs(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    state = dict(found.module.named_buffers())
    for name, value in theirs.named_buffers():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_random_operations_stay_even_where_nobody_uses_them() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            F.dropout(x, 0.5, training=True)
            return F.dropout(x, 0.5, training=True), F.dropout(x, 0.5, training=False)

    found = rewritten(Noisy(), families.RULES, torch.randn(5, 4))
    live = [n for n in found.module.graph.nodes if n.target is aten.dropout.default and n.args[2]]
    assert len(live) == 2
    x = torch.randn(6, 4)
    torch.manual_seed(1)
    a = found.module(x)
    torch.manual_seed(1)
    assert all(torch.equal(p, q) for p, q in zip(a, Noisy()(x), strict=True))


def test_constants_that_would_grow_are_left_to_be_computed() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.randn(2048))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.outer(self.row, self.row) + (self.row * 2)

    module = captured(Grows(), torch.randn(3, 2048))
    assert constants.fold(module) == 1
    assert sum(b.nbytes for b in module.buffers()) == 4 * 2048


def test_a_measured_rule_is_timed_where_it_is_used() -> None:
    @rule(SUMMED, family="pooling", measured=True, **DOMAIN)
    def timed(x: Any, weight: Any, bias: Any, dims: Any, keepdim: bool) -> Any:
        """Far less work: a sum of weights."""
        total = None if bias is None else bias.sum(0, keepdim=True)
        out = F.linear(x, weight.sum(0, keepdim=True), total)
        return out if keepdim else out.squeeze(-1)

    found = driver.Rewriter(captured(Summed(4096), torch.randn(60, 64)), (timed,), WEIGHER)
    found.run()
    assert [(f.rule, f.measured) for f in found.fired] == [("timed", True)]


def test_times_are_kept_and_a_damaged_line_is_measured_anew(tmp_path: Path) -> None:
    @rule(SUMMED, family="pooling", measured=True, **DOMAIN)
    def timed(x: Any, weight: Any, bias: Any, dims: Any, keepdim: bool) -> Any:
        """Far less work: a sum of weights."""
        total = None if bias is None else bias.sum(0, keepdim=True)
        out = F.linear(x, weight.sum(0, keepdim=True), total)
        return out if keepdim else out.squeeze(-1)

    def run(rows: int = 60) -> list[Firing]:
        module = captured(Summed(4096), torch.randn(rows, 64))
        found = driver.Rewriter(module, (timed,), WEIGHER, memory=Memory(path))
        found.run()
        return found.fired

    path = tmp_path / "deep" / "rewrites.jsonl"
    first, second = run(), run()
    assert [(f.before_s, f.after_s) for f in first] == [(f.before_s, f.after_s) for f in second]
    assert len(path.read_text().splitlines()) == 1
    run(rows=50)
    assert len(path.read_text().splitlines()) == 2  # another size is another question
    path.write_bytes(path.read_bytes()[:-30])
    assert run(rows=50)
    assert run()[0].before_s == first[0].before_s


def test_a_rewritten_module_shares_the_state_of_the_one_it_was_made_from() -> None:
    torch.manual_seed(0)
    mine, theirs = Stateful().train(), Stateful().train()
    theirs.load_state_dict(mine.state_dict())
    found = rewrite_module(mine, (torch.randn(9, 64),), Rewrite("pooling"))
    assert not isinstance(found, Unsupported)
    module, log = found
    assert "sum_of_linear" in {f.rule for f in log.fired}
    x = torch.randn(9, 64)
    for a, b in zip(module(x), theirs(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for (name, a), (_, b) in zip(mine.named_buffers(), theirs.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_what_is_not_one_graph_is_said() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    found = rewrite_module(Branches(), (torch.randn(5),), Rewrite("all"))
    assert isinstance(found, Unsupported)
    assert "one graph" in found.text


def test_a_program_never_comes_to_return_memory_that_it_was_given() -> None:
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sum(1, keepdim=True), x.sum(1, keepdim=True) + 1

    found = rewritten(One(), families.RULES, torch.randn(5, 1))
    x = torch.randn(6, 1)
    kept = x.clone()
    first, second = found.module(x)
    first.zero_()
    assert torch.equal(x, kept)
    torch.testing.assert_close(second, kept + 1)


def test_assertions_stay() -> None:
    class Asserts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.ops.aten._assert_tensor_metadata(x, None, None, torch.float32)
            return F.dropout(x, 0.5, training=False) * 2

    found = rewritten(Asserts(), families.RULES, torch.randn(5, 4))
    assert aten._assert_tensor_metadata.default in targets(found.module)
    assert "dropout_off" in {f.rule for f in found.fired}


def test_sizes_in_lists_are_seen_and_follow_the_input() -> None:
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            h = self.linear(x).reshape(rows, 2, 2).reshape(rows, 4).expand(rows, 4)
            return h.view(rows, -1).sum(-1)

    module = Expands().eval()
    found = rewritten(module, families.RULES, torch.randn(5, 4))
    assert found.fired
    x = torch.randn(9, 4)
    torch.testing.assert_close(found.module(x), module(x))
