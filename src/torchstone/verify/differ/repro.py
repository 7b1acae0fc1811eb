"""Writes a divergence as one Python file that needs torch only and shows it on its own.

The file holds the operands, what A does and what B does as two functions, and prints how far each is
from A's in float64. It exits with 1 while B diverges, with 0 where it does not. Large operands are made
from a seed where the divergence shows on such numbers too, else they are in the file as base64.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from torchstone.compat import differ as doors
from torchstone.verify.differ.measure import Held, held
from torchstone.verify.differ.region import Region, Side
from torchstone.verify.differ.replay import run_in_order
from torchstone.verify.differ.trace import ALIAS, Op, Ref, written

__all__ = ["engine_source", "shows", "source", "write"]

_INLINE = 16
_REGENERATE_BYTES = 16 << 10
_RUN_S = 120.0


def write(region: Region, path: Path, title: str) -> bool:
    """Write the file and run it once in a fresh process.

    :returns: whether it showed the divergence.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source(region, title), encoding="utf-8")
    return shows(path)


def shows(path: Path) -> bool:
    """Whether running the file exits with 1, having printed its last line."""
    try:
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, timeout=_RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 1 and done.stdout.rstrip().endswith("diverges")


def source(region: Region, title: str) -> str:
    """The file's text."""
    judged = _judged(region, region.operands)
    lines, operands = _operands(region)
    got = "b_side(*given())"
    if (judged is None or judged.right) and region.recorded is not None:
        got = _literal(region.recorded.detach().cpu())  # here B's operations give something else
    b_side = "\n".join(_function("b_side", region.b, operands, copying=True))
    return _text(title, region, (lines, operands), (b_side, got))


def engine_source(region: Region, title: str, engine: str, *, drawn: bool) -> str:
    """The file's text where an engine computes what eager does otherwise.

    :param engine: Python code of a function ``compiled(function, inputs)``.
    :param drawn: whether to draw large operands from a seed rather than to hold them.
    """
    made = {name: tensor.detach().cpu() for name, tensor in region.operands.items()}
    lines = {name: _literal(tensor) for name, tensor in made.items()}
    for seed, (name, tensor) in enumerate(made.items()):
        if drawn and _is_large(tensor):
            made[name], lines[name] = _random(tensor, seed)
    written_out = [f"{name} = {text}{_label(region, name)}" for name, text in lines.items()]
    return _text(title, region, (written_out, made), (engine, "compiled(a_side, tuple(given()))"))


def _text(
    title: str,
    region: Region,
    operands: tuple[list[str], dict[str, torch.Tensor]],
    b: tuple[str, str],
) -> str:
    lines, tensors = operands
    names = ", ".join(tensors)
    return _FILE.format(
        title=title,
        size=sum(t.numel() * t.element_size() for t in tensors.values()),
        operands="\n".join(lines),
        a="\n".join(_function("a_side", region.a, tensors, copying=region.a is not region.b)),
        b=b[0],
        got=b[1],
        names=names,
        comma="," if names else "",
    )


def _judged(region: Region, operands: Mapping[str, torch.Tensor]) -> Held | None:
    """B's operations against A's on these operands; None where they do not run by themselves."""
    truth, plain = (_ran(region.a, operands, float64=f) for f in (True, False))
    got = _ran(region.b, operands, float64=False)
    truth = plain if truth is None else truth
    return None if got is None or truth is None else held(got, truth, plain)


def _ran(side: Side, operands: Mapping[str, torch.Tensor], *, float64: bool) -> torch.Tensor | None:
    given = {n: operands[name] for n, name in side.names.items() if name in operands}
    env = run_in_order(side.ops, given, float64=float64)
    return None if env is None else env.get(side.result)


# --- operands -------------------------------------------------------------------------------------


def _operands(region: Region) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Lines that make the operands, and the operands that they make."""
    made = {name: tensor.detach().cpu() for name, tensor in region.operands.items()}
    lines = {name: _literal(tensor) for name, tensor in made.items()}
    for seed, (name, tensor) in enumerate(made.items()):
        if not _is_large(tensor):
            continue
        drawn, text = _random(tensor, seed)
        judged = _judged(region, {**made, name: drawn})
        if judged is not None and not judged.right:
            made[name], lines[name] = drawn, text
    return [f"{name} = {text}{_label(region, name)}" for name, text in lines.items()], made


_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= _REGENERATE_BYTES and tensor.dtype in _REAL


def _label(region: Region, name: str) -> str:
    return f"  # {region.labels[name]}" if name in region.labels else ""


def _random(tensor: torch.Tensor, seed: int) -> tuple[torch.Tensor, str]:
    """Numbers of the tensor's mean and deviation, and the line that draws them."""
    wide = tensor.to(torch.float64)
    finite = wide[wide.isfinite()]
    deviation, mean = (float(f"{v:.6g}") for v in (finite.std(), finite.mean()))
    shape = list(tensor.shape)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * deviation + mean
    text = f"torch.randn({shape}, generator=torch.Generator().manual_seed({seed}))"
    return drawn.to(tensor.dtype), f"({text} * {deviation!r} + {mean!r}).to({tensor.dtype})"


