"""Tuning on a device, live: ours, Helion's search, an exhaustive loop, and what Inductor chooses.

    python benchmarks/tune_live.py --out DIR [--kernels gemm attention] [--parts ours warm]

Of each kernel in ``examples/kernels``, at its own size, each searcher gets a process of its own and an
empty compilation cache, one after the other on the quiet machine:

* ours: ``torchstone.tune`` through its public door, cold, with its proofs and finals.
* warm: the same, after the kernel was tuned at the other two sizes of its tables into the same cache;
  the seconds are of the last tuning alone.
* Helion: ``helion.autotuner.autotune`` with ``LFBOTreeSearch``, default effort, on the same space and
  ``build``; through that door it compiles serially. Stopped by its own ``autotune_budget_seconds``.
* exhaustive: what ``triton.autotune`` does with a list of all configs: each is compiled, then timed by
  ``triton.testing.do_bench`` with its default windows. Stopped at a limit; how far it got is said.
* Inductor: ``torch.compile`` of the reference, default and ``max-autotune-no-cudagraphs``.

Then all winners, the default config and the best config of the recorded table are held against float64
and timed side by side in one process: rounds are interleaved, the cache is emptied before each call.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "kernels"))
KERNELS = ("gemm", "attention", "softmax", "layer_norm")
OURS_S, SIBLING_S, HELION_S, EXHAUSTIVE_S = 45, 25, 75, 30
ROUNDS = 40


def tunable(kernel: str) -> Any:
    return importlib.import_module(kernel).tunable


def ours(kernel: str, siblings: bool = False) -> dict[str, Any]:
    import torchstone

    one, before_s = tunable(kernel), 0.0
    with tempfile.TemporaryDirectory() as home:
        for sizes in sizes_beside(one) if siblings else ():
            before = torchstone.tune(one, sizes=sizes, budget=float(SIBLING_S), home=home)
            before_s += before.record.seconds
        tuned = torchstone.tune(one, budget=float(OURS_S), home=home)
    record = tuned.record
    took = [m.time for m in record.measurements]
    return {
        "config": record.config,
        "configs": len(record.measurements),
        "learned_from": record.siblings,
        "before_s": before_s,
        "stop": record.stop,
        "decision": record.text,
        "inside_s": record.seconds,
        "times": took,
    }


def sizes_beside(one: Any) -> list[dict[str, int]]:
    """The other sizes that the kernel has tables of."""
    from torchstone.tuner import replay

    found = [replay.read(p).sizes for p in sorted((HERE / "tables").glob(f"{one.name}-*.json.gz"))]
    return [dict(sizes) for sizes in found if dict(sizes) != one.sizes]


def helion(kernel: str) -> dict[str, Any]:
    from helion.autotuner.config_fragment import BooleanFragment, EnumFragment, PowerOfTwoFragment
    from helion.autotuner.external import autotune

    one = tunable(kernel)
    tunables: dict[str, Any] = {}
    for name, knob in one.space.knobs.items():
        values = list(knob.values)
        numbers = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
        if all(isinstance(v, bool) for v in values):
            tunables[name] = BooleanFragment()
        elif numbers and all(b == 2 * a for a, b in itertools.pairwise(values)):
            tunables[name] = PowerOfTwoFragment(values[0], values[-1], one.space.default()[name])
        else:
            tunables[name] = EnumFragment(tuple(values))
    tried = set()

    def build(config: Any) -> Callable[..., Any]:
        found = one.space.settled({n: config[n] for n in tunables})
        if one.space.why_not(found) is not None:  # it has no predicate: what is refused costs nothing
            raise ValueError("not a valid config")
        tried.add(json.dumps(found))
        return one.build(found)

    best = autotune(
        tunables,
        build,
        one.inputs(0, **one.sizes),
        baseline_fn=one.reference,
        algorithm="LFBOTreeSearch",
        autotune_budget_seconds=HELION_S,
        autotune_ignore_errors=True,
        autotune_random_seed=0,
        autotune_log_level=0,
        autotune_progress_bar=False,
    )
    return {"config": one.space.settled({n: best[n] for n in tunables}), "configs": len(tried)}


def exhaustive(kernel: str) -> dict[str, Any]:
    from triton.testing import do_bench

    one = tunable(kernel)
    given, found, began = one.inputs(0, **one.sizes), {}, time.monotonic()
    configs = list(one.space.all)
    random.Random(0).shuffle(configs)  # a list has no order that could be trusted to be good first
    for tried, config in enumerate(configs, 1):
        try:
            call = one.build(config)
            found[tried] = do_bench(lambda call=call: call(*given), warmup=25, rep=100)
        except (ValueError, RuntimeError) as error:  # as triton.autotune: what does not fit is skipped
            print(kernel, config, str(error)[:80], file=sys.stderr)
        if time.monotonic() - began > EXHAUSTIVE_S:
            break
    best = configs[min(found, key=found.__getitem__) - 1]
    return {"config": best, "configs": tried, "of": len(configs)}


def inductor(kernel: str, mode: str) -> dict[str, Any]:
    import torch

    one = tunable(kernel)
    given = one.inputs(0, **one.sizes)
    torch.compile(one.reference, mode=None if mode == "default" else mode)(*given)
    torch.cuda.synchronize()
    return {"configs": None}


def final(kernel: str, winners: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Errors and interleaved times of everything together."""
    import torch

    from torchstone.bench.timer import Flusher, Timed
    from torchstone.verify.drive import widened_inputs

    one = tunable(kernel)
    given = one.inputs(7, **one.sizes)
    with torch.no_grad():
        truth = one.reference(*widened_inputs(given))
    calls: dict[str, Callable[..., Any]] = {}
    for who, found in winners.items():
        if found.get("config") is not None:
            calls[who] = one.build(found["config"])
        elif who.startswith("inductor"):
            mode = who.partition(" ")[2]
            calls[who] = torch.compile(one.reference, mode=None if mode == "default" else mode)
    calls["control"] = one.build(winners["default"]["config"])
    flusher = Flusher(given[0].device)
    timed, result = {}, {}
    for who, call in calls.items():
        out = call(*given)
        error = float((out.double() - truth).norm() / truth.norm())
        result[who] = {"relative_error": error, "seconds": []}
        timed[who] = Timed(call, given, None, flusher)
    order = list(timed)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for who in order:
            result[who]["seconds"] += timed[who].samples(1, True)
    return result


