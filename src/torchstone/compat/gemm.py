"""Which backends for matrix products the installed Inductor knows: they came with torch's versions."""

from __future__ import annotations

import importlib.util

__all__ = ["knows"]

_DOORS = {"cutedsl": "ensure_cute_available", "nvgemm": "use_nv_universal_gemm_template"}
"""Functions of ``torch._inductor.utils`` that came with a backend."""


def knows(name: str) -> bool:
    """Whether Inductor has a backend of that name, in small letters."""
    from torch._inductor import utils

    if name in _DOORS:
        return hasattr(utils, _DOORS[name])
    if name == "flydsl":
        return importlib.util.find_spec("torch._inductor.codegen.flydsl") is not None
    return name in ("aten", "triton", "cpp", "cutlass", "ck")