def _literal(tensor: torch.Tensor) -> str:
    """The tensor as Python: written out where it is small, else as compressed bytes."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    if dense.numel() <= _INLINE and not dense.is_complex():
        values = written(dense.tolist(), str)
        return f"torch.tensor({values}, dtype={dense.dtype})"
    data = base64.b85encode(zlib.compress(dense.flatten().view(torch.uint8).numpy().tobytes(), 9))
    return f'unpack("{data.decode()}", {dense.dtype}, {list(dense.shape)})'


# --- code -----------------------------------------------------------------------------------------


def _function(
    name: str, side: Side, operands: Mapping[str, torch.Tensor], *, copying: bool
) -> list[str]:
    """The operations as a Python function of the operands."""
    parameters = [*operands, "w=lambda x: x", "float32=torch.float32"]
    lines = [f"def {name}({', '.join(parameters)}):"]
    lines += [f"    {line}" for op in side.ops for line in _code(op, side.names, copying=copying)]
    return [*lines, f"    return {side.names[side.result]}"]


def _code(op: Op, names: Mapping[int, str], *, copying: bool) -> list[str]:
    """One operation as lines.

    :param copying: whether what it writes to is copied first, since a trace may read it again.
    """
    if op.target == ALIAS:
        operands = ", ".join(f"w({names[ref.value]})" for ref in op.args)
        return [f"{names[op.outs[0] or 0]} = read_again([{operands}], {op.kwargs['layouts']})"]
    lines: list[str] = []
    written_to = doors.written_positions(op.target)
    parts = [_argument(a, names) for a in op.args]
    for position in (p for p in written_to if p < len(parts) and copying):
        many = parts[position].startswith("[")
        copied = f"[x.clone() for x in {parts[position]}]" if many else f"{parts[position]}.clone()"
        lines.append(f"written{position} = {copied}")
        parts[position] = f"written{position}"
    parts += [f"{k}={_argument(v, names)}" for k, v in op.kwargs.items() if k != "pin_memory"]
    call = f"torch.ops.{op.target}({', '.join(parts)})"
    if op.target == "_operator.getitem":
        call = f"{names[op.args[0].value]}[{parts[1]}]"
    results = doors.result_count(op.target, len(op.outs))
    targets = ", ".join("_" if n is None else names[n] for n in op.outs[:results])
    lines.append(f"{targets} = {call}" if targets else call)
    if len(written_to) == 1 and copying and op.outs[-1] is not None:
        lines.append(f"{names[op.outs[-1]]} = written{written_to[0]}")
    return lines


def _argument(value: object, names: Mapping[int, str]) -> str:
    if isinstance(value, Ref):
        return f"w({names[value.value]})"
    if isinstance(value, torch.dtype):
        return "float32" if value is torch.float32 else str(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(_argument(item, names) for item in value)
        return f"[{inner}]"
    if isinstance(value, torch.device):
        return '"cpu"'
    return written(value, lambda n: names[n])


_FILE = '''"""{title}

One divergence of two implementations, on its own: python FILE. Needs torch only; holds {size} bytes of
operands. Exits with 1 while side B is further from side A in float64 than rounding explains.
"""

import base64
import sys
import zlib

import torch


def unpack(text, dtype, shape):
    data = bytearray(zlib.decompress(base64.b85decode(text)))
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def wide(x):
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def read_again(tensors, layouts):
    """The first tensor after the others were written to its memory (offset, shape, strides each)."""
    memory = tensors[0].new_zeros(max(o + 1 + sum((n - 1) * s for n, s in zip(*r)) for o, *r in layouts))
    for tensor, (offset, shape, stride) in zip(tensors, layouts):
        memory.as_strided(shape, stride, offset).copy_(tensor)
    offset, shape, stride = layouts[0]
    return memory.as_strided(shape, stride, offset).clone()


def errors(x, truth):
    """Relative error of all, and the worst of an element; infinite where no number says how wrong."""
    if x.shape != truth.shape or x.is_floating_point() != truth.is_floating_point():
        return float("inf"), float("inf")
    if not (truth.is_floating_point() or truth.is_complex()):
        return (float((x != truth).double().mean()),) * 2
    x, truth = wide(x), wide(truth)
    same = (x == truth) | (x.isnan() & truth.isnan())
    truth = torch.where(same & ~truth.isfinite(), 0, truth)
    apart = torch.where(same, 0, x - truth).abs()
    size = float(truth.abs().square().mean().sqrt())
    if not size:
        return (float(apart.max() > 0),) * 2
    return float(apart.square().mean().sqrt()) / size, float((apart / truth.abs().clamp(min=size)).max())


def usual(truth):
    """The elements that others do not dwarf, as a mask that is added dwarfs scores; None: all are."""
    size = truth.abs().nan_to_num(0.0, 0.0, 0.0) if truth.is_floating_point() else torch.zeros(1)
    some = size[size > 0]
    if not some.numel() or float(size.max()) < 1e3 * float(some.median()):
        return None
    return size < 1e3 * some.median()


{operands}


{a}


{b}


def given():
    return [x.clone() for x in ({names}{comma})]


torch.set_grad_enabled(False)
try:
    truth = a_side(*given(), w=wide, float32=torch.float64)
except RuntimeError:  # no float64 kernel
    truth = a_side(*given())
a, b = a_side(*given()), {got}
epsilon = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
floors = (64 * epsilon, 256 * epsilon) if epsilon < 1e-6 else (4 * epsilon, 8 * epsilon)
parts, keep = [("all", a, b, truth)], usual(truth)
if keep is not None and b.shape == truth.shape:
    parts.append(("beside huge ones", a[keep], b[keep], truth[keep]))
wrong = False
for part, x, y, t in parts:
    for what, own, other, floor in zip(("error", "worst element"), errors(y, t), errors(x, t), floors):
        bound = max(floor, min(16 * other, max(2 * other, 1e-2)))
        print(f"{{part}} {{what}}: B {{own:.2e}} from A in float64, A {{other:.2e}}, may {{bound:.2e}}")
        wrong = wrong or not own <= bound
print("B diverges" if wrong else "B is right")
sys.exit(int(wrong))
'''
