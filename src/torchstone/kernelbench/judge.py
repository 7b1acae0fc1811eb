"""Right or wrong: by the suite's protocol, and against float64 under a contract.

*The suite's.* Five trials with seeds of its own; each output within its tolerance of eager's.

*Ours.* The model in float64 on the same inputs is the truth. An output keeps to a contract ``c`` in one
of two ways. ``bound``: its relative Frobenius error is at most ``c``, and on the suite's inputs no
element is off by more than ``c + c * |truth|``. ``eager``: eager itself is beyond that, as where cuDNN
computes convolutions in TF32 by default, and the output is no worse: 1.1 times its relative error at
most, and 1.1 times as many elements out of tolerance (another order of summation draws other rounding
errors of the same distribution). What :mod:`torchstone.verify.budget` says of non-finite values, wrong
shapes, integers and single elements far off counts on top of that, and so does the protocol: inputs
unchanged unless eager changes them, buffers as eager leaves them, memory poisoned before each call,
eager's strides, a result that a later call does not change.

Arithmetic is in pieces of bounded size: the suite's tensors reach 6 GB, and float64 doubles that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import nn

from torchstone.kernelbench.load import TOLERANCE, Loaded, seed_all, trial_seeds
from torchstone.recipe import Numerics
from torchstone.records import Case, CaseErrors, OutputErrors, ReferenceErrors
from torchstone.verify import budget, compare, drive, tensors
from torchstone.verify.compare import Leaf

__all__ = ["Desk", "Finding", "Judged", "Trial", "Truth", "same", "trials"]

_TRIALS = 5
_WIDE_TRIALS = 3  # of these are held against float64 as well; float64 convolutions take seconds on a GPU
_SCALES = {"tiny": 1e-3, "large": 100.0}
_PIECE = 2**26  # elements
_LUCK = 1.1
_FEW = 8  # elements out of tolerance that are chance
_SANE = 1e-2  # where eager is further off than this, "no worse than eager" says nothing
_THIN = 2**22  # elements by which outputs of two inputs are compared
_NOTHING = 1e-5  # of eager's rounding error
_RANDOM = 1e-3  # relative difference of two calls of eager that atomics do not explain


class Trial(NamedTuple):
    """One set of inputs."""

    case: Case
    """As the verdict's rules take it; ``values`` says how floats are scaled."""
    suite: bool
    """Whether it is one of the suite's trials."""
    wide: bool
    """Whether it is held against float64."""


def trials() -> tuple[Trial, ...]:
    """The suite's five trials, and two with scaled inputs."""
    made = []
    seeds = trial_seeds(_TRIALS)
    for i, seed in enumerate(seeds):
        case = Case(name=f"trial-{i + 1}", kind="traffic" if i else "example", sizes={}, seed=seed)
        made.append(Trial(case, suite=True, wide=i < _WIDE_TRIALS))
    for values in _SCALES:
        case = Case(name=f"values-{values}", kind="values", sizes={}, values=values, seed=seeds[0])
        made.append(Trial(case, suite=False, wide=True))
    return tuple(made)


class Finding(NamedTuple):
    """What one trial says of a column under one contract."""

    kept: Literal["bound", "eager", "not judged", "unverifiable", "broken"]
    """How the contract is kept, or why not."""
    text: str = ""
    """One sentence, unless kept."""


class Judged(NamedTuple):
    """What one trial says of a column."""

    suite: bool | None = None
    """Whether it passes the suite's comparison; None where this is none of its trials."""
    relative: float | None = 0.0
    """Largest relative error against float64; None where not finite."""
    findings: dict[float, Finding] = {}  # noqa: RUF012  never changed
    """By contract; none without float64."""
    broken: str = ""
    """What it does to its inputs, outputs or buffers that it must not: one sentence."""


