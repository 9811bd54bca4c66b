"""What an engine did and holds, as one frozen value."""

from __future__ import annotations

import dataclasses

_RATES = frozenset({"write_bytes_per_s", "read_bytes_per_s"})
_GAUGES = _RATES | {
    "slots_in_use",
    "slot_bytes_in_use",
    "file_bytes",
    "in_flight_bytes",
    "staging_bytes",
    "idle_bytes",
    "io_path",
}

NO_IO_PATH = "none yet"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Counters since the engine was opened, then gauges of this moment."""

    offloads: int = 0
    """Tensors handed to ``offload``."""
    reloads: int = 0
    """Calls of ``reload``; more than ``offloads`` under ``retain_graph=True``."""
    bytes_written: int = 0
    """Tensor bytes that reached the file."""
    bytes_read: int = 0
    """Tensor bytes that came back from the file."""
    read_ahead_bytes: int = 0
    """Of these, bytes that came back to host memory before ``reload`` had asked for them."""
    forwarded: int = 0
    """Reloads served from host memory, all or in part: the write was not over or had failed, or the bytes were in the
    host tier, or had been read ahead."""
    forwarded_bytes: int = 0
    kept: int = 0
    """Chunks that stay in ordinary memory because they could not be written."""
    kept_bytes: int = 0
    kept_for_time: int = 0
    """Tensors that stayed in memory, because moving them would have held up the step for longer than allowed."""
    kept_for_time_bytes: int = 0
    host_bytes: int = 0
    """Bytes that came to rest in the host tier."""
    demoted_bytes: int = 0
    """Of these, bytes that had to be written after all, because staging ran short. Many of them mean that the plan has
    put more into the host tier than ``host_budget_bytes`` has room for."""
    cancelled_bytes: int = 0
    """Bytes whose write had not begun when the last token died."""
    deduplicated_bytes: int = 0
    """Bytes handed to ``offload`` that another graph had handed in already."""
    late_bytes: int = 0
    """Bytes that had not left when ``release`` returned, because the next graph could run meanwhile."""
    ahead_bytes: int = 0
    """Bytes whose reload was begun while the graph before was running, and then asked for."""
    release_stall_s: float = 0.0
    """Time that ``release`` made the caller wait."""
    wait_stall_s: float = 0.0
    """Time that ``wait`` made the caller wait."""
    slots_in_use: int = 0
    slot_bytes_in_use: int = 0
    file_bytes: int = 0
    """Disk space that the file holds, used or free."""
    in_flight_bytes: int = 0
    """Bytes issued in either direction and not yet complete."""
    staging_bytes: int = 0
    """Host memory that the staging buffers hold."""
    idle_bytes: int = 0
    """Memory of CPU tensors that were reloaded and are dead, kept for the next ones."""
    write_bytes_per_s: float | None = None
    """Rate of the disk in one direction while the other one rests, averaged over the last transfers; None until there
    were enough at a time to keep it busy."""
    read_bytes_per_s: float | None = None
    io_path: str = NO_IO_PATH
    """What is really in use, such as "posix O_DIRECT"."""

    @property
    def stall_s(self) -> float:
        return self.release_stall_s + self.wait_stall_s

    def since(self, earlier: Statistics) -> Statistics:
        """The counters of one stretch, such as a step: ``after.since(before)``. Gauges are those of ``self``."""
        changes = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _GAUGES
        }
        return dataclasses.replace(self, **changes)

    def __add__(self, other: Statistics) -> Statistics:
        """Two engines taken together; rates are those of the faster one, since both may use one disk."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
            if field.name != "io_path" and field.name not in _RATES
        }
        for name in _RATES:
            sums[name] = max((rate for rate in (getattr(self, name), getattr(other, name)) if rate), default=None)
        io_paths = sorted({self.io_path, other.io_path} - {NO_IO_PATH})
        return Statistics(**sums, io_path=", ".join(io_paths) or NO_IO_PATH)
