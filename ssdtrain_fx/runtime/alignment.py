"""The alignment of direct I/O: addresses, lengths and file offsets are multiples of it."""

from __future__ import annotations

ALIGNMENT_BYTES = 4096
"""The largest that drives and file systems ask for: a smaller one fails with EINVAL on some of them."""


def round_up(size_bytes: int) -> int:
    """Round ``size_bytes`` up to a multiple of the alignment: 1 -> 4096, 4096 -> 4096, 4097 -> 8192."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
