"""The public suite, on problems of our own: what becomes of each, and of each way to be wrong."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest
import torch

from torchstone import cli
from torchstone.errors import EnvironmentLacksError, InputError, StoreError
from torchstone.kernelbench import Request, execute, gather
from torchstone.kernelbench.jobs import Line
from torchstone.kernelbench.load import Setup
from torchstone.kernelbench.policy import Policy
from torchstone.kernelbench.suite import Selection, parse_problems
from torchstone.records.kernelbench import BenchColumn, BenchProblem, BenchRun
from torchstone.report import kernelbench as report

pytestmark = pytest.mark.slow  # workers, compilers or the interpreter in most of them

TESTS = Path(__file__).parent
SAMPLES = TESTS / "kernelbench_samples"
LINE = "kernelbench_samples.line"
QUICK = Policy(begin_s=60, build_s=6, call_s=60, race=5, rounds=8, seconds=1)


def suite_in(folder: Path) -> Path:
    """The samples, and one that no parser takes, which must not lie among our sources."""
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("*.pyc", "line.py"))
    (folder / "level2" / "4_syntax_error.py").write_text("class Model(\n")
    return folder


def request(folder: Path, problems: str = "", **changes: object) -> Request:
    given: dict[str, object] = {
        "path": folder / "suite",
        "out": folder / "out",
        "home": folder,
        "setup": Setup(device="cpu"),
        "selection": Selection(problems=parse_problems(problems)),
        "line": Line(columns=f"{LINE}:COLUMNS", candidates=f"{LINE}:ALL"),
        "policy": QUICK,
        "threads": 1,
    }
    return Request(**{**given, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> tuple[BenchRun, Path]:
    """A run over all samples but the one that hangs; made once, whichever test processes ask for it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "kernelbench"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "out" / "results.json").exists():
            suite = suite_in(folder / "suite")
            (suite / "level3" / "3_hangs.py").unlink()
            execute(request(folder))
    return msgspec.json.decode((folder / "out" / "results.json").read_bytes(), type=BenchRun), folder


def problem(run: BenchRun, key: str) -> BenchProblem:
    return next(p for p in run.problems if p.key == key)


def column(run: BenchRun, key: str, name: str) -> BenchColumn:
    found = problem(run, key).column(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("key", "outcome", "text"),
    [
        ("1/1", "judged", ""),
        ("1/2", "judged", ""),
        ("1/3", "unverifiable", "two calls of eager differ in output"),
        ("2/1", "degenerate", "does not depend on its input"),
        ("2/2", "degenerate", "does not depend on its input"),
        ("2/3", "judged", ""),
        ("2/4", "failed", "SyntaxError"),
        ("3/1", "judged", ""),
        ("3/2", "failed", "exited with code 7"),
        ("3/4", "failed", "package_that_nobody_has"),
    ],
)
def test_outcome_of_each_problem(
    whole: tuple[BenchRun, Path], key: str, outcome: str, text: str
) -> None:
    found = problem(whole[0], key)
    assert found.outcome == outcome, found.text
    assert text in found.text
    if outcome != "failed":
        assert [o.contract for o in found.ours] == [1e-4, 1e-3]
    if outcome in ("degenerate", "unverifiable"):
        assert all(o.choice == "KEEP_BASELINE" and o.ratio == 1 and o.reason for o in found.ours)


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("one element", "wrong", "from float64"),
        ("three thousandths", "wrong", "3.0e-03 from float64"),
        ("other strides", "wrong", "strides"),
        ("half", "wrong", "dtype torch.float16"),
        ("same storage", "wrong", "a later call changes the result of an earlier one"),
        ("writes input", "wrong", "it changes input[0]"),
        ("unfit", "unfit", "made for something else"),
        ("raises", "invalid", "no such kernel"),
        ("crashes", "crashed", "exited with code 3"),
        ("crashes later", "crashed", "exited with code 4"),
        ("hangs", "timed_out", "no answer within 6 s"),
    ],
)
def test_each_way_to_be_wrong_is_told_apart(
    whole: tuple[BenchRun, Path], name: str, status: str, text: str
) -> None:
    found = column(whole[0], "1/1", name)
    assert found.status == status, found.text
    assert text in found.text
    assert not any(p.proved for p in found.proofs)


def test_what_is_right_a_few_times_and_then_stale_is_found_after_timing(
    whole: tuple[BenchRun, Path],
) -> None:
    stale = [column(whole[0], key, "remembers") for key in ("1/1", "2/3", "1/2", "3/1")]
    assert all(c.status != "timed" for c in stale)  # whoever is timed in the finals has survived them
    assert any(c.text.startswith("after many calls") for c in stale)


def test_a_contract_admits_what_keeps_to_it_and_no_more(whole: tuple[BenchRun, Path]) -> None:
    found = column(whole[0], "1/1", "five ten-thousandths")
    assert [(p.contract, p.proved) for p in found.proofs] == [(1e-4, False), (1e-3, True)]
    assert found.relative == pytest.approx(5e-4, rel=0.01)
    assert (found.suite_passed, found.suite_trials) == (0, 5)
    assert column(whole[0], "1/1", "right").suite_passed == 5