@dataclass
class Truth:
    """One trial's inputs, and what eager makes of them."""

    trial: Trial
    inputs: tuple[Any, ...]
    """As made; only copies are ever given away."""
    names: list[str]
    """Of outputs, of inputs that eager changes, of buffers that it changes."""
    plain: list[Leaf]
    """Eager's, in this order."""
    outputs: int
    """How many of them are outputs."""
    strides: list[tuple[int, ...] | None]
    """Of the outputs."""
    mutated: list[int]
    """Which inputs eager changes."""
    buffers: list[str]
    """Which buffers eager changes."""
    wide: list[Leaf] = field(default_factory=list)
    """The same in float64; empty where there is no such reference."""
    own: tuple[OutputErrors, ...] = ()
    """Eager's own errors."""
    problem: str = ""
    """Why there is no float64 reference."""


class Desk:
    """Judges the columns of one problem.

    :param loaded: the problem.
    :param contracts: bounds to judge under.
    """

    def __init__(self, loaded: Loaded, contracts: Sequence[float]) -> None:
        self.loaded, self.contracts = loaded, tuple(contracts)
        self._tolerance = TOLERANCE[loaded.setup.dtype]
        self._pristine = {n: b.clone() for n, b in loaded.module.named_buffers()}
        self._wide: nn.Module | None = None
        self._usual: dict[str, float] = {}
        self._outside: dict[tuple[str, float], int] = {}
        self._before: tuple[list[Leaf], list[Leaf]] | None = None
        self.truth: Truth | None = None

    def reset(self, module: nn.Module) -> None:
        """Put buffers back to what they were when the problem was made."""
        for name, buffer in module.named_buffers():
            if name in self._pristine:
                buffer.copy_(self._pristine[name])

    def inputs(self, trial: Trial) -> tuple[Any, ...]:
        """New inputs of a trial."""
        made = self.loaded.inputs(trial.case.seed)
        scale = _SCALES.get(trial.case.values, 1.0)
        return made if scale == 1.0 else tuple(_scaled(value, scale) for value in made)

    def prepare(self, trial: Trial) -> Truth:
        """Make a trial's inputs and eager's answer, and the float64 one.

        :raises Exception: what eager raises.
        """
        self.truth, self._outside = None, {}
        inputs = self.inputs(trial)
        found = self._eager(trial, inputs)
        if trial.wide:
            if trial.case.kind == "example":
                found.problem = self._random(found)
            if not found.problem:
                found.problem = self._widen(found)
        self.truth = found
        return found

    def constant(self) -> bool | None:
        """Whether the outputs of two trials differ by no more than rounding; None before the second.

        To be asked once a trial, after :meth:`prepare`. An output that is zero but for rounding moves in
        float64 by a billionth of what it moves by in float32.
        """
        truth = self.truth
        assert truth is not None
        leaves = (truth.wide or truth.plain)[: truth.outputs]
        now = ([_thinned(leaf) for leaf in leaves], [_thinned(_leaf(v)) for v in truth.inputs])
        before, self._before = self._before, now
        if before is None:
            return None
        if not leaves or len(before[0]) != len(leaves) or all(map(same, before[1], now[1])):
            return False
        noise = [e.error_rms or 0.0 for e in truth.own[: truth.outputs]] or [0.0] * len(leaves)
        return all(_moves_nothing(*row) for row in zip(before[0], now[0], noise, strict=True))

    def judge(self, call: Callable[..., Any], module: nn.Module, *, hold: bool) -> Judged:
        """Call a column on the trial at hand.

        :param module: that the column was built from, whose buffers it must treat as eager does.
        :param hold: whether to call once more on other values, with the first result held.
        """
        truth = self.truth
        assert truth is not None
        self.reset(module)
        given = tensors.copies(truth.inputs)
        drive.poison(truth.plain[: truth.outputs])
        live = drive.leaves(call(*given))
        broken = self._breach(truth, live, given)
        if broken:
            return Judged(suite=False if truth.trial.suite else None, relative=None, broken=broken)
        state = dict(module.named_buffers())
        lost = [name for name in truth.buffers if name not in state]
        if lost:
            return Judged(None, None, broken=f"buffer {lost[0]} is gone, which eager updates")
        own = [*live, *(given[i] for i in truth.mutated), *(state[n] for n in truth.buffers)]
        own = [_leaf(value) for value in own]
        pairs = list(zip(truth.plain, own, strict=True))[: truth.outputs]
        passed = all(_close(*pair, self._tolerance) for pair in pairs) if truth.trial.suite else None
        relative, findings = self._against_float64(truth, own)
        if hold and self._changes_earlier(call, module, truth, live):
            return Judged(
                passed, relative, findings, "a later call changes the result of an earlier one"
            )
        return Judged(passed, relative, findings)

    def _eager(self, trial: Trial, inputs: tuple[Any, ...]) -> Truth:
        module = self.loaded.module
        self.reset(module)
        given = tensors.copies(inputs)
        seed_all(trial.case.seed)
        result = module(*given)
        live = drive.leaves(result)
        changed = [i for i, pair in enumerate(zip(inputs, given, strict=True)) if not same(*pair)]
        state = dict(module.named_buffers())
        buffers = [n for n, old in self._pristine.items() if n in state and not same(old, state[n])]
        names = [
            *drive.names_of(result),
            *(f"input[{i}]" for i in changed),
            *(f"buffer {n}" for n in buffers),
        ]
        beside = [*(given[i] for i in changed), *(state[n].clone() for n in buffers)]
        plain = [_leaf(value) for value in (*live, *beside)]
        strides = [_strides(value) for value in live]
        return Truth(trial, inputs, names, plain, len(live), strides, changed, buffers)

    def _random(self, found: Truth) -> str:
        """Whether eager gives something else when called again; empty if not."""
        module = self.loaded.module
        self.reset(module)
        seed_all(found.trial.case.seed + 1)
        again = [_leaf(v) for v in drive.leaves(module(*tensors.copies(found.inputs)))]
        for name, new, old in zip(found.names, again, found.plain, strict=False):
            if same(new, old):
                continue
            errors = _errors(name, new, old, old)
            if errors.relative is None or errors.relative > _RANDOM or errors.mismatched:
                return f"two calls of eager differ in {name}: it draws random numbers, or keeps state"
        return ""

    def _widen(self, found: Truth) -> str:
        """Fill in the float64 answer and eager's errors; why that cannot be, or empty."""
        try:
            if self._wide is None:
                self._wide = drive.widened(self.loaded.module)
            self.reset(self._wide)
            given = tuple(map(_fresh, found.inputs, drive.widened_inputs(found.inputs)))
            wide = drive.float64_call(self._wide)(*given)
        except RuntimeError as error:  # no float64 kernel; or no memory, which is a RuntimeError too
            self._wide = None
            return f"no float64 reference: {' '.join(str(error).split())[:200]}"
        state = dict(self._wide.named_buffers())
        beside = [*(given[i] for i in found.mutated), *(state[n].clone() for n in found.buffers)]
        wide = [_leaf(value) for value in (*wide, *beside)]
        if len(wide) != len(found.plain):
            return f"no float64 reference: float64 gives {len(wide)} results, eager {len(found.plain)}"
        found.wide = wide
        rows = zip(found.names, found.plain, wide, strict=True)
        found.own = tuple(_errors(name, plain, truth, plain) for name, plain, truth in rows)
        if found.trial.case.kind == "example":
            self._usual = {e.output: e.rms or 0.0 for e in found.own}
        return ""

    def _breach(self, truth: Truth, live: list[Any], given: tuple[Any, ...]) -> str:
        if len(live) != truth.outputs:
            return f"it gives {len(live)} outputs, eager {truth.outputs}"
        for name, value, plain, strides in zip(
            truth.names, live, truth.plain, truth.strides, strict=False
        ):
            if isinstance(value, torch.Tensor) and isinstance(plain, torch.Tensor):
                for what in ("shape", "dtype", "device"):
                    has, should = getattr(value, what), getattr(plain, what)
                    if has != should:
                        return f"{name} has {what} {has}, eager's {should}"
                if _strides(value) != strides:
                    return f"{name} has strides {_strides(value)}, eager's {strides}"
        for i, pair in enumerate(zip(given, truth.inputs, strict=True)):
            if i not in truth.mutated and not same(*pair):
                return f"it changes input[{i}], which eager leaves as it was"
        return ""

    def _against_float64(
        self, truth: Truth, own: list[Leaf]
    ) -> tuple[float | None, dict[float, Finding]]:
        if not truth.wide:
            return 0.0, {}
        rows = list(zip(truth.names, own, truth.wide, truth.plain, strict=True))
        errors = [_errors(*row) for row in rows]
        relatives = [e.relative for e in errors]
        worst = None if None in relatives else max((r for r in relatives if r is not None), default=0.0)
        findings = {}
        for contract in self.contracts:
            each = [
                self._output(truth, contract, (mine, eagers), row)
                for mine, eagers, row in zip(errors, truth.own, rows, strict=True)
            ]
            order = ("broken", "unverifiable", "eager", "bound", "not judged")
            findings[contract] = min(each, key=lambda f: order.index(f.kept), default=Finding("bound"))
        return worst, findings

    def _output(
        self,
        truth: Truth,
        contract: float,
        pair: tuple[OutputErrors, OutputErrors],
        row: tuple[str, Leaf, Leaf, Leaf],
    ) -> Finding:
        """One output under one contract."""
        own, eager = pair
        case = truth.trial.case
        held = [self._examined(case, bound, own, eager) for bound in (contract, _SANE)]
        name, mine, wide, plain = row
        elements = truth.trial.suite  # on scaled inputs an absolute tolerance means nothing
        outside = _outside(mine, wide, contract) if elements else 0
        small = held[0].relative is not None and held[0].relative <= contract
        if held[0].status == "right" and small and not outside:
            return Finding("bound")
        if held[0].status == "not judged":
            return Finding("not judged")
        if held[1].status == "right" and own.relative is not None:
            key = (name, contract)
            if elements and key not in self._outside:
                self._outside[key] = _outside(plain, wide, contract)
            allowed = _LUCK * self._outside.get(key, 0) + _FEW
            if own.relative <= _LUCK * (eager.relative or 0.0) and outside <= allowed:
                return Finding("eager")
        if held[1].status == "unverifiable":
            return Finding("unverifiable", held[1].text)
        text = held[0].text if held[0].status == "wrong" else ""
        if not text:
            far = "too far" if own.relative is None else f"{own.relative:.1e}"
            text = f"case {case.name}: {name} is {far} from float64, eager {eager.relative or 0.0:.1e}"
            text = f"{text}; {outside} of {own.elements} elements are beyond {contract:.0e}"
        return Finding("broken", text)

    def _examined(
        self, case: Case, bound: float, own: OutputErrors, eager: OutputErrors
    ) -> budget.Finding:
        rules = budget.Rules(numerics=Numerics.LOSSY, budget=bound, usual_rms=self._usual)
        found = CaseErrors(case=case.name, errors=(own,), problem=None)
        return budget.examine(rules, found, ReferenceErrors(case=case, errors=(eager,)))

    def _changes_earlier(
        self, call: Callable[..., Any], module: nn.Module, truth: Truth, live: list[Any]
    ) -> bool:
        held = [v for v in live if isinstance(v, torch.Tensor)]
        before = [_bits(v) for v in held]
        self.reset(module)
        later = call(*(_scaled(value, 0.5) for value in tensors.copies(truth.inputs)))
        changed = before != [_bits(v) for v in held]
        del later
        return changed


