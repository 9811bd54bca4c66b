"""What one engine counts."""

from __future__ import annotations

import dataclasses
from typing import Any

_NOT_SHOWN = frozenset({"unwritten_bytes", "unmade_bytes", "held_bytes"})
"""What only the engine needs, to predict stalls."""


@dataclasses.dataclass(slots=True)
class Counters:
    """See :class:`ssdtrain_fx.runtime.statistics.Statistics`."""

    offloads: int = 0
    reloads: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    forwarded: int = 0
    forwarded_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    kept_for_time: int = 0
    kept_for_time_bytes: int = 0
    cancelled_bytes: int = 0
    host_bytes: int = 0
    demoted_bytes: int = 0
    read_ahead_bytes: int = 0
    deduplicated_bytes: int = 0
    late_bytes: int = 0
    ahead_bytes: int = 0
    release_stall_s: float = 0.0
    wait_stall_s: float = 0.0
    in_flight_bytes: int = 0
    unwritten_bytes: int = 0
    """Of these, offloaded bytes that have not reached the file."""
    unmade_bytes: int = 0
    """Of these, bytes that are still needed on a device, which may not have made them yet."""
    held_bytes: int = 0
    """Bytes in the host tier now."""

    def shown(self) -> dict[str, Any]:
        """Those that are fields of ``Statistics``."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _NOT_SHOWN
        }
