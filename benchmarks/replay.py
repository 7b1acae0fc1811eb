"""Our searcher against Helion's own, on recorded tables, in simulated seconds.

    python benchmarks/replay.py --hub CHECKOUT --helion-python PYTHON --out DIR

``benchmarks/tables/split.toml`` says which tables were developed on and which are judged on. Of each
table, with each seed: Helion's default search (the real package, in an interpreter that has it, see
``replay_helion.py``), ours without any prior, and ours with what siblings gave: other sizes of the
kernel for our own tables, other devices, of those developed on, for the hub's. All pay alike for
compiling, proving and timing, and for the seconds that they themselves compute. What counts is the true
time of the config that a search would name at each moment, by what it has measured.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import math
import statistics
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replay_helion import Costs
from replay_helion import Found as HelionFound
from torchstone.errors import InputError
from torchstone.records.tuning import Measurement
from torchstone.tuner import replay
from torchstone.tuner.driver import Budget, search
from torchstone.tuner.replay import ReplayMeasurer, Row, Table
from torchstone.tuner.search import searcher_of
from torchstone.tuner.search.base import Problem, Proposal, Stop
from torchstone.tuner.space import key_of

TABLES = Path(__file__).parent / "tables"
MOST = 128
"""Measurements after which a search of ours is stopped if it has not stopped by itself."""
SHARE = 0.02
"""Within this of the best counts as found."""
BUDGETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Task:
    """One table, and its siblings."""

    path: Path
    siblings: tuple[Path, ...]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One search: after each measurement, how far off the config is that it would name, and when."""

    table: str
    who: str
    seed: int
    excess: list[float]
    """The named config's true time over the table's best, less 1; one a measurement; 99 before the
    first."""
    at_s: list[float]
    """Simulated seconds."""

    @property
    def found_at(self) -> int | None:
        """How many measurements it took to be within :data:`SHARE`, for good or for a while."""
        return next((n for n, e in enumerate(self.excess, 1) if e <= SHARE), None)


@dataclass
class Timed:
    """A searcher whose own seconds pass on the measurer's clock."""

    inner: Any
    clock: ReplayMeasurer

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def _timed(self, call: Any, *args: Any) -> Any:
        start = time.process_time()
        result = call(*args)
        self.clock.spend(time.process_time() - start)
        return result

    def init(self, problem: Problem, seed: int) -> Any:
        return self._timed(self.inner.init, problem, seed)

    def ask(self, state: Any, count: int) -> tuple[tuple[Proposal, ...], Any]:
        found: tuple[tuple[Proposal, ...], Any] = self._timed(self.inner.ask, state, count)
        return found

    def tell(self, state: Any, found: Sequence[Measurement]) -> Any:
        return self._timed(self.inner.tell, state, found)

    def done(self, state: Any) -> Stop | None:
        return self.inner.done(state)


def ours(task: Task, seed: int, who: str) -> Trace:
    """A search by one of ours: ``guided``, ``guided+prior``, ``pattern``, ..."""
    table = replay.read(task.path)
    name, _, prior = who.partition("+")
    siblings = [replay.read(p) for p in task.siblings] if prior else []
    clock = Costs()
    measurer = ReplayMeasurer(table, seed, clock.lanes)
    problem = replay.problem_of(table, siblings, clock.lanes)
    times: list[float] = []
    found = search(
        problem,
        Timed(searcher_of(name), measurer),
        measurer,
        Budget(measurements=min(MOST, len(table.rows))),
        seed=seed,
        watch=lambda _, at, __: times.append(at),
    )
    truth = {key_of(table.config(row)): row.time for row in table.rows}
    best = table.best.time or math.nan
    excess, named, least = [], 99.0, math.inf
    for one in found.measurements:
        if one.time is not None and one.time < least:
            least, named = one.time, (truth[key_of(one.config)] or math.inf) / best - 1
        excess.append(named)
    return Trace(table=task.path.name, who=who, seed=seed, excess=excess, at_s=times)


def helions(found: Sequence[HelionFound], tables: dict[str, Path]) -> list[Trace]:
    """Helion's searches, in the same form; its own computing is spread evenly over its seconds."""
    traces = []
    for one in found:
        table = replay.read(tables[one.table])
        truth = {row.values: row.time for row in table.rows}
        best = table.best.time or math.nan
        slower = (one.end_s + one.own_s) / one.end_s
        excess, at = [99.0] * one.asked, [0.0] * one.asked
        for step, (asked, seconds, values) in zip(_informed(one), one.incumbents(), strict=True):
            assert step is not None
            excess[asked - 1 :] = [(truth[values] or math.inf) / best - 1] * (one.asked - asked + 1)
            at[asked - 1 :] = [seconds * slower] * (one.asked - asked + 1)
        traces.append(
            Trace(table=tables[one.table].name, who="helion", seed=one.seed, excess=excess, at_s=at)
        )
    return traces