def _scaled(value: Any, scale: float) -> Any:
    wide = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value * scale if wide else value


def _fresh(value: Any, wide: Any) -> Any:
    """The widened value, in memory of its own."""
    return tensors.copies((value,))[0] if wide is value else wide


def _leaf(value: Any) -> Leaf:
    return value.detach() if isinstance(value, torch.Tensor) else drive.keep([value])[0]


def _strides(value: Any) -> tuple[int, ...] | None:
    """Strides of dims that have more than one element; others mean nothing."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return None
    return tuple(s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1)


def _pieces(*leaves: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, of one shape, cut alike into flat pieces of bounded size."""
    flat = [leaf.reshape(-1) for leaf in leaves]
    for start in range(0, max(flat[0].numel(), 1), _PIECE):
        yield tuple(f[start : start + _PIECE] for f in flat)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the bit, all NaNs being one."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and (isinstance(a, torch.Tensor) or bool(a == b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or all(drive.same(x, y) for x, y in _pieces(a, b))


def _close(plain: Leaf, own: Leaf, tolerance: float) -> bool:
    """The suite's comparison."""
    if not (isinstance(plain, torch.Tensor) and isinstance(own, torch.Tensor)):
        return bool(plain == own)
    pieces = _pieces(plain, own)
    return all(torch.allclose(x, y, atol=tolerance, rtol=tolerance) for x, y in pieces)


