"""The cache of measurements: nothing lost, nothing invented, whatever happens to its files."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone import cli
from torchstone.errors import InputError, StoreError
from torchstone.records.tuning import Measurement, TuningKey
from torchstone.tuner import cache as cache_module
from torchstone.tuner.cache import Cache, merge
from torchstone.tuner.space import key_of

# a cache that is not closed is what a killed process leaves
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

DEVICE, VERSIONS = "NVIDIA H200", {"torch": "2.11.0", "triton": "3.6.0", "driver": "580"}
KEY = TuningKey(
    kernel="soft/max",
    space="a1",
    source="b2",
    sizes={"M": 4096, "N": 1024},
    signature=("f32[4096,1024] (1024,1) 16",),
    device=DEVICE,
    versions=VERSIONS,
    policy="c3",
)
DAY = datetime.timedelta(days=1)
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one example, in memory where there is such a place: syncs cost nothing there."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def near(**changes: object) -> TuningKey:
    return msgspec.structs.replace(KEY, **changes)


def timed(block: int, seconds: float = 1e-3) -> Measurement:
    return Measurement(config={"BLOCK": block}, status="timed", seconds=(seconds, seconds * 1.01))


def lines_of(cache: Cache) -> list[bytes]:
    return [line for p in sorted(cache.path.glob("*/rows-*")) for line in p.read_bytes().splitlines()]


def content(cache: Cache) -> dict[bytes, set[bytes]]:
    """Every row by key, as bytes."""
    return {
        msgspec.json.encode(s.key, order="deterministic"): {msgspec.json.encode(r) for r in s.rows}
        for s in cache.shelves()
        if s.rows
    }


class Clock:
    """Time that stands still unless it is moved."""

    def __init__(self, at: datetime.datetime = START) -> None:
        self.at = at

    def __call__(self) -> datetime.datetime:
        return self.at


# What is kept

values = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.permutations(range(3)).map(tuple),
)
configs = st.dictionaries(st.text("abXY_", min_size=1, max_size=4), values, min_size=1, max_size=4)
finite = st.floats(0, 1e3, allow_nan=False)
measurements = st.builds(
    Measurement,
    config=configs,
    status=st.sampled_from(
        ["timed", "dropped", "wrong", "unverifiable", "crashed", "timed_out", "invalid"]
    ),
    seconds=st.lists(finite, max_size=3).map(tuple),
    compile_s=finite,
    relative=st.none() | finite,
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    facts=st.dictionaries(st.sampled_from(["registers", "spills"]), finite),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(measurements, max_size=8))
def test_what_was_appended_is_there_for_another_reader(found: list[Measurement]) -> None:
    with scratch() as folder:
        cache = Cache(folder / "tuning")
        for measurement in found:
            cache.append(KEY, measurement)
        last = {key_of(m.config): m for m in found}
        for reader in (cache, Cache(cache.path)):
            rows = reader.rows(KEY)
            assert {key_of(m.config): m for m in rows} == last
            assert len(rows) == len(last)
            for m in rows:
                assert m.config == last[key_of(m.config)].config
                wrote, read = last[key_of(m.config)].config, m.config
                assert {k: type(v) for k, v in read.items()} == {k: type(v) for k, v in wrote.items()}
            assert sum(len(s.rows) for s in reader.shelves()) == len(found)
            assert not reader.problems
        cache.close()


def test_an_empty_cache_is_empty_and_reading_makes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "tuning")
    assert (cache.rows(KEY), cache.histories(KEY), cache.shelves(), cache.problems) == ((), (), (), [])
    assert not cache.path.exists()


def test_no_two_rows_of_a_writer_are_of_one_moment_and_the_last_counts(tmp_path: Path) -> None:
    cache = Cache(tmp_path, Clock())
    for seconds in (3e-3, 1e-3, 2e-3):
        cache.append(KEY, timed(64, seconds))
    assert cache.rows(KEY) == (timed(64, 2e-3),)
    (shelf,) = cache.shelves()
    assert [r.at - START for r in shelf.rows] == [datetime.timedelta(microseconds=n) for n in range(3)]


def test_a_time_that_is_not_finite_is_refused_and_an_infinite_error_is_none(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(InputError, match="cannot be kept"):
        cache.append(KEY, timed(64, float("inf")))
    cache.append(KEY, Measurement(config={"BLOCK": 64}, status="wrong", relative=float("inf")))
    (row,) = Cache(tmp_path).rows(KEY)
    assert (row.status, row.relative) == ("wrong", None)


def test_a_demoted_config_stays_so_until_it_is_measured_again_whatever_the_clocks(
    tmp_path: Path,
) -> None:
    fast_clock, slow_clock = Clock(START + 5 * DAY), Clock(START)
    Cache(tmp_path, fast_clock).append(KEY, timed(64))
    cache = Cache(tmp_path, slow_clock)
    assert cache.rows(KEY) == (timed(64),)
    cache.demote(KEY, {"BLOCK": 64}, "output 0 is off by 0.3")
    (row,) = Cache(tmp_path).rows(KEY)
    assert (row.status, row.text, row.time) == ("wrong", "output 0 is off by 0.3", None)
    cache.append(KEY, timed(64, 2e-3))
    assert Cache(tmp_path).rows(KEY) == (timed(64, 2e-3),)


@pytest.mark.parametrize("status", ["wrong", "unverifiable"])
@pytest.mark.parametrize("doubt_first", [True, False])
def test_of_two_writers_at_the_same_moment_the_doubt_counts(
    tmp_path: Path, status: str, doubt_first: bool
) -> None:
    doubt = msgspec.structs.replace(timed(64), status=status)
    for measurement in (doubt, timed(64)) if doubt_first else (timed(64), doubt):
        Cache(tmp_path, Clock()).append(KEY, measurement)
    assert Cache(tmp_path).rows(KEY) == (doubt,)
    Cache(tmp_path, Clock(START + DAY)).append(KEY, timed(64))
    assert Cache(tmp_path).rows(KEY) == (timed(64),)


CHANGES = [
    {"versions": {**VERSIONS, "driver": "590"}},
    {"versions": {**VERSIONS, "torch": "2.12.0"}},
    {"device": "NVIDIA A100"},
    {"sizes": {"M": 4096, "N": 2048}},
    {"signature": ("f32[4096,1024] (1024,1) 4",)},
    {"source": "other"},
    {"policy": "other"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: next(iter(c)))
def test_another_version_size_or_source_is_a_prior_and_never_an_answer(
    tmp_path: Path, change: dict[str, object]
) -> None:
    cache = Cache(tmp_path)
    cache.append(KEY, timed(64))
    other = near(**change)
    assert cache.rows(other) == ()
    assert cache.histories(other) == ((KEY, (timed(64),)),)
    cache.append(other, timed(128))
    assert cache.histories(other) == ((KEY, (timed(64),)),)
    assert cache.histories(KEY) == ((other, (timed(128),)),)


@pytest.mark.parametrize("change", [{"kernel": "soft-max"}, {"kernel": "gemm"}, {"space": "other"}])
def test_another_kernel_or_space_is_nothing_to_learn_from(
    tmp_path: Path, change: dict[str, object]
) -> None:
    cache = Cache(tmp_path)
    cache.append(KEY, timed(64))
    assert cache.histories(near(**change)) == ()
    assert cache.rows(near(**change)) == ()


# Damage


def kept(folder: Path, count: int = 4) -> tuple[Path, bytes]:
    """A file of rows that nobody writes to any more."""
    cache = Cache(folder, Clock())
    for block in range(count):
        cache.append(KEY, timed(block, 1e-3 * (block + 1)))
    cache.close()
    (path,) = folder.glob("*/rows-*")
    return path, path.read_bytes()


def test_every_point_at_which_a_file_may_be_cut_off() -> None:
    with scratch() as tmp_path:
        path, whole = kept(tmp_path / "whole", 3)
        ends = [n + 1 for n, byte in enumerate(whole) if byte == 10]
        for cut in range(len(whole)):
            home = tmp_path / "cut"
            shutil.copytree(path.parent.parent, home)
            damaged = home / path.parent.name / path.name
            damaged.write_bytes(whole[:cut])
            cache = Cache(home)
            complete = sum(end - 1 <= cut for end in ends)  # a row that lacks but its newline is whole
            assert cache.rows(KEY) == tuple(timed(b, 1e-3 * (b + 1)) for b in range(complete))
            torn = cut not in {0, *ends, *(end - 1 for end in ends)}
            assert len(cache.problems) == torn
            if torn:
                assert f"{damaged}:{complete + 1}: a row is cut short" in cache.problems[0]
                assert (damaged.parent / "corrupt" / path.name).read_bytes() == whole[:cut]
            again = Cache(home)
            assert (again.rows(KEY), again.problems) == (cache.rows(KEY), [])
            shutil.rmtree(home)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes_are_told_and_cost_only_the_rows_they_are_in(data: st.DataObject) -> None:
    with scratch() as folder:
        path, whole = kept(folder)
        changed = bytearray(whole)
        places = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3, unique=True))
        for place in places:
            changed[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(changed)
        wrote = {block: timed(block, 1e-3 * (block + 1)) for block in range(4)}
        cache = Cache(folder)
        found = {m.config["BLOCK"]: m for m in cache.rows(KEY)}
        assert found.items() <= wrote.items()  # nothing is invented
        hit = {whole[:p].count(b"\n") for p in places}
        hit |= {
            whole[:p].count(b"\n") + 1 for p in places if whole[p] == 10
        }  # the line that it ran into
        assert wrote.keys() - hit <= found.keys()  # the rest is kept
        intact = found == wrote and changed[:-1] == whole[:-1]  # only the very last newline is gone
        assert cache.problems or intact
        assert all(str(path) in problem for problem in cache.problems)
        again = Cache(folder)
        assert {m.config["BLOCK"]: m for m in again.rows(KEY)} == found
        assert again.problems == []


def test_a_file_of_another_key_gives_no_rows(tmp_path: Path) -> None:
    path, _ = kept(tmp_path / "one", 2)
    other = near(device="NVIDIA A100")
    cache = Cache(tmp_path / "two")
    cache.append(other, timed(7))
    (folder,) = (tmp_path / "two").glob("soft-max-*")
    shutil.copy(path, folder / path.name)
    assert cache.rows(other) == (timed(7),)
    assert len(cache.problems) == 2


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\x00", msgspec.json.encode(near(device="x"))])
def test_a_damaged_key_is_told_and_mended_by_whoever_knows_it(tmp_path: Path, damage: bytes) -> None:
    path, _ = kept(tmp_path, 1)
    (path.parent / "key.json").write_bytes(damage)
    cache = Cache(tmp_path)
    assert cache.shelves() == ()
    assert cache.histories(near(source="x")) == ()
    assert len(cache.problems) == 1
    assert "key.json" in cache.problems[0]
    assert cache.rows(KEY) == (timed(0),)
    cache.append(KEY, timed(1))
    (shelf,) = Cache(tmp_path).shelves()
    assert shelf.key == KEY
    assert shelf.latest == (timed(0), timed(1))


def test_a_row_of_a_later_version_is_told_and_kept_as_it_is(tmp_path: Path) -> None:
    path, whole = kept(tmp_path, 1)
    named = (path.parent / "key.json").read_bytes()
    later = cache_module._line(named, b'{"at":"2030-01-01T00:00:00Z","energy_j":3}')
    path.write_bytes(later + whole + b"damaged\n")
    cache = Cache(tmp_path)
    assert cache.rows(KEY) == (timed(0),)
    assert sorted("another version" in p for p in cache.problems) == [False, True]
    assert later.strip() in lines_of(cache)


def test_a_cache_that_may_not_be_written_to_is_read_as_it_is(tmp_path: Path) -> None:
    path, whole = kept(tmp_path, 2)
    path.write_bytes(whole[:-5])
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()  # also root cannot open it for writing
    cache = Cache(tmp_path)
    assert cache.rows(KEY) == (timed(0),)
    assert len(cache.problems) == 1
    assert path.read_bytes() == whole[:-5]
    with pytest.raises(StoreError, match="cannot keep a measurement"):
        cache.append(KEY, timed(9))


# Several processes


def fill(home: Path, writer: int, count: int) -> None:
    cache = Cache(home)
    for number in range(count):
        cache.append(KEY, timed(1000 * writer + number))


def test_writers_at_once_lose_nothing_and_one_that_is_killed_loses_only_its_last_line(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=fill, args=(tmp_path, n, 40), daemon=True) for n in range(3)]
    victim = context.Process(target=fill, args=(tmp_path, 9, 1_000_000), daemon=True)
    for process in (victim, *writers):
        process.start()
    reader = Cache(tmp_path)
    deadline = time.monotonic() + 120
    while sum(m.config["BLOCK"] >= 9000 for m in reader.rows(KEY)) < 30:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    for process in (victim, *writers):
        process.join(120)
    assert [w.exitcode for w in writers] == [0, 0, 0]
    assert reader.problems == []  # a line that is being written is no damage
    found = {m.config["BLOCK"] for m in Cache(tmp_path).rows(KEY)}
    assert {1000 * n + i for n in range(3) for i in range(40)} <= found
    killed = sorted(b for b in found if b >= 9000)
    assert killed == list(range(9000, 9000 + len(killed)))
    assert len(killed) >= 30
    assert all(m == timed(m.config["BLOCK"]) for m in Cache(tmp_path).rows(KEY))
    assert len(list(tmp_path.glob("*/rows-*"))) == 4


def test_half_a_line_is_ignored_while_its_writer_lives_and_told_once_it_is_dead(tmp_path: Path) -> None:
    code = f"""
        import sys, time, msgspec
        from pathlib import Path
        from torchstone.tuner.cache import Cache
        from torchstone.records.tuning import *
        key = msgspec.json.decode({msgspec.json.encode(KEY)!r}, type=TuningKey)
        cache = Cache(Path({str(tmp_path)!r}))
        cache.append(key, Measurement(config={{"BLOCK": 1}}, status="crashed"))
        (file,) = cache._files.values()
        file.write(b"0123456789abcdef {{half")
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            cache = Cache(tmp_path)
            assert [m.status for m in cache.rows(KEY)] == ["crashed"]
            assert cache.problems == []
            assert cache.prune(older_than_s=-1) == ()  # in use
        finally:
            writer.kill()
    assert [m.status for m in cache.rows(KEY)] == ["crashed"]
    assert len(cache.problems) == 1
    assert len(list(tmp_path.glob("*/corrupt/rows-*"))) == 1
    assert [m.status for m in Cache(tmp_path).rows(KEY)] == ["crashed"]


