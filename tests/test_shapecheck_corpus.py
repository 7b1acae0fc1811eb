"""The corpus: every model clean and with one planted bug, in eager and before running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CORPUS = Path(__file__).parent / "corpus"
sys.path.insert(0, str(CORPUS))

import eager  # noqa: E402  lies beside the models
from plants import MODELS, PLANTS, Plant  # noqa: E402

from torchstone.records import FileCheck  # noqa: E402
from torchstone.shapecheck import check  # noqa: E402


def written(folder: Path, text: Callable[[Plant], str]) -> list[str]:
    """The corpus as files of a folder."""
    for plant in PLANTS:
        (folder / f"{plant.model}.py").write_text(text(plant))
    return [str(folder / f"{plant.model}.py") for plant in PLANTS]


def errors(file: FileCheck) -> list[str]:
    return [f"{f.place.line}: {f.message}" for f in file.findings if f.kind != "could-not-run"]


def test_the_corpus_is_varied() -> None:
    assert {p.model for p in PLANTS} == {path.stem for path in MODELS.glob("*.py")}
    assert len(PLANTS) >= 28
    assert len({p.kind for p in PLANTS}) >= 8
    assert len({p.family for p in PLANTS}) >= 8


@pytest.mark.slow
def test_clean_models_run_in_eager_and_their_twins_raise(tmp_path: Path) -> None:
    for plant, twin in zip(PLANTS, written(tmp_path, lambda plant: plant.buggy), strict=True):
        clean = eager.run(MODELS / f"{plant.model}.py")
        assert clean, plant.model
        assert [ran.error for ran in clean] == [None] * len(clean), plant.model
        raised = [ran.error for ran in eager.run(Path(twin))]
        assert None not in raised, plant.model


@pytest.mark.slow
def test_no_false_alarm_on_the_clean_models(tmp_path: Path) -> None:
    """Neither as they are, nor where their inputs have to be guessed."""
    undeclared = written(tmp_path, lambda plant: plant.undeclared)
    report = check([str(MODELS / f"{plant.model}.py") for plant in PLANTS] + undeclared, limit_s=300)
    assert {file.file: errors(file) for file in report.files if errors(file)} == {}
    assert report.passed
    executed = [entry.status for file in report.files[: len(PLANTS)] for entry in file.entries]
    assert executed == ["clean"] * len(PLANTS)


@pytest.mark.slow
def test_planted_bugs_are_caught_before_running(tmp_path: Path) -> None:
    report = check(written(tmp_path, lambda plant: plant.buggy), limit_s=300)
    missed = [plant.model for plant, file in zip(PLANTS, report.files, strict=True) if not errors(file)]
    assert len(missed) <= 0.05 * len(PLANTS), missed
    assert missed == ["switch_moe"]  # two masks may select equally many: only values could tell
