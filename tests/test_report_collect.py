"""The report as a record: what it holds, in which order, and its JSON."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import report_samples as samples
from torchstone.records import Build, Comparison, Decision, LoadResult, VerdictEntry
from torchstone.report import schema
from torchstone.report.collect import collect, from_json, to_json

SCHEMA = Path(__file__).parent.parent / "docs" / "report.schema.json"


def test_ladder_is_promoted_then_by_speed_then_failed() -> None:
    report = collect(*samples.full())
    status = {row.recipe: row.status for row in report.rows}
    ratios = [row.comparison.ratio for row in report.rows[1:7] if row.comparison]
    assert [row.recipe for row in report.rows][:2] == [
        "openvino",
        "aotinductor(freezing) + quantize(pt2e_static)",
    ]
    assert ratios == sorted(ratios, reverse=True)
    assert [row.status for row in report.rows][-8:] == [
        "wrong",
        "wrong",
        "wrong",
        "unverifiable",
        "crashed",
        "timed out",
        "unsupported",
        "not tried",
    ]
    assert status["openvino"] == "promoted"
    assert status["eager"] == "baseline"
    assert sorted(status) == sorted(report.header.recipes)


def test_rows_hold_whole_records() -> None:
    header, entries = samples.full()
    row = collect(header, entries).rows[0]
    assert row.build in entries
    assert row.verdict in entries
    assert row.metric in entries
    assert row.comparison is not None
    assert row.comparison.against == "eager"
    assert [peer.against for peer in row.peers] == ["onnxruntime"]
    assert [result.rate for result in row.load] == sorted(samples.RATES)
    assert all(result in entries for result in row.load)


@given(st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_the_order_of_entries(draw: random.Random) -> None:
    header, entries = samples.full()
    shuffled = list(entries)
    draw.shuffle(shuffled)
    assert collect(header, shuffled).rows == collect(header, entries).rows


def test_collect_changes_nothing_and_repeats() -> None:
    header, entries = samples.full()
    before = list(entries)
    assert collect(header, entries) == collect(header, entries)
    assert entries == before


def test_of_repeated_entries_the_last_counts() -> None:
    header, entries = samples.full()
    again = samples.comparison("openvino", 0.2, "SLOWER")
    slower = Build(recipe="openvino", seconds=99, first_call_s=1, peak_memory_bytes=1, artifact=None)
    row = next(r for r in collect(header, [*entries, again, slower]).rows if r.recipe == "openvino")
    assert row.comparison == again
    assert row.build == slower


def test_entries_on_other_recipes_stay_out_of_the_rows() -> None:
    header, entries = samples.kept()
    stray = samples.comparison("openvino", 0.01, "FASTER")
    assert collect(header, [*entries, stray]).rows == collect(header, entries).rows


def test_unfinished_run_has_pending_rows_and_no_decision() -> None:
    report = collect(*samples.partial())
    assert report.decision is None
    assert {row.recipe: row.status for row in report.rows if row.verdict} == {
        "eager": "baseline",
        "openvino": "verified",
    }
    assert {row.status for row in report.rows if row.verdict is None} == {"pending"}


def test_a_baseline_that_fails_is_not_called_baseline() -> None:
    header, entries = samples.kept()
    failed = VerdictEntry(recipe="eager", verdict=samples.failures()[3].verdict)
    report = collect(header, [*entries, failed])
    assert next(r for r in report.rows if r.recipe == "eager").status == "unverifiable"


def test_keeping_the_baseline_promotes_nothing() -> None:
    report = collect(*samples.kept())
    assert {row.status for row in report.rows} == {"baseline", "verified"}


def test_commands_are_quoted_for_the_shell() -> None:
    rows = {row.recipe: row for row in collect(*samples.full("my models/it's")).rows}
    recipe = "aotinductor(freezing) + quantize(pt2e_static)"
    assert rows[recipe].reproduce == (
        f"torchstone verify 'my models/it'\"'\"'s' --recipe '{recipe}'",
        f"torchstone bench 'my models/it'\"'\"'s' --recipe '{recipe}'",
    )


def test_commands_name_a_seed_that_is_not_the_default() -> None:
    header, entries = samples.single()
    seeded = msgspec.structs.replace(header, seed=7)
    assert collect(seeded, entries).rows[0].reproduce[0].endswith("--recipe eager --seed 7")


def test_runs_from_python_are_reproduced_from_python() -> None:
    row = collect(*samples.full(origin=None)).rows[0]
    (line,) = row.reproduce
    call = compile(line, "<line>", "eval")
    assert "optimize" in call.co_names
    assert "'openvino'" in line


@pytest.mark.parametrize("name", samples.RUNS)
def test_json_round_trips(name: str) -> None:
    report = collect(*samples.RUNS[name]())
    assert from_json(to_json(report)) == report


def test_json_is_read_strictly() -> None:
    data = msgspec.json.decode(to_json(collect(*samples.full())))
    data["rows"][0]["verdict"]["verdict"]["sure"] = True
    with pytest.raises(msgspec.ValidationError, match="sure"):
        from_json(msgspec.json.encode(data))


def test_committed_schema_is_up_to_date() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema.text(), (
        "run: python -m torchstone.report.schema > docs/report.schema.json"
    )


def test_schema_describes_every_field_of_the_report() -> None:
    definitions = schema.schema()["$defs"]
    for kind in (Build, Comparison, Decision, LoadResult):
        for field in msgspec.structs.fields(kind):
            assert definitions[kind.__name__]["properties"][field.name]["description"]
    assert all("description" in p for p in definitions["Report"]["properties"].values())
    assert all("description" in p for p in definitions["Row"]["properties"].values())


def test_schema_names_every_field_that_a_report_holds() -> None:
    made = schema.schema()
    data = msgspec.json.decode(to_json(collect(*samples.full())))
    assert set(data) == set(made["$defs"]["Report"]["properties"])
    assert set(data["rows"][0]) == set(made["$defs"]["Row"]["properties"])
