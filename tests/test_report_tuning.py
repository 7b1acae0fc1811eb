"""A tuning's page, its end on a terminal, and its display while it runs: complete, safe, and right."""

from __future__ import annotations

import ast
import html
import io
import math
import re
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import tuning_samples as samples
from test_report_html import CHROMIUM, Page, never_scrolls_sideways, squeezed
from torchstone.records.tuning import Config, Finals, Measurement, Tuning, Value
from torchstone.report import format as fmt
from torchstone.report import schema
from torchstone.report import tune_words as words
from torchstone.report import tuning as report
from torchstone.report.html import tuning as page

SCHEMA = Path(__file__).parent.parent / "docs" / "tuning.schema.json"


@pytest.fixture(scope="module", params=samples.SAMPLES)
def found(request: pytest.FixtureRequest) -> Tuning:
    return samples.SAMPLES[request.param]()


@pytest.fixture(scope="module")
def full() -> Tuning:
    return samples.full()


def shown(found: Tuning, width: int = 80, use: str | None = None) -> str:
    out = io.StringIO()
    report.render(found, Console(file=out, width=width), {"report": "a/report.html"}, use)
    return out.getvalue()


def text_of(found: Tuning) -> str:
    return Page(re.sub(r"<style>.*?</style>", "", page.render(found), flags=re.DOTALL)).text


def times(*seconds: float, **config: Value) -> Measurement:
    return Measurement(config=config, status="timed", seconds=seconds)


# --- the page -------------------------------------------------------------------------------------


def test_page_is_well_formed_and_the_same_after_a_round_trip(found: Tuning) -> None:
    source = page.render(found)
    Page(source)
    assert source == page.render(msgspec.json.decode(msgspec.json.encode(found), type=Tuning))
    source.encode("utf-8")
    assert len(source) < 200_000


def test_nothing_is_fetched_and_nothing_runs(found: Tuning) -> None:
    source = page.render(found)
    for tag, attributes in Page(source).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "form", "a", "base")
        assert not [
            a for a in attributes if a in ("src", "href", "xlink:href", "style") or a.startswith("on")
        ]
    (style,) = re.findall(r"<style>(.*?)</style>", source, re.DOTALL)
    assert not re.search(r"url\(|@import|https?:", style)


def test_drawings_and_tables_are_named(found: Tuning) -> None:
    tags = Page(page.render(found)).tags
    assert all(a.get("aria-label") for tag, a in tags if tag == "svg" and a.get("role") == "img")
    assert sum(tag == "table" for tag, _ in tags) == sum(tag == "caption" for tag, _ in tags)
    assert sum(tag == "h1" for tag, _ in tags) == 1
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(a["aria-labelledby"] in ids for _, a in tags if "aria-labelledby" in a)


def test_no_figure_is_broken(found: Tuning) -> None:
    source = re.sub(r"<style>.*?</style>", "", page.render(found), flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None)\b", source)
    assert not re.search(r"\b(nan|inf|None)\b", shown(found))


def test_decision_finals_failures_and_evidence_are_there(found: Tuning) -> None:
    text = text_of(found)
    assert squeezed(words.headline(found)) in text
    assert found.stop in text
    for entry in found.finals.entries:
        assert squeezed(words.config(entry.config)) in text
    for one in found.comparisons:
        assert squeezed(f"{fmt.ratio(one.ratio)} {fmt.interval(one.low, one.high)}") in text
    for failure in words.failures(found.measurements):
        assert squeezed(f"{failure.number} {failure.status.replace('_', ' ')}") in text
        assert squeezed(failure.texts[0][0])[:40] in text
    for part in (found.key.space, found.key.source, found.key.policy):
        assert part in text


def test_figures_of_the_winner_come_first(full: Tuning) -> None:
    top = text_of(full).split("Thesearch")[0]
    won = words.chosen(full)
    assert won is not None
    assert full.floor_s is not None
    seconds = statistics.median(
        next(e for e in full.finals.entries if e.config == full.config and e.label == "finalist").seconds
    )
    for part in (
        fmt.ratio(won.ratio),
        squeezed(fmt.interval(won.low, won.high)),
        squeezed(fmt.seconds(seconds)),
        fmt.percent(full.floor_s / seconds),
        str(len(full.measurements)),
        squeezed(words.config(full.config)),
    ):
        assert part in top


