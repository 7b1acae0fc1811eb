"""The page of an inspection: terminal, HTML and JSON; complete, safe, and whole if parts are missing."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import inspection_samples as samples
from test_report_html import CHROMIUM, Page, never_scrolls_sideways, squeezed
from torchstone.records import Cause, Inspection, Outcome, PartName, Peaks, Rung, SizeBin
from torchstone.records.compiles import LimitKind
from torchstone.report import format as fmt
from torchstone.report import inspect_headline as top
from torchstone.report import inspect_words as words
from torchstone.report import inspection as report
from torchstone.report import schema
from torchstone.report.html import inspection as page
from torchstone.report.html.inspection import compiler, draw, work

SCHEMA = Path(__file__).parent.parent / "docs" / "inspection.schema.json"
BROKEN = re.compile(r"\b(nan|inf|None)\b")


@pytest.fixture(scope="module", params=samples.SAMPLES)
def found(request: pytest.FixtureRequest) -> Inspection:
    return samples.SAMPLES[request.param]()


def shown(found: Inspection, width: int = 80, *, terminal: bool = False) -> str:
    out = io.StringIO()
    report.render(found, Console(file=out, width=width, force_terminal=terminal))
    return out.getvalue()


def words_of(found: Inspection) -> str:
    """What a reader of the page reads, the style left out."""
    source = re.sub(r"<style>.*?</style>", "", page.render(found), flags=re.DOTALL)
    return " ".join(Page(source).words)


def only(found: Inspection, *names: PartName) -> Inspection:
    """The inspection as it is if only these parts were asked for."""
    return msgspec.structs.replace(
        found,
        parts=tuple(p for p in found.parts if p.name in names),
        stale=found.stale if "recompiles" in names else None,
        **{name: None for name in samples.PARTS if name not in names},
    )


# --- every view of every sample -------------------------------------------------------------------


def test_page_is_well_formed_and_the_same_each_time(found: Inspection) -> None:
    source = page.render(found)
    Page(source)
    assert source == page.render(found)
    source.encode("utf-8")


def test_nothing_is_fetched_and_nothing_runs(found: Inspection) -> None:
    for tag, attributes in Page(page.render(found)).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "form", "a", "base")
        assert not [
            a for a in attributes if a in ("src", "href", "xlink:href", "style") or a.startswith("on")
        ]


def test_drawings_and_tables_are_named(found: Inspection) -> None:
    tags = Page(page.render(found)).tags
    assert all(a.get("aria-label") for tag, a in tags if tag == "svg" and a.get("role") == "img")
    assert sum(tag == "table" for tag, _ in tags) == sum(tag == "caption" for tag, _ in tags)
    assert sum(tag == "h1" for tag, _ in tags) == 1
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(a["aria-labelledby"] in ids for _, a in tags if "aria-labelledby" in a)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_console(found: Inspection, width: int) -> None:
    text = shown(found, width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_json_round_trips(found: Inspection) -> None:
    assert report.from_json(report.to_json(found)) == found


@pytest.mark.parametrize("name", [*samples.PARTS, "whole"])
def test_whatever_is_missing_nothing_breaks(name: Any) -> None:
    found = samples.full()
    assert found.inventory is not None
    few = msgspec.structs.replace(
        found.inventory, modules=found.inventory.modules[:3], ops=found.inventory.ops[:2]
    )
    found = msgspec.structs.replace(found, inventory=few)
    within = samples.holes(found if name == "whole" else only(found, name))
    holes = [(p, one) for p, one in within if ("." in p) == (name != "whole")]
    assert len(holes) > 7
    for path, changed in holes:
        text = shown(changed)
        assert max(cell_len(line) for line in text.splitlines()) <= 80, path
        assert not BROKEN.search(text), path
        assert not BROKEN.search(words_of(changed)), path


# --- the headline ---------------------------------------------------------------------------------


def test_headline_says_what_it_is_what_it_costs_and_what_matters_most() -> None:
    assert top.headline(samples.full()) == (
        "encoder: 22.7 M parameters (86.6 MiB, float32), one graph by torch.export",
        "eager takes 36.8 ms a call, 1.63x its roofline time of 22.6 ms; a million requests cost $0.410",
        "compiled call 7 answers wrongly: The float argument scale was made symbolic when it changed, "
        "and baked in",
        "5 recompiles over 64 calls: integer argument n, size 0 or 1 of ids.size()[0]; "
        "torch's limit was hit",
        "one graph holds only where B != 1 (model.py:41), else the answer is wrong without a word; "
        "and 2 more conditions",
    )


def test_other_findings_follow_in_the_order_of_weight() -> None:
    told = top.findings(samples.full())
    assert [t.split(" ")[0] for t in told] == ["compiled", "5", "one", "2", "83%", "requests"]
    assert told[3] == (
        "2 graph breaks, the first at model.py:72 print('rows', x.shape[0]); "
        "nested graph breaks leave 3 of 6 graphs"
    )
    assert told[4] == (
        "83% of the time in operations is in aten.addmm, at 61% of what this machine allows"
    )


def test_headline_of_a_clean_model_speaks_of_time() -> None:
    told = top.headline(samples.clean())
    assert told[0].endswith("one graph by the light tracer")
    assert told[2].startswith("83% of the time")


def test_usual_recompiles_weigh_less_than_time() -> None:
    found = samples.full()
    assert found.recompiles is not None
    usual = msgspec.structs.replace(found.recompiles.storms[1], cause="FIRST_SIZE")
    mild = msgspec.structs.replace(found.recompiles, storms=(usual,), limited=(), exceeds=False)
    told = top.findings(msgspec.structs.replace(found, recompiles=mild, stale=None))
    assert [t.split(" ")[0] for t in told] == ["one", "2", "83%", "5", "requests"]


def test_headline_of_a_model_that_nothing_captures() -> None:
    assert top.headline(samples.uncapturable()) == (
        "encoder: no parameters, no graph at all",
        "eager takes 36.8 ms a call",
        "it cannot be compiled: Dynamo compiles nothing of this model: all of it runs eagerly",
        "no one graph holds for the declared sizes: The code branches on S > 128, so that one graph "
        "cannot hold for all sizes (model.py:41 if x.shape[1] > 128:)",
    )


def test_headline_of_nothing() -> None:
    assert top.headline(samples.minimal()) == ("encoder: nothing is known of the model",)
    assert top.headline(samples.failed())[1] == "capture: not found out, killed by signal 11 in capture"


# --- parts ----------------------------------------------------------------------------------------

HEADINGS: dict[PartName, set[str]] = {
    "capture": {"How it is captured"},
    "inventory": {
        "Where the time goes",
        "What this machine allows",
        "What the traffic asks for",
        "What the engines cover",
        "Weights",
    },
    "breaks": {"Graph breaks"},
    "recompiles": {"Recompiles"},
    "contract": {"Sizes that hold"},
    "ladder": {"Compiling for dynamic sizes"},
}


@pytest.mark.parametrize("name", samples.PARTS)
def test_only_what_was_asked_for_has_a_section(name: PartName) -> None:
    headings = set(Page(page.render(only(samples.full(), name))).headings)
    everything = set().union(*HEADINGS.values())
    assert headings & everything == HEADINGS[name]


@pytest.mark.parametrize("name", samples.PARTS)
def test_a_part_that_failed_says_why_and_keeps_its_log(name: PartName) -> None:
    found = only(samples.failed(), name)
    assert f"killed by signal 11 in {name}" in words_of(found)
    assert f"log of {name}" in words_of(found)
    assert squeezed(f"not found out, after 2.00 s: killed by signal 11 in {name}") in squeezed(
        shown(found)
    )


def test_wrong_answers_are_told_though_the_replay_failed() -> None:
    found = msgspec.structs.replace(samples.failed(), stale=samples.stale())
    assert "Compiled call 7 answers wrongly" in words_of(found)
    assert "WRONG ANSWER at compiled call 7" in shown(found)


def test_page_has_every_figure_that_matters() -> None:
    text = squeezed(words_of(samples.full()))
    for told in (
        "print('rows', x.shape[0])",  # the line of a break, its cost, its edit
        "costs 1.10 ms a call",
        "Write the calls out (a, b = self.blocks; x = b(a(x))).",
        "inductor(module, nested)",
        "equal to the bit",
        "return x[:, :n]",  # a storm: its line, its fix, its guard
        "n = torch.tensor(n)",
        "0/1: n == 3  # return x[: n]",
        "5 graphs, but not every answer agrees with eager",
        "B != 1",  # the contract: its proof and its danger
        "known by a guard, and sizes that failed, only the capture needs it",
        "a program without guards answers wrongly without a word",
        "Condition: S > 128",
        "State: S <= 128",
        "torch._check(ids.shape[1] <= 128)",
        "the model itself refuses",
        "B unbacked from 2 (0 and 1 apart), S backed (mark_dynamic)",
        "wrong answer at B=1 S=8",
        "not tried: torch is older than 2.13",
        "bfloat16 2.90 TFLOP/s",  # the roof
        "memory 20.5 GiB/s",
        "719 GFLOP/s at 130 FLOPs a byte, 61% of best",
        "cannot be fused",
        "pip install tensorrt",
        "embeddings.word.weight, head.weight",
        "p50 48, p90 88, p99 96, max 96",
    ):
        assert squeezed(told) in text, told


def test_modules_are_folded_below_the_second_level_and_largest_first() -> None:
    made = Page(page.render(only(samples.full(), "inventory")))
    tree = [a for tag, a in made.tags if tag == "details"]
    layers = 6
    assert sum("open" in a for a in tree) == 3  # the model, its layers, its embeddings
    assert sum("open" not in a for a in tree) >= 2 * layers  # each layer and its attention
    names = [w for w in made.words if w in ("layers", "embeddings")]
    assert names == ["layers", "embeddings"]


def test_repeated_blocks_are_one_group() -> None:
    groups = words.module_groups(tuple(samples.modules()))
    assert [(g.path, g.number) for g in groups[:2]] == [("layers.*", 6), ("layers.*.attention", 6)]
    assert groups[0].parameters == 6 * 1_774_464


def test_page_stays_small() -> None:
    assert len(page.render(samples.full())) < 200_000


# --- safety ---------------------------------------------------------------------------------------


def test_text_from_outside_is_text() -> None:
    source = page.render(samples.hostile())
    assert "<script" not in source
    made = Page(source)
    told = "".join(made.words)
    assert told.count("<script>alert(1)</script>") > 60
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", told)


def test_markup_of_the_user_is_text_on_a_terminal() -> None:
    text = shown(samples.hostile(), 200, terminal=True)
    assert "[bold red]x[/]" in text
    assert "\u202e" not in text
    assert set(re.findall(r"\x1b\[([0-9;]*)m", text)) <= {"0", "1", "2"}  # our own bold and dim


def test_long_logs_are_cut_and_said_to_be() -> None:
    found = samples.failed()
    log = "\n".join(f"line {i} " + "x" * 1000 for i in range(400))
    part = msgspec.structs.replace(found.parts[0], log=log)
    text = words_of(msgspec.structs.replace(found, parts=(part,)))
    assert "Log, last 60 of 400 lines" in text
    assert "line 399" in text
    assert "line 300 " not in text
    assert len(text) < 60 * 500


# --- the terminal ---------------------------------------------------------------------------------


def test_terminal_is_short_and_starts_with_the_headline() -> None:
    text = shown(samples.full())
    assert len(text.splitlines()) <= 75
    assert text.startswith("encoder: 22.7 M parameters (86.6 MiB, float32), one graph by torch.export\n")


def test_terminal_shows_the_first_of_many_and_says_how_many_more() -> None:
    found = samples.full()
    assert found.recompiles is not None
    assert found.contract is not None
    storm, clause = found.recompiles.storms[0], found.contract.dims[0].clauses[0]
    named = [msgspec.structs.replace(storm, guarded=f"n{i}") for i in range(11)]
    ties = tuple(msgspec.structs.replace(clause, text=f"B != {i}") for i in range(14))
    text = shown(
        msgspec.structs.replace(
            found,
            recompiles=msgspec.structs.replace(found.recompiles, storms=tuple(named)),
            contract=msgspec.structs.replace(found.contract, dims=(), ties=ties),
        )
    )
    assert "n7:" in text
    assert "n8:" not in text
    assert "and 3 more causes" in text
    assert "B != 9 " in text
    assert "B != 10 " not in text
    assert "and 4 more conditions" in text


# --- words ----------------------------------------------------------------------------------------


def test_every_code_has_words() -> None:
    assert set(words.CAUSES) == set(get_args(Cause))
    assert set(words.OUTCOMES) == set(get_args(Outcome))
    assert set(words.PARTS) == set(get_args(PartName))
    assert all(words.rung(rung) for rung in get_args(Rung))
    assert set(compiler._LIMITS) == set(get_args(LimitKind))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ada/x/model.py:41 in forward", "model.py:41 in forward"),
        ("it reads a global (/a/b/m.py:7)", "it reads a global (m.py:7)"),
        ("src/m.py:7: x / y and a/b", "m.py:7: x / y and a/b"),
        ("no place here", "no place here"),
        ("/" * 20_000, "/" * 20_000),
    ],
)
def test_folders_are_left_out_of_places(text: str, expected: str) -> None:
    assert words.short(text) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (214, "214"),
        (999.7, "1.00 k"),
        (22_713_216, "22.7 M"),
        (2.1e9, "2.10 G"),
        (1.22e12, "1.22 T"),
        (0.25, "0.250"),
        (3e18, "3,000 P"),
    ],
)
def test_amounts_have_a_prefix(value: float, text: str) -> None:
    assert fmt.si(value) == text


@given(st.floats(1e-3, 1e17))
def test_amounts_keep_three_digits(value: float) -> None:
    number, _, prefix = fmt.si(value).partition(" ")
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[prefix]
    assert float(number.replace(",", "")) * scale == pytest.approx(value, rel=0.0051)


# --- drawings -------------------------------------------------------------------------------------


def places(source: str, kind: str) -> list[tuple[float, float]]:
    """Where the marks of a kind are, in per cent from the left and from the top."""
    found = re.findall(rf'<svg x="([\d.]+)%" y="([\d.]+)%"[^>]*><\w+ [^>]*class="mark {kind}"', source)
    return [(float(x), float(y)) for x, y in found]


def test_marks_stand_where_their_figures_say() -> None:
    source = page.render(samples.full())
    ops = [at for op in samples.ops()[: work.NUMBERED] if (at := words.attained(op)) is not None]
    marks = places(source, "op")
    assert len(marks) == len(ops)
    further = sorted(range(len(ops)), key=lambda i: ops[i][0])
    higher = sorted(range(len(ops)), key=lambda i: ops[i][1])
    assert further == sorted(range(len(ops)), key=lambda i: marks[i][0])
    assert higher == sorted(range(len(ops)), key=lambda i: -marks[i][1])
    assert len(places(source, "whole")) == 1


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e4), st.floats(1e3, 1e15), st.floats(0, 1)), max_size=12),
    st.dictionaries(st.sampled_from(["float32", "bfloat16", "float16"]), st.floats(1e6, 1e15)),
    st.floats(1e6, 1e13),
)
def test_roofline_holds_whatever_is_measured(
    marks: list[tuple[float, float, float]], rates: dict[str, float], bandwidth: float
) -> None:
    peaks = msgspec.structs.replace(samples.peaks(), flops_per_s=rates)
    slow = msgspec.structs.replace(peaks.bandwidth[-1], bytes_per_s=bandwidth)
    roof = draw.Roof.of(msgspec.structs.replace(peaks, bandwidth=(*peaks.bandwidth, slow)), "float32")
    if not rates:
        assert roof is None
        return
    assert roof is not None
    source = draw.roofline(roof, [draw.Mark("1", *mark, "op") for mark in marks], "it")
    Page(source)
    assert "nan" not in source
    assert len(places(source, "op")) == len(marks)
    assert all(0 <= value <= 100 for place in places(source, "op") for value in place)
    drawn = re.findall(r'<line x1="([\d.-]+)%" y1="([\d.-]+)%" x2="([\d.-]+)%" y2="([\d.-]+)%"', source)
    assert all(0 <= float(value) <= 100 for line in drawn for value in line)


def test_labels_of_marks_in_one_place_do_not_lie_on_each_other() -> None:
    roof = draw.Roof.of(samples.peaks(), "float32")
    assert roof is not None
    source = draw.roofline(roof, [draw.Mark(str(i), 0.1, 1e9, 0.01, "op") for i in range(9)], "it")
    labels = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)" text-anchor="middle">\d</text>', source)
    assert len(labels) == 9
    assert len(set(labels)) == 9


def test_no_roof_of_nothing() -> None:
    nothing = Peaks(device="cpu", threads=1, flops_per_s={}, bandwidth=(), beyond_cache=False)
    assert draw.Roof.of(nothing, "float32") is None


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_bars_are_as_high_as_their_requests(requests: list[int]) -> None:
    bins = [SizeBin(low=i, high=i, requests=n) for i, n in enumerate(requests)]
    source = draw.histogram(bins, "it")
    Page(source)
    heights = [float(h) for h in re.findall(r'height="([\d.]+)%" class="block"', source)]
    most = max(requests, default=0) or 1
    assert heights == pytest.approx([100 * n / most for n in requests], abs=0.006)


def test_timeline_has_a_tick_for_each_recompile_and_eager_call() -> None:
    found = samples.full()
    assert found.recompiles is not None
    source = page.render(found)
    assert source.count('class="event other"') == len(found.recompiles.recompiles)
    assert source.count('class="event late"') == len(found.recompiles.eager_calls)


# --- schema ---------------------------------------------------------------------------------------


def test_json_is_read_strictly() -> None:
    data = msgspec.json.decode(report.to_json(samples.full()))
    data["capture"]["sure"] = True
    with pytest.raises(msgspec.ValidationError, match="sure"):
        report.from_json(msgspec.json.encode(data))


def test_committed_schema_is_up_to_date() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema.text("inspection"), (
        "run: python -m torchstone.report.schema inspection > docs/inspection.schema.json"
    )


def test_schema_describes_every_field_of_an_inspection() -> None:
    definitions: dict[str, Any] = schema.schema("inspection")["$defs"]
    assert {"Inspection", "Inventory", "BreakStudy", "ShapeContract", "LadderStudy"} <= set(definitions)
    missing = [
        (name, field)
        for name, definition in definitions.items()
        for field, described in definition["properties"].items()
        if "description" not in described and field != "type"  # the tag, which no docstring is under
    ]
    assert missing == []
    assert set(msgspec.json.decode(report.to_json(samples.full()))) == set(
        definitions["Inspection"]["properties"]
    )


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, to lay the page out")
def test_page_never_scrolls_sideways(tmp_path: Path) -> None:
    names = ("full", "hostile", "uncapturable")
    never_scrolls_sideways(tmp_path, {n: page.render(samples.SAMPLES[n]()) for n in names})
