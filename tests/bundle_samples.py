"""Models, workload specs and bundles that the tests of ``torchstone.bundle`` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchstone import backends, env
from torchstone import recipe as recipes
from torchstone.bundle import Contents, write
from torchstone.records import Case, Dim, TensorSpec, WorkloadSpec
from torchstone.workload import Workload

BATCH = Dim(name="B", low=1, high=8)
LENGTH = Dim(name="S", low=2, high=16)


class Mlp(nn.Module):
    """(B, 6) -> (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class Attention(nn.Module):
    """(B, S, 8), (B, S) mask -> (B, S, 8), written with views of a fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)) / 8**0.5
        scores = scores.masked_fill(~mask[:, None, :], -1e4)
        return self.out(torch.softmax(scores, dim=-1) @ v)


class Tied(nn.Module):
    """(B, S) int64 -> {"logits": (B, S, 50), "extra": (hidden, None)}: every kind of tensor that a
    program can hold: a tied weight, buffers that persist or do not, a channels-last weight, a constant,
    a view into a larger storage and two buffers that share one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(4, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("positions", torch.randn(16, 8))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("part", torch.randn(9, 8)[3])
        store = torch.randn(12)
        self.register_buffer("first", store[:8])
        self.register_buffer("second", store[4:])
        self.register_buffer("index", torch.arange(8).flip(0))
        self.constant = torch.linspace(-1, 1, 8)

    def forward(self, ids: torch.Tensor) -> Any:
        h = self.embedding(ids) + self.positions[: ids.shape[1]] * self.scale
        h = h + self.constant + self.part + self.first + self.second + torch.tensor([0.25])
        h = h[..., self.index]
        image = self.conv(h.reshape(ids.shape[0], -1, 2, 4).transpose(1, 2).new_ones(1, 4, 5, 5))
        return {"logits": self.head(h), "extra": (h * image.mean(), None)}


def tensor(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def spec_of(name: str, inputs: tuple[Any, ...], dims: tuple[Dim, ...]) -> WorkloadSpec:
    return WorkloadSpec(
        name=name,
        inputs=inputs,
        dims=dims,
        example_sizes={d.name: min(d.high, d.low + 2 * d.multiple) for d in dims},
        traffic=(),
        metric=None,
        digest="0" * 64,
    )


MLP = spec_of("mlp", (tensor("x", "B", 6),), (BATCH,))
ATTENTION = spec_of(
    "attention", (tensor("x", "B", "S", 8), tensor("mask", "B", "S", dtype="bool")), (BATCH, LENGTH)
)
TIED = spec_of("tied", (tensor("ids", "B", "S", dtype="int64"),), (BATCH, LENGTH))


def inputs(spec: WorkloadSpec, sizes: dict[str, int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in spec.inputs:
        assert isinstance(i, TensorSpec)
        shape = [sizes[s] if isinstance(s, str) else s for s in i.shape]
        values = torch.randint(0, 50, shape, generator=generator)
        dtype = getattr(torch, i.dtype)
        floats = torch.randn(shape, generator=generator, dtype=torch.float64)
        made.append(
            (values % 3 > 0) if dtype == torch.bool else values if dtype == torch.int64 else floats
        )
    return tuple(
        m.to(getattr(torch, i.dtype))
        for m, i in zip(made, spec.inputs, strict=True)
        if hasattr(i, "dtype")
    )


def judged(spec: WorkloadSpec, *layouts: str) -> tuple[Case, ...]:
    """Cases at both ends of every dim, lying as told."""
    ends = [{d.name: getattr(d, end) for d in spec.dims} for end in ("low", "high")]
    return tuple(
        Case(name=f"{layout}-{i}", kind="dims", sizes=sizes, layout=layout)  # type: ignore[arg-type] # a Literal
        for layout in layouts
        for i, sizes in enumerate(ends)
    )


def exported(model: nn.Module, spec: WorkloadSpec, path: Path) -> Path:
    dims = {d.name: torch.export.Dim(d.name, min=d.low, max=d.high) for d in spec.dims}
    shapes = tuple(
        {axis: dims[s] for axis, s in enumerate(i.shape) if isinstance(s, str)}
        for i in spec.inputs
        if isinstance(i, TensorSpec)
    )
    sizes = {d.name: d.low + 2 for d in spec.dims}
    program = torch.export.export(model, inputs(spec, sizes), dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


def workload(model: nn.Module, spec: WorkloadSpec) -> Workload:
    return Workload(
        name=spec.name,
        model=lambda: model,
        inputs=lambda: inputs(spec, spec.example_sizes),
        dims=spec.dims,
        shapes={i.name: i.shape for i in spec.inputs if isinstance(i, TensorSpec)},
    )


def contents(model: nn.Module, spec: WorkloadSpec, program: Path, **changes: Any) -> Contents:
    leaves = model(*inputs(spec, spec.example_sizes))
    fields: dict[str, Any] = {
        "name": spec.name,
        "recipe": "eager",
        "decision": "KEEP_BASELINE",
        "program": program,
        "artifact": None,
        "spec": spec,
        "cases": judged(spec, "contiguous"),
        "environment": env.environment(),
        "evidence": (),
        "output_spec": torch.utils._pytree.treespec_dumps(torch.utils._pytree.tree_structure(leaves)),
    }
    return Contents(**{**fields, **changes})


def compiled(model: nn.Module, spec: WorkloadSpec, folder: Path, recipe: str, **changes: Any) -> Path:
    """Export, build with an engine, and bundle as promoted."""
    program = exported(model, spec, folder / "program.pt2")
    made = recipes.parse(recipe)
    files = folder / "artifact"
    files.mkdir()
    context = backends.Context(
        workload=workload(model, spec), recipe=made, program=program, directory=files
    )
    built = backends.of(made).build(context)
    assert isinstance(built, backends.Built), built
    changes = {"recipe": recipe, "decision": "PROMOTE", "artifact": files, **changes}
    return write(contents(model, spec, program, **changes), folder / "bundle")


def bundle(model: nn.Module, spec: WorkloadSpec, folder: Path, **changes: Any) -> Path:
    program = exported(model, spec, folder / "program.pt2")
    return write(contents(model, spec, program, **changes), folder / "bundle")


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)
