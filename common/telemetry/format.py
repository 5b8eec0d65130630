"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> str:
    """Four significant digits; integers in full with separators; what is no number as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15 and abs(value) >= 1000:
        return f"{int(value):,}"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def scaled(value: float) -> str:
    """With a decimal prefix: 12.3k, 4.56M, 151G."""
    if not math.isfinite(value):
        return str(value)
    for unit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit and abs(value) >= 10_000:
            return _three_digits(value / unit) + prefix
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def rate(value: float, unit: str) -> str:
    """A rate with its unit: "12.3k tokens/s"."""
    return f"{scaled(value)} {unit}"


def duration(seconds: float) -> str:
    """A time: "53 s", "12:04", "3:12:04"; below a second in ms."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def size(count: float) -> str:
    """Bytes with a binary prefix: "1.3 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{_three_digits(count)} {unit}"
        count /= 1024
    return f"{_three_digits(count)} TiB"