def _outside(own: Leaf, wide: Leaf, contract: float) -> int:
    """Elements beyond ``contract + contract * |truth|``."""
    if not (isinstance(own, torch.Tensor) and isinstance(wide, torch.Tensor)) or own.shape != wide.shape:
        return 0
    total = 0
    for mine, truth in _pieces(own, wide):
        near = torch.isclose(mine.to(truth.dtype), truth, contract, contract, equal_nan=True)
        total += near.numel() - int(near.sum())
    return total


def _errors(name: str, own: Leaf, wide: Leaf, plain: Leaf) -> OutputErrors:
    """:func:`torchstone.verify.compare.errors`, in pieces where the output is large."""
    leaves = [leaf for leaf in (own, wide, plain) if isinstance(leaf, torch.Tensor)]
    alike = len(leaves) == 3 and len({leaf.shape for leaf in leaves}) == 1
    if not alike or leaves[0].numel() <= _PIECE:
        return compare.errors(name, own, wide, plain)
    return _joined([compare.errors(name, *piece) for piece in _pieces(*leaves)], leaves[0])


def _joined(parts: list[OutputErrors], whole: torch.Tensor) -> OutputErrors:
    """Errors of a tensor from those of its pieces; sums of squares are put together again.

    ``worst`` of a piece is relative to that piece's root mean square, which of so many elements hardly
    differs from the whole's.
    """
    count = sum(p.elements for p in parts)
    floating = parts[0].rms is not None

    def mean_square(field: str) -> float:
        return math.sqrt(sum((getattr(p, field) or 0.0) ** 2 * p.elements for p in parts) / count)

    rms, error_rms = mean_square("rms"), mean_square("error_rms")
    finite = all(p.relative is not None for p in parts)
    relative = (error_rms / rms if rms else float(error_rms > 0)) if finite else None
    at = max(range(len(parts)), key=lambda i: parts[i].worst or 0.0)
    position = at * _PIECE + (parts[at].worst_index or (0,))[0]
    index = torch.unravel_index(torch.tensor(position), whole.shape)
    return msgspec.structs.replace(
        parts[at],
        relative=relative,
        worst=(parts[at].worst or 0.0) if finite else None,
        worst_index=tuple(int(i) for i in index),
        sqnr_db=-20 * math.log10(relative) if relative else None,
        non_finite=sum(p.non_finite for p in parts),
        mismatched=sum(p.mismatched for p in parts),
        differing=sum(p.differing for p in parts),
        elements=count,
        typical=mean_square("typical") if floating else None,
        rms=rms if floating else None,
        error_rms=error_rms if floating else None,
    )


def _thinned(leaf: Leaf) -> Leaf:
    """Every so many elements of a large tensor, copied."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.reshape(-1)[:: max(1, leaf.numel() // _THIN)].clone()


def _moves_nothing(one: Leaf, other: Leaf, noise: float) -> bool:
    """Whether an output of two inputs differs by nothing next to eager's rounding error."""
    if same(one, other):
        return True
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if one.shape != other.shape or one.dtype != torch.float64:
        return False
    return float((one - other).square().mean().sqrt()) <= _NOTHING * noise


def _bits(tensor: torch.Tensor) -> int:
    """Sum of the tensor's bits: changed by whoever writes there."""
    bits = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    return int(bits.detach().contiguous().view(width).sum(dtype=torch.int64))
