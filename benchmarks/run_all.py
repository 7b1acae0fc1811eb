"""All benchmarks, one after the other: ``make bench``; ``make bench ARGS="own_costs"`` for some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("own_costs", "bundle_overhead", "tracing", "nested_breaks", "shape_corpus", "examples")


def main(names: list[str]) -> int:
    """Run them; the exit code is the first failure's."""
    code = 0
    for name in names or BENCHMARKS:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(Path(__file__).parent / f"{name}.py")]
        done = subprocess.run(command, check=False)
        code = code or done.returncode
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
