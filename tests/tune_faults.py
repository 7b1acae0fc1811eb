"""A tunable whose knob ``how`` is what may go wrong with a config, each caused for real."""

import ctypes
import gc
import itertools
import os
import time
from collections.abc import Callable

import torch

from torchstone.measure.prove import Truth
from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Space
from torchstone.tuner.tunable import Tunable

SIZE = 4096
SHARED: dict[str, torch.Tensor] = {}


def inputs(seed: int, n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)),)


def reference(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def right(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, x).add_(1)


def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return right(x)


def slower(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.08)
    return right(x)


def exits(x: torch.Tensor) -> torch.Tensor:
    os._exit(3)


def segfault(x: torch.Tensor) -> torch.Tensor:
    ctypes.string_at(0)
    return right(x)


def endless(x: torch.Tensor) -> torch.Tensor:
    while True:
        pass


def hog(x: torch.Tensor) -> torch.Tensor:
    hoard = []
    while True:
        hoard.append(b"x" * 50_000_000)
        time.sleep(0.001)


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("device-side assert triggered")


def sticky(x: torch.Tensor) -> torch.Tensor:
    """As after an illegal address on a GPU: nothing works in this process from here on."""

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    for name in ("empty", "full", "full_like", "arange", "add"):
        setattr(torch, name, broken)
    torch.Tensor.sum = torch.Tensor.clone = broken
    raise RuntimeError("an illegal memory access was encountered")


def sticky_later(x: torch.Tensor) -> torch.Tensor:
    """Right, but leaves the process unusable for the next config."""
    torch.arange = raises
    return right(x)


def changes_inputs(x: torch.Tensor) -> torch.Tensor:
    made = right(x)
    x.zero_()
    return made


def half(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[: len(x) // 2] = right(x[: len(x) // 2])
    return out


def fast_and_wrong(x: torch.Tensor) -> torch.Tensor:
    return x


def trespasses(x: torch.Tensor) -> torch.Tensor:
    """As a store out of bounds does: hits what the tuner keeps."""
    for found in gc.get_objects():
        if isinstance(found, Truth):
            found.inputs[0][7] = 12.0
    return right(x)


def shares(x: torch.Tensor) -> torch.Tensor:
    """Answers with the latest result of a right config."""
    return SHARED.get("out", torch.zeros_like(x))


def narrow(x: torch.Tensor) -> torch.Tensor:
    """Right for the usual magnitudes only, as with a lookup table or an early overflow."""
    return right(x.clamp(-6, 6))


def odd_sizes(x: torch.Tensor) -> torch.Tensor:
    """Forgets the remainder of a block."""
    out = torch.zeros_like(x)
    whole = len(x) // 64 * 64
    out[:whole] = right(x[:whole])
    return out


def noise(x: torch.Tensor) -> torch.Tensor:
    """As a race does: some elements are wrong, others each time."""
    out = right(x)
    out[torch.randint(len(x), (8,))] = 0.0
    return out


def jitter(x: torch.Tensor) -> torch.Tensor:
    """As atomics do: another rounding each time, within the bound."""
    return right(x) * (1 + 1e-7 * torch.randint(2, x.shape))


def wrong_dtype(x: torch.Tensor) -> torch.Tensor:
    return right(x).double()


def wrong_shape(x: torch.Tensor) -> torch.Tensor:
    return right(x)[None]


def two_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return right(x), x


FUNCTIONS = (
    right,
    slow,
    slower,
    exits,
    segfault,
    endless,
    hog,
    raises,
    sticky,
    sticky_later,
    changes_inputs,
    half,
    fast_and_wrong,
    trespasses,
    shares,
    narrow,
    odd_sizes,
    noise,
    jitter,
    wrong_dtype,
    wrong_shape,
    two_outputs,
)
BY_NAME: dict[str, Callable[..., object]] = {f.__name__: f for f in FUNCTIONS}


def first_call_only() -> Callable[..., torch.Tensor]:
    calls = itertools.count()
    return lambda x: right(x) if next(calls) == 0 else torch.zeros_like(x)


def tires() -> Callable[..., torch.Tensor]:
    """Right as long as it is likely to be looked at."""
    calls = itertools.count()
    return lambda x: right(x) if next(calls) < 8 else torch.zeros_like(x)


def remembers() -> Callable[..., torch.Tensor]:
    """Answers by the address of the input, once it has seen that a few times."""
    seen: dict[int, list[torch.Tensor]] = {}

    def answer(x: torch.Tensor) -> torch.Tensor:
        known = seen.setdefault(x.data_ptr(), [])
        if len(known) < 4:
            known.append(right(x))
        return known[-1]

    return answer


def overwrites() -> Callable[..., torch.Tensor]:
    """One output buffer for all calls."""
    out = torch.empty(SIZE)
    return lambda x: torch.add(x, x, out=out).add_(1) if len(x) == SIZE else right(x)


def dies_later() -> Callable[..., torch.Tensor]:
    """Right while it is proved and warmed up; then the process ends."""
    calls = itertools.count()
    return lambda x: right(x) if next(calls) < 14 else exits(x)


MAKERS = {f.__name__: f for f in (first_call_only, tires, dies_later, remembers, overwrites)}
HOWS = (*BY_NAME, *MAKERS, "no_build", "build_exits", "build_hangs", "one_block", "fills")


def build(config: Config) -> Callable[..., object]:
    how, block = config["how"], config["block"]
    if how == "no_build":
        raise ValueError(f"no kernel with a block of {block}")
    if how == "build_exits":
        os._exit(4)
    if how == "build_hangs":
        time.sleep(600)
    if how == "one_block":
        return fast_and_wrong if block == 64 else right
    if how == "fills":
        return lambda x: SHARED.setdefault("out", right(x)) if not SHARED else right(x)
    made = MAKERS.get(str(how))
    return BY_NAME[str(how)] if made is None else made()


def tunable(*hows: str, blocks: tuple[int, ...] = (32,)) -> Tunable:
    """The configs ``hows`` x ``blocks``; the first is the default."""
    return Tunable(
        name="faults",
        build=build,
        space=Space({"how": Choice(hows), "block": Choice(blocks)}),
        inputs=inputs,
        reference=reference,
        sizes={"n": SIZE},
        odd=({"n": 1000},),
    )
