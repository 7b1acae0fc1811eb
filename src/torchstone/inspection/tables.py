"""Tables of an inventory, from what was traced and profiled: operations, modules, source lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from torchstone.inspection import weights, work
from torchstone.inspection.profile import Profiled
from torchstone.inspection.trace import Trace, source_text
from torchstone.inspection.weights import Held
from torchstone.inspection.work import Weighted
from torchstone.records.inventory import LineUse, ModuleUse, OpUse, Peaks, Profile, Work

__all__ = ["modules", "ops", "profile"]

_LINES = 15
_NONE = Work(calls=0, flops=0, other_flops=0, bytes=0)
_HOW: tuple[Literal["uncounted", "formula", "elements", "movement"], ...] = (
    "uncounted",
    "formula",
    "elements",
    "movement",
)
"""Where calls of one operation were counted in different ways, the first of these is said."""


def ops(
    example: Trace, mix: Sequence[Weighted], peaks: Peaks, profiled: Profiled | None
) -> tuple[OpUse, ...]:
    """Every operation of a call on the example, the slowest first.

    :param mix: traces over the traffic; empty where there are none.
    :param profiled: without it times are None, and the order is that of the roofline's.
    """
    counts, means = work.tally([Weighted(example, 1)], work.by_op), work.tally(mix, work.by_op)
    least = work.operations_s(example, peaks, work.by_op)
    seconds = work.seconds_by(profiled.places, work.by_op) if profiled else {}
    whole = sum(seconds.values())
    how: dict[str, set[str]] = defaultdict(set)
    for place, cost in example.calls:
        how[place.op].add(cost.how)
    found = [
        OpUse(
            op=op,
            counted=next(h for h in _HOW if h in how[op]),
            work=counted,
            mix=means.get(op, _NONE) if mix else None,
            seconds=seconds.get(op, 0.0) if profiled else None,
            share=seconds.get(op, 0.0) / whole if whole else None,
            bound_s=least[op],
        )
        for op, counted in counts.items()
    ]
    return tuple(sorted(found, key=lambda o: (-(o.seconds or 0), -(o.bound_s or 0), o.op)))


def modules(
    module: nn.Module, example: Trace | None, mix: Sequence[Weighted], profiled: Profiled | None
) -> tuple[ModuleUse, ...]:
    """Every submodule, in the model's order, itself first.

    :param module: the user's own module.
    """
    traced = [Weighted(example, 1)] if example else []
    own, running = work.tally(traced, work.by_module), work.tally(traced, work.running)
    means = work.tally(mix, work.running)
    places = profiled.places if profiled else {}
    seconds = work.seconds_by(places, work.by_module)
    total_seconds = work.seconds_by(places, work.running)
    has = weights.by_path(module)
    sums = _sums(has)
    return tuple(
        ModuleUse(
            path=path,
            kind=type(one).__name__,
            depth=path.count(".") + 1 if path else 0,
            parameters=has.get(path, _NOTHING).elements,
            parameter_bytes=has.get(path, _NOTHING).bytes,
            total_parameters=sums.get(path, _NOTHING).elements,
            total_parameter_bytes=sums.get(path, _NOTHING).bytes,
            work=own.get(path, _NONE),
            total=running.get(path, _NONE),
            mix=means.get(path, _NONE) if mix else None,
            seconds=seconds.get(path, 0.0) if profiled else None,
            total_seconds=total_seconds.get(path, 0.0) if profiled else None,
        )
        for path, one in module.named_modules()
    )


def profile(profiled: Profiled) -> Profile:
    """Its totals, and the source lines that take most."""
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    calls: Counter[tuple[str, int]] = Counter()
    for place, amount in profiled.places.items():
        seconds[place.file, place.line] += amount
        calls[place.file, place.line] += profiled.counts[place]
    whole = sum(seconds.values())
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:_LINES]
    return Profile(
        calls=profiled.calls,
        seconds=profiled.seconds,
        operations_s=profiled.operations_s,
        outside=max(0.0, 1 - profiled.operations_s / profiled.seconds),
        lines=tuple(
            LineUse(
                file=file,
                line=line,
                text=source_text(file, line),
                calls=calls[file, line],
                seconds=amount,
                share=amount / whole if whole else 0.0,
            )
            for (file, line), amount in slowest
            if file
        ),
    )


_NOTHING = Held(0, 0)


def _sums(has: Mapping[str, Held]) -> dict[str, Held]:
    """Each module's parameters with those of its submodules."""
    found: dict[str, Held] = {}
    for path, own in has.items():
        parts = path.split(".") if path else []
        for end in range(len(parts) + 1):
            prefix = ".".join(parts[:end])
            before = found.get(prefix, _NOTHING)
            found[prefix] = Held(before.elements + own.elements, before.bytes + own.bytes)
    return found
