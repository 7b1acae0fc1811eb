"""Where a measurement is made, and which differences forbid a comparison. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

import psutil

from torchstone.records import Absent, Environment

__all__ = ["PACKAGES", "differs", "environment", "instruction_sets", "missing_package"]

PACKAGES = (
    "torch",
    "torchao",
    "onnxruntime",
    "openvino",
    "onnx",
    "onnxscript",
    "transformers",
    "numpy",
    "triton",
    "helion",
)
"""Packages that can change an answer or a time."""

ISA = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "avx_vnni_int8",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
    "sme",
)
"""Instruction sets, by the kernel's names, that ATen, oneDNN, ONNX Runtime and OpenVINO dispatch on."""


def environment(threads: int | None = None) -> Environment:
    """Describe this machine and its packages, in milliseconds and without loading torch.

    :param threads: intra-op threads that candidates run with; all usable cores if None.
    """
    cores = _cores()
    return Environment(
        python=platform.python_version(),
        platform=f"{sys.platform}-{platform.machine()}",
        cpu=_cpu_name(),
        isa=instruction_sets(),
        cores=cores,
        threads=threads or cores,
        memory_bytes=psutil.virtual_memory().total,
        packages=_versions(),
        devices=devices(),
    )


def instruction_sets() -> tuple[str, ...]:
    """Those of :data:`ISA` that this processor has, sorted; empty where the system does not say."""
    flags = set(_cpuinfo("flags", "Features").split())
    return tuple(sorted(flags.intersection(ISA)))


def differs(a: Environment, b: Environment) -> tuple[str, ...]:
    """The facts that forbid comparing measurements made in ``a`` and ``b``; empty if none does.

    Memory does not count: a size that matters shows as a failure, not as a time.
    """
    found = [
        f"{name}: {_text(left)} against {_text(right)}"
        for name in ("platform", "cpu", "isa", "cores", "threads", "devices", "python")
        if (left := getattr(a, name)) != (right := getattr(b, name))
    ]
    for name in sorted({*a.packages, *b.packages}):
        left, right = a.packages.get(name, "absent"), b.packages.get(name, "absent")
        if left != right:
            found.append(f"{name}: {left} against {right}")
    return tuple(found)


def missing_package(engine: str, package: str, extra: str, oldest: tuple[int, ...]) -> Absent | None:
    """What ``engine`` lacks if a package is absent or too old; the package is not imported.

    :param extra: our extra that installs it.
    :param oldest: first parts of the oldest version that will do.
    """
    hint = f"pip install 'torchstone[{extra}]'"
    if importlib.util.find_spec(package) is None:
        return Absent(engine=engine, why=f"{package} is not installed", hint=hint)
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Absent(
            engine=engine, why=f"{package} has no version: it is not an installed package", hint=hint
        )
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[: len(oldest)] if p.isdigit())
    if parts < oldest:
        needed = ".".join(map(str, oldest))
        return Absent(engine=engine, why=f"{package} {version} is older than {needed}", hint=hint)
    return None


def _text(value: object) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    return _cpuinfo("model name", "Model", "CPU part") or platform.processor() or platform.machine()


def _cpuinfo(*names: str) -> str:
    """The value of the first of these fields in the first processor's block of ``/proc/cpuinfo``."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return next((fields[name] for name in names if name in fields), "")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices() -> tuple[str, ...]:
    """Names of NVIDIA devices, from the driver's own files: starting nvidia-smi takes too long."""
    return tuple(
        line.partition(":")[2].strip()
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Model:")
    )
