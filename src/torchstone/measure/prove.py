"""Whether a config computes what the reference does: float64 is the truth, the reference's own error the
yardstick. All of it stays on the device that the outputs are on, for they may be large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import msgspec
import torch
from torch import nn

from torchstone.policy import Policy
from torchstone.recipe import Numerics
from torchstone.records import Case, CaseErrors, OutputErrors, ReferenceErrors
from torchstone.tuner.tunable import Tunable
from torchstone.verify import budget, compare, drive, tensors
from torchstone.verify.compare import Leaf

__all__ = ["Proof", "Prover", "Truth", "held_out", "put", "searched", "truth"]

Function = Callable[..., Any]
_SCALES = {"tiny": 1e-3, "large": 100.0}
_SCALED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUDGES = 3  # one may by chance move two nearly equal elements alike
_HELD_OUT = 1000  # seeds from here on are never searched with


class Proof(NamedTuple):
    """What became of a config."""

    status: Literal["wrong", "unverifiable"] | None = None
    """None: right."""
    text: str = ""
    """One sentence, unless right."""
    relative: float | None = 0.0
    """Largest relative error against float64; None where it is not finite."""
    deterministic: bool = True
    """Whether repeated calls gave the same bits."""
    live: Sequence[Any] = ()
    """What the latest call gave; not a copy."""

    def wrong(self, text: str) -> Proof:
        """The same, found wrong."""
        return Proof("wrong", text, self.relative, self.deterministic)

    def also(self, finding: budget.Finding) -> Proof:
        """The same with one more finding; what is no evidence either way changes nothing."""
        if finding.status == "not judged":
            return self
        pair = (self.relative, finding.relative)
        relative = None if pair[0] is None or pair[1] is None else max(pair[0], pair[1])
        if finding.status == "right":
            return self._replace(relative=relative)
        return Proof(finding.status, finding.text, relative, self.deterministic)


@dataclass
class Truth:
    """One set of inputs, and what the reference makes of it."""

    case: Case
    inputs: tuple[Any, ...]
    """As made; only copies of them are ever given to a config."""
    own: ReferenceErrors
    """The reference's own errors in its plain dtype, or why there is no truth."""
    names: list[str] = field(default_factory=list)
    plain: list[Leaf] = field(default_factory=list)
    """Outputs in the plain dtype, then the inputs that the reference writes to."""
    wide: list[Leaf] = field(default_factory=list)
    """The same in float64."""
    mutated: list[int] = field(default_factory=list)
    """Which inputs the reference writes to."""

    def judged(self, held: budget.Rules, outputs: Sequence[Any], given: Sequence[Any]) -> budget.Finding:
        """What the outputs for these inputs, and the inputs after the call, are worth."""
        leaves = [_leaf(value) for value in (*outputs, *(given[i] for i in self.mutated))]
        problem = self.own.problem or self._problem(leaves, given)
        rows = () if problem else zip(self.names, leaves, self.wide, self.plain, strict=True)
        errors = tuple(compare.errors(*row) for row in rows)
        found = CaseErrors(case=self.case.name, errors=errors, problem=problem)
        return budget.examine(held, found, self.own)

    def _problem(self, leaves: list[Leaf], given: Sequence[Any]) -> str | None:
        counts = [len(outputs) - len(self.mutated) for outputs in (leaves, self.plain)]
        if counts[0] != counts[1]:
            return f"SHAPE_OR_DTYPE: it gives {counts[0]} outputs, the reference {counts[1]}"
        for name, *pair in zip(self.names, leaves, self.plain, strict=True):
            places = [leaf.device for leaf in pair if isinstance(leaf, torch.Tensor)]
            if len(set(places)) == 2:
                return f"SHAPE_OR_DTYPE: {name} is on {places[0]}, the reference's on {places[1]}"
        for i, (after, before) in enumerate(zip(given, self.inputs, strict=True)):
            if i not in self.mutated and not drive.same(_leaf(after), _leaf(before)):
                return f"MUTATION_DIFFERS: it changes input[{i}], which the reference leaves as it was"
        return None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept."""
        return [v for v in (*self.inputs, *self.plain, *self.wide) if isinstance(v, torch.Tensor)]


def searched(tunable: Tunable) -> tuple[Case, Case]:
    """The two sets of inputs on which each config of a search is proved."""
    sizes = dict(tunable.sizes)
    return (
        Case(name="first-inputs", kind="example", sizes=sizes),
        Case(name="second-inputs", kind="traffic", sizes=sizes, seed=1),
    )


def held_out(tunable: Tunable, seed: int) -> tuple[Case, ...]:
    """What no search has seen: other seeds, other magnitudes, odd sizes."""
    start, sizes = _HELD_OUT + 16 * seed, dict(tunable.sizes)
    made = [Case(name=f"held-out-{i}", kind="traffic", sizes=sizes, seed=start + i) for i in range(2)]
    for values in _SCALES:
        name = f"values-{values}"
        made.append(Case(name=name, kind="values", sizes=sizes, values=values, seed=start + 2))
    for i, odd in enumerate(tunable.odd):
        made.append(Case(name=f"odd-{i}", kind="dims", sizes=dict(odd), seed=start + 3))
    return tuple(made)


def truth(tunable: Tunable, case: Case) -> Truth:
    """Make a case's inputs and run the reference on them: twice as it is, and in float64.

    :raises Exception: whatever the tunable's ``inputs`` and ``reference`` raise.
    """
    inputs = _scaled(tuple(tunable.inputs(case.seed, **case.sizes)), case.values)
    given = tensors.copies(inputs)
    result = _reference(tunable)(*given)
    names = drive.names_of(result)
    pairs = zip(inputs, given, strict=True)
    mutated = [i for i, (a, b) in enumerate(pairs) if not drive.same(_leaf(a), _leaf(b))]
    names += [f"input[{i}]" for i in mutated]
    plain = [_kept(leaf) for leaf in (*drive.leaves(result), *(given[i] for i in mutated))]
    found = Truth(case, inputs, ReferenceErrors(case=case, errors=()), names, plain, mutated=mutated)
    found.own = _own(tunable, found)
    return found


def _own(tunable: Tunable, found: Truth) -> ReferenceErrors:
    """The reference's own errors; fills in its float64 outputs."""
    case = found.case
    for name, leaf in zip(found.names, found.plain, strict=True):
        if isinstance(leaf, str) and leaf.startswith("<"):
            return _problem(case, f"NO_REFERENCE: output {name} is a {leaf}, no tensor or number")
    inputs, nudged = drive.widened_inputs(found.inputs), []
    if tunable.reference is None:  # a kernel is for its own dtypes
        found.wide = list(drive.widened_inputs(tuple(found.plain)))
    else:
        try:
            found.wide = _in_float64(tunable.reference, found, tensors.copies(inputs))
            for i in range(_NUDGES):
                pairs = zip(inputs, found.inputs, strict=True)
                moved = tuple(_nudged(*pair, case.seed + i) for pair in pairs)
                nudged.append(_in_float64(tunable.reference, found, moved))
        except (RuntimeError, TypeError) as error:
            return _problem(case, f"NO_REFERENCE: the reference does not run in float64: {error}")
    rows = zip(found.names, found.plain, found.wide, *nudged, strict=True)
    found.own = ReferenceErrors(case=case, errors=tuple(_own_error(*row) for row in rows))
    given = tensors.copies(found.inputs)
    again = drive.leaves(_reference(tunable)(*given))
    same = all(map(drive.same, map(_leaf, again), found.plain))
    if not same and found.judged(_rules(tunable, found), again, given).status != "right":
        text = "two calls of the reference on the same input give different results"
        return _problem(case, f"NOT_DETERMINISTIC: {text}")
    return found.own


