"""``torchstone check`` on the corpus of models with a planted bug each: who catches what, and how fast.

The corpus is in ``tests/corpus``. A bug counts as caught where an error is reported for the file with
the bug and, in brackets, where one is at the line at which eager raises. The speed is that of the
command on a file of 500 lines: whole process, files of the environment in the page cache, compiled to
.pyc.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torchstone.records import FileCheck, Finding
from torchstone.shapecheck import check

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "corpus"
sys.path.insert(0, str(CORPUS))

import eager  # noqa: E402  lies beside the models
from plants import MODELS, PLANTS, Plant  # noqa: E402

LONG = (
    "unet",
    "swin_block",
    "diffusion_unet",
    "dit",
    "mamba",
    "perceiver",
    "nerf",
    "wavenet",
    "pointnet",
)
"""Models that make up the long file."""
LINES = 500
ROUNDS = 7


def errors(file: FileCheck) -> list[Finding]:
    return [finding for finding in file.findings if finding.kind != "could-not-run"]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        buggy, clean = _checked(folder / "buggy", "buggy"), _checked(folder / "clean", "clean")
        read = _checked(folder / "read", "buggy", checker="pyrefly")
        guessed = [_checked(folder / v, v) for v in ("undeclared", "buggy_undeclared")]
        raised = [eager.run(Path(file.file))[0].line for file in buggy]
        _table(buggy, clean, read, raised)
        one = _speed(folder / "one.py", _long("Denoiser"))
        nine = _speed(folder / "nine.py", _long(None))
    caught = sum(bool(errors(file)) for file in buggy)
    alarms = sum(len(errors(file)) for file in clean)
    where = sum(_at(file, line) for file, line in zip(buggy, raised, strict=True))
    print(
        f"\ncaught {caught} of {len(PLANTS)} ({caught / len(PLANTS):.1%}), "
        f"{where} at the line that raises"
    )
    print(f"false alarms on the clean models: {alarms}")
    alone, found = (sum(bool(errors(file)) for file in files) for files in guessed)
    print(f"without the comments that declare inputs: caught {found}, false alarms {alone}")
    print(f"refuted false alarms of pyrefly on the clean models: {sum(len(f.refuted) for f in clean)}")
    print(f"a file of {LINES} lines, one model executed: {one}")
    print(f"a file of {LINES} lines, nine models executed: {nine}")
    return 0 if caught >= 0.95 * len(PLANTS) and alarms == 0 else 1


def _checked(folder: Path, version: str, checker: str = "both") -> Sequence[FileCheck]:
    folder.mkdir()
    for plant in PLANTS:
        (folder / f"{plant.model}.py").write_text(getattr(plant, version))
    files = [str(folder / f"{plant.model}.py") for plant in PLANTS]
    return check(files, checker="pyrefly" if checker == "pyrefly" else "both").files


def _table(
    buggy: Sequence[FileCheck],
    clean: Sequence[FileCheck],
    read: Sequence[FileCheck],
    raised: Sequence[int | None],
) -> None:
    form = "{:<21} {:<23} {:<22} {:>8} {:>8} {:>7} {:>7} {:>8}"
    print(form.format("model", "family", "bug", "pyrefly", "symbolic", "merged", "at line", "refuted"))
    rows = zip(PLANTS, buggy, clean, read, raised, strict=True)
    for plant, file, before, alone, line in rows:
        print(
            form.format(plant.model, plant.family, plant.kind, *_cells(plant, file, before, alone, line))
        )


def _cells(
    plant: Plant, file: FileCheck, clean: FileCheck, alone: FileCheck, line: int | None
) -> tuple[str, ...]:
    # what pyrefly says of the clean file too is no sign of the bug
    usual = {(f.rule, f.message) for f in (*clean.findings, *clean.refuted)}
    pyrefly = any((f.rule, f.message) not in usual for f in errors(alone))
    symbolic = any("symbolic" in f.proved_by for f in errors(file))
    marks = (pyrefly, symbolic, bool(errors(file)), _at(file, line))
    refuted = len(file.refuted) + len(clean.refuted)
    return (*("yes" if mark else "-" for mark in marks), str(refuted) if refuted else "-")


def _at(file: FileCheck, line: int | None) -> bool:
    return any(line is not None and f.place.line <= line <= f.place.end_line for f in errors(file))


def _long(executed: str | None) -> str:
    """A file of 500 lines that holds nine models, of which all are executed or one."""
    texts = [(MODELS / f"{model}.py").read_text() for model in LONG]
    own = [re.sub(r'\A"""[^"]*"""\n|^from __future__ [^\n]*\n', "", text, flags=re.M) for text in texts]
    text = "from __future__ import annotations\n" + "\n".join(own)
    if executed is not None:
        text = re.sub(rf"^# torchstone: check (?!{executed}\(\)).*\n(#.*\n)*", "", text, flags=re.M)
    assert len(text.splitlines()) >= LINES
    return text


def _speed(path: Path, text: str) -> str:
    """Wall seconds of the command on a file; one run before is not counted."""
    path.write_text(text)
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        command = [sys.executable, "-m", "torchstone", "check", str(path)]
        done = subprocess.run(command, capture_output=True, check=False)
        times.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    kept = times[1:]
    median = statistics.median(kept)
    return f"median {median:.2f} s of {len(kept)} runs, {min(kept):.2f} to {max(kept):.2f} s"


if __name__ == "__main__":
    sys.exit(main())