def _informed(one: HelionFound) -> Iterator[Any]:
    """The steps from the first on that gave a time: those that have an incumbent."""
    begun = False
    for step in one.steps:
        begun = begun or step.seconds is not None
        if begun:
            yield step


def tasks(split: str, hub: Path | None, folder: Path) -> list[Task]:
    """The tables of one side of the split, with siblings; the hub's are unpacked to ``folder``."""
    sides = tomllib.loads((TABLES / "split.toml").read_text())
    made = []
    for kernel in sides["h200"][split]:
        sizes = sorted(TABLES.glob(f"{kernel}-*.json.gz"))
        made += [Task(p, tuple(q for q in sizes if q != p)) for p in sizes]
    if hub is not None:
        known = {n: _unpacked(hub, n, folder) for n in {*sides["hub"]["develop"], *sides["hub"][split]}}
        for name in sides["hub"][split]:
            kernel = name.split("/")[0]
            others = [n for n in sides["hub"]["develop"] if n != name and n.startswith(f"{kernel}/")]
            made.append(Task(known[name], tuple(known[n] for n in others)))
    return made


def _unpacked(hub: Path, name: str, folder: Path) -> Path:
    kernel, device = name.split("/")
    path = folder / f"{kernel}-{device}.json.gz"
    if not path.exists():
        file = f"cachefiles/{kernel}_milo/{device}.json.gz"
        if (hub / file).is_file():
            data = (hub / file).read_bytes()
        else:  # a repository without a work tree
            show = ["git", "-C", str(hub), "show", f"HEAD:{file}"]
            data = subprocess.run(show, check=True, capture_output=True).stdout
        replay.write(read_kernel_tuner(gzip.decompress(data), kernel, device), path)
    return path


