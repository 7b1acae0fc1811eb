"""What Torchstone itself costs: importing it, its help, and the promise that it loads no torch.

python benchmarks/own_costs.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 15
COMMANDS = {
    "python -c pass": "pass",
    "import torchstone": "import torchstone",
    "torchstone --help": "from torchstone.cli import main; main(['--help'])",
    "torchstone run --help": "from torchstone.cli import main; main(['run', '--help'])",
}


def main() -> None:
    """Time each in fresh processes, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, code in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            times[name].append(time.perf_counter() - start)
    empty = statistics.median(times["python -c pass"])
    for name, seconds in times.items():
        median, worst = statistics.median(seconds), max(seconds)
        print(
            f"{name:<24} median {median:.3f} s, worst {worst:.3f} s, over python {median - empty:.3f} s"
        )
    code = "import sys, torchstone; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"import torchstone loads torch: {loaded.stdout.strip()}")


if __name__ == "__main__":
    main()
