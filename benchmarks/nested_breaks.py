"""What nested graph breaks save: a break 2, 4, 8 and 16 calls deep, compiled without and with them.

    python benchmarks/nested_breaks.py [--depths 2 4 8 16] [--backend inductor] [--json FILE]

Eager, without and with are timed in turns in one session; capture times are cold, with an empty cache.
Outputs are compared with each other to the bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTH = 64

LEVEL = """
class Level{i}(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({width}, {width})
        self.inner = {inner}()

    def forward(self, x):
        x = torch.relu(self.linear(x))
        x = self.inner(x)
        return torch.relu(x) + {i}
"""
INNERMOST = """
import torch
from torch import nn


class Innermost(nn.Module):
    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timed rounds, for each depth")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(Path(folder), depth, options) for depth in options.depths]
    print(
        f"{'depth':>5}  {'':<8}{'graphs':>7}{'breaks':>7}{'capture s':>10}{'backend s':>10}"
        f"{'call us':>9}{'outside us':>11}{'eager us':>9}  outputs"
    )
    for found in rows:
        for name in ("plain", "nested"):
            show(found, name)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    if any(found["relative"] not in (0.0, None) for found in rows):
        sys.exit("outputs differ")


def row(folder: Path, depth: int, options: argparse.Namespace) -> dict[str, Any]:
    import msgspec
    import torch

    from torchstone.capture.compiled.breaks import study_breaks
    from torchstone.workload import Workload

    made = model(folder, depth)
    workload = Workload(
        name=f"depth-{depth}", model=lambda: made, inputs=lambda: (torch.randn(8, WIDTH),)
    )
    study = study_breaks(workload, workload.module(), backend=options.backend, seconds=options.seconds)
    found: dict[str, Any] = msgspec.to_builtins(study)
    return {"depth": depth, **found}


def model(folder: Path, depth: int) -> Any:
    """A chain of ``depth`` modules around one that breaks, each a class with code of its own."""
    text = INNERMOST
    for i in range(depth):
        inner = f"Level{i - 1}" if i else "Innermost"
        text += LEVEL.format(i=i, inner=inner, width=WIDTH)
    path = folder / f"depth_{depth}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, f"Level{depth - 1}")().eval()


def show(found: dict[str, Any], name: str) -> None:
    way = found[name]
    if way is None:
        print(f"{found['depth']:>5}  {name:<8}{found['why']}")
        return
    same = "equal" if found["relative"] == 0 else f"relative error {found['relative']}"
    print(
        f"{found['depth']:>5}  {name:<8}{way['graphs']:>7}{way['breaks']:>7}{way['capture_s']:>10.2f}"
        f"{way['compile_s']:>10.2f}{way['steady_s'] * 1e6:>9.0f}{way['outside_s'] * 1e6:>11.0f}"
        f"{found['eager_s'] * 1e6:>9.0f}  {same}",
        flush=True,
    )


if __name__ == "__main__":
    main()
