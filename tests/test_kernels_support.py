"""What the tests of kernels share: how they reach Triton's interpreter, and what holds a kernel.

The interpreter is chosen when Triton is imported, hence a process of its own: a file's tests marked with
``here`` are skipped in an ordinary process, where one test runs the file again under the interpreter.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from torchstone.kernels.base import Kernel
from torchstone.kernels.registry import KERNELS as ALL
from torchstone.measure import prove
from torchstone.records import Case
from torchstone.tuner.space import Boolean, Space
from torchstone.tuner.tunable import Tunable

ROOT = Path(__file__).resolve().parents[1]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNELS = {kernel.name: kernel for kernel in ALL}

here = pytest.mark.skipif(not INTERPRETED, reason="runs under Triton's interpreter")
outside = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton, not interpreted"
)
gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
drawn = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def interpret(file: str, marked: str = "not slow") -> None:
    """Run a file's tests under the interpreter; fails as they do."""
    path = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", file]
    command += ["-m", marked]
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=500, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the device of the tests, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def judged(kernel: Kernel, args: Sequence[Any], call: Callable[..., Any] | None = None) -> prove.Proof:
    """What a call is worth, by default of the operator, in the measures of the one verification."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def filled(given: Sequence[Any]) -> list[Any]:
        rest = iter(given)
        return [next(rest) if isinstance(a, torch.Tensor) else a for a in args]

    def called(*given: Any) -> Any:
        return (call or kernel.op)(*filled(given))

    tunable = Tunable(
        name=kernel.name,
        build=lambda config: called,
        space=Space({"one": Boolean()}),
        inputs=lambda seed: tuple(tensors),
        reference=lambda *given: kernel.reference(*filled(given)),
        numerics=kernel.numerics,
    )
    known = prove.truth(tunable, Case(name="drawn", kind="traffic", sizes={}))
    return prove.Prover(tunable, known, known).on(called, known, prove.Proof())


def holds(kernel: Kernel, args: Sequence[Any], call: Callable[..., Any] | None = None) -> None:
    """The operator, or another call, is right on these arguments, and Triton is what was run."""
    assert kernel.refuses(*args) is None
    proof = judged(kernel, args, call)
    assert proof.status is None, proof.text


def every_way(kernel: Kernel, args: Sequence[Any], most: int = 6) -> None:
    """Some configs of the space, spread over it, are right."""
    space = kernel.space(*args)
    assert space.why_not(space.default()) is None
    found = space.all or ()
    ways = {str(c.get("way")): c for c in found}
    for config in [*ways.values(), *found[:: max(1, len(found) // most)]]:
        holds(kernel, args, lambda *given, config=config: kernel.launch(config, *given))


def agrees_with_fake(kernel: Kernel, args: Sequence[Any]) -> None:
    """Fake tensors tell shapes, dtypes and strides of what the operator gives."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = kernel.op(*args)
    with FakeTensorMode() as mode:
        fake = kernel.op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    pairs = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@st.composite
def tensors(
    draw: st.DrawFn,
    dims: tuple[int, int] = (1, 4),
    dtypes: Sequence[torch.dtype] = DTYPES,
    longest: int = 300,
) -> torch.Tensor:
    """Values of some magnitude, in some order in memory, at some offset; one long dimension at most."""
    count = draw(st.integers(*dims))
    shape = [draw(st.sampled_from([1, 2, 3, 5, 8, 17])) for _ in range(count)]
    if draw(st.booleans()):
        shape[draw(st.integers(0, count - 1))] = draw(st.integers(1, longest))
    while torch.Size(shape).numel() > 4_000:
        shape[shape.index(max(shape))] //= 4
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    order = draw(st.permutations(range(count)))
    step = draw(st.sampled_from([1, 1, 2]))
    memory = torch.randn(
        [shape[i] for i in order[:-1]] + [shape[order[-1]] * step + 3], generator=generator
    )
    memory = memory * draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0])) + draw(st.sampled_from([0.0, 5.0]))
    dtype = draw(st.sampled_from(list(dtypes)))
    sliced = memory.to(dtype).to(DEVICE)[..., 1 : 1 + shape[order[-1]] * step : step]
    return sliced.permute([order.index(i) for i in range(count)])