def read_kernel_tuner(data: bytes, kernel: str, device: str | None = None) -> Table:
    """Read a cache file of Kernel Tuner, unpacked.

    The form of "FAIR Sharing of Data in Autotuning Research", doi:10.1145/3629527.3651429.

    :param kernel: what to call the kernel: files of one kernel from several devices share it.
    :param device: what to call the device, in place of what the file says; some say nothing.
    :raises InputError: where it is something else.
    """
    try:
        found: dict[str, Any] = msgspec.json.decode(data)
        names = found["tune_params_keys"]
        knobs = {n: tuple(sorted(found["tune_params"][n])) for n in names}
        rows = tuple(_row(one, names) for one in found["cache"].values())
        size = found.get("problem_size") or ()
        device = device or found["device_name"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise InputError(f"not a cache file of Kernel Tuner: {error!r}") from None
    sizes = {f"n{i}": int(s) for i, s in enumerate(size if isinstance(size, list) else [size])}
    return Table(kernel=kernel, device=device, sizes=sizes, knobs=knobs, rows=rows)


def _row(one: dict[str, Any], names: list[str]) -> Row:
    values = tuple(one[n] for n in names)
    compile_s = (one.get("compile_time") or 0.0) / 1e3
    if isinstance(one["time"], str):  # the name of an error
        return Row(values=values, status="crashed", compile_s=compile_s, text=one["time"])
    return Row(values=values, seconds=tuple(t / 1e3 for t in one["times"]), compile_s=compile_s)


def at_budget(trace: Trace, budget: int) -> float:
    """How far off it is after so many measurements; where it has stopped, as it stopped."""
    return trace.excess[min(budget, len(trace.excess)) - 1]


def expected(traces: Sequence[Trace], seconds: bool) -> float:
    """What one success costs: all that was spent until success or the end, over successes.

    The expected running time of COCO (Hansen et al., Optimization Methods and Software 36, 2021).
    """
    spent, hits = 0.0, 0
    for trace in traces:
        at = trace.found_at or len(trace.excess)
        spent += trace.at_s[at - 1] if seconds else at
        hits += trace.found_at is not None
    return spent / hits if hits else math.inf


def report(traces: Sequence[Trace]) -> str:
    """The table that is printed."""
    names = sorted({t.table for t in traces})
    whos = list(dict.fromkeys(t.who for t in traces))
    of = {(n, w): [t for t in traces if (t.table, t.who) == (n, w)] for n in names for w in whos}
    lines = ["expected measurements / simulated seconds to be within 2% of the best"]
    for name in names:
        cells = [
            f"{expected(of[name, w], False):6.0f} /{expected(of[name, w], True):6.0f} s" for w in whos
        ]
        lines.append(f"{name:38s} " + "  ".join(cells))
    lines.insert(1, f"{'':38s} " + "  ".join(f"{w:>16s}" for w in whos))
    for who in whos:
        for seconds in (False, True):
            ratios = [expected(of[n, who], seconds) / expected(of[n, "helion"], seconds) for n in names]
            usable = [r for r in ratios if math.isfinite(r) and r > 0]
            word = "seconds" if seconds else "measurements"
            middle = math.exp(statistics.fmean(map(math.log, usable))) if usable else math.nan
            half, quarter = (sum(r <= bound for r in ratios) for bound in (0.5, 0.25))
            lines.append(
                f"{who}: {word} over Helion's: geometric mean {middle:.2f}, "
                f"median {statistics.median(ratios):.2f}, at most a half on {half}, "
                f"at most a quarter on {quarter} of {len(names)} tables"
            )
    lines.append("share within 2% / mean log of time over best, each table counting the same")
    for who in whos:
        cells = []
        for budget in BUDGETS:
            each = [[at_budget(t, budget) for t in of[n, who]] for n in names]
            share = statistics.fmean(statistics.fmean(e <= SHARE for e in one) for one in each)
            regret = statistics.fmean(
                statistics.fmean(min(math.log1p(e), 2.0) for e in one) for one in each
            )
            cells.append(f"{budget}: {share:.2f}/{regret:.3f}")
        lines.append(f"{who:14s} " + "  ".join(cells))
    return "\n".join(lines)


def fingerprint(path: Path, seed: int) -> str:
    """Digests of the first 96 proposals of each searcher: alike on any machine."""
    table = replay.read(path)
    lines = []
    for name in ("guided", "lfbo", "pattern", "evolution", "random"):
        found = search(
            replay.problem_of(table),
            searcher_of(name),
            ReplayMeasurer(table, seed),
            Budget(measurements=96),
            seed=seed,
        )
        text = "\n".join(key_of(m.config) for m in found.measurements)
        lines.append(f"{name} {hashlib.sha256(text.encode()).hexdigest()}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hub", type=Path, help="checkout of AutoTuningAssociation/benchmark_hub")
    parser.add_argument("--helion-python", help="interpreter that has Helion 1.5")
    parser.add_argument(
        "--helion-found", type=Path, help="what replay_helion.py wrote, in place of running it"
    )
    parser.add_argument("--split", choices=("held_out", "develop"), default="held_out")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--who", nargs="*", default=["guided", "guided+prior"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("replay"))
    parser.add_argument("--proposals", type=Path, help="only print digests of proposals on this table")
    arguments = parser.parse_args()
    if arguments.proposals:
        print(fingerprint(arguments.proposals, 0))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    todo = tasks(arguments.split, arguments.hub, arguments.out)
    named = {replay.read(t.path).name: t.path for t in todo}
    traces: list[Trace] = []
    file = arguments.helion_found or arguments.out / "helion.json"
    if arguments.helion_python and not file.exists():
        command = [arguments.helion_python, str(Path(__file__).with_name("replay_helion.py"))]
        command += [*map(str, named.values()), "--seeds", str(arguments.seeds), "--out", str(file)]
        subprocess.run([*command, "--jobs", str(arguments.jobs)], check=True, stdout=subprocess.DEVNULL)
    if file.exists():
        found = msgspec.json.decode(file.read_bytes(), type=list[HelionFound])
        traces += helions([f for f in found if f.table in named and f.seed < arguments.seeds], named)
    for who in arguments.who:  # a run that was cut goes on where it was
        kept = arguments.out / f"{who}-{arguments.split}-{arguments.seeds}.json.gz"
        if not kept.exists():
            work = [(t, s, who) for t in todo for s in range(arguments.seeds)]
            with ProcessPoolExecutor(arguments.jobs) as pool:
                made = list(pool.map(ours, *zip(*work, strict=True), chunksize=4))
            kept.write_bytes(gzip.compress(msgspec.json.encode(made)))
        traces += msgspec.json.decode(gzip.decompress(kept.read_bytes()), type=list[Trace])
    text = report(traces)
    (arguments.out / "report.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
