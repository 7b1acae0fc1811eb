"""Measure every config of the kernels in ``examples/kernels`` at three sizes each, and write the tables.

The tables let searches be replayed on any machine (``torchstone.tuner.replay``). Three parts work at
once:

* Compilers, most of the cores: each compiles for the device without touching it. Their CUDA is hidden,
  inputs are tensors without memory, and a launch stops after compilation; what they make reaches the
  timer by Triton's cache on disk. So nothing but the timer uses the device, and two or three cores stay
  free for it.
* The timer: one process holds the inputs and the float64 results. Each config is first held against
  those, its outputs poisoned with NaN beforehand; then timed by CUDA events, the L2 cache flushed
  before each sample, with the host far ahead of the device.
* The main process, which feeds both. A config that raises, that crashes or hangs the timer, or that is
  wrong, becomes a row that says so; a timer whose CUDA is broken is replaced.

Kernels are done one after the other; when the time is up, complete tables are written first.
``--smoke`` does all of it in small: compilation is real (for sm_90, which needs no device), and timing
is the interpreter's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import random
import statistics
import sys
import tarfile
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchstone.records import Crashed, TimedOut
from torchstone.records.tuning import Config
from torchstone.tuner.replay import Row, Table, write
from torchstone.tuner.space import key_of
from torchstone.tuner.tunable import Tunable
from torchstone.worker import Limits, Worker

KERNELS_DIR = Path(__file__).resolve().parents[1] / "examples" / "kernels"


@dataclass(frozen=True)
class Plan:
    """What is measured of one kernel."""

    bound: float
    """Largest error of an element, over its scale, that is still right; float16 rounds by 5e-4."""
    sizes: tuple[dict[str, int], ...]
    small: dict[str, int]
    """For the interpreter."""


PLANS = {  # in order of importance
    "gemm": Plan(
        2e-3,
        (
            {"m": 4096, "n": 4096, "k": 4096},
            {"m": 256, "n": 8192, "k": 8192},
            {"m": 16384, "n": 1024, "k": 1024},
        ),
        {"m": 64, "n": 80, "k": 32},
    ),
    "attention": Plan(
        1e-2,  # where causal, the first rows are much larger than most
        (
            {"batch": 2, "heads": 16, "length": 4096, "dim": 128, "causal": 1},
            {"batch": 1, "heads": 4, "length": 8192, "dim": 128, "causal": 1},
            {"batch": 32, "heads": 16, "length": 512, "dim": 128, "causal": 0},
        ),
        {"batch": 1, "heads": 1, "length": 48, "dim": 128, "causal": 1},
    ),
    "softmax": Plan(
        1e-5,
        ({"rows": 8192, "cols": 8192}, {"rows": 65536, "cols": 1024}, {"rows": 1024, "cols": 65536}),
        {"rows": 8, "cols": 256},
    ),
    "layer_norm": Plan(
        2e-3,
        ({"rows": 8192, "cols": 8192}, {"rows": 65536, "cols": 1024}, {"rows": 2048, "cols": 32768}),
        {"rows": 8, "cols": 256},
    ),
    "column_sum": Plan(
        1e-5,
        ({"rows": 8192, "cols": 8192}, {"rows": 1048576, "cols": 64}, {"rows": 128, "cols": 524288}),
        {"rows": 64, "cols": 64},
    ),
    "cross_entropy": Plan(
        1e-5,
        (
            {"rows": 8192, "classes": 32768},
            {"rows": 512, "classes": 128256},
            {"rows": 256, "classes": 262144},
        ),
        {"rows": 4, "classes": 512},
    ),
    "dequant_gemv": Plan(
        2e-3,
        ({"rows": 8192, "cols": 28672}, {"rows": 28672, "cols": 8192}, {"rows": 128256, "cols": 4096}),
        {"rows": 32, "cols": 512},
    ),
}

SAMPLES = 12
SLOW_S = 5e-3
SLOW_SAMPLES = 5
AHEAD_CYCLES = 4_000_000
"""The device waits so long, about 2 ms, that the host has queued all samples before the first runs."""


# ---- jobs of the compilers


class Hidden(TorchFunctionMode):
    """Tensors are made without memory, whatever device is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "meta"
            kwargs.pop("generator", None)
        return func(*args, **kwargs)


class _Target:
    """As much of a driver as compiling without a device takes."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def become_compiler(state: dict[str, Any], *, arch: int) -> None:
    """Hide the device, and have launches compile only."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.nice(10)
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Target(arch))
    run = JITFunction.run
    state["compiled"] = compiled = []

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        compiled.append((kernel.hash, time.perf_counter() - began))
        return kernel

    JITFunction.run = compile_only