def test_a_child_of_a_fork_writes_to_a_file_of_its_own(tmp_path: Path) -> None:
    code = f"""
        import os, sys, msgspec
        from pathlib import Path
        from torchstone.tuner.cache import Cache
        from torchstone.records.tuning import *
        key = msgspec.json.decode({msgspec.json.encode(KEY)!r}, type=TuningKey)
        cache = Cache(Path({str(tmp_path)!r}))
        cache.append(key, Measurement(config={{"BLOCK": 1}}, status="crashed"))
        child = os.fork()
        for n in range(20):
            block = n + (100 if child else 200)
            cache.append(key, Measurement(config={{"BLOCK": block}}, status="crashed"))
        if child:
            sys.exit(os.waitpid(child, 0)[1])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
    cache = Cache(tmp_path)
    blocks = {m.config["BLOCK"] for m in cache.rows(KEY)}
    assert blocks == {1, *range(100, 120), *range(200, 220)}
    assert cache.problems == []
    assert len(list(tmp_path.glob("*/rows-*"))) == 2


def test_a_disk_that_is_full_is_told_and_costs_no_other_row(tmp_path: Path) -> None:
    """The limit of a file's size cuts a line short as a full disk does."""
    cache = Cache(tmp_path)
    cache.append(KEY, timed(1))
    (path,) = tmp_path.glob("*/rows-*")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, limits[1]))
    try:
        with pytest.raises(StoreError, match="cannot keep a measurement"):
            cache.append(KEY, timed(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    cache.append(KEY, timed(3))
    assert cache.rows(KEY) == (timed(1), timed(3))
    assert len(cache.problems) == 1


# Exchange


def exported(folder: Path, name: str, rows: list[tuple[TuningKey, int, Measurement]]) -> Path:
    """An exported file of a machine that appended these, each at an hour of its own."""
    clock = Clock()
    cache = Cache(folder / f"home-{name}", clock)
    for key, hour, measurement in rows:
        clock.at = max(START + datetime.timedelta(hours=hour), clock.at)
        cache.append(key, measurement)
    cache.export(folder / f"{name}.jsonl")
    cache.close()
    return folder / f"{name}.jsonl"


KEYS = [KEY, near(device="NVIDIA A100"), near(kernel="gemm"), near(sizes={"M": 1})]
ROWS = [(KEY, 1, timed(1)), (KEYS[1], 2, timed(2)), (KEY, 3, timed(3, 9.0))]
machines = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.integers(0, 3),
        st.builds(timed, st.integers(0, 2), st.sampled_from([1e-3, 2e-3])),
    ),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(machines, machines, machines)
def test_merging_is_commutative_associative_and_idempotent(
    a: list[tuple[TuningKey, int, Measurement]],
    b: list[tuple[TuningKey, int, Measurement]],
    c: list[tuple[TuningKey, int, Measurement]],
) -> None:
    with scratch() as folder:
        files = [exported(folder, n, rows) for n, rows in zip("abc", (a, b, c), strict=True)]

        def merged(*paths: Path) -> Path:
            out = folder / f"m{len(list(folder.glob('m*')))}.jsonl"
            merge(paths, out)
            return out

        whole = merged(*files).read_bytes()
        assert merged(*reversed(files)).read_bytes() == whole
        assert merged(merged(files[0], files[1]), files[2]).read_bytes() == whole
        assert merged(files[0], merged(files[1], files[2])).read_bytes() == whole
        assert merged(*files, *files).read_bytes() == whole
        assert merged(files[0]).read_bytes() == files[0].read_bytes()
        one = Cache(folder / "one")  # importing them, in any order, and exporting is the same
        for file in (files[2], files[0], files[1], files[0]):
            one.import_(file, device=DEVICE, versions=VERSIONS, foreign=True)
        one.export(folder / "one.jsonl")
        assert (folder / "one.jsonl").read_bytes() == whole


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_cache_survives_export_and_import(tmp_path: Path, suffix: str) -> None:
    cache = Cache(tmp_path / "here")
    for block in range(5):
        cache.append(KEY, timed(block))
        cache.append(near(sizes={"M": block}), timed(block))
    cache.demote(KEY, {"BLOCK": 2}, "off")
    file = tmp_path / f"all{suffix}"
    header = cache.export(file)
    assert (header.keys, header.rows, header.devices) == (6, 11, (DEVICE,))
    assert cache.export(tmp_path / f"again{suffix}") == header
    assert (tmp_path / f"again{suffix}").read_bytes() == file.read_bytes()
    assert suffix == ".jsonl" or file.read_bytes()[4:8] == bytes(4)  # gzip's time
    other = Cache(tmp_path / "there")
    found = other.import_(file, device=DEVICE, versions=VERSIONS)
    assert (found.added, found.known, found.foreign) == (11, 0, 0)
    assert content(other) == content(cache)
    assert other.rows(KEY) == cache.rows(KEY)
    before = lines_of(other)
    found = other.import_(file, device=DEVICE, versions=VERSIONS)
    assert (found.added, found.known, found.foreign) == (0, 11, 0)
    assert lines_of(other) == before


def test_some_keys_may_be_exported(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "here")
    for key in KEYS:
        cache.append(key, timed(1))
    cache.export(tmp_path / "one.jsonl", [KEYS[2]])
    other = Cache(tmp_path / "there")
    other.import_(tmp_path / "one.jsonl", device=DEVICE, versions=VERSIONS)
    assert [s.key for s in other.shelves()] == [KEYS[2]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_file_that_is_changed_or_cut_short_is_refused_and_nothing_is_taken(
    data: st.DataObject,
) -> None:
    with scratch() as folder:
        file = exported(folder, "a", ROWS)
        zipped = folder / "a.jsonl.gz"
        merge([file], zipped)
        file = data.draw(st.sampled_from([file, zipped]))
        whole = file.read_bytes()
        place = data.draw(st.integers(0, len(whole) - 1))
        changed = bytearray(whole)
        changed[place] ^= data.draw(st.integers(1, 255))
        cut = data.draw(st.booleans())
        file.write_bytes(whole[:place] if cut else changed)
        cache = Cache(folder / "there")
        cache.append(KEY, timed(7))
        cache.close()
        before = content(cache)
        if file == zipped and not cut:  # some bits of gzip are not of the content
            with contextlib.suppress(zlib.error, EOFError, OSError):
                if gzip.decompress(changed) == gzip.decompress(whole):
                    cache.import_(file, device=DEVICE, versions=VERSIONS, foreign=True)
                    return
        with pytest.raises(InputError) as refused:
            cache.import_(file, device=DEVICE, versions=VERSIONS, foreign=True)
        assert refused.value.where == str(file)
        assert refused.value.hint
        assert content(cache) == before
        with pytest.raises(InputError):
            merge([file], folder / "out.jsonl")
        assert not (folder / "out.jsonl").exists()


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    file = exported(tmp_path, "a", ROWS)
    body = file.read_bytes().replace(b'"format":1', b'"format":2').rpartition(b"{")[0]
    file.write_bytes(body + cache_module._seal(body))
    with pytest.raises(InputError, match="another version: format 2"):
        Cache(tmp_path / "there").import_(file, device=DEVICE, versions=VERSIONS)


def test_rows_of_another_machine_are_refused_unless_asked_for_and_then_only_priors(
    tmp_path: Path,
) -> None:
    file = exported(tmp_path, "a", [*ROWS, (near(versions={"torch": "2.0"}), 5, timed(5))])
    cache = Cache(tmp_path / "there")
    found = cache.import_(file, device=DEVICE, versions=VERSIONS)
    assert (found.added, found.foreign) == (2, 2)
    assert [s.key for s in cache.shelves()] == [KEY]
    with pytest.raises(InputError, match="nothing in it is of this machine") as refused:
        Cache(tmp_path / "none").import_(file, device="TPU", versions=VERSIONS)
    assert "--foreign" in str(refused.value)
    assert not (tmp_path / "none").exists()
    found = cache.import_(file, device=DEVICE, versions=VERSIONS, foreign=True)
    assert (found.added, found.known, found.foreign) == (2, 2, 0)
    assert cache.rows(KEY) == (timed(1), timed(3, 9.0))
    assert {k.device for k, _ in cache.histories(KEY)} == {"NVIDIA A100", DEVICE}


def test_rows_of_the_future_are_refused(tmp_path: Path) -> None:
    file = exported(tmp_path, "a", ROWS)
    cache = Cache(tmp_path / "there", Clock(START - 2 * DAY))
    with pytest.raises(InputError, match="clock"):
        cache.import_(file, device=DEVICE, versions=VERSIONS)
    assert cache.shelves() == ()


def test_a_wrong_verdict_of_one_machine_beats_an_older_time_of_another(tmp_path: Path) -> None:
    wrong = Measurement(config={"BLOCK": 1}, status="wrong")
    older, newer = (KEY, 1, timed(1)), (KEY, 3, timed(1, 2e-3))
    files = [exported(tmp_path, "a", [older]), exported(tmp_path, "b", [(KEY, 2, wrong)])]
    merge(files, tmp_path / "ab.jsonl")
    cache = Cache(tmp_path / "there")
    cache.import_(tmp_path / "ab.jsonl", device=DEVICE, versions=VERSIONS)
    assert cache.rows(KEY) == (wrong,)
    cache.import_(exported(tmp_path, "c", [newer]), device=DEVICE, versions=VERSIONS)
    assert cache.rows(KEY) == (newer[2],)


# Pruning


def pruned(tmp_path: Path) -> Iterator[TuningKey]:
    yield from (s.key for s in Cache(tmp_path).shelves())


def test_pruning_drops_what_is_old_or_of_other_versions_and_says_how_much(tmp_path: Path) -> None:
    clock = Clock()
    cache = Cache(tmp_path, clock)
    old, other = near(sizes={"M": 1}), near(versions={"torch": "2.0"})
    cache.append(old, timed(1))
    clock.at += 10 * DAY
    cache.append(KEY, timed(1))
    cache.append(other, timed(1))
    cache.close()
    with pytest.raises(InputError, match="what to prune"):
        cache.prune()
    would = cache.prune(versions=VERSIONS, older_than_s=5 * 86_400, dry_run=True)
    assert {d.key.sizes["M"]: d.why for d in would if d.key.versions == VERSIONS} == {1: "old"}
    assert [d.why for d in would if d.key == other] == ["other versions"]
    assert len(cache.shelves()) == 3
    assert cache.prune(older_than_s=11 * 86_400) == ()
    size = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert cache.prune(versions=VERSIONS, older_than_s=5 * 86_400) == would
    left = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert size - left == sum(d.bytes for d in would) > 0
    assert list(pruned(tmp_path)) == [KEY]
    assert {p.name for p in tmp_path.iterdir()} == {"lock", cache._place(KEY).folder.name}


def test_what_is_half_pruned_is_no_key_and_the_next_pruning_ends_it(tmp_path: Path) -> None:
    path, _ = kept(tmp_path, 1)
    path.parent.rename(tmp_path / ".dropped.0123456789abcdef")  # killed at that moment
    cache = Cache(tmp_path)
    assert (cache.shelves(), cache.rows(KEY), cache.problems) == ((), (), [])
    assert cache.prune(older_than_s=0) == ()
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_what_a_process_writes_to_is_not_pruned(tmp_path: Path) -> None:
    cache = Cache(tmp_path, Clock())
    cache.append(KEY, timed(1))
    assert Cache(tmp_path).prune(versions={}) == ()
    cache.append(KEY, timed(2))
    cache.close()
    assert len(Cache(tmp_path).prune(versions={})) == 1
    cache.append(KEY, timed(3))
    assert cache.rows(KEY) == (timed(3),)


# The command


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["cache", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out, err


def test_the_command_lists_exports_imports_merges_and_prunes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from torchstone.measure.device import here

    device, versions = here()
    mine = near(device=device, versions=versions)
    home, there = tmp_path / "home", tmp_path / "there"
    assert "nothing is kept" in call(capsys, "ls", "--home", home)[1]
    cache = Cache(home / "tuning")
    cache.append(mine, timed(64, 2e-3))
    cache.demote(mine, {"BLOCK": 128}, "off")
    cache.append(near(kernel="gemm\x1b[31m"), timed(1))
    cache.close()
    code, out, _ = call(capsys, "ls", "--home", home)
    assert code == 0
    assert len(out.splitlines()) == 2
    assert "2 configs     1 failed  best   2.01 ms" in out
    assert "\x1b" not in out
    code, out, _ = call(capsys, "ls", "--home", home, "--json", "--kernel", "soft/max")
    (line,) = json.loads(out)
    assert (line["configs"], line["failed"], line["best_s"]) == (2, 1, pytest.approx(2.01e-3))
    file, one, all_ = tmp_path / "a.jsonl.gz", tmp_path / "one.jsonl", tmp_path / "all.jsonl"
    assert "3 rows of 2 keys" in call(capsys, "export", file, "--home", home)[1]
    assert (
        json.loads(call(capsys, "export", one, "--kernel", "soft/max", "--home", home, "--json")[1])[
            "rows"
        ]
        == 2
    )
    assert "3 rows of 2 keys" in call(capsys, "merge", all_, one, file)[1]
    out = call(capsys, "import", all_, "--home", there)[1]
    assert "2 rows added; 0 were known" in out
    assert "1 left out" in out
    out = call(capsys, "import", all_, "--home", there, "--foreign", "--json")[1]
    assert json.loads(out) == {"added": 1, "known": 2, "foreign": 0}
    assert Cache(there / "tuning").rows(mine) == Cache(home / "tuning").rows(mine)
    out = call(capsys, "prune", "--other-versions", "--dry-run", "--home", there)[1]
    assert "1 keys would be dropped" in out
    code, out, _ = call(capsys, "prune", "--other-versions", "--home", there, "--json")
    assert [d["why"] for d in json.loads(out)] == ["other versions"]
    assert "1 keys dropped" in call(capsys, "prune", "--older-than", 0, "--home", there)[1]
    assert Cache(there / "tuning").shelves() == ()


def test_the_command_tells_of_damage_and_refuses_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, whole = kept(tmp_path / "tuning", 2)
    path.write_bytes(whole[:-9])
    code, out, err = call(capsys, "ls", "--home", tmp_path)
    assert code == 0
    assert "1 configs" in out
    assert f"damaged: {path}:2: a row is cut short" in err
    assert call(capsys, "import", tmp_path / "nothing", "--home", tmp_path)[0] == 2
    assert call(capsys, "prune", "--home", tmp_path)[0] == 2
    (mended,) = path.parent.glob("rows-*")  # rows, and no exported file
    code, out, _ = call(capsys, "import", mended, "--home", tmp_path, "--json")
    assert code == 2
    assert "no exported cache" in json.loads(out)["error"]


@pytest.mark.parametrize("name", ["ls", "export", "import", "merge", "prune"])
def test_each_part_of_the_command_has_help_with_an_example(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    assert f"Example: torchstone cache {name}" in out
    assert "--json" in out
