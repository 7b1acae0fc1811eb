"""Split products in graphs: fakes, export for any batch, compilers that must not fold the split away."""

import pytest
import torch
from torch.export import Dim

from torchstone.kernels import split_gemm  # noqa: F401  registers the operators
from torchstone.kernels.split_gemm_parts import recombined

OPS = torch.ops.torchstone
both = pytest.mark.parametrize("parts", [2, 3])


class Layer(torch.nn.Module):
    """A linear layer whose weights were split ahead of time, and a product of what depends on inputs."""

    def __init__(self, parts):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = parts
        self.register_buffer("w", OPS.split_parts(torch.randn(24, 40, generator=generator), parts))
        self.register_buffer("bias", torch.randn(24, generator=generator))

    def forward(self, x):
        y = OPS.split_linear(x * 1.5, self.w, self.bias, self.parts, "gelu")
        return OPS.split_matmul(y, y.mT, self.parts) + y.mean()


def example(batch):
    return torch.randn(batch, 7, 40, generator=torch.Generator().manual_seed(batch))


@both
def test_operators_are_what_compilers_expect(parts):
    w = torch.randn(5, 8)
    x = torch.randn(3, 2, 8).transpose(0, 1)
    split = OPS.split_parts(w, parts)
    torch.library.opcheck(OPS.split_parts.default, (w.T, parts))
    torch.library.opcheck(OPS.split_linear.default, (x, split, torch.randn(5), parts, "relu"))
    torch.library.opcheck(OPS.split_linear.default, (x[0, 0], split, None, parts, "none"))
    torch.library.opcheck(OPS.split_matmul.default, (x, torch.randn(2, 4, 8).mT, parts))
    torch.library.opcheck(OPS.split_matmul.default, (torch.randn(2, 1, 3, 8), w.T, parts))


@both
def test_export_for_any_batch(parts):
    model = Layer(parts)
    batch = Dim("batch", min=1, max=512)
    program = torch.export.export(model, (example(4),), dynamic_shapes=({0: batch},))
    for size in (1, 4, 37):
        assert torch.equal(program.module()(example(size)), model(example(size)))
    named = [str(node.target) for node in program.graph.nodes]
    assert "torchstone.split_linear.default" in named
    assert "torchstone.split_matmul.default" in named


@both
@pytest.mark.slow
def test_a_compiler_leaves_the_split_alone(parts):
    """Bit for bit, where the split is of a parameter, of an input, and inside the product."""

    def whole(x, w):
        split = OPS.split_parts(w + 1.0, parts)
        return OPS.split_linear(x * 2.0, split, None, parts, "tanh"), split

    torch._dynamo.reset()
    x, w = example(3), torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    y, split = whole(x, w)
    compiled_y, compiled_split = torch.compile(whole, backend="inductor")(x, w)
    assert torch.equal(compiled_split, split)
    assert torch.equal(compiled_y, y)
    assert compiled_split[1].any()
    torch.testing.assert_close(recombined(split), w + 1.0, rtol=2.0**-17, atol=0)
    model = Layer(parts)
    compiled = torch.compile(model, backend="inductor", dynamic=True)
    for size in (2, 5):
        torch.testing.assert_close(compiled(example(size)), model(example(size)), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_why_the_split_is_no_part_of_the_graph():
    """Written as casts, Inductor folds it: the second part is zero by default."""
    from torch._inductor import config

    def casts(x):
        first = x.bfloat16()
        return first, (x - first.float()).bfloat16()

    x = example(3)
    first, second = casts(x)
    assert second.any()
    split = OPS.split_parts(x, 2)
    assert torch.equal(split[0].float(), first.float() * 2.0**16)
    assert torch.equal(split[1].float(), second.float() * 2.0**16)
    found = {}
    for emulated in (False, True):
        torch._dynamo.reset()
        with config.patch(emulate_precision_casts=emulated):
            found[emulated] = torch.compile(casts, backend="inductor")(x)[1]
    assert not found[False].any()
    assert torch.equal(found[True], second)
