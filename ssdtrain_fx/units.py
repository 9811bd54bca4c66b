"""Format bytes (in binary units), seconds and long lists for people."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(size_bytes: float) -> str:
    """``1536 -> "1.50 KiB"``; plain bytes below 1 KiB."""
    sign, rest = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if rest < 1024:
        return f"{sign}{rest:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        rest /= 1024
        if rest < 1024 or unit == "TiB":
            return f"{sign}{rest:.2f} {unit}"
    raise AssertionError


def format_seconds(seconds: float) -> str:
    """``0.0042 -> "4.2 ms"``; up to three significant digits, and whole numbers from 100 on."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        scaled = seconds * scale
        if abs(scaled) >= 1 or unit == "µs":
            return f"{scaled:.0f} {unit}" if abs(scaled) >= 100 else f"{scaled:.3g} {unit}"
    raise AssertionError


def some_of(texts: Sequence[str], *, count: int = 8) -> str:
    """``a, b and 3 more``; ``none`` if there is none."""
    shown = ", ".join(texts[:count]) or "none"
    return f"{shown} and {len(texts) - count} more" if len(texts) > count else shown