def _reference(tunable: Tunable) -> Function:
    return tunable.reference or tunable.build(tunable.space.default())


def _in_float64(function: Function, found: Truth, given: tuple[Any, ...]) -> list[Leaf]:
    # it only calls what it is given, module or not
    outputs = drive.float64_call(cast(nn.Module, function))(*given)
    return [_kept(leaf) for leaf in (*outputs, *(given[i] for i in found.mutated))]


def _own_error(name: str, plain: Leaf, wide: Leaf, *nudged: Leaf) -> OutputErrors:
    """The reference's error, or what a rounding of its inputs makes of its result, whichever is larger.

    Nobody who rounds can be asked for more (Higham, "Accuracy and Stability of Numerical Algorithms",
    section 1.6): a softmax of large numbers by ``exp2`` is right, and further off than one by ``exp``.
    """
    own = compare.errors(name, plain, wide, plain)
    if own.relative is None or not isinstance(plain, torch.Tensor):
        return own
    moved = [leaf.to(plain.dtype) for leaf in nudged if isinstance(leaf, torch.Tensor)]
    found = [own, *(compare.errors(name, leaf, wide, plain) for leaf in moved)]
    largest = {n: max(getattr(one, n) or 0.0 for one in found) for n in ("relative", "worst")}
    return msgspec.structs.replace(own, **largest)