def compile_config(state: dict[str, Any], *, kernel: str, sizes: dict[str, int], config: Config) -> Any:
    """Compile what a config launches at these sizes: hash and seconds of each kernel."""
    key = (kernel, *sizes.values())
    if key not in state:
        with torch.device("meta"), Hidden():
            state[key] = tunable(kernel).inputs(0, **sizes)
    state["compiled"].clear()
    tunable(kernel).build(config)(*state[key])
    return list(state["compiled"])


# ---- jobs of the timer


class Poisoned(TorchFunctionMode):
    """Memory that is not initialized holds NaN: what a kernel did not write is then seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.fill_(float("nan")) if func in (torch.empty, torch.empty_like) else made


def become_timer(state: dict[str, Any], *, interpret: bool) -> dict[str, Any]:
    """Take the device; gives its name, its architecture and its figures."""
    state["launched"] = launched = []
    state["missed"] = 0
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        figures = {"multiprocessors": 1.0, "l2_bytes": 2**20, "shared_bytes": 232_448.0}
        return {"name": "interpreter", "arch": 90, "facts": figures | {"bandwidth": 1e9, "flops": 1e9}}
    from triton import knobs
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        launched.append(kernel)
        return kernel

    def missed(*, cache_hit: bool, **_: Any) -> None:
        state["missed"] += not cache_hit

    JITFunction.run = watched
    knobs.compilation.listener = missed
    device = torch.cuda.get_device_properties(0)
    state["flush"] = torch.empty(2 * device.L2_cache_size, dtype=torch.uint8, device="cuda")
    figures = {
        "multiprocessors": float(device.multi_processor_count),
        "l2_bytes": float(device.L2_cache_size),
        "shared_bytes": float(device.shared_memory_per_block_optin),
    }
    return {"name": device.name, "arch": 10 * device.major + device.minor, "facts": figures}


def peaks(state: dict[str, Any]) -> dict[str, float]:
    """The most bytes a second of a copy and of a sum, and operations a second of float16 products."""
    big = torch.ones(2**29, device="cuda")
    other = torch.empty_like(big)
    copied = min(_on_device(lambda: other.copy_(big), state["flush"], 10))
    summed = min(_on_device(big.sum, state["flush"], 10))
    rates = []
    for n in (4096, 8192):
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
        rates.append(2.0 * n**3 / min(_on_device(lambda a=a, b=b: a @ b, state["flush"], 10)))
    return {"bandwidth": max(2**32 / copied, 2**31 / summed), "flops": max(rates)}


def prepare(state: dict[str, Any], *, kernel: str, sizes: dict[str, int]) -> None:
    """Make inputs and the float64 result; those of other kernels go."""
    for key in [k for k in state if isinstance(k, tuple) and k[0] != kernel]:
        del state[key]
    case = (kernel, *sizes.values())
    if case not in state:
        args = tunable(kernel).inputs(0, **sizes)
        wide = (a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
        state[case] = args, tunable(kernel).reference(*wide)


def measure(
    state: dict[str, Any], *, kernel: str, sizes: dict[str, int], config: Config
) -> dict[str, Any]:
    """Hold a config against float64 and time it: relative error, samples, what the compiler said."""
    from torchstone.compat.triton import facts

    args, truth = state[kernel, *sizes.values()]
    function = tunable(kernel).build(config)
    state["launched"].clear()
    with Poisoned():
        found = function(*args)
    told = {"relative": relative_error(found, truth), "facts": facts(state["launched"])}
    told |= {"missed": state["missed"], "seconds": ()}
    if not told["relative"] <= PLANS[kernel].bound:
        return told
    del found

    def call() -> Any:
        return function(*args)

    flush = state.get("flush")
    told["seconds"] = _on_device(call, flush, SAMPLES) if flush is not None else _on_host(call)
    return told


def responds(state: dict[str, Any]) -> None:
    """Raises where CUDA is broken."""
    if "flush" in state:
        torch.cuda.synchronize()
        state["flush"].zero_()
        torch.cuda.synchronize()


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error over the element plus the root mean square of all; NaN where one is NaN."""
    scale = truth.abs() + truth.square().mean().sqrt() + 1e-300
    return float(((found.double() - truth).abs() / scale).max())