def test_buffers_must_come_out_as_eager_leaves_them(whole: tuple[BenchRun, Path]) -> None:
    assert "buffer norm.running_mean" in column(whole[0], "1/2", "frozen buffers").text
    assert column(whole[0], "1/2", "right").keeps(1e-4)
    assert column(whole[0], "2/3", "frozen buffers").keeps(1e-4)  # it has none


def test_a_problem_that_changes_its_input_is_judged_by_that_too(whole: tuple[BenchRun, Path]) -> None:
    assert column(whole[0], "3/1", "right").keeps(1e-4)
    assert not column(whole[0], "3/1", "writes input").keeps(1e-3)


def test_ours_is_proved_and_faster_or_the_baseline_at_one(whole: tuple[BenchRun, Path]) -> None:
    run, _ = whole
    for found in run.problems:
        for one in found.ours:
            if one.promoted:
                chosen = column(run, found.key, one.choice)
                assert chosen.status == "timed"
                assert chosen.keeps(one.contract)
                assert one.relation == "FASTER"
                assert one.low > 1
            else:
                assert (one.ratio, one.low, one.high) == (1, 1, 1)
                assert one.reason
    promoted = [o for p in run.problems for o in p.ours if o.promoted]
    assert promoted  # the baseline of these tests works for two milliseconds first


def test_figures_are_of_counted_problems_alone(whole: tuple[BenchRun, Path]) -> None:
    run, _ = whole
    levels = {(s.level, s.half): s for s in run.levels}
    two = levels[2, "all"]
    assert (two.problems, two.counted, two.correct) == (4, 1, 1)
    assert two.degenerate == ("2/1", "2/2")
    assert two.failed == ("2/4",)
    assert levels[1, "all"].unverifiable == ("1/3",)
    assert levels[1, "even"].problems + levels[1, "odd"].problems == levels[1, "all"].problems
    assert set(run.worst) == {"1/1", "1/2", "1/3", "2/3", "3/1"}


def test_the_least_that_a_problem_asks_for_is_counted(whole: tuple[BenchRun, Path]) -> None:
    roof = problem(whole[0], "1/1").roofline
    assert roof is not None
    assert roof.bytes == 3 * 64 * 96 * 4  # two inputs, one output
    linear = problem(whole[0], "2/3").roofline
    assert linear is not None
    assert linear.flops >= 2 * 24 * 48 * 32
    assert linear.memory_s > 0


def test_raw_samples_are_kept_and_paired(whole: tuple[BenchRun, Path]) -> None:
    for found in whole[0].problems:
        timed = [c for c in found.columns if c.status == "timed"]
        assert len({len(c.seconds) for c in timed}) <= 1
        assert all(s > 0 for c in timed for s in (*c.race, *c.seconds))


def test_the_report_says_what_became_of_everything(whole: tuple[BenchRun, Path]) -> None:
    text = report.markdown(whole[0])
    for words in (
        "| 1/1 1_add_scaled | judged |",
        "level 2, output does not depend on the input: 2/1, 2/2",
        "3/2 cannot be run: eager: exited with code 7",
        "copy bandwidth",
        "## What limits the worst ten",
    ):
        assert words in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 2  # two tables, each of one width
    assert not report.clean(whole[0])  # some cannot be run


def test_what_is_known_is_not_done_again_unless_it_is_damaged(
    whole: tuple[BenchRun, Path], tmp_path: Path
) -> None:
    shutil.copytree(whole[1] / "suite", tmp_path / "suite")
    shutil.copytree(whole[1] / "out", tmp_path / "out", ignore=shutil.ignore_patterns("cache", "work"))
    kept = {p.name.rpartition("-")[0]: p for p in (tmp_path / "out" / "problems").glob("*.json")}
    kept["3-4"].write_bytes(kept["3-4"].read_bytes()[:-2])
    kept["2-4"].unlink()
    seen: list[str] = []
    again = execute(request(tmp_path), lambda found, *_: seen.append(found.key))
    assert seen == ["2/4", "3/4"]
    assert again.measured == 2
    assert len(again.damaged) == 1
    assert kept["3-4"].name in again.damaged[0]
    assert [p.key for p in again.problems] == [p.key for p in whole[0].problems]
    with pytest.raises(StoreError, match="columns"):
        execute(request(tmp_path, line=Line(columns=f"{LINE}:COLUMNS", candidates=f"{LINE}:RIGHT")))


