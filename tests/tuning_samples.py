"""Tunings as the real loop makes them over recorded tables; finals are drawn from the same samples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from torchstone.records.tuning import (
    Config,
    Final,
    Finals,
    Measurement,
    MeasurePolicy,
    Tuning,
    TuningKey,
)
from torchstone.tuner.driver import Budget, search
from torchstone.tuner.replay import ReplayMeasurer, Row, Table, problem_of, space_of
from torchstone.tuner.search.base import AnySearcher
from torchstone.tuner.search.exhaustive import Exhaustive
from torchstone.tuner.search.pattern import Pattern
from torchstone.tuner.search.random import Random
from torchstone.tuner.space import Integer, Permutation, PowerOfTwo, Space, key_of
from torchstone.tuning import _decision

GEMM = Space(
    {
        "BLOCK_M": PowerOfTwo(16, 256, 64),
        "BLOCK_N": PowerOfTwo(16, 256, 64),
        "num_warps": PowerOfTwo(1, 8, 4),
        "num_stages": Integer(1, 4, 2),
        "order": Permutation(3),
    },
    valid=(lambda c: int(c["BLOCK_M"]) * int(c["BLOCK_N"]) >= 1024,),
)
FAULTS = {
    0: ("wrong", "3.1% of elements are beyond rounding; the largest relative error is 0.42 (full)"),
    1: ("crashed", "CUDA error: an illegal memory access was encountered (measure)"),
    2: ("timed_out", "no answer within 20 s (measure)"),
    3: ("unverifiable", "outputs are not the same from call to call (measure)"),
}


def gemm_s(config: Config) -> float:
    """Seconds that a matrix product might take: a ridge where tiles, warps and stages fit each other."""
    m, n = int(config["BLOCK_M"]), int(config["BLOCK_N"])
    warps, stages = int(config["num_warps"]), int(config["num_stages"])
    tile = abs(np.log2(m * n / 16384)) * 0.28 + abs(np.log2(m / n)) * 0.07
    fit = abs(np.log2(m * n / warps / 4096)) * 0.12 + (stages - 3) ** 2 * 0.06
    return 21e-6 * float(np.exp(tile + fit)) * (1.12 if config["order"][0] == 2 else 1.0)  # type: ignore[index]


def table(space: Space = GEMM, seconds: Callable[[Config], float] = gemm_s, name: str = "gemm") -> Table:
    """Every config of a space; what needs too much memory is not built, and a few are at fault."""
    rows, rng = [], np.random.default_rng(1)
    for config in space.all or ():
        values, chance = tuple(config.values()), zlib.crc32(key_of(config).encode()) % 60
        if int(config.get("BLOCK_M", 0)) * int(config.get("num_stages", 0)) > 600:
            text = "out of resource: shared memory, Required: 262144, Hardware limit: 232448 (build)"
            rows.append(Row(values=values, status="invalid", compile_s=2.0, text=text))
        elif chance in FAULTS and config != space.default():
            status, text = FAULTS[chance]
            rows.append(Row(values=values, status=status, compile_s=2.0, text=text))  # type: ignore[arg-type]
        else:
            samples = seconds(config) * (1 + np.abs(rng.normal(0, 0.01, 20)))
            rows.append(Row(values=values, seconds=tuple(samples.tolist()), compile_s=2.0))
    return Table(
        kernel=name,
        device="NVIDIA H200",
        sizes={"M": 4096, "N": 4096, "K": 512},
        knobs={n: tuple(k.values) for n, k in space.knobs.items()},
        rows=tuple(rows),
        default=space.default(),
        floor_s=19.2e-6,
    )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a table is searched."""

    table: Table
    searcher: AnySearcher = Random()  # noqa: RUF009  frozen
    measurements: int = 160
    known: int = 0
    right: Callable[[Config], bool] = lambda _: True
    """Whether a finalist is right on what was held out."""


def tuning(asked: Asked) -> Tuning:
    """Search it, hold finals, decide."""
    policy, problem = MeasurePolicy(), problem_of(asked.table, lanes=8)
    known: tuple[Measurement, ...] = ()
    if asked.known:
        known = tuning(replace(asked, measurements=asked.known, known=0)).measurements
    found = search(
        problem,
        asked.searcher,
        ReplayMeasurer(asked.table, 0, policy=policy),
        Budget(measurements=asked.measurements),
        known=known,
    )
    default = space_of(asked.table).default()
    right = sorted((m for m in found.measurements if m.time is not None), key=lambda m: m.time or 0.0)
    few = [m.config for m in right if m.config != default][: policy.finalists]
    finals = _finals(asked, few, default, policy.rounds)
    return Tuning(
        key=TuningKey(
            kernel=asked.table.kernel,
            space="0f3a52d1c4b7e689",
            source="9c1de0b2a7f48356",
            sizes=asked.table.sizes,
            signature=("float16 4096x512 512,1 aligned", "float16 512x4096 4096,1 aligned"),
            device=asked.table.device,
            versions={"torch": "2.13.0", "triton": "3.7.1", "driver": "570.86"},
            policy="77aa01b9cc3d2e4f",
        ),
        searcher=repr(asked.searcher),
        seed=0,
        started_at="2026-12-01T10:20:30+00:00",
        seconds=found.seconds + 9,
        measurements=found.measurements,
        known=found.known,
        siblings=0,
        stop=found.stop.code,
        stop_text=found.stop.text,
        regret=1.013,
        floor_s=asked.table.floor_s,
        finals=finals,
        **_decision(finals, default),
    )


