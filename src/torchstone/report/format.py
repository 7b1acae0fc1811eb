"""The only place that turns seconds, bytes, ratios and errors into text; all functions are pure.

Everything is plain ASCII, so that a pipe of any encoding takes it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from typing import TypeVar

__all__ = [
    "DASH",
    "clean",
    "count",
    "duration",
    "error",
    "interval",
    "maybe",
    "money",
    "percent",
    "rate",
    "ratio",
    "seconds",
    "si",
    "signed",
    "significant",
    "size",
]

T = TypeVar("T")

DASH = "-"
"""Stands where there is no figure."""

_SECONDS = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", " k", " M", " G", " T", " P")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def maybe(formatter: Callable[[T], str], value: T | None) -> str:
    """``formatter(value)``, or a dash where there is none."""
    return DASH if value is None else formatter(value)


def significant(value: float, digits: int = 3) -> str:
    """``value`` rounded to ``digits`` significant digits, thousands parted by commas: ``12,300``."""
    if not math.isfinite(value):
        return "not finite"
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def seconds(value: float) -> str:
    """Seconds in the unit that suits, three significant digits: ``166 ms``, ``4.20 us``, ``1.00 s``."""
    if not math.isfinite(value):
        return "not finite"
    rounded = float(f"{value:.2e}")
    if rounded == 0:
        return "0 s"
    # the slack keeps a rounded 1.00e-3 from falling under its own unit
    unit, scale = next(
        ((u, s) for u, s in reversed(_SECONDS) if abs(rounded) >= s * (1 - 1e-9)), _SECONDS[0]
    )
    return f"{significant(rounded / scale)} {unit}"


def duration(value: float) -> str:
    """A waiting time, whole seconds: ``8 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60:02d} s" if whole % 60 else "")
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(value: float) -> str:
    """Bytes, three significant digits, binary units: ``812 MiB``."""
    scaled = float(value)
    for unit in _BYTES[:-1]:
        if abs(scaled) < 1023.5:
            return f"{round(scaled) if unit == 'B' else significant(scaled)} {unit}"
        scaled /= 1024
    return f"{significant(scaled)} {_BYTES[-1]}"


def ratio(value: float) -> str:
    """How many times: ``1.42x``, ``0.79x``, ``12.3x``."""
    return f"{_times(value)}x"


def interval(low: float, high: float) -> str:
    """An interval of ratios: ``[1.58, 1.66]``."""
    return f"[{_times(low)}, {_times(high)}]"


def _times(value: float) -> str:
    return significant(value, 2 if abs(value) < 0.995 else 3)


def percent(value: float) -> str:
    """A share, two significant digits: 0.0123 is ``1.2%``."""
    return f"{significant(100 * value, 2)}%"


def signed(value: float) -> str:
    """A difference, always with its sign: ``+0.0012``, ``-1.25``; tiny ones as ``+9e-07``."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    return f"{value:+.0e}" if abs(value) < 1e-4 else f"{'+' if value > 0 else ''}{significant(value, 2)}"


def error(value: float | None) -> str:
    """A relative error: ``9.8e-07``; ``0`` for an exact one, ``not finite`` for None."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def count(value: float) -> str:
    """A number of things, thousands parted by commas; large ones to three digits: ``1,240``."""
    return f"{value:,.0f}" if abs(value) < 1e5 else significant(value)


def si(value: float) -> str:
    """An amount, three significant digits and the prefix of its unit: ``22.7 M``, ``214``."""
    scaled = float(value)
    for prefix in _THOUSANDS[:-1]:
        if abs(scaled) < 999.5:
            whole = not prefix and scaled == round(scaled)
            return f"{round(scaled) if whole else significant(scaled)}{prefix}"
        scaled /= 1000
    return f"{significant(scaled)}{_THOUSANDS[-1]}"


def rate(value: float) -> str:
    """Requests a second: ``14.2/s``."""
    return f"{significant(value)}/s"


def money(value: float) -> str:
    """Dollars: ``$0.0142``, ``$12.30``."""
    return f"${value:,.2f}" if abs(value) >= 1 else f"${significant(value)}"


def clean(text: str) -> str:
    """Text from outside, safe to print: no terminal codes, control or direction characters.

    Escape sequences are dropped, and other characters that could move the cursor, reorder the line
    or fail to encode become ``?``. Newlines and tabs stay.
    """
    plain = _ANSI.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(c if c in "\n\t" or not _hazardous(c) else "?" for c in plain)


def _hazardous(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