ASKED = ("ours", "warm", "helion", "exhaustive", "inductor")
PARTS = {"ours": ours, "helion": helion, "exhaustive": exhaustive}


def ask(part: str, kernel: str, limit_s: float, **more: Any) -> dict[str, Any]:
    """Run a part in a process of its own, with an empty compilation cache."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable,
            __file__,
            "--part",
            part,
            "--kernels",
            kernel,
            "--answer",
            str(answer),
        ]
        if more:
            command += ["--more", json.dumps(more)]
        print(f"{kernel}: {part} {more.get('mode', '')}", file=sys.stderr)
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                check=False,
                env={**os.environ, **caches},
                timeout=limit_s,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer within {limit_s:g} s"}
        seconds = time.monotonic() - began
        if not answer.exists():
            return {"failed": done.stderr[-600:], "seconds": seconds}
        return {**json.loads(answer.read_text()), "seconds": seconds}


def table_best(kernel: str) -> dict[str, Any]:
    from torchstone.tuner import replay

    one = tunable(kernel)
    sizes = "x".join(str(s) for s in one.sizes.values())
    path = HERE / "tables" / f"{kernel}-{sizes}.json.gz"
    if not path.exists():
        return {"failed": f"no table {path.name}"}
    table = replay.read(path)
    return {"config": table.config(table.best), "configs": len(table.rows)}


def compare(kernel: str, parts: list[str]) -> dict[str, Any]:
    """Everything that is asked for about one kernel."""
    found: dict[str, Any] = {}
    if "ours" in parts:
        found["ours"] = ask("ours", kernel, OURS_S + 60)
    if "warm" in parts:
        warm = ask("ours", kernel, OURS_S + 2 * SIBLING_S + 150, siblings=True)
        found["warm"] = {**warm, "seconds": warm.get("seconds", 0.0) - warm.get("before_s", 0.0)}
    if "helion" in parts:
        found["helion"] = ask("helion", kernel, HELION_S + 60)
    if "exhaustive" in parts:
        found["exhaustive"] = ask("exhaustive", kernel, EXHAUSTIVE_S + 30)
    if "inductor" in parts:
        for mode in ("default", "max-autotune-no-cudagraphs"):
            found[f"inductor {mode}"] = ask("inductor", kernel, 90, mode=mode)
    found["table's best"] = table_best(kernel)
    found["default"] = {"config": tunable(kernel).space.default(), "configs": 0}
    usable = {w: f for w, f in found.items() if "failed" not in f}
    found["final"] = ask("final", kernel, 120, winners=usable)
    return found


def line(kernel: str, found: dict[str, Any]) -> str:
    rows = []
    times = {w: f for w, f in found["final"].items() if isinstance(f, dict)}
    base = times.get("table's best") or times.get("ours")
    for who, about in found.items():
        if who == "final":
            continue
        if who not in times:
            rows.append(f"{kernel:11s} {who:36s} {about.get('failed', 'not timed')[-90:]}")
            continue
        seconds = times[who]["seconds"]
        ratio = [s / b for s, b in zip(seconds, base["seconds"], strict=True)]
        low, high = sorted(ratio)[len(ratio) // 10], sorted(ratio)[-len(ratio) // 10]
        what = f"{about.get('configs')!s:>5s} configs {about.get('seconds', 0):6.1f} s"
        took = f"{statistics.median(seconds) * 1e6:8.1f} us, {statistics.median(ratio):.3f} of the best"
        error = f"error {times[who]['relative_error']:.1e}"
        rows.append(f"{kernel:11s} {who:36s} {what} {took} [{low:.3f}, {high:.3f}] {error}")
    if "control" in times:
        pairs = zip(times["control"]["seconds"], times["default"]["seconds"], strict=True)
        noise = statistics.median(a / b for a, b in pairs)
        rows.append(f"{kernel:11s} default, built twice: {noise:.3f}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS))
    parser.add_argument("--parts", nargs="*", default=list(ASKED))
    parser.add_argument("--out", type=Path, default=Path("live"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--more", type=json.loads, default={}, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        functions = {**PARTS, "inductor": inductor, "final": final}
        answer = functions[arguments.part](arguments.kernels[0], **arguments.more)
        arguments.answer.write_text(json.dumps(answer))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for kernel in arguments.kernels:
        found = compare(kernel, arguments.parts)
        (arguments.out / f"live-{kernel}.json").write_text(json.dumps(found))
        print(line(kernel, found), flush=True)


if __name__ == "__main__":
    main()
