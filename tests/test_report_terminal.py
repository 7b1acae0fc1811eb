"""The report on a terminal, and a run while it is going on."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading

import pytest
from rich.cells import cell_len
from rich.console import Console

import report_samples as samples
from torchstone.report import format as fmt
from torchstone.report import words
from torchstone.report.collect import Report, collect
from torchstone.report.progress import LiveProgress, QuietProgress
from torchstone.report.terminal import render


def shown(
    report: Report, width: int, *, terminal: bool = False, files: dict[str, str] | None = None
) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=width, force_terminal=terminal), files)
    return out.getvalue()


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", samples.RUNS)
def test_no_line_is_wider_than_the_console(name: str, width: int) -> None:
    text = shown(collect(*samples.RUNS[name]()), width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_verdict_comes_first_in_one_sentence() -> None:
    text = shown(collect(*samples.full()), 120)
    assert text.startswith(
        "PROMOTE openvino: 1.62x faster than eager [1.58, 1.66], error 9.8e-07 within 1.1e-05\n"
    )


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("kept", "KEEP_BASELINE: keep eager"),
        ("held", "HOLD: stay with eager"),
        ("partial", "UNFINISHED: 2 of 7 candidates have a verdict"),
        ("started", "UNFINISHED: 0 of 7 candidates have a verdict"),
    ],
)
def test_other_verdicts(name: str, start: str) -> None:
    assert shown(collect(*samples.RUNS[name]()), 80).startswith(start)


def test_unfinished_run_says_how_to_go_on() -> None:
    assert "torchstone run examples/minilm --resume" in shown(collect(*samples.partial()), 80)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("terminal", [False, True])
def test_every_reason_and_failure_is_said(width: int, terminal: bool) -> None:
    report = collect(*samples.full())
    text = squeezed(re.sub(r"\x1b\[[0-9;]*m", "", shown(report, width, terminal=terminal)))
    assert report.decision is not None
    for reason in report.decision.reasons:
        assert squeezed(reason.text) in text
    for row in words.failed(report):
        assert row.verdict is not None
        assert squeezed(f"{row.recipe}: {row.status}") in text
        assert squeezed(words.reason(row.verdict.verdict)) in text
    assert "pipinstalltensorrt" in text


def test_every_candidate_has_a_line_with_its_figures() -> None:
    report = collect(*samples.full())
    lines = shown(report, 200).splitlines()
    for row in report.rows:
        line = next(line for line in lines if line.startswith(f"{row.recipe} "))
        assert row.status in line
        if row.comparison is not None:
            assert fmt.interval(row.comparison.low, row.comparison.high) in line
        if row.build is not None:
            assert fmt.seconds(row.build.seconds) in line


def test_files_come_last_and_are_not_broken() -> None:
    path = "/somewhere/" + "deep/" * 30 + "report.html"
    assert shown(collect(*samples.single()), 80, files={"report": path}).endswith(f"report: {path}\n")


def test_markup_of_the_user_is_text() -> None:
    assert "[bold red]x[/]" in shown(collect(*samples.hostile()), 200, terminal=True)


def driven(progress: LiveProgress | QuietProgress) -> None:
    progress.stage("capture", None, 120)
    progress.stage("build and verify", 2, 1800)
    progress.step("eager")
    progress.note("verified  eager  1.0e-06 <= 1.1e-05")
    progress.advance()
    progress.step("openvino\x1b[31m")
    progress.advance()
    progress.done()
    progress.done()


def test_plain_progress_is_one_line_each() -> None:
    out = io.StringIO()
    driven(LiveProgress(Console(file=out, width=80)))
    assert out.getvalue().splitlines() == [
        "capture, at most 2 min",
        "build and verify, 2 steps, at most 30 min",
        "  1/2 eager",
        "  verified  eager  1.0e-06 <= 1.1e-05",
        "  2/2 openvino",
    ]


def test_live_progress_shows_the_ladder_with_its_counts_and_limits() -> None:
    out = io.StringIO()
    now = iter(range(0, 100_000, 30))
    progress = LiveProgress(
        Console(file=out, width=80, force_terminal=True), clock=lambda: float(next(now))
    )
    driven(progress)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "of at most 30 min" in text
    last = text.splitlines()[-2:]
    assert last[0].startswith("capture")
    assert last[1].startswith("build and verify  2/2")
    assert "verified  eager" in text


def test_live_progress_gives_the_cursor_back() -> None:
    out = io.StringIO()
    driven(LiveProgress(Console(file=out, width=80, force_terminal=True)))
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0


def test_an_interrupt_that_skips_done_gives_the_cursor_back() -> None:
    code = (
        "from rich.console import Console\n"
        "from torchstone.report.progress import LiveProgress\n"
        "progress = LiveProgress(Console(stderr=True, force_terminal=True))\n"
        "progress.stage('bench', 20, 60)\n"
        "raise KeyboardInterrupt\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "KeyboardInterrupt" in ended.stderr
    assert ended.stderr.rfind("\x1b[?25h") > ended.stderr.rfind("\x1b[?25l") >= 0


def test_progress_takes_calls_from_many_threads() -> None:
    out = io.StringIO()
    progress = LiveProgress(Console(file=out, width=80, force_terminal=True))
    progress.stage("build and verify", 400, None)

    def work(name: int) -> None:
        for i in range(50):
            progress.step(f"{name}/{i}")
            progress.note(f"note {name}/{i}")
            progress.advance()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    progress.done()
    assert "400/400" in out.getvalue()
    assert out.getvalue().count("note ") == 400


def test_quiet_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    driven(QuietProgress())
    assert capsys.readouterr() == ("", "")