def test_every_measurement_is_drawn_once(found: Tuning) -> None:
    source = page.render(found)
    right = [m for m in found.measurements if m.time is not None]
    assert source.count("h0") == len(right)
    lane = re.search(r'aria-label="Failures by number.*?</figure>', source, re.DOTALL)
    failed = len(found.measurements) - len(right)
    kinds = len(words.failures(found.measurements))
    drawn = 0 if lane is None else len(re.findall(r'<path d="M(?:0 -7|-4 -4)', lane.group()))
    assert drawn == (failed + kinds if failed else 0)  # one more of each kind, in the legend


def test_what_is_not_known_is_not_claimed() -> None:
    for name in ("failed", "empty"):
        text = text_of(samples.SAMPLES[name]())
        assert "roofline" not in text
        assert "Whateachknobdid" not in text
        assert "Noconfigcanberecommended" in text
    assert "optimum" not in text_of(samples.failed())


def test_a_roofline_far_below_does_not_squash_the_plot(full: Tuning) -> None:
    assert 'class="level roofline"' in page.render(full)
    assert "too far off" not in page.render(full)
    far = page.render(msgspec.structs.replace(full, floor_s=1e-9))
    assert 'class="level roofline"' not in far
    assert "The roofline, 1.00 ns, is too far off to be drawn." in far


def test_page_stays_small_however_long_the_search(full: Tuning) -> None:
    many = msgspec.structs.replace(full, measurements=full.measurements * 60)
    assert len(many.measurements) == 9600
    assert len(page.render(many)) < 600_000


def test_a_permutation_has_too_many_values_to_draw_all() -> None:
    rng = np.random.default_rng(0)
    base = samples.one_knob()
    configs = [{"order": tuple(map(int, rng.permutation(5)))} for _ in range(300)]
    many = msgspec.structs.replace(base, measurements=tuple(times(1e-3, **c) for c in configs))
    text = text_of(many)
    left = len({c["order"] for c in configs}) - 16
    assert f"{left}morevalues,measuredlessoften" in text


# --- figures --------------------------------------------------------------------------------------


def test_share_of_a_knob_by_hand() -> None:
    """Two groups of log times {0, 1} and {2, 3}: total variance 5/3, within 1/2: 1 - 0.3."""
    measured = [times(math.exp(t), a=a) for a, t in ((1, 0), (1, 1), (2, 2), (2, 3))]
    (knob,) = words.knobs(measured)
    assert knob.share == pytest.approx(0.7)
    assert [u.value for u in knob.uses] == [1, 2]


def test_the_knob_that_matters_comes_first_and_noise_explains_nothing() -> None:
    rng = np.random.default_rng(3)
    measured = []
    for _ in range(400):
        config: Config = {"noise": int(rng.integers(0, 20)), "tile": int(2 ** rng.integers(3, 8))}
        measured.append(times(float(config["tile"]) * math.exp(rng.normal(0, 0.01)), **config))
    tile, noise = words.knobs(measured)
    assert (tile.name, noise.name) == ("tile", "noise")
    assert tile.share is not None
    assert tile.share > 0.99
    assert noise.share is not None
    assert noise.share < 0.05


def test_true_is_not_one() -> None:
    (knob,) = words.knobs([times(1.0, a=True), times(2.0, a=1), times(3.0, a="1")])
    assert [repr(u.value) for u in knob.uses] == ["True", "1", "'1'"]
    assert knob.share is None


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, True, "x", (0, 1)]), st.floats(1e-9, 1e3) | st.none()),
        max_size=30,
    )
)
def test_shares_are_shares_and_nobody_is_lost(given_: list[tuple[Value, float | None]]) -> None:
    measured = [
        times(t, a=v) if t is not None else Measurement(config={"a": v}, status="wrong")
        for v, t in given_
    ]
    for knob in words.knobs(measured):
        assert knob.share is None or 0 <= knob.share <= 1
        assert sum(len(u.times) + u.failed for u in knob.uses) == len(measured)


