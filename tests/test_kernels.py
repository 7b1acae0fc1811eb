"""What holds for every kernel: registration, fakes, compilers, export, tuning."""

import subprocess
import sys

import pytest
import torch

from test_kernels_support import (
    INTERPRETED,
    KERNELS,
    agrees_with_fake,
    gpu,
    here,
    holds,
    interpret,
    outside,
    random,
)
from torchstone.errors import EnvironmentLacksError, InputError
from torchstone.kernels import base
from torchstone.measure import prove
from torchstone.records import Case

EXAMPLES = {
    "softmax": (random(3, 37), 1, True),
    "layer_norm": (random(3, 37), [1], random(37), None, 1e-5),
    "rms_norm": (random(3, 7, 5), [1], None, random(7), 1e-5),
    "group_norm": (random(2, 6, 5), 3, random(6), random(6), 1e-5, "relu"),
    "batch_norm": (random(2, 6, 5), random(6), random(6), 1e-5, "silu"),
    "reduce": (random(3, 4, 5), "mean", [0, 2], True),
    "arg_reduce": (random(3, 4, 5), "max", 1, False),
    "cross_entropy": (random(3, 7), torch.tensor([1, 6, 2]), "mean", 6),
    "scan": (random(3, 7), random(3, 7) > 0, "sum", 1, True, False),
    "pool": (random(1, 2, 7, 9), "max", [3, 2], [2, 1], [1, 0], [1, 2], True, True),
    "depthwise_conv": (random(1, 2, 7, 9), random(4, 1, 3, 3), None, [1, 2], [1, 1], [1, 1], "gelu"),
}
each = pytest.mark.parametrize("name", EXAMPLES)


@outside
@pytest.mark.slow
def test_in_the_interpreter():
    interpret(__file__)


@outside
@pytest.mark.slow
def test_slow_ones_in_the_interpreter():
    interpret(__file__, "slow")


def test_every_kernel_has_an_example():
    ours = {n for n, k in KERNELS.items() if k.launch.__module__.split(".")[-1] != "split_gemm"}
    assert set(EXAMPLES) <= ours
    assert all(k.op is getattr(torch.ops.torchstone, n) for n, k in KERNELS.items())


@each
def test_right_wherever_it_runs(name):
    """Triton under the interpreter, the reference on a plain CPU; and fakes agree with either."""
    kernel, args = KERNELS[name], EXAMPLES[name]
    holds(kernel, args)
    agrees_with_fake(kernel, args)
    assert base.launches("cpu") == INTERPRETED


@each
def test_operators_are_registered_as_pytorch_wants(name):
    torch.library.opcheck(KERNELS[name].op.default, EXAMPLES[name], test_utils=CHECKS)


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


class Calls(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, tensors):
        rest = iter(tensors[1:])
        args = [next(rest) if isinstance(a, torch.Tensor) else a for a in EXAMPLES[self.name][1:]]
        return KERNELS[self.name].op(tensors[0] * 2, *args)


@each
def test_exported_with_a_size_that_varies(name):
    tensors = [a for a in EXAMPLES[name] if isinstance(a, torch.Tensor)]
    batch = torch.export.Dim("batch", min=2, max=64)
    shaped = name in ("cross_entropy", "scan")  # the other tensor has the batch too
    first = torch.cat([tensors[0]] * 4)
    given = [first, *(torch.cat([t] * 4) if shaped else t for t in tensors[1:])]
    dims = [{0: batch}, *({0: batch} if shaped else {} for _ in tensors[1:])]
    program = torch.export.export(Calls(name), (given,), dynamic_shapes=(dims,))
    assert f"torchstone.{name}" in program.graph_module.code
    small = [torch.cat([t] * 2) if shaped or t is tensors[0] else t for t in tensors]
    found, wanted = program.module()(small), Calls(name)(small)
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_compiled_by_inductor_around_them():
    """All in one graph: what is around them is compiled, they are called."""
    plain = [n for n in EXAMPLES if n not in ("cross_entropy",)]

    def everything(tensors):
        found = []
        for name in plain:
            x, *rest = tensors[name]
            out = KERNELS[name].op(x * 2 + 1, *rest)
            found += [t * 3 for t in (out if isinstance(out, tuple) else (out,))]
        return found

    tensors = {n: EXAMPLES[n] for n in plain}
    compiled = torch.compile(everything, backend="inductor", fullgraph=True)
    torch.testing.assert_close(compiled(tensors), everything(tensors))


@each
@here
def test_tunables_are_proved_at_their_own_and_at_odd_sizes(name):
    kernel = KERNELS[name]
    tunable = kernel.tunable(*EXAMPLES[name])
    moved, operations = tunable.work(**tunable.sizes)
    assert moved == pytest.approx(kernel.work(*EXAMPLES[name])[0])
    assert operations >= 0
    call = tunable.build(tunable.space.default())
    cases = [Case(name="own", kind="traffic", sizes=dict(tunable.sizes))]
    cases += [Case(name="odd", kind="dims", sizes=dict(odd), seed=3) for odd in tunable.odd[:2]]
    for case in cases:
        known = prove.truth(tunable, case)
        proof = prove.Prover(tunable, known, known).on(call, known, prove.Proof())
        assert proof.status is None, proof.text
    assert tunable.build.cache_key == kernel.tunable(*EXAMPLES[name]).build.cache_key