def _on_device(call: Callable[[], Any], flush: torch.Tensor, samples: int) -> tuple[float, ...]:
    """Seconds of each call, on the device's clock; its L2 cache holds nothing of use before each."""
    call()
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(samples)]
    pairs[0][0].record()
    call()
    pairs[0][1].record()
    torch.cuda.synchronize()
    if pairs[0][0].elapsed_time(pairs[0][1]) > SLOW_S * 1e3:
        pairs = pairs[:SLOW_SAMPLES]
    torch.cuda._sleep(AHEAD_CYCLES)
    for begin, end in pairs:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return tuple(round(begin.elapsed_time(end) * 1e-3, 9) for begin, end in pairs)


def _on_host(call: Callable[[], Any]) -> tuple[float, ...]:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds)


def tunable(kernel: str) -> Tunable:
    """The kernel of that name in ``examples/kernels``."""
    if str(KERNELS_DIR) not in sys.path:
        sys.path.insert(0, str(KERNELS_DIR))
    one: Tunable = importlib.import_module(kernel).tunable
    return one


# ---- the main process


@dataclass
class Work:
    """One kernel's configs on their way through compilers and timer."""

    kernel: str
    sizes: tuple[dict[str, int], ...]
    configs: list[Config]
    ready: queue.SimpleQueue[tuple[Config, list[Any]]] = field(default_factory=queue.SimpleQueue)
    """Compiled: for each size the kernels' hashes, or a row's status and text."""
    hashes: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    rows: list[dict[str, Row]] = field(default_factory=list)
    """For each size, by config; seconds of compilation come when the table is written."""
    again: list[list[float]] = field(default_factory=list)
    """Medians of the default, measured again after all."""


class Compiler(threading.Thread):
    """One process that compiles what a queue gives; several share the queue."""

    def __init__(self, name: str, board: Board) -> None:
        super().__init__(daemon=True)
        self.label = name
        self.board = board
        self.worker: Worker | None = None

    def run(self) -> None:
        while not self.board.over():
            try:
                work, config = self.board.wanted.get_nowait()
            except queue.Empty:
                break
            work.ready.put((config, [self._compiled(work, sizes, config) for sizes in work.sizes]))
        if self.worker is not None:
            self.worker.close()

    def _compiled(self, work: Work, sizes: dict[str, int], config: Config) -> Any:
        if self.board.over():
            return "invalid", "the time is up"  # nobody reads it
        if self.worker is None or not self.worker.alive:
            self.worker = self.board.start(self.label)
            target = "record_tables:become_compiler"
            failed = self.worker.call(target, stage="start", limit_s=120, arch=self.board.arch)
            if failed is not None:
                raise RuntimeError(f"no compiler: {told(failed)}\n{failed.log}")
        args = {"kernel": work.kernel, "sizes": sizes, "config": config}
        made = self.worker.call("record_tables:compile_config", stage="compile", limit_s=60, **args)
        if isinstance(made, Crashed | TimedOut):
            return "invalid", told(made)
        for digest, seconds in made:  # a second compilation of the same is read from the cache
            self.board.compile_s[digest] = max(seconds, self.board.compile_s.get(digest, 0.0))
        return tuple(digest for digest, _ in made)


class NoInputsError(RuntimeError):
    """The inputs of a kernel, or their float64 result, cannot be made on the device."""


