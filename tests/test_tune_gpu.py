"""Tuning real kernels on a real device: what only a device can show.

Timing is compared here, so the tests take turns even where several processes run tests.
"""

import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchstone import tuning
from torchstone.bench.timer import Flusher, Timed
from torchstone.measure.live import LiveMeasurer
from torchstone.records.tuning import Config, MeasurePolicy
from torchstone.tuner.driver import Budget
from torchstone.tuner.search import searcher_of
from torchstone.tuner.search.base import Proposal
from torchstone.tuner.space import Choice, Space
from torchstone.tuner.tunable import Tunable

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "kernels"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICY = MeasurePolicy(samples=5, race=2, rounds=6, finalists=2)
SIZE = 1 << 16
LOG = "TUNE_GPU_LOG"
"""Variable that names a file to which workers add lines."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "test_tune_gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "log"
    file.touch()
    monkeypatch.setenv(LOG, str(file))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return file


def say(*words: object) -> None:
    """One line to the log; lines of several processes do not mix."""
    with Path(os.environ[LOG]).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


# ---- a kernel that can break the device


@triton.jit
def _double(x, out, n, AWAY: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at + AWAY, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.jit(debug=True)
def _double_asserting(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.device_assert(n < 0, "on purpose")
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def build(config: Config) -> Callable[[torch.Tensor], torch.Tensor]:
    how, block = config["how"], config["block"]

    def call(x: torch.Tensor) -> torch.Tensor:
        say(os.getpid(), how)
        out = torch.empty_like(x)
        grid = (triton.cdiv(len(x), block),)
        if how == "asserts":
            _double_asserting[grid](x, out, len(x), BLOCK=block)
        else:  # 2^47 bytes away there is nothing
            _double[grid](x, out, len(x), AWAY=1 << 45 if how == "strays" else 0, BLOCK=block)
        return out

    return call


def inputs(seed: int, n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)).cuda(),)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


DOUBLE = Tunable(
    name="double",
    build=build,
    space=Space({"how": Choice(("right", "strays", "asserts")), "block": Choice((128, 256, 512, 1024))}),
    inputs=inputs,
    reference=doubled,
    sizes={"n": SIZE},
    odd=({"n": 77},),
)


def proposals(*configs: tuple[str, int]) -> list[Proposal]:
    return [Proposal({"how": how, "block": block}, "test") for how, block in configs]


@pytest.mark.parametrize(
    ("how", "told"), [("strays", "illegal memory access"), ("asserts", "device-side assert")]
)
def test_what_breaks_the_device_is_a_row_and_the_next_config_gets_a_new_process(
    tmp_path: Path, log: Path, how: str, told: str
) -> None:
    wanted = proposals(("right", 256), (how, 256), ("right", 512))
    with LiveMeasurer(DOUBLE, POLICY, tmp_path / "work", 0) as one:
        found = list(one.measure(wanted, None))
    assert [m.status for m in found[:2]] == ["timed", "crashed"], found
    assert found[2].status in ("timed", "dropped"), found[2]
    assert told in found[1].text
    assert found[1].time is None
    assert found[2].time is not None
    lines = [line.split() for line in log.read_text().splitlines()]
    turns = [pid for i, (pid, _) in enumerate(lines) if i == 0 or pid != lines[i - 1][0]]
    assert len(turns) == 2  # one process until it was spoiled, then one other
    spoiled = {pid for pid, kind in lines if kind == how}
    assert spoiled == {turns[0]}
    assert lines[-1] == [turns[1], "right"]


# ---- compiled by others


def build_watched(config: Config) -> Callable[[torch.Tensor], torch.Tensor]:
    def compiled(*, cache_hit: bool, **_: object) -> None:
        say(os.getpid(), config["block"], "found" if cache_hit else "compiled")

    triton.knobs.compilation.listener = compiled

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _double[(triton.cdiv(len(x), config["block"]),)](x, out, len(x), 0, config["block"])
        return out

    return call


def test_what_the_pool_compiles_reaches_the_process_that_times_by_the_cache_on_disk(
    tmp_path: Path, log: Path
) -> None:
    wanted = proposals(*(("right", block) for block in (128, 256, 512, 1024)))
    with LiveMeasurer(replace(DOUBLE, build=build_watched), POLICY, tmp_path / "work", 2) as one:
        found = list(one.measure(wanted, None))
    assert {m.status for m in found} <= {"timed", "dropped"}, found
    assert all(m.facts["registers"] > 0 for m in found)
    pids: dict[str, set[str]] = {"compiled": set(), "found": set()}
    blocks: dict[str, list[int]] = {"compiled": [], "found": []}
    for line in log.read_text().splitlines():
        pid, block, what = line.split()
        pids[what].add(pid)
        blocks[what].append(int(block))
    assert sorted(blocks["compiled"]) == [128, 256, 512, 1024]  # each once, by whomever
    assert sorted(blocks["found"]) == [128, 256, 512, 1024]
    assert len(pids["found"]) == 1
    assert not pids["found"] & pids["compiled"]  # who times has compiled nothing


# ---- a whole search


def test_a_search_goes_on_past_what_does_not_fit_and_its_finals_are_paired(tmp_path: Path) -> None:
    import gemm

    whole = gemm.tunable
    fixed = {name: Choice((value,)) for name, value in whole.space.default().items()}
    # seven stages of two tiles of 128 x 128 in float16 are more than any block may have
    varied = {"BLOCK_K": Choice((128,)), "stages": Choice((2, 7)), "group": Choice((4, 16))}
    one = replace(
        whole,
        space=Space({**fixed, **varied}),
        limits=None,  # or the search would know beforehand
        sizes={"m": 1024, "n": 1024, "k": 1024},
    )
    request = tuning.Request(
        budget=Budget(seconds=60.0),
        searcher=searcher_of("exhaustive"),
        policy=POLICY,
        home=tmp_path,
        lanes=2,
    )
    tuned = tuning.execute(one, request)
    status = defaultdict(list)
    for m in tuned.record.measurements:
        status[m.config["stages"]].append(m)
    assert [m.status for m in status[7]] == ["invalid", "invalid"], status[7]
    assert all("out of resource" in m.text for m in status[7])
    assert len(status[2]) == 2
    assert {m.status for m in status[2]} <= {"timed", "dropped"}, status[2]
    entries = tuned.record.finals.entries
    assert [e.label for e in entries] == ["default", "finalist", "control"]
    assert {e.status for e in entries} == {"timed"}, entries
    assert {len(e.seconds) for e in entries} == {POLICY.rounds}
    assert {"held-out-0", "values-large", "odd-0", "odd-2"} <= set(tuned.record.finals.cases)
    assert tuned.record.decision in ("PROMOTE", "KEEP_BASELINE")
    assert tuned.config["stages"] == 2
    floor_s = tuned.record.floor_s
    assert floor_s is not None
    # no call beats the roofline; 2% for the clocks of the two measurements
    assert min(min(e.seconds) for e in entries) > 0.98 * floor_s
    given = whole.inputs(5, **one.sizes)
    exact = whole.reference(*(value.double() for value in given))
    assert float((tuned(*given).double() - exact).norm() / exact.norm()) < 2e-3


# ---- seconds


@triton.jit
def _chase(following, out, steps):
    at = tl.load(following)
    for _ in range(1, steps):
        at = tl.load(following + at)
    tl.store(out, at)


def test_emptying_the_cache_makes_each_load_a_miss() -> None:
    """A chain of loads, each waiting for the one before: its time is latency and nothing else."""
    steps, apart = 1024, 1024  # 4 KiB apart: no two in a line
    following = torch.zeros(steps * apart, dtype=torch.int32, device="cuda")
    places = torch.arange(steps, device="cuda") * apart
    following[places] = ((places + apart) % (steps * apart)).int()
    out = torch.full((1,), -1, dtype=torch.int32, device="cuda")

    def call(following: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _chase[(1,)](following, out, steps, num_warps=1)
        return out

    timed = Timed(call, (following, out), None, Flusher(following.device))
    cold, warm = (statistics.median(timed.samples(15, flush)) for flush in (True, False))
    assert int(out) == 0  # once around
    assert cold > 1.3 * warm, (cold, warm)  # an L2 hit takes some 250 ns, a miss twice that and more
    assert 5e-8 < warm / steps < 2e-6, warm


def test_events_and_the_wall_clock_agree() -> None:
    """Of long calls, back to back, where launches hide behind the work."""
    a = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")

    def call(a: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            out = a @ a
        return out

    timed = Timed(call, (a,), None, Flusher(a.device))
    timed.samples(10, False)  # clocks settle
    events = statistics.median(timed.samples(20, False))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        call(a)
    torch.cuda.synchronize()
    assert events == pytest.approx((time.perf_counter() - began) / 20, rel=0.25)


# ---- in the place of triton.autotune

SCRIPT = """
import json, sys, torch, triton, triton.language as tl
import torchstone

