"""One formatter for people: binary units."""

from __future__ import annotations


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
