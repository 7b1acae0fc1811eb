"""One visit to a machine with a GPU: its tests, then as much of KernelBench as fits into the time.

    python benchmarks/kernelbench_visit.py --suite CHECKOUT --out DIR --seconds 540 -- --sample

What comes after ``--`` goes to ``torchstone kernelbench``. Results are kept in one archive,
``results.tar.gz`` beside the table: with ``--before`` the next visit goes on where this one stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

_REPORT_S = 30
"""For the report and the archive."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True, help="checkout of KernelBench")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole visit")
    parser.add_argument("--before", type=Path, help="results.tar.gz of an earlier visit")
    parser.add_argument("--tests", nargs="*", default=[], help="test files whose gpu tests run first")
    parser.add_argument("more", nargs="*", help="options of torchstone kernelbench")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds - _REPORT_S
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tests:
        tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        _run([*tests, *options.tests], options.out / "tests.log", ends)
    with tempfile.TemporaryDirectory() as folder:
        if options.before is not None:
            with tarfile.open(options.before) as archive:
                archive.extractall(folder, filter="data")
        suite = [sys.executable, "-m", "torchstone", "kernelbench", str(options.suite), *options.more]
        _run([*suite, "--out", folder], options.out / "run.log", ends)
        # what is known, whether the run came to its end or not
        _run([*suite, "--out", folder, "--known"], options.out / "known.log", ends + _REPORT_S)
        with tarfile.open(options.out / "results.tar.gz", "w:gz") as archive:
            for kept in ("problems", "asked.json", "machine.json"):
                if Path(folder, kept).exists():
                    archive.add(Path(folder, kept), arcname=kept)
        for name in ("results.json", "results.md"):
            if Path(folder, name).exists():
                Path(options.out, name).write_bytes(Path(folder, name).read_bytes())


def _run(command: list[str], log: Path, ends: float) -> None:
    """Run until it is done or time is up; its output goes to a file and to ours."""
    left = ends - time.monotonic()
    if left < 1:
        return
    with log.open("w") as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=left, check=False)
            print(f"{log.name}: exit code {done.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{log.name}: stopped, time is up", flush=True)
    print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), flush=True)


if __name__ == "__main__":
    main()