@given(st.lists(st.floats(1e-9, 1) | st.none(), max_size=40))
def test_best_so_far_is_the_running_minimum(seconds: list[float | None]) -> None:
    measured = [
        times(s, a=1) if s is not None else Measurement(config={"a": 1}, status="crashed")
        for s in seconds
    ]
    found = dict(words.best_so_far(measured))
    best = math.inf
    for number, s in enumerate(seconds, 1):
        assert (number in found) == (s is not None and s < best)
        best = min(best, s or math.inf)


def test_default_is_timed_by_the_search_where_there_were_no_finals(full: Tuning) -> None:
    entry = words.default_of(full)
    assert entry is not None
    bare = Finals(entries=(msgspec.structs.replace(entry, status="crashed", seconds=()),))
    left = msgspec.structs.replace(full, finals=bare)
    same = next(m for m in full.measurements if m.config == entry.config)
    assert words.default_s(left) == same.time
    assert words.choice_s(left) is None


def test_snippet_is_python_that_holds_the_config(found: Tuning) -> None:
    use = words.snippet(found, "kernel.tunable()", "softmax")
    assert use.splitlines()[0] == "from softmax import kernel"
    call = ast.parse(use).body[1]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    assert ast.literal_eval(call.value.args[0]) == found.config
    ast.parse(words.snippet(found))


def test_the_command_does_the_same_again(full: Tuning) -> None:
    changes = {
        "origin": "my kernels/gemm.py:gemm",
        "budget_s": 12.5,
        "budget_measurements": 40,
        "seed": 3,
    }
    told = html.unescape(page.render(msgspec.structs.replace(full, **changes)))
    (command,) = [line for line in re.split("[<>]", told) if line.startswith("torchstone tune ")]
    sizes = [part for name, size in full.key.sizes.items() for part in ("--size", f"{name}={size}")]
    assert shlex.split(command)[2:] == [
        *("my kernels/gemm.py:gemm", *sizes, "--budget", "12.5", "--measurements", "40"),
        *("--searcher", full.searcher.partition("(")[0].lower(), "--seed", "3", "--fresh"),
    ]
    assert "torchstone tune FILE.py:NAME" in page.render(full)
    alone = page.render(msgspec.structs.replace(full, siblings_allowed=False))
    assert "--fresh --no-siblings<" in html.unescape(alone)


def test_regret_in_words(full: Tuning) -> None:
    def said(**fields: Any) -> str | None:
        return words.regret(msgspec.structs.replace(full, **fields))

    assert said(regret=None) is None
    assert said(regret=1.013) == "the optimum is expected to be 1.3% faster than the best found"
    assert said(regret=1.0) == "nothing quicker is expected to exist"
    near = said(regret=1.02, stop="NEAR_ROOFLINE")
    assert near == "no config can be more than 1.02x as fast as the best found"


# --- the terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_console(found: Tuning, width: int) -> None:
    told, copied = shown(found, width).split("\nreport: ")
    assert max(cell_len(line) for line in told.splitlines()) <= width
    assert copied == "a/report.html\n"
    assert "\x1b" not in told
    assert len(told.splitlines()) < 90


def test_terminal_says_what_and_why(full: Tuning) -> None:
    text = " ".join(shown(full, 100, words.snippet(full, "tunable", "gemm")).split())
    won = words.chosen(full)
    assert won is not None
    for part in (
        f"PROMOTE: {fmt.ratio(won.ratio)} as fast as the default config, proved right",
        f"{fmt.ratio(won.ratio)} {fmt.interval(won.low, won.high)} over the default",
        "of the roofline",
        f"160 configs: {words.tally(full.measurements)}",
        "12 invalid: out of resource: shared memory",
        "a finalist is wrong: 12% of elements",
        "the budget of 160 measurements is spent (ENOUGH)",
        f"call = tunable.build({full.config!r})",
    ):
        assert part in text
    assert "cache" not in text
    text = " ".join(shown(samples.cached()).split())
    assert "60 of them known from the cache learned from 412 rows of other sizes" in text


# --- while it runs --------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(found: Tuning, *, terminal: bool, step: float = 0.5, **goal: Any) -> str:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=110, force_terminal=terminal, _environ={})
    watch = report.LiveTuning(report.Goal(name="gemm", **goal), console, clock)
    watch.begin(
        samples.space_of(samples.table()).default(), found.floor_s, found.measurements[: found.known]
    )
    for number, one in enumerate(found.measurements[found.known :]):
        clock.now += step
        watch(one, step * number, 1.05)
    watch.stage("the finals")
    watch.done()
    watch.done()
    return out.getvalue()