class Board:
    """What all parts share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.until = time.monotonic() + options.budget_s
        self.wanted: queue.SimpleQueue[tuple[Work, Config]] = queue.SimpleQueue()
        self.compile_s: dict[str, float] = {}
        self.restarts = 0
        self.missed = 0
        """Kernels that the timer had to compile itself since it was started: none, if all is well."""
        self.compilers: list[Compiler] = []
        self.timer: Worker | None = None
        self.become_timer()

    def over(self) -> bool:
        return time.monotonic() > self.until

    def start(self, name: str) -> Worker:
        limits = Limits(memory_bytes=48 * 2**30, threads=1)
        return Worker(name, directory=self.folder / "logs", workload=None, limits=limits)

    def become_timer(self) -> None:
        """Start the timer, or a new one."""
        if self.timer is not None:
            self.restarts += 1
            self.timer.close()
        self.timer = self.start("timer")
        device = self.timer.call(
            "record_tables:become_timer", stage="start", limit_s=120, interpret=self.options.smoke
        )
        if isinstance(device, Crashed | TimedOut):
            raise SystemExit(f"no timer: {told(device)}\n{device.log}")
        if not hasattr(self, "device"):
            self.device, self.arch, self.facts = device["name"], device["arch"], device["facts"]

    def timed(self, work: Work, sizes: dict[str, int], config: Config) -> Row:
        """Measure one config at one size, whatever it does to the timer."""
        args = {"kernel": work.kernel, "sizes": sizes}
        values = tuple(config[name] for name in tunable(work.kernel).space.knobs)
        ready = self.timer.call("record_tables:prepare", stage="prepare", limit_s=180, **args)
        if isinstance(ready, Crashed | TimedOut):
            self.become_timer()
            raise NoInputsError(f"{work.kernel} {sizes}: {told(ready)}\n{ready.log}")
        found = self.timer.call(
            "record_tables:measure", stage="measure", limit_s=30, **args, config=config
        )
        if isinstance(found, TimedOut):
            self.become_timer()
            return Row(values=values, status="timed_out", text=told(found))
        if isinstance(found, Crashed):
            healthy = self.timer.alive and not isinstance(
                self.timer.call("record_tables:responds", stage="responds", limit_s=30),
                Crashed | TimedOut,
            )
            if not healthy:
                self.become_timer()
            does_not_fit = healthy and ("OutOfResources" in found.text or "ValueError" in found.text)
            return Row(values=values, status="invalid" if does_not_fit else "crashed", text=told(found))
        self.missed = found["missed"]
        status = "timed" if found["seconds"] else "wrong"
        text = "" if found["seconds"] else f"relative error {found['relative']:.2e}"
        return Row(
            values=values, status=status, seconds=found["seconds"], text=text, facts=found["facts"]
        )


def told(failed: Crashed | TimedOut) -> str:
    text = failed.text if isinstance(failed, Crashed) else f"no answer within {failed.limit_s:g} s"
    return text[:200]


def planned(board: Board) -> Iterator[Work]:
    """All work, in order; the default first, the rest at random, so that a part of a table is fair."""
    for kernel, plan in PLANS.items():
        if board.options.kernels and kernel not in board.options.kernels:
            continue
        one = tunable(kernel)
        default = one.space.default()
        configs = [c for c in one.space.all or () if c != default and fits(one, c, board.facts)]
        random.Random(0).shuffle(configs)
        configs = [default, *configs][: 4 if board.options.smoke else None]
        sizes = (plan.small,) if board.options.smoke else plan.sizes
        yield Work(kernel, sizes, configs, rows=[{} for _ in sizes], again=[[] for _ in sizes])


def fits(one: Tunable, config: Config, facts: dict[str, float]) -> bool:
    need = one.limits(config) if one.limits else {}
    most = {"shared_bytes": facts["shared_bytes"], "threads": 1024, "registers": 255}
    return all(need.get(name, 0) <= limit for name, limit in most.items())


def do(board: Board, work: Work) -> None:
    """Time what the compilers give, until all is done or the time is up."""
    for _ in work.configs:
        while True:
            if board.over():
                return
            try:
                config, compiled = work.ready.get(timeout=0.5)
                break
            except queue.Empty:
                if not any(one.is_alive() for one in board.compilers) and work.ready.empty():
                    return  # they could not start
        for at, (sizes, made) in enumerate(zip(work.sizes, compiled, strict=True)):
            if isinstance(made, tuple) and made and made[0] == "invalid":
                values = tuple(config[name] for name in tunable(work.kernel).space.knobs)
                work.rows[at][key_of(config)] = Row(values=values, status="invalid", text=made[1])
                continue
            work.hashes[key_of(config), at] = made
            work.rows[at][key_of(config)] = board.timed(work, sizes, config)
    for at, sizes in enumerate(work.sizes):
        rows = [board.timed(work, sizes, work.configs[0]) for _ in range(3)]
        work.again[at] = [row.time for row in rows if row.time is not None]


def tables_of(board: Board, work: Work) -> Iterator[tuple[str, Table, dict[str, Any]]]:
    """For each size: file name, table, and its line in the summary."""
    one = tunable(work.kernel)
    for at, sizes in enumerate(work.sizes):
        rows = []
        for config in work.configs:
            row = work.rows[at].get(key_of(config))
            if row is not None:
                digests = work.hashes.get((key_of(config), at), ())
                compile_s = sum(board.compile_s.get(d, 0.0) for d in digests)
                rows.append(Row(**{**_fields(row), "compile_s": round(compile_s, 4)}))
        moved, operations = one.work(**sizes) if one.work else (0.0, 0.0)
        table = Table(
            kernel=work.kernel,
            device=board.device,
            sizes=sizes,
            knobs={name: tuple(knob.values) for name, knob in one.space.knobs.items()},
            rows=tuple(rows),
            default=one.space.default(),
            floor_s=max(moved / board.facts["bandwidth"], operations / board.facts["flops"]),
            device_facts=board.facts,
        )
        whole = len(rows) == len(work.configs)
        name = f"{work.kernel}-{'x'.join(map(str, sizes.values()))}{'' if whole else '.partial'}.json.gz"
        yield name, table, _line(table, whole, work.again[at])


def _fields(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__struct_fields__}


def _line(table: Table, whole: bool, again: list[float]) -> dict[str, Any]:
    counts: dict[str, int] = defaultdict(int)
    for row in table.rows:
        counts[row.status] += 1
    line: dict[str, Any] = {
        "rows": len(table.rows),
        "whole": whole,
        **counts,
        "floor_us": _us(table.floor_s),
    }
    times = sorted(row.time for row in table.rows if row.time is not None)
    if times:
        best = table.best
        default = next((r for r in table.rows if table.config(r) == table.default), None)
        line |= {
            "best_us": _us(times[0]),
            "default_us": _us(default.time if default else None),
            "default_again_us": [_us(t) for t in again],
            "median_us": _us(statistics.median(times)),
            "worst_us": _us(times[-1]),
            "within_2_percent": sum(t <= 1.02 * times[0] for t in times),
            "best": table.config(best),
            "spread": round(statistics.median(map(_spread, (r for r in table.rows if r.seconds))), 4),
            "spills": sum(r.facts.get("spills", 0) > 0 for r in table.rows),
        }
    line["texts"] = sorted({row.text for row in table.rows if row.text})[:6]
    return line


def _spread(row: Row) -> float:
    """Interquartile range over median of a row's samples."""
    low, middle, high = statistics.quantiles(row.seconds, n=4)
    return (high - low) / middle


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)


