"""The store: append-only, content-addressed, honest about damage."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchstone import env, store
from torchstone.errors import StoreError
from torchstone.records import Build, Decision, RunHeader, WorkloadSpec


def header(name: str = "mini") -> RunHeader:
    spec = WorkloadSpec(
        name=name, inputs=(), dims=(), example_sizes={}, traffic=(), metric=None, digest="0" * 64
    )
    return RunHeader(
        format=store.FORMAT,
        workload=spec,
        policy={},
        recipes=("eager",),
        environment=env.environment(1),
        seed=0,
        origin=None,
        started_at="2026-01-01T00:00:00+00:00",
    )


def build(seconds: float = 1.0) -> Build:
    return Build(recipe="eager", seconds=seconds, first_call_s=0.1, peak_memory_bytes=1, artifact=None)


def test_what_was_put_is_there_for_another_reader(tmp_path: Path) -> None:
    run = store.create(tmp_path, header())
    run.put("build/eager", build(1.0))
    run.put("build/eager", build(2.0))
    again = store.RunStore(run.path)
    assert again.get("build/eager", Build) == build(2.0)
    assert again.get("build/eager", Decision) is None
    assert again.get("build/other", Build) is None
    assert again.entries == (build(1.0), build(2.0))
    assert again.header == header()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_reported_set_aside_and_never_used(
    tmp_path: Path, data: st.DataObject
) -> None:
    run = store.create(tmp_path, header())
    run.put("build/eager", build())
    (entry,) = (run.path / "entries").iterdir()
    content = bytearray(entry.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    entry.write_bytes(content)
    damaged = store.RunStore(run.path)
    assert damaged.get("build/eager", Build) is None
    assert len(damaged.problems) == 1
    assert entry.name in damaged.problems[0]
    assert not entry.exists()
    assert len(list((run.path / "corrupt").iterdir())) == 1
    damaged.put("build/eager", build(3.0))
    assert store.RunStore(run.path).get("build/eager", Build) == build(3.0)


@pytest.mark.parametrize("damage", ["change", "remove", "truncate"])
def test_an_entry_counts_only_while_its_files_match(tmp_path: Path, damage: str) -> None:
    run = store.create(tmp_path, header())
    artifact = run.files / "engine" / "model.bin"
    artifact.parent.mkdir()
    artifact.write_bytes(b"compiled code")
    run.put("build/eager", build(), files=(artifact.parent,))
    assert store.RunStore(run.path).get("build/eager", Build) == build()
    if damage == "remove":
        artifact.unlink()
    else:
        artifact.write_bytes(b"compiled c0de" if damage == "change" else b"comp")
    reader = store.RunStore(run.path)
    assert reader.get("build/eager", Build) is None
    assert "engine/model.bin" in reader.problems[0]
    assert reader.entries == (build(),)  # the record itself is intact, and still tells what was


def test_an_unfinished_write_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    run = store.create(tmp_path, header())
    run.put("build/eager", build())
    (run.path / "entries" / ".000002-abc.json.1234").write_bytes(b'{"key": "half')
    (tmp_path / "runs" / ".mini-unfinished").mkdir()
    again = store.RunStore(run.path)
    assert again.entries == (build(),)
    assert again.problems == []
    runs, problems = store.listing(tmp_path)
    assert [r.run_id for r in runs] == [run.run_id]
    assert problems == ()


def test_one_writer_a_run(tmp_path: Path) -> None:
    run = store.create(tmp_path, header())
    with run.writing():
        other = store.RunStore(run.path)
        assert other.in_use
        with pytest.raises(StoreError, match="another process"), other.writing():
            pass
    assert not store.RunStore(run.path).in_use


def _fill(home: Path, count: int) -> None:
    run = store.create(home, header())
    with run.writing():
        for i in range(count):
            run.put("build/eager", build(float(i)))


def test_runs_at_once_in_one_folder_do_not_harm_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_fill, args=(tmp_path, 25)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    runs, problems = store.listing(tmp_path)
    assert len(runs) == 3
    assert problems == ()
    for run in runs:
        assert [e.seconds for e in run.entries if isinstance(e, Build)] == [float(i) for i in range(25)]


def test_a_damaged_header_is_told_and_leaves_other_runs_alone(tmp_path: Path) -> None:
    good, bad = store.create(tmp_path, header("good")), store.create(tmp_path, header("bad"))
    (bad.path / "header.json").write_bytes(b"{}")
    runs, problems = store.listing(tmp_path)
    assert [r.run_id for r in runs] == [good.run_id]
    assert "header" in problems[0]


def test_finding_a_run(tmp_path: Path) -> None:
    run = store.create(tmp_path, header("one"))
    store.create(tmp_path, header("two"))
    assert store.find(tmp_path, run.run_id).path == run.path
    assert store.find(tmp_path, "one").path == run.path
    assert store.find(tmp_path, run.path).path == run.path
    with pytest.raises(StoreError, match="no run 'three'"):
        store.find(tmp_path, "three")
    store.create(tmp_path, header("one"))
    with pytest.raises(StoreError, match="fits 2 runs"):
        store.find(tmp_path, "one")
