"""What Inductor needs in both its forms: a C++ compiler, and options."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

from torchstone import quantize, recipe
from torchstone.backends import gemm
from torchstone.records import Absent

__all__ = ["absent", "notes", "options"]


def options(made: recipe.Recipe) -> dict[str, Any]:
    """Inductor's options of a recipe."""
    step = made.engine
    assert isinstance(step, recipe.Inductor | recipe.AOTInductor)
    chosen: dict[str, Any] = {}
    pt2e = isinstance(made.numeric, recipe.Quantize) and made.numeric.scheme.startswith("pt2e")
    if step.freezing or pt2e:  # int8 kernels are chosen for constant weights only
        chosen["freezing"] = True
    if step.max_autotune:
        chosen["max_autotune"] = True
    if isinstance(step, recipe.Inductor) and step.gemm:
        chosen |= gemm.options(step.gemm)
    return chosen


def absent(engine: str) -> Absent | None:
    """Whether what Inductor compiles with is missing."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        why = "no C++ compiler: neither g++ nor clang++ is on the path"
        return Absent(engine=engine, why=why, hint="apt-get install g++")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return Absent(
            engine=engine, why="Python's C headers are missing", hint="apt-get install python3-dev"
        )
    return None


def notes(made: recipe.Recipe) -> tuple[str, ...]:
    """What this processor lacks for the recipe to pay."""
    lacking = quantize.lacking(made.numeric)
    return () if lacking is None else (lacking,)