def test_plain_lines_are_one_a_new_best_and_one_each_ten_seconds(full: Tuning) -> None:
    default = words.default_of(full)
    assert default is not None
    lines = watched(full, terminal=False, budget_s=60.0, most=160).splitlines()
    bests = [line for line in lines if " best " in line]
    assert len(bests) == len(words.best_so_far(full.measurements))
    last = words.best_so_far(full.measurements)[-1][1]
    default_s = next(m.time for m in full.measurements if m.config == default.config)
    assert last.time is not None
    assert default_s is not None
    assert full.floor_s is not None
    assert f"best {fmt.seconds(last.time)}, {fmt.percent(full.floor_s / last.time)} of the" in bests[-1]
    assert f"{fmt.ratio(default_s / last.time)} against the default" in bests[-1]
    assert words.config(last.config) in bests[-1]
    sums = [line for line in lines if " measured (" in line]
    assert len(sums) == 7  # at 10, 20, ... 70 s of 80
    assert "21 of at most 160 measured" in sums[0]
    assert "50 s left, gain still expected 5.0%" in sums[0]
    assert "its time is spent" in sums[-1]
    assert lines[-1].endswith("the finals")
    assert len(lines) == len(bests) + len(sums) + 1


def test_on_a_terminal_it_stays_in_place_and_the_cursor_comes_back(full: Tuning) -> None:
    drawn = watched(full, terminal=True, budget_s=200.0)
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1
    tail = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
    best = min(m.time for m in full.measurements if m.time is not None)
    assert fmt.seconds(best) in tail
    assert f"160 measured ({words.tally(full.measurements)})" in " ".join(tail.split())
    assert "the finals: 0 s" in tail
    end = tail[tail.rindex("tuning ") :]
    assert "the finals" not in end
    assert re.search(r"time +1 min 20 s, gain", end)


def test_what_the_cache_knows_counts_as_found() -> None:
    found = samples.cached()
    lines = watched(found, terminal=False).splitlines()
    known = words.best_so_far(found.measurements[:60])
    assert known[-1][1].time is not None
    assert f"60 known from the cache, best {fmt.seconds(known[-1][1].time)}" in lines[0]
    bests = [line for line in lines[1:] if " best " in line]
    assert len(bests) == len(words.best_so_far(found.measurements)) - len(known)
    assert any("21 measured (" in line and ", 60 known from the cache" in line for line in lines)


def test_nothing_right_is_said_to_be_so() -> None:
    drawn = watched(samples.failed(), terminal=True, budget_s=None)
    assert "nothing is right yet" in drawn
    assert " best " not in watched(samples.failed(), terminal=False)


def test_a_hostile_name_reaches_no_terminal() -> None:
    lines = watched(samples.hostile(), terminal=False)
    assert "\x1b" not in lines
    assert "\u202e" not in lines


# --- schema ---------------------------------------------------------------------------------------


def test_committed_schema_is_up_to_date() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema.text("tuning"), (
        "run: python -m torchstone.report.schema tuning > docs/tuning.schema.json"
    )


def test_schema_describes_every_field_of_a_tuning(full: Tuning) -> None:
    definitions: dict[str, Any] = schema.schema("tuning")["$defs"]
    assert {"Tuning", "TuningKey", "Measurement", "Finals", "Final", "Comparison"} <= set(definitions)
    missing = [
        (name, field)
        for name, definition in definitions.items()
        for field, described in definition["properties"].items()
        if "description" not in described and field != "type"  # the tag, which no docstring is under
    ]
    assert missing == []
    assert set(msgspec.json.decode(msgspec.json.encode(full))) == set(
        definitions["Tuning"]["properties"]
    )


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, to lay the page out")
def test_page_never_scrolls_sideways(tmp_path: Path) -> None:
    made: dict[str, Callable[[], Tuning]] = samples.SAMPLES
    pages = {n: page.render(made[n]()) for n in ("full", "cached", "kept", "failed", "hostile")}
    never_scrolls_sideways(tmp_path, pages)