def write_all(board: Board, done: list[Work]) -> dict[str, Any]:
    """Write the tables, one archive of them, whole tables first, and the summary."""
    out: Path = board.options.out
    found = [one for work in done for one in tables_of(board, work)]
    summary = {
        "device": board.device,
        "facts": board.facts,
        "timer_restarts": board.restarts,
        "binaries": len(board.compile_s),
        "compile_s": round(sum(board.compile_s.values()), 1),
        "compiled_by_timer": board.missed,
        "tables": {name: line for name, _, line in found},
    }
    with tarfile.open(out / "tables.tar", "w") as archive:
        for name, table, _ in sorted(found, key=lambda one: not one[2]["whole"]):
            write(table, board.folder / "tables" / name)
            archive.add(board.folder / "tables" / name, arcname=name)
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for tables.tar and summary.json")
    parser.add_argument(
        "--folder", type=Path, help="folder for single tables and logs; a temporary one if not"
    )
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 4) - 3), help="compilers"
    )
    parser.add_argument("--kernels", nargs="*", help="only these")
    parser.add_argument("--smoke", action="store_true", help="in small, on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = options.folder or Path(temporary)
        os.environ["TRITON_CACHE_DIR"] = str(Path(temporary) / "cache")
        began = time.monotonic()
        summary = run(Board(options, folder))
    print(json.dumps(summary["tables"], indent=None)[:6000])
    took, binaries = time.monotonic() - began, summary["binaries"]
    print(f"{took:.0f} s; {binaries} binaries, {summary['compile_s']} s of compilation")
    return 0


def run(board: Board) -> dict[str, Any]:
    works = list(planned(board))
    for work in works:
        for config in work.configs:
            board.wanted.put((work, config))
    board.compilers = [Compiler(f"compiler-{i}", board) for i in range(board.options.processes)]
    for one in board.compilers:
        one.start()
    print(f"{len(board.compilers)} compilers, {sum(len(w.configs) for w in works)} configs", flush=True)
    if not board.options.smoke:
        found = board.timer.call("record_tables:peaks", stage="peaks", limit_s=60)
        if isinstance(found, Crashed | TimedOut):
            raise SystemExit(f"no peaks: {told(found)}\n{found.log}")
        board.facts = board.facts | found
    began, done = time.monotonic(), []
    for work in works:
        done.append(work)
        try:
            do(board, work)
        except NoInputsError as error:
            print(error, flush=True)
        summary = write_all(board, done)
        print(f"{work.kernel}: {time.monotonic() - began:.0f} s", flush=True)
        if board.over():
            break
    for one in board.compilers:
        if one.worker is not None:
            one.worker.close()
    board.timer.close()
    return summary


if __name__ == "__main__":
    raise SystemExit(main())
