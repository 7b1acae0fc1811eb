"""What a loaded bundle costs: the check of each call, and the way to the first answer.

    python benchmarks/bundle_overhead.py [--repeats 5] [--layers 2]

Prints one line a figure, with the spread over the repeats. Cold starts are those of fresh processes,
from after ``import torch`` to the first answer; ``torch.compile`` starts with an empty cache, then again
with the cache that it left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from time import perf_counter
from typing import Any

BATCH, LENGTH, WIDTH = 4, 32, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=5, help="timings, and fresh processes, per figure"
    )
    parser.add_argument("--layers", type=int, default=2, help="size of the model for the cold starts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.folder, options.layers)))
        return
    for inputs in (1, 2, 3):
        show(f"envelope check, hit, {inputs} inputs", check_us(inputs, options.repeats), "us")
    with tempfile.TemporaryDirectory() as folder:
        measure_starts(Path(folder), options)


def show(what: str, values: list[float], unit: str) -> None:
    spread = f"{min(values):8.3f} .. {max(values):.3f}"
    print(
        f"{what:<52} {statistics.median(values):8.3f} {unit}   ({spread}, n={len(values)})", flush=True
    )


def check_us(inputs: int, repeats: int, calls: int = 20_000) -> list[float]:
    import torch

    from torchstone.bundle import Envelope, compile_check
    from torchstone.records import Dim, TensorSpec

    check = compile_check(
        Envelope(
            inputs=tuple(
                TensorSpec(name=f"input{i}", dtype="int64", shape=("B", "S")) for i in range(inputs)
            ),
            dims=(Dim(name="B", low=1, high=8), Dim(name="S", low=1, high=64)),
            scalars={},
            layouts=("contiguous",),
        )
    )
    args = tuple(torch.zeros(BATCH, LENGTH, dtype=torch.int64) for _ in range(inputs))
    assert check(args) == "hit"
    return [t / calls * 1e6 for t in timeit.repeat(lambda: check(args), number=calls, repeat=repeats)]


def measure_starts(folder: Path, options: argparse.Namespace) -> None:
    built = child("build", folder, options)
    print(f"bundle of {built['bytes'] / 2**20:.1f} MiB, {built['parameters']:,} parameters")
    caches = folder / "empty"
    kinds = (
        ("bundle: load, first answer", "bundle", lambda i: folder / "unused"),
        ("torch.compile: first answer, empty cache", "compile", lambda i: caches / str(i)),
        ("torch.compile: first answer, its own cache", "compile", lambda i: caches / str(i)),
        ("eager: make the model, first answer", "eager", lambda i: folder / "unused"),
    )
    for what, kind, cache in kinds:
        runs = [child(kind, folder, options, cache(i)) for i in range(options.repeats)]
        for part in runs[0]:
            label = what if part == "total" else f"    of which {part}"
            show(label, [run[part] for run in runs], "s ")
    overhead = child("calls", folder, options)
    for what, value in overhead.items():
        show(what, value, "us")


def child(
    kind: str, folder: Path, options: argparse.Namespace, cache: Path | None = None
) -> dict[str, Any]:
    arguments = ["--child", kind, "--folder", str(folder), "--layers", str(options.layers)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache or folder / "build-cache")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def model(layers: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(layers)
    ]
    norms = [nn.LayerNorm(WIDTH) for _ in range(layers)]
    parts = [part for pair in zip(blocks, norms, strict=True) for part in pair]
    return nn.Sequential(*parts).eval().requires_grad_(False)


def example() -> Any:
    import torch

    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def build(folder: Path, layers: int) -> dict[str, Any]:
    """Export, compile ahead of time, and write the bundle."""
    import torch

    from torchstone import backends, bundle, env, recipe
    from torchstone.capture import program as programs
    from torchstone.records import Case, Dim
    from torchstone.workload import Workload

    workload = Workload(
        name="blocks",
        model=lambda: model(layers),
        inputs=lambda: (example(),),
        dims=(Dim(name="B", low=1, high=8),),
        shapes={"input": ("B", LENGTH, WIDTH)},
    )
    exported = torch.export.export(
        model(layers), (example(),), dynamic_shapes=({0: torch.export.Dim("B", min=1, max=8)},)
    )
    programs.save(exported, folder / "program.pt2")
    made = recipe.parse("aotinductor")
    (folder / "code").mkdir()
    backends.of(made).build(
        backends.Context(
            workload=workload, recipe=made, program=folder / "program.pt2", directory=folder / "code"
        )
    )
    contents = bundle.Contents(
        name=workload.name,
        recipe="aotinductor",
        decision="PROMOTE",
        program=folder / "program.pt2",
        artifact=folder / "code",
        spec=workload.spec(),
        cases=tuple(Case(name=f"B{b}", kind="dims", sizes={"B": b}) for b in (1, 8)),
        environment=env.environment(),
        evidence=(),
        output_spec=programs.output_spec(exported),
    )
    manifest = bundle.load(bundle.write(contents, folder / "bundle")).manifest
    return {"bytes": sum(f.size for f in manifest.files.values()), "parameters": manifest.parameters}


def start_bundle(folder: Path, layers: int) -> dict[str, float]:
    import torch  # noqa: F401 # every start is counted from here

    from torchstone.bundle import load, manifest

    started = perf_counter()
    manifest.read(folder / "bundle")
    checked = perf_counter()
    loaded = load(folder / "bundle")
    ready = perf_counter()
    loaded(example())
    answered = perf_counter()
    digests = checked - started
    return {
        "total": answered - checked,
        "digests": digests,
        "code": ready - checked - digests,
        "first call": answered - ready,
    }


def start_compile(folder: Path, layers: int) -> dict[str, float]:
    import torch

    started = perf_counter()
    compiled = torch.compile(model(layers))
    with torch.no_grad():
        compiled(example())
    return {"total": perf_counter() - started}


def start_eager(folder: Path, layers: int) -> dict[str, float]:
    import torch

    started = perf_counter()
    with torch.no_grad():
        model(layers)(example())
    return {"total": perf_counter() - started}


def calls(folder: Path, layers: int) -> dict[str, list[float]]:
    """All that a bundle adds to a call: with an engine that answers at once."""
    import torch

    from torchstone import backends, bundle

    x = example()
    answer = (torch.zeros(1),)
    backends.load_artifact = lambda *_: lambda *_: answer
    loaded = bundle.load(folder / "bundle")
    values = {"a call, all but the engine": [timed(lambda: loaded(x)) for _ in range(30)]}
    with torch.no_grad():
        values["the same, inside torch.no_grad()"] = [timed(lambda: loaded(x)) for _ in range(30)]
    return values


def timed(function: Any, number: int = 2000) -> float:
    return timeit.timeit(function, number=number) / number * 1e6


CHILDREN = {
    "build": build,
    "bundle": start_bundle,
    "compile": start_compile,
    "eager": start_eager,
    "calls": calls,
}

if __name__ == "__main__":
    main()