def _nudged(wide: Any, given: Any, seed: int) -> Any:
    """Each element an epsilon larger or smaller: float32's, or float64's where that was given."""
    if not isinstance(wide, torch.Tensor) or wide.dtype != torch.float64:
        return tensors.copies((wide,))[0]
    generator = torch.Generator(wide.device).manual_seed(seed)
    signs = torch.empty_like(wide).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    return wide * (1 + signs * (2.0**-52 if given.dtype == torch.float64 else 2.0**-23))


@dataclass(frozen=True)
class Prover:
    """Proves functions on the two sets of inputs of a search, or on others."""

    tunable: Tunable
    first: Truth
    second: Truth

    @cached_property
    def held(self) -> budget.Rules:
        """What the outputs are held to."""
        return _rules(self.tunable, self.first)

    def digest(self) -> list[int]:
        """Sums of the bits of all that is kept: changed by whoever writes where it must not."""
        return [_sum(value) for value in (*self.first.tensors, *self.second.tensors)]

    def on(self, call: Function, known: Truth, proof: Proof, given: tuple[Any, ...] = ()) -> Proof:
        """Call once, on copies of a truth's inputs or on ``given``; the proof with what that says.

        What is allocated and not written shows: memory of the outputs' sizes is poisoned before.
        """
        given = given or tensors.copies(known.inputs)
        drive.poison(known.plain)  # last of all, so that the copies do not take those blocks
        live = drive.leaves(call(*given))
        return proof.also(known.judged(self.held, live, given))._replace(live=live)

    def prove(self, call: Function) -> Proof:
        """Call on the first inputs, and twice on the second; each result is held over the next call."""
        proof, kept, before = Proof(), list[Leaf](), None
        for known in (self.first, self.second, self.second):
            proof, held = self.on(call, known, proof), proof.live
            if proof.status is None and not all(map(drive.same, map(_leaf, held), kept)):
                return proof.wrong("a later call changes the result of an earlier one")
            if proof.status is not None:
                break
            last, kept = kept, [_kept(leaf) for leaf in proof.live]
            if before is known:
                proof = proof._replace(deterministic=all(map(drive.same, kept, last)))
            before = known
        return proof._replace(live=())

    def again(self, call: Function, given: tuple[Any, ...], proof: Proof) -> Proof:
        """What the last of many calls on ``given`` gave, and what one gives when other values lie there.

        The second is for what remembers results by the address of its inputs.

        :param proof: with the result of the last call, still live.
        """
        if not self.first.mutated:
            proof = proof.also(self.first.judged(self.held, proof.live, given))
        if proof.status is None:
            proof = self.on(call, self.second, proof, put(given, self.second.inputs))
        put(given, self.first.inputs)  # others are timed on them too
        return proof if proof.status is None else proof._replace(text=f"after many calls: {proof.text}")


def _rules(tunable: Tunable, first: Truth) -> budget.Rules:
    lossy = tunable.numerics is Numerics.LOSSY
    return budget.Rules(
        numerics=tunable.numerics,
        budget=tunable.max_relative_error if lossy else Policy().max_relative_error,
        usual_rms={e.output: e.rms or 0.0 for e in first.own.errors},
    )


def put(given: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """``values`` in the memory of ``given``, where they fit."""
    made = []
    for old, new in zip(given, values, strict=True):
        tensors_both = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
        fits = tensors_both and (old.shape, old.dtype) == (new.shape, new.dtype)
        made.append(old.copy_(new) if fits else tensors.copies((new,))[0])
    return tuple(made)


def _scaled(inputs: tuple[Any, ...], values: str) -> tuple[Any, ...]:
    made = tensors.copies(inputs) if values in _SCALES else ()
    for value in made:
        if isinstance(value, torch.Tensor) and value.dtype in _SCALED:
            value.mul_(_SCALES[values])
    return made or inputs


def _leaf(value: Any) -> Leaf:
    return value.detach() if isinstance(value, torch.Tensor) else drive.keep([value])[0]


def _kept(value: Any) -> Leaf:
    leaf = _leaf(value)
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, torch.Tensor) else leaf


def _sum(tensor: torch.Tensor) -> int:
    bits = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    return int(bits.view(width).sum(dtype=torch.int64))


def _problem(case: Case, problem: str) -> ReferenceErrors:
    return ReferenceErrors(case=case, errors=(), problem=problem)
