"""Our searcher against Helion's own, on recorded tables, in simulated seconds.

    python benchmarks/replay.py --hub CHECKOUT --helion-python PYTHON --out DIR

``benchmarks/tables/split.toml`` says which tables were developed on and which are judged on. Of each
table, with each seed: Helion's default search (the real package, in an interpreter that has it, see
``replay_helion.py``), ours without any prior, and ours with what siblings gave: other sizes of the
kernel for our own tables, other devices, of those developed on, for the hub's. All pay alike for
compiling, proving and timing, and for the seconds that they themselves compute. What counts is the true
time of the config that a search would name at each moment, by what it has measured.

A run that was cut goes on where it was: what is kept in DIR is named by a digest of the tuner's sources,
of the tables and of the seeds, so that figures of different code are never mixed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import math
import subprocess
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replay_helion import Costs
from replay_helion import Found as HelionFound
from replay_report import SHARE, Cost, Trace, report
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


@dataclass(frozen=True)
class Task:
    """One table, and its siblings."""

    path: Path
    siblings: tuple[Path, ...]


@dataclass
class Timed:
    """A searcher whose own seconds pass on the measurer's clock."""

    inner: Any
    clock: ReplayMeasurer
    own_s: float = 0.0

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def _timed(self, call: Any, *args: Any) -> Any:
        start = time.process_time()
        result = call(*args)
        took = time.process_time() - start
        self.own_s += took
        self.clock.spend(took)
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


def ours(task: Task, seed: int, who: str, most: int = MOST) -> Trace:
    """A search by one of ours: ``guided``, ``guided+prior``, ``pattern``, ..."""
    table = replay.read(task.path)
    name, _, prior = who.partition("+")
    siblings = [replay.read(p) for p in task.siblings] if prior else []
    measurer = ReplayMeasurer(table, seed, Costs.lanes)
    searcher = Timed(searcher_of(name), measurer)
    costs: list[Cost] = []

    def spent() -> Cost:  # by the measurer's clock: the loop's begins only after ``init``
        return len(costs), measurer.now(), measurer.now() - searcher.own_s

    found = search(
        replay.problem_of(table, siblings, Costs.lanes),
        searcher,
        measurer,
        Budget(measurements=min(most, len(table.rows))),
        seed=seed,
        watch=lambda *_: costs.append((len(costs) + 1, *spent()[1:])),
    )
    truth = {key_of(table.config(row)): row.time for row in table.rows}
    best = table.best.time or math.nan
    excess, named, least = [], 99.0, math.inf
    for one in found.measurements:
        if one.time is not None and one.time < least:
            least, named = one.time, (truth[key_of(one.config)] or math.inf) / best - 1
        excess.append(named)
    hit = next((cost for cost, e in zip(costs, excess, strict=True) if e <= SHARE), None)
    return Trace(
        table=task.path.name,
        who=who,
        seed=seed,
        excess=excess,
        at_s=[at for _, at, _ in costs],
        spent=hit or spent(),
        hit=hit is not None,
    )


def helions(found: Sequence[HelionFound], tables: dict[str, Path]) -> list[Trace]:
    """Helion's searches, in the same form; its own computing is spread evenly over its seconds."""
    return [_helions(one, tables[one.table]) for one in found]


def _helions(one: HelionFound, path: Path) -> Trace:
    table = replay.read(path)
    truth = {row.values: row.time for row in table.rows}
    best = table.best.time or math.nan
    slower = (one.end_s + one.own_s) / one.end_s
    excess, hit = [99.0] * one.asked, None
    for asked, seconds, values in one.incumbents():
        now = (truth[values] or math.inf) / best - 1
        excess[asked - 1 :] = [now] * (one.asked - asked + 1)
        if hit is None and now <= SHARE:
            hit = (asked, seconds * slower, seconds)
    return Trace(
        table=path.name,
        who="helion",
        seed=one.seed,
        excess=excess,
        at_s=[step.at_s * slower for step in one.steps if not step.again],
        spent=hit or (one.asked, one.end_s + one.own_s, one.end_s),
        hit=hit is not None,
    )


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


