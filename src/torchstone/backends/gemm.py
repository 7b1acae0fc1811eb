"""Whose matrix products Inductor may try beside the library's when it autotunes, and why some cannot be.

Inductor leaves out a backend that it cannot use and says so in its log at best; a recipe that names one
is refused instead, with what is missing.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import get_args, get_type_hints

from torchstone import env
from torchstone.recipe import Inductor
from torchstone.records import Absent

__all__ = ["NAMES", "absent", "options"]

NAMES: tuple[str, ...] = tuple(n for n in get_args(get_type_hints(Inductor)["gemm"]) if n)
"""As ``inductor(gemm=...)`` takes them."""


def options(name: str) -> dict[str, object]:
    """Inductor's options that have it try a backend beside the library."""
    names = "ATEN" if name == "aten" else f"ATEN,{name.upper()}"
    return {"max_autotune_gemm": True, "max_autotune_gemm_backends": names}


def absent(name: str) -> Absent | None:
    """Why a backend cannot be used here; None if it can.

    :param name: one of :data:`NAMES`.
    """
    from torchstone.compat import gemm

    if not gemm.knows(name):
        return _absent(name, f"this torch's Inductor has no backend called {name.upper()}")
    return _CHECKS[name]()


def _absent(name: str, why: str, hint: str | None = None) -> Absent:
    return Absent(engine=f"inductor(gemm={name})", why=why, hint=hint)


def _device(name: str, least: tuple[int, int] = (0, 0)) -> Absent | None:
    import torch

    if not env.devices() or torch.version.hip:
        return _absent(name, "it needs an NVIDIA device, and there is none")
    has = torch.cuda.get_device_capability()
    if has < least:
        return _absent(name, f"it needs compute capability {least[0]}.{least[1]}, this device has {has}")
    return None


def _package(name: str, module: str, package: str) -> Absent | None:
    if importlib.util.find_spec(module) is not None:
        return None
    return _absent(name, f"the package {package} is not installed", hint=f"pip install {package}")


def _triton() -> Absent | None:
    return _device("triton") or _package("triton", "triton", "triton")


def _cpp() -> Absent | None:
    if env.devices():
        return _absent("cpp", "it is for processors, and this machine computes on a device")
    return None


def _cutlass() -> Absent | None:
    found = _device("cutlass")
    if found is None and shutil.which("nvcc") is None:
        return _absent("cutlass", "nvcc is not on the path", hint="install the CUDA toolkit")
    return found or _package("cutlass", "cutlass_library", "nvidia-cutlass")


def _cutedsl() -> Absent | None:
    found = _device("cutedsl", (9, 0))
    return found or _package("cutedsl", "cutlass", "nvidia-cutlass-dsl")


def _nvgemm() -> Absent | None:
    found = _device("nvgemm", (9, 0)) or _package("nvgemm", "cutlass", "nvidia-cutlass-dsl")
    return found or _package("nvgemm", "cutlass_api", "cutlass_api")


def _flydsl() -> Absent | None:
    import torch

    if not torch.version.hip:
        return _absent("flydsl", "it needs an AMD device, and torch's build for one")
    return _package("flydsl", "flydsl", "flydsl")


_CHECKS: dict[str, Callable[[], Absent | None]] = {
    "aten": lambda: None,
    "triton": _triton,
    "cpp": _cpp,
    "cutlass": _cutlass,
    "cutedsl": _cutedsl,
    "nvgemm": _nvgemm,
    "flydsl": _flydsl,
}
