from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils import _pytree as pytree

from bundle_samples import MLP, TIED, Mlp, Tied, exported, inputs, seeded
from torchstone.bundle import weights
from torchstone.errors import BundleError


def split(model: nn.Module, spec: Any, folder: Path) -> tuple[Path, Path]:
    program = torch.export.load(exported(model, spec, folder / "whole.pt2"))
    weights.neutral(program)
    paths = folder / "program.pt2", folder / "model.safetensors"
    weights.split(program, *paths)
    return paths


def assert_equal(a: Any, b: Any) -> None:
    (leaves, tree), (others, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    assert tree == other
    for x, y in zip(leaves, others, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def test_every_kind_of_tensor_survives(tmp_path: Path) -> None:
    model = seeded(Tied)
    program = weights.attach(*split(model, TIED, tmp_path)).module()
    for sizes in ({"B": 2, "S": 5}, {"B": 7, "S": 16}):
        assert_equal(program(*inputs(TIED, sizes)), model(*inputs(TIED, sizes)))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    paths = split(seeded(Tied), TIED, tmp_path)
    stored = load_file(paths[1])
    assert len({"embedding.weight", "head.weight"} & stored.keys()) == 1
    state = weights.attach(*paths).state_dict
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert isinstance(state["embedding.weight"], nn.Parameter)


def test_views_of_one_storage_stay_inside(tmp_path: Path) -> None:
    paths = split(seeded(Tied), TIED, tmp_path)
    inside = {n for n, v in torch.export.load(paths[0]).state_dict.items() if not v.is_meta}
    assert {"first", "second", "conv.weight"} <= inside  # and the channels-last one keeps its strides
    assert inside.isdisjoint(load_file(paths[1]))
    assert not weights.attach(*paths).state_dict["conv.weight"].is_contiguous()


def test_numbers_are_not_stored_twice(tmp_path: Path) -> None:
    paths = split(seeded(lambda: nn.Sequential(nn.Linear(6, 3000), nn.Linear(3000, 3))), MLP, tmp_path)
    numbers = 4 * (6 * 3000 + 3000 + 3000 * 3 + 3)
    assert numbers <= os.path.getsize(paths[1]) < numbers + 1000
    assert os.path.getsize(paths[0]) < numbers / 5


def test_the_program_alone_answers_nothing(tmp_path: Path) -> None:
    path, _ = split(seeded(Mlp), MLP, tmp_path)
    with pytest.raises(RuntimeError, match="meta"):
        torch.export.load(path).module()(*inputs(MLP, {"B": 3}))
    with pytest.raises(BundleError, match="lacks"):
        weights.attach(path, None)


def test_not_a_number_and_negative_zero_survive(tmp_path: Path) -> None:
    model = seeded(Mlp)
    first = model.get_submodule("layers.0")
    with torch.no_grad():
        first.weight[0] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, -float("inf"), 0.0])
    paths = split(model, MLP, tmp_path)
    back = weights.attach(*paths).state_dict["layers.0.weight"]
    assert "layers.0.weight" in load_file(paths[1])
    assert torch.equal(back.detach().view(torch.int32), first.weight.detach().view(torch.int32))


def test_foreign_weights_are_refused(tmp_path: Path) -> None:
    path, file = split(seeded(Mlp), MLP, tmp_path)
    stored = load_file(file)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    changed = {**stored, "layers.0.weight": stored["layers.0.weight"].double()}
    save_file(changed, tmp_path / "other", metadata=header)
    with pytest.raises(BundleError, match=r"layers\.0\.weight"):
        weights.attach(path, tmp_path / "other")
    del stored["layers.0.bias"]
    save_file(stored, tmp_path / "less", metadata=header)
    with pytest.raises(BundleError, match="differ"):
        weights.attach(path, tmp_path / "less")


def test_a_model_without_weights_needs_no_file(tmp_path: Path) -> None:
    path, file = split(seeded(nn.ReLU), MLP, tmp_path)
    assert not file.exists()
    x = inputs(MLP, {"B": 3})
    assert torch.equal(weights.attach(path, None).module()(*x), torch.relu(*x))


def test_example_inputs_do_not_ship(tmp_path: Path) -> None:
    path, _ = split(seeded(Mlp), MLP, tmp_path)
    (x,), _ = torch.export.load(path).example_inputs
    assert x.shape == (3, 6)
    assert not x.any()
    secret = inputs(MLP, {"B": 3})[0].numpy().tobytes()
    assert secret in (tmp_path / "whole.pt2").read_bytes()
    assert secret not in path.read_bytes()
