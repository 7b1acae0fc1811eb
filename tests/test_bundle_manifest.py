from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bundle_samples import MLP, Mlp, bundle, seeded
from torchstone import bundle as bundles
from torchstone.bundle import manifest as manifests
from torchstone.errors import BundleError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    evidence = folder / "run.json"
    evidence.write_text('{"speedup": 1.0}')
    return bundle(seeded(Mlp), MLP, folder, evidence=(evidence,))


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def names(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in files(folder)]


def test_layout(original: Path) -> None:
    assert names(original) == [
        "MANIFEST.sha256",
        "evidence/run.json",
        "fallback/program.pt2",
        "manifest.json",
        "weights/model.safetensors",
    ]


def test_manifest_is_ready_for_later_parts(original: Path) -> None:
    raw = json.loads((original / "manifest.json").read_bytes())
    assert {raw["signature"], raw["sbom"], raw["schema"]} == {None}
    assert raw["parameters"] == 6 * 16 + 16 + 16 * 3 + 3
    assert raw["requires"] == ["safetensors", "torch"]


def test_seal_is_what_sha256sum_checks(original: Path) -> None:
    assert (original / "MANIFEST.sha256").read_text().split() == [
        manifests._digest(original / "manifest.json").sha256,
        "manifest.json",
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bit_is_refused(copy: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files(copy)))
    raw = path.read_bytes()
    offset = data.draw(st.integers(0, len(raw) - 1))
    bit = data.draw(st.integers(0, 7))
    path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 1 << bit]) + raw[offset + 1 :])
    try:
        with pytest.raises(BundleError) as caught:
            bundles.load(copy)
        sealed = ("manifest.json", "MANIFEST.sha256")
        assert path.name in str(caught.value) or path.name in sealed
    finally:
        path.write_bytes(raw)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"\n")


def _rename(path: Path) -> None:
    path.rename(path.with_name("renamed"))


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("damage", [_truncate, _empty, _append, _rename, Path.unlink])
def test_damage_is_refused_with_the_file_named(
    copy: Path, index: int, damage: Callable[[Path], object]
) -> None:
    path = files(copy)[index]
    damage(path)
    with pytest.raises(BundleError) as caught:
        bundles.load(copy)
    assert path.name in str(caught.value) or path.name in ("manifest.json", "MANIFEST.sha256")


@pytest.mark.parametrize("index", range(5))
def test_symlink_to_the_right_bytes_is_refused(copy: Path, tmp_path: Path, index: int) -> None:
    path = files(copy)[index]
    path.rename(tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    with pytest.raises(BundleError, match=f"{path.name} is a symlink"):
        bundles.load(copy)


def test_symlinked_folder_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "weights").rename(tmp_path / "weights")
    (copy / "weights").symlink_to(tmp_path / "weights")
    with pytest.raises(BundleError, match="weights is a symlink"):
        bundles.load(copy)


@pytest.mark.parametrize(
    "extra", ["extra", "code/model.so", "evidence/run.json.bak", ".hidden", "code/"]
)
def test_extra_file_or_folder_is_refused(copy: Path, extra: str) -> None:
    path = copy / extra
    path.parent.mkdir(exist_ok=True)
    if extra.endswith("/"):
        path.mkdir(exist_ok=True)
    else:
        path.write_text("x")
    with pytest.raises(BundleError, match="not in the manifest"):
        bundles.load(copy)


def test_two_files_that_swapped_names_are_refused(copy: Path) -> None:
    a, b = copy / "evidence/run.json", copy / "weights/model.safetensors"
    a.rename(copy / "third")
    b.rename(a)
    (copy / "third").rename(b)
    with pytest.raises(BundleError, match="was changed"):
        bundles.load(copy)


def test_socket_is_refused(copy: Path) -> None:
    os.mkfifo(copy / "pipe")
    with pytest.raises(BundleError, match="not a plain file"):
        bundles.load(copy)


def test_mode_and_place_do_not_matter(copy: Path, tmp_path: Path) -> None:
    for path in files(copy):
        path.chmod(0o444)
    (tmp_path / "current").symlink_to(copy)  # how deployments point at a release
    assert bundles.load(tmp_path / "current").name == "mlp"


def test_format_from_the_future_is_refused(copy: Path) -> None:
    raw = json.loads((copy / "manifest.json").read_bytes())
    reseal(copy, json.dumps({**raw, "format": 2, "unheard": "of"}).encode())
    with pytest.raises(BundleError, match="format 2; this torchstone reads format 1"):
        bundles.load(copy)


def test_sealed_nonsense_is_refused(copy: Path) -> None:
    reseal(copy, b"[1, 2")
    with pytest.raises(BundleError, match="not a manifest"):
        bundles.load(copy)


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle here"):
        bundles.load(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"manifest\.json is missing"):
        bundles.load(tmp_path)


def test_manifest_cannot_point_outside(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    raw = json.loads((copy / "manifest.json").read_bytes())
    raw["files"]["../secret"] = {"sha256": "0" * 64, "size": 1}
    reseal(copy, json.dumps(raw).encode())
    with pytest.raises(BundleError, match="secret is missing"):
        bundles.load(copy)


def reseal(folder: Path, raw: bytes) -> None:
    (folder / "manifest.json").write_bytes(raw)
    (folder / "MANIFEST.sha256").write_bytes(manifests._sealed(raw))