def _finals(asked: Asked, few: Sequence[Config], default: Config, rounds: int) -> Finals:
    rows = {key_of(asked.table.config(row)): row for row in asked.table.rows}
    rng = np.random.default_rng(2)

    def entry(config: Config, label: str) -> Final:
        row = rows[key_of(config)]
        if not row.seconds:
            return Final(config=config, label=label, status=row.status, text=row.text)
        if label == "finalist" and not asked.right(config):
            text = "12% of elements are beyond rounding; the largest relative error is 1.0 (M=37)"
            return Final(config=config, label=label, status="wrong", relative=1.0, text=text)
        times = tuple(rng.choice(row.seconds, rounds).tolist())
        return Final(config=config, label=label, status="timed", seconds=times, relative=4.2e-4)

    entries = [entry(default, "default"), *(entry(config, "finalist") for config in few)]
    leader = next((e.config for e in entries[1:] if e.status == "timed"), None)
    if leader is not None:
        entries.append(entry(leader, "control"))
    return Finals(entries=tuple(entries), cases=("seed 1", "M=37, N=129, K=65", "offset by 4 bytes"))


# --- the samples ----------------------------------------------------------------------------------


def full() -> Tuning:
    """A winner, every kind of failure, and a finalist that is wrong at an odd size."""
    wrong: list[str] = []

    def right(config: Config) -> bool:
        if not wrong:
            wrong.append(key_of(config))
        return key_of(config) != wrong[0]

    return tuning(Asked(table=table(), searcher=Pattern(), right=right))


def cached() -> Tuning:
    """Goes on with 60 rows of the cache, and has learned from others."""
    found = tuning(Asked(table=table(), searcher=Pattern(), known=60))
    return msgspec.structs.replace(found, siblings=412, problems=("line 17 of rows.jsonl is damaged",))


def kept() -> Tuning:
    """The default is already the best."""
    base = table()
    default = key_of(space_of(base).default())
    return tuning(Asked(table=table(seconds=lambda c: gemm_s(c) if key_of(c) == default else 1e-4)))


def failed() -> Tuning:
    """Nothing can be built."""
    base = table()
    rows = tuple(
        Row(values=r.values, status="invalid", text="PTXASError: no such target") for r in base.rows
    )
    whole = msgspec.structs.replace(base, rows=rows, floor_s=None)
    return msgspec.structs.replace(tuning(Asked(table=whole, measurements=40)), regret=None)


def empty() -> Tuning:
    """Ended before anything was measured."""
    return msgspec.structs.replace(
        failed(), measurements=(), finals=Finals(entries=()), stop_text="the budget of 0.1 s is spent"
    )


def one_knob() -> Tuning:
    """Three configs."""
    space = Space({"warps": PowerOfTwo(1, 4)})
    asked = Asked(table=table(space, lambda c: 1e-3 / int(c["warps"]), "tiny"), searcher=Exhaustive())
    return tuning(asked)


def hostile() -> Tuning:
    """Whatever is a text is markup, a terminal code, or far too long."""
    base, bad = full(), "<script>alert(1)</script>\x1b[31m&\u202e"
    rename = {"BLOCK_M": f"{bad}M", "order": "order-" + "x" * 300}

    def renamed(config: Config) -> Config:
        return {rename.get(n, n): v if n != "num_warps" else f"{bad}{v}" for n, v in config.items()}

    measurements = tuple(
        msgspec.structs.replace(
            m, config=renamed(m.config), text=m.text and m.text + bad + "y" * 100_000, proposer=bad
        )
        for m in base.measurements
    )
    entries = tuple(
        msgspec.structs.replace(e, config=renamed(e.config), text=e.text and bad * 900)
        for e in base.finals.entries
    )
    texts = {c.recipe: key_of(renamed(msgspec.json.decode(c.recipe))) for c in base.comparisons}
    comparisons = tuple(msgspec.structs.replace(c, recipe=texts[c.recipe]) for c in base.comparisons)
    versions = {f"{bad}torch": bad, "triton": "9" * 400}
    return msgspec.structs.replace(
        base,
        key=msgspec.structs.replace(
            base.key, kernel=bad * 8, device=bad, versions=versions, sizes={bad: 1}
        ),
        measurements=measurements,
        finals=Finals(entries=entries, cases=(bad, "z" * 500)),
        comparisons=comparisons,
        config=renamed(base.config),
        searcher=f"{bad}(" + "s" * 500,
        stop_text=bad,
        text=bad,
        problems=(bad * 40,),
    )


SAMPLES: dict[str, Callable[[], Tuning]] = {
    "full": full,
    "cached": cached,
    "kept": kept,
    "failed": failed,
    "empty": empty,
    "one knob": one_knob,
    "hostile": hostile,
}
