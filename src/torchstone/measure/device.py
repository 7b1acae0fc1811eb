"""The device that is tuned for: its name, its versions, its figures, and what cannot fit on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torchstone import env
from torchstone.records.tuning import Config
from torchstone.tuner.space import Constraint

__all__ = ["facts", "fitting", "here"]

_VERSIONS = ("torch", "triton", "helion")


def here() -> tuple[str, dict[str, str]]:
    """The device's name, and the versions that a measurement depends on. Imports no torch."""
    found = env.environment()
    name = found.devices[0] if found.devices else f"{found.cpu} x{found.threads}"
    versions = {p: v for p, v in found.packages.items() if p in _VERSIONS}
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return name, versions
    return name, {**versions, "driver": next((w for w in driver.split() if w.count(".") == 2), driver)}


def facts() -> dict[str, float]:
    """Figures of the device that a model may learn from; none on a CPU. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties(0)
    return {
        "multiprocessors": float(found.multi_processor_count),
        "l2_bytes": float(found.L2_cache_size),
        "memory_bytes": float(found.total_memory),
        "shared_bytes": float(getattr(found, "shared_memory_per_block_optin", 48 * 1024)),
        "threads": 1024.0,
        "registers": 255.0,
    }


def fitting(limits: Callable[[Config], Mapping[str, float]], device: Mapping[str, float]) -> Constraint:
    """Refuses what the device has no room for.

    :param limits: what a config needs: ``shared_bytes`` and ``threads`` a block, ``registers`` a thread.
    :param device: what there is, by the same names; what is not named is not checked.
    """

    def fits(config: Config) -> str | None:
        for name, needed in limits(config).items():
            if name in device and needed > device[name]:
                return (
                    f"needs {needed:,.0f} {name.replace('_', ' ')}; the device has {device[name]:,.0f}"
                )
        return None

    return fits