N = 1 << 24

@torchstone.autotune(
    [triton.Config({"BLOCK": b}, num_warps=w) for b in (1024, 2048, 4096) for w in (4, 8)],
    key=["n"], home=sys.argv[1],
)
@triton.jit
def scale(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if BLOCK == 4096:  # half the work, so the quickest by far
        mask = at < n // 2
    tl.store(x + at, tl.load(x + at, mask=mask) * 2 + 1, mask=mask)

launches, run = [], scale.fn.run
scale.fn.run = lambda *a, **k: (launches.append(k["BLOCK"]), run(*a, **k))[1]
grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)
before = torch.randn(N, device="cuda")
x = before.clone()
scale[grid](x, N)
first = len(launches)
once = torch.equal(x, before * 2 + 1)
scale[grid](x, N)
twice = torch.equal(x, (before * 2 + 1) * 2 + 1)
print(json.dumps({
    "first": first, "second": len(launches) - first, "blocks": sorted(set(launches)),
    "once": once, "twice": twice, "best": str(scale.best_config),
    "block": scale.best_config.kwargs["BLOCK"],
    "ms": [t[0] for t in getattr(scale, "configs_timings", {}).values()],
}))
"""


def test_a_kernel_in_place_is_tuned_on_copies_and_a_second_process_takes_the_answer(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"  # Triton reads the source of a kernel from a file
    script.write_text(SCRIPT)

    def run() -> dict[str, object]:
        command = [sys.executable, str(script), str(tmp_path / "home")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return answer

    first, second = run(), run()
    for one in (first, second):
        assert (one["once"], one["twice"], one["second"]) == (True, True, 1), one
        assert one["block"] in (1024, 2048), one
    assert first["blocks"] == [1024, 2048, 4096]
    assert len(first["ms"]) == 4  # what is wrong has no time
    moved = 2 * 4 * (1 << 24)
    # 128 MiB through memory: no device of today reads 20 TB/s, none that runs this is below 100 GB/s
    assert all(moved / 20e12 < ms / 1e3 < moved / 100e9 for ms in first["ms"]), first
    assert second["best"] == first["best"]
    assert second["ms"] == []  # nothing was searched
    assert second["first"] < first["first"] / 2
    assert 4096 not in second["blocks"]
