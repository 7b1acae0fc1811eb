"""``precision(fp16_products)``: which products have half operands, how exact they are, in what range."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from torchstone import recipe
from torchstone import workload as workload_module
from torchstone.errors import InputError, RecipeError
from torchstone.policy import Policy
from torchstone.quantize.convolution import parts_of
from torchstone.quantize.half import halve
from torchstone.quantize.products import converted
from torchstone.quantize.split import split
from torchstone.records import VerdictEntry, Verified
from torchstone.report.progress import QuietProgress
from torchstone.run import Request, execute

HALF = 2.0**-10  # two operands, each off by at most 2**-11 of itself
MATMUL = "torchstone.half_matmul.default"


class Of(nn.Module):
    """A function as a module, with parameters if it has any."""

    def __init__(self, call: Any, **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.call(self, *inputs)


def halved(
    module: nn.Module, *args: torch.Tensor, dtype: torch.dtype = torch.float16
) -> tuple[Any, int]:
    return halve(torch.export.export(module.eval(), args), dtype)


def targets(module: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def wide(module: nn.Module, *args: torch.Tensor) -> Any:
    found = module.double()(*(a.double() for a in args))
    module.float()
    return found


LINEAR = Of(lambda self, x: self.layer(x), layer=nn.Linear(128, 128))
CASES: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "linear": (LINEAR, (torch.randn(128, 128),)),
    "matmul": (Of(lambda _, a, b: a @ b), (torch.randn(2, 96, 128), torch.randn(2, 128, 96))),
    "broadcast": (Of(lambda _, a, b: a @ b), (torch.randn(3, 2, 96, 96), torch.randn(96, 96))),
    "odd sizes": (Of(lambda _, a, b: a @ b), (torch.randn(99, 101), torch.randn(101, 97))),
    "bmm": (Of(lambda _, a, b: torch.bmm(a, b)), (torch.randn(2, 96, 96), torch.randn(2, 96, 96))),
    "addmm": (
        Of(lambda _, b, x, w: torch.addmm(b, x, w)),
        (torch.randn(192), torch.randn(128, 192), torch.randn(192, 192)),
    ),
    "einsum": (
        Of(lambda _, a, b: torch.einsum("bijl,lk->bijk", a, b)),
        (torch.randn(2, 8, 8, 96), torch.randn(96, 96)),
    ),
    "conv1d": (
        Of(lambda s, x: s.c(x), c=nn.Conv1d(64, 64, 5, padding=2)),
        (torch.randn(2, 64, 256),),
    ),
    "conv2d": (
        Of(lambda s, x: F.relu(s.c(x)), c=nn.Conv2d(64, 64, 3, stride=2, bias=False)),
        (torch.randn(2, 64, 33, 31),),
    ),
    "grouped": (
        Of(lambda s, x: s.c(x), c=nn.Conv2d(64, 128, 3, groups=2)),
        (torch.randn(2, 64, 20, 20),),
    ),
    "conv3d": (Of(lambda s, x: s.c(x), c=nn.Conv3d(32, 64, 3)), (torch.randn(1, 32, 9, 9, 9),)),
    "transposed": (
        Of(lambda s, x: s.c(x), c=nn.ConvTranspose2d(64, 32, 4, stride=2, output_padding=1)),
        (torch.randn(2, 64, 17, 16),),
    ),
    "grouped transposed": (
        Of(lambda s, x: s.c(x), c=nn.ConvTranspose2d(64, 64, 4, groups=2)),
        (torch.randn(2, 64, 17, 16),),
    ),
    "attention": (
        Of(lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        tuple(torch.randn(1, 2, 128, 64) for _ in range(3)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_product_is_as_exact_as_its_operands(name: str) -> None:
    module, args = CASES[name]
    found, count = halved(module, *args)
    assert count == 1
    exact = wide(module, *args)
    assert 0 < relative(found(*args), exact) < HALF
    brain, _ = halved(module, *args, dtype=torch.bfloat16)
    assert HALF < relative(brain(*args), exact) < 8 * HALF


def test_what_is_too_small_or_no_float32_stays() -> None:
    small = Of(lambda s, x: s.a(x), a=nn.Linear(8, 8))
    assert halved(small, torch.randn(4, 8))[1] == 0
    depthwise = Of(lambda s, x: s.c(x), c=nn.Conv2d(64, 64, 3, groups=64))
    assert halved(depthwise, torch.randn(2, 64, 32, 32))[1] == 0
    assert halved(LINEAR.double(), torch.randn(128, 128).double())[1] == 0
    LINEAR.float()


def test_weights_are_converted_ahead_of_time() -> None:
    for name, weight in (("linear", "t"), ("conv2d", "conv2d")):
        module, args = CASES[name]
        found, _ = halved(module, *args)
        stored = [b for b in found.buffers() if b.dtype is torch.float16]
        assert len(stored) == 1, weight
        casts = [t for t in targets(found) if t.startswith("aten.to")]
        assert len(casts) == 1  # of the input


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["linear", "matmul", "conv2d", "transposed", "conv3d"]),
    st.integers(-30, 30),
    st.integers(-6, 6),
)
def test_magnitudes_cost_no_exactness(name: str, inputs: int, weights: int) -> None:
    module, args = CASES[name]
    args = tuple(a * 10.0**inputs for a in args[:1]) + args[1:]
    scaled = {n: p * 10.0**weights for n, p in module.named_parameters() if n.endswith("weight")}
    scaled |= {n: torch.zeros_like(p) for n, p in module.named_parameters() if n.endswith("bias")}
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    try:
        module.load_state_dict(scaled)
        found, _ = halved(module, *args)
        exact = wide(module, *args)
        assert relative(found(*args), exact) < HALF
    finally:
        module.load_state_dict(before)


@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed"])
@pytest.mark.parametrize("worst", [1e30, float("inf"), float("nan")])
def test_what_one_sample_holds_changes_no_other(name: str, worst: float) -> None:
    module, (x,) = CASES[name]
    found, _ = halved(module, x)
    spoiled = x.clone()
    spoiled[0].view(-1)[3] = worst
    plain, beside = found(x), found(spoiled)
    assert torch.equal(plain[1:], beside[1:])
    finite = module(spoiled)[0].isfinite()
    assert torch.equal(finite, beside[0].isfinite())


def test_no_result_of_a_convolution_overflows() -> None:
    conv = nn.Conv2d(256, 64, 3, bias=False)
    with torch.no_grad():
        conv.weight.fill_(100.0)
    module, x = Of(lambda s, x: s.c(x), c=conv), torch.full((1, 256, 8, 8), 1000.0)
    found, _ = halved(module, x)
    assert relative(found(x), wide(module, x)) < 1e-3


@pytest.mark.slow
def test_symbolic_sizes_and_inductor() -> None:
    module = Of(lambda s, x: s.b(F.relu(s.a(x))), a=nn.Linear(128, 256), b=nn.Linear(256, 128)).eval()
    program = torch.export.export(
        module, (torch.randn(256, 128),), dynamic_shapes=[({0: Dim("N", min=2, max=512)},)]
    )
    found, count = halve(program, torch.float16)
    assert count == 2
    call = torch.compile(found)
    with torch.no_grad():
        for rows in (64, 7):
            x = torch.randn(rows, 128)
            assert relative(call(x), wide(module, x)) < HALF


def test_the_operator_says_what_it_takes() -> None:
    a, b = torch.randn(4, 8).half(), torch.randn(8, 3).half()
    call = torch.ops.torchstone.half_matmul
    assert call(a, b).dtype is torch.float32
    torch.testing.assert_close(call(a, b), a.float() @ b.float())
    assert call(a[:0], b).shape == (0, 3)
    assert call(a[:, :0], b[:0]).eq(0).all()
    for wrong in ((a.float(), b), (a, b.bfloat16()), (a[0], b)):
        with pytest.raises(InputError, match=r"half_matmul"):
            call(*wrong)
    torch.library.opcheck(call, (a.expand(2, 4, 8), b), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_split_convolutions_are_nearly_as_exact_as_float32(name: str) -> None:
    module, args = CASES[name]
    found, count = split(torch.export.export(module.eval(), args), 2)
    assert count == 1
    assert "torchstone.half_conv.default" in targets(found)
    exact = wide(module, *args)
    assert relative(found(*args), exact) < 2.0**-16
    module.cpu()


@pytest.mark.slow
def test_inductor_keeps_the_parts() -> None:
    module, args = CASES["conv2d"]
    found, _ = split(torch.export.export(module.eval(), args), 2)
    with torch.no_grad():
        assert relative(torch.compile(found)(*args), wide(module, *args)) < 2.0**-16


@given(st.floats(width=32))
def test_two_parts_are_a_number_but_for_its_last_bits(number: float) -> None:
    x = torch.tensor([number])
    high, low = parts_of(x)
    if not x.isfinite().all():
        assert torch.equal(high.float().nan_to_num(), x.nan_to_num())
        return
    if not high.isfinite().all():
        assert abs(number) > 3.38e38  # bfloat16 rounds it to infinity
        return
    left = float(x.double() - high.double() - low.double())
    assert abs(left) <= max(2.0**-16 * abs(number), 2.0**-133)


def test_mixed_products_are_half_in_convolutions_alone() -> None:
    program = torch.export.export(network(), (torch.randn(64, 16, 8, 8),))
    found, counts = converted(program, "mixed_products")
    assert counts == {"half": 1, "split": 1}
    assert "torchstone.split_linear.default" in targets(found)
    assert [b.dtype for b in found.buffers() if b.dtype is torch.float16] == [torch.float16]


def test_recipes() -> None:
    for form in ("fp16_products", "bf16_products", "mixed_products"):
        found = recipe.parse(f"inductor + rewrite(norms) + precision({form})")
        assert found.numerics is recipe.Numerics.LOSSY
    with pytest.raises(RecipeError, match=r"products in other formats"):
        recipe.parse("eager + precision(fp16_products)")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 64)).eval()


@pytest.mark.slow
def test_a_run_proves_it(tmp_path: Path) -> None:
    text = "inductor + precision(fp16_products)"
    workload = workload_module.from_objects(
        network,
        torch.randn(8, 16, 8, 8),
        dims={"B": "1..32"},
        policy=Policy(),
        shapes={"input": ["B", 16, 8, 8]},
    )
    request = Request(workload=workload, recipes=(recipe.parse(text),), home=tmp_path, until="verify")
    entry = execute(request, QuietProgress()).store.get(f"verdict/{text}", VerdictEntry)
    assert entry is not None
    assert isinstance(entry.verdict, Verified), entry.verdict


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_product_on_a_device(name: str) -> None:
    module, args = CASES[name]
    args = tuple(a.cuda() for a in args)
    found, _ = halved(module.cuda(), *args)
    exact = wide(module, *args)
    call = torch.compile(found)
    with torch.no_grad():
        assert relative(found(*args), exact) < HALF
        assert relative(call(*args), exact) < HALF
    module.cpu()