def fingerprint(path: Path, seed: int) -> str:
    """Digests of the first 96 proposals of each searcher, priors being the other sizes beside the table:
    alike on any machine."""
    table = replay.read(path)
    sizes = sorted(path.parent.glob(f"{path.name.split('-')[0]}-*.json.gz"))
    others = [replay.read(p) for p in sizes if p != path]
    lines = []
    for who in ("guided", "guided+prior", "lfbo", "pattern", "evolution", "random"):
        name, _, prior = who.partition("+")
        found = search(
            replay.problem_of(table, others if prior else ()),
            searcher_of(name),
            ReplayMeasurer(table, seed),
            Budget(measurements=96),
            seed=seed,
        )
        text = "\n".join(key_of(m.config) for m in found.measurements)
        lines.append(f"{who} {hashlib.sha256(text.encode()).hexdigest()}")
    return "\n".join(lines)


def digest(sources: Sequence[Path], todo: Sequence[Task], *settings: int) -> str:
    """What a kept result depends on, in 12 digits."""
    made = hashlib.sha256(str(settings).encode())
    tables = [p for task in todo for p in (task.path, *task.siblings)]
    for path in (*sources, *tables):
        made.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return made.hexdigest()[:12]


def run_helion(options: argparse.Namespace, todo: Sequence[Task]) -> list[Trace]:
    """Helion's searches, in its own interpreter, unless they are kept."""
    script = Path(__file__).with_name("replay_helion.py")
    named = {replay.read(t.path).name: t.path for t in todo}
    file = options.helion_found or options.out / f"helion-{digest([script], todo, options.seeds)}.json"
    if not file.exists():
        command = [options.helion_python, script, *named.values(), "--seeds", str(options.seeds)]
        command += ["--jobs", str(options.jobs), "--out", file.with_suffix(".part")]
        with (options.out / "helion.log").open("w") as log:
            subprocess.run(list(map(str, command)), check=True, stdout=log, stderr=log)
        file.with_suffix(".part").rename(file)
    found = msgspec.json.decode(file.read_bytes(), type=list[HelionFound])
    return helions([f for f in found if f.table in named and f.seed < options.seeds], named)


def run_ours(options: argparse.Namespace, todo: Sequence[Task], who: str) -> list[Trace]:
    """Our searches, unless they are kept."""
    sources = [Path(__file__), *sorted(Path(replay.__file__).parent.rglob("*.py"))]
    file: Path = options.out / f"{who}-{digest(sources, todo, options.seeds, options.most)}.json.gz"
    if not file.exists():
        work = [(t, s, who, options.most) for t in todo for s in range(options.seeds)]
        with ProcessPoolExecutor(options.jobs) as pool:
            made = list(pool.map(ours, *zip(*work, strict=True), chunksize=4))
        file.write_bytes(gzip.compress(msgspec.json.encode(made)))
    return msgspec.json.decode(gzip.decompress(file.read_bytes()), type=list[Trace])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hub", type=Path, help="checkout of AutoTuningAssociation/benchmark_hub")
    parser.add_argument("--helion-python", help="interpreter that has Helion 1.5")
    parser.add_argument(
        "--helion-found", type=Path, help="what replay_helion.py wrote, in place of running it"
    )
    parser.add_argument("--split", choices=("held_out", "develop"), default="held_out")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most", type=int, default=MOST, help="measurements at which ours is stopped")
    parser.add_argument("--who", nargs="*", default=["guided", "guided+prior"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("replay"))
    parser.add_argument("--proposals", type=Path, help="only print digests of proposals on this table")
    parser.add_argument("--seed", type=int, default=0, help="of --proposals")
    options = parser.parse_args()
    if options.proposals:
        print(fingerprint(options.proposals, options.seed))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    todo = tasks(options.split, options.hub, options.out)
    traces: list[Trace] = []
    if options.helion_python or options.helion_found:
        traces += run_helion(options, todo)
    for who in options.who:
        traces += run_ours(options, todo, who)
    text = report(traces)
    (options.out / "report.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