@here
@pytest.mark.slow
def test_a_kernel_is_tuned_by_the_one_tuner_and_launches_with_what_won(tmp_path, monkeypatch):
    import torchstone
    from torchstone.kernels import choice
    from torchstone.tuner.driver import Budget

    kernel, args = KERNELS["softmax"], (random(4, 300), 1, False)
    tunable = kernel.tunable(*args)
    tuned = torchstone.tune(tunable, budget=Budget(seconds=60, measurements=2), home=tmp_path)
    assert kernel.space(*args).why_not(tuned.config) is None
    assert {e.status for e in tuned.record.finals.entries} <= {"timed", "dropped"}
    monkeypatch.setenv("TORCHSTONE_HOME", str(tmp_path))
    choice.forget()
    assert choice.config(kernel, args) == tuned.config  # promoted, or the default
    other = next(c for c in kernel.space(*args).all if c["way"] == "split")
    tunable.build.keep(other, tmp_path)
    assert choice.config(kernel, args) == other
    choice.forget()


@outside
def test_tuning_without_triton_here_is_refused():
    with pytest.raises(EnvironmentLacksError, match="does not run on cpu"):
        KERNELS["softmax"].tunable(random(3, 4), 1, False)
    with pytest.raises(InputError, match="float64"):
        KERNELS["softmax"].tunable(random(3, 4).double(), 1, False)


def test_importing_the_package_loads_no_torch():
    code = "import sys, torchstone.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dimensions_merge_only_where_one_stride_reaches_all():
    x = torch.empty(4, 5, 6, 7)
    assert base.rows_of(x, 1, 2)[1:] == (4, 30, 7, (210, 7, 1))
    assert base.rows_of(x.transpose(0, 1), 2, 3).x.is_contiguous()
    assert base.copied(x.transpose(0, 1), 2, 3) is True
    assert base.copied(x[:, :, ::2], 1, 1) is True
    assert base.copied(x[:, ::2], 1, 1) is False
    assert base.rows_of(torch.empty(3, 1, 4)[:, :, 1:], 2, 2)[1:] == (3, 3, 1, (4, 1, 1))


def test_offsets_of_huge_views_are_counted_in_64_bits():
    """No memory is touched: strides of rows beyond 2**31 elements, as device code gets them."""
    x = torch.empty((3, 2**31, 2), device="meta", dtype=torch.float16)
    assert base.rows_of(x, 2, 2)[1:] == (3 * 2**31, 2, 1, (2, 1, 1))
    assert base.rows_of(x, 1, 1).strides == (2**32, 2, 1)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm", "scan", "reduce", "group_norm"])
def test_rows_beyond_32_bits_on_a_device(name):
    """More than 2**31 elements: the last rows are as they are alone."""
    few = torch.randn(8, 4096, device="cuda").half()
    x = torch.zeros(2**19 + 8, 4096, device="cuda", dtype=torch.float16)
    x[-8:] = few
    rest = {
        "softmax": (1, False),
        "layer_norm": ([1], None, None, 1e-5),
        "rms_norm": ([1], None, None, 1e-5),
        "scan": (None, "sum", 1, False, False),
        "reduce": ("sum", [1], False),
        "group_norm": (1, None, None, 1e-5, "none"),
    }[name]
    found, alone = KERNELS[name].op(x, *rest)[-8:], KERNELS[name].op(few, *rest)
    torch.testing.assert_close(found, alone, rtol=1e-2, atol=1e-3)


COMPILES = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from torchstone.kernels.registry import KERNELS

class Target:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return device
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Target())
run, compiled = JITFunction.run, []
def compile_only(self, *args, **kwargs):
    compiled.append(run(self, *args, **{**kwargs, "warmup": True}))
JITFunction.run = compile_only
def on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value
examples = torch.load(sys.argv[1])
for name, args in examples.items():
    kernel = next(k for k in KERNELS if k.name == name)
    args = [on_meta(a) for a in args]
    space = kernel.space(*args)
    ways = {str(c.get("way")): c for c in reversed(space.all)}
    for config in [space.default(), *ways.values()]:
        kernel.launch(config, *args)
print("compiled", len(compiled))
"""


@outside
@pytest.mark.slow
def test_every_way_compiles_for_hopper(tmp_path):
    """What the interpreter cannot tell: whether Triton accepts the code. No device is needed."""
    examples = tmp_path / "examples.pt"
    torch.save(EXAMPLES, examples)
    command = [sys.executable, "-c", COMPILES, str(examples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled" in done.stdout