def test_what_is_known_can_be_gathered_with_nothing_run(
    whole: tuple[BenchRun, Path], tmp_path: Path
) -> None:
    run, folder = whole
    shutil.copytree(folder / "out", tmp_path / "out", ignore=shutil.ignore_patterns("cache", "work"))
    (tmp_path / "out" / "results.json").unlink()  # as where the run was cut short
    found = gather(request(tmp_path, setup=Setup(device="cuda")))  # wherever that is asked
    assert (found.problems, found.levels, found.worst) == (run.problems, run.levels, run.worst)
    assert (found.device, found.peaks, found.environment) == (run.device, run.peaks, run.environment)
    assert found.measured == 0
    with pytest.raises(StoreError, match="holds no results"):
        gather(request(tmp_path, out=tmp_path / "nowhere"))


def in_another_process(folder: Path, code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


RUN = """
    import sys
    from pathlib import Path
    from test_kernelbench import request
    from torchstone.kernelbench import execute
    print(execute(request(Path(sys.argv[1]), sys.argv[2])).measured)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    suite_in(tmp_path / "suite")
    asked = (tmp_path, "1/2,2/4,2/3,3/4")
    first = in_another_process(tmp_path, RUN, *asked)
    folder, deadline = tmp_path / "out" / "problems", time.monotonic() + 240
    while not list(folder.glob("*.json")) and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.json")}
    assert 1 <= len(before) < 4
    out, err = in_another_process(tmp_path, RUN, *asked).communicate(timeout=400)
    assert out.split() == [str(4 - len(before))], err
    assert {p.name: p.stat().st_mtime_ns for p in folder.glob("*.json") if p.name in before} == before
    run = msgspec.json.decode((tmp_path / "out" / "results.json").read_bytes(), type=BenchRun)
    assert [p.outcome for p in run.problems] == ["judged", "judged", "failed", "failed"]


@pytest.mark.slow
def test_the_command_runs_the_real_compiler_and_answers_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_in(tmp_path / "suite")
    options = ["--device", "cpu", "--columns", "core", "--candidates", f"{LINE}:RIGHT", "--json"]
    folders = ["--out", str(tmp_path / "out"), "--home", str(tmp_path)]
    command = ["kernelbench", str(suite), "--problems", "1/2", *options, *folders]
    with pytest.raises(SystemExit) as stopped:
        cli.main(command)
    out, _ = capsys.readouterr()
    assert stopped.value.code == 0
    run = msgspec.json.decode(out, type=BenchRun)
    found = column(run, "1/2", "compile")
    assert found.keeps(1e-4)
    assert found.cold_s is not None
    assert found.warm_s is not None
    assert problem(run, "1/2").against == "compile"
    assert (tmp_path / "out" / "results.md").read_text().startswith("# KernelBench: 1 problems on cpu")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["kernelbench", str(tmp_path), "--json"])
    assert stopped.value.code == 2
    assert "no folder level1" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs that there is no CUDA device")
def test_a_device_that_is_not_there_is_said_before_anything_is_written(tmp_path: Path) -> None:
    suite_in(tmp_path / "suite")
    with pytest.raises(EnvironmentLacksError, match="no CUDA device"):
        execute(request(tmp_path, setup=Setup(device="cuda")))
    assert not (tmp_path / "out").exists()


def test_a_column_that_is_not_there_is_said_with_those_that_are(tmp_path: Path) -> None:
    suite_in(tmp_path / "suite")
    with pytest.raises(InputError, match="no column 'fastest'") as caught:
        execute(request(tmp_path, columns=("fastest",)))
    assert "eager, compile, other" in (caught.value.hint or "")
    with pytest.raises(InputError, match="no_such_module"):
        execute(request(tmp_path, line=Line(candidates="no_such_module:X")))


@pytest.mark.slow
def test_a_problem_that_hangs_is_an_outcome(tmp_path: Path) -> None:
    suite_in(tmp_path / "suite")
    run = execute(request(tmp_path, "3/3", policy=Policy(build_s=3, call_s=5)))
    assert run.problems[0].outcome == "failed"
    assert "no answer within 3 s" in run.problems[0].text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_compiling_overlaps_and_everything_is_judged(tmp_path: Path) -> None:
    suite_in(tmp_path / "suite")
    run = execute(
        request(
            tmp_path,
            "1/1,1/2,1/3,2/1,2/3,3/1",
            setup=Setup(device="cuda", inputs_on="cuda"),
            line=Line(),
            jobs=3,
            policy=Policy(),
        )
    )
    outcomes = {p.key: p.outcome for p in run.problems}
    assert outcomes == {
        "1/1": "judged",
        "1/2": "judged",
        "1/3": "unverifiable",
        "2/1": "degenerate",
        "2/3": "judged",
        "3/1": "judged",
    }
    for found in run.problems:
        compiled = found.column("compile")
        assert compiled is not None
        assert compiled.status == "timed", compiled.text
        assert found.strong is not None
        for one in found.ours:
            assert one.ratio >= 1
    graph = column(run, "2/3", "static CUDA graph")
    assert graph.keeps(1e-4), graph.text
    tf32 = column(run, "2/3", "TF32")
    assert tf32.keeps(1e-3) or tf32.text
    assert report.markdown(run)
