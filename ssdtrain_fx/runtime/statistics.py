"""What an engine has done and holds now, as one frozen value."""

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
    "allocated_peak_bytes",
    "planned_peak_bytes",
    "io_path",
}

NO_IO_PATH = "none yet"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Counters since the engine was opened, then gauges with their current values."""

    offloads: int = 0
    """Tensors handed to ``offload``."""
    reloads: int = 0
    """Calls of ``reload``; more than ``offloads`` under ``retain_graph=True``."""
    bytes_written: int = 0
    """Tensor bytes that reached the file."""
    bytes_read: int = 0
    """Tensor bytes that were read from the file."""
    read_ahead_bytes: int = 0
    """Of these, bytes that were read into host memory before ``reload`` requested them."""
    forwarded: int = 0
    """Reloads served from host memory, fully or in part: the write had not finished or had failed, or the bytes were in
    the host tier or had been read ahead."""
    forwarded_bytes: int = 0
    kept: int = 0
    """Chunks that stay in ordinary memory because they could not be written."""
    kept_bytes: int = 0
    kept_for_time: int = 0
    """Tensors that stayed in memory because moving them would have stalled the step for longer than allowed."""
    kept_for_time_bytes: int = 0
    host_bytes: int = 0
    """Bytes that were put into the host tier."""
    demoted_bytes: int = 0
    """Of these, bytes that had to be written after all because staging ran short. A large value means that the plan put
    more into the host tier than fits into ``host_budget_bytes``."""
    cancelled_bytes: int = 0
    """Bytes whose write had not begun when the last token died."""
    deduplicated_bytes: int = 0
    """Bytes of CPU tensors passed to ``offload`` that another graph had already offloaded."""
    late_bytes: int = 0
    """Bytes that had not left when ``release`` returned, so that they are moved while the next graph runs."""
    ahead_bytes: int = 0
    """Bytes whose reload began while the backward of the previous graph was running, and that were then requested."""
    release_stall_s: float = 0.0
    """Time for which ``release`` blocked the caller."""
    wait_stall_s: float = 0.0
    """Time for which ``wait`` blocked the caller."""
    slots_in_use: int = 0
    slot_bytes_in_use: int = 0
    file_bytes: int = 0
    """Disk space of the file, used or free."""
    in_flight_bytes: int = 0
    """Bytes issued in either direction and not yet complete."""
    staging_bytes: int = 0
    """Host memory of the staging buffers."""
    idle_bytes: int = 0
    """Memory of reloaded CPU tensors that have died, kept for later reloads."""
    allocated_peak_bytes: int = 0
    """The most memory that compiled steps on a CPU have used at a time; more in ``memory_stats()``."""
    planned_peak_bytes: int = 0
    """What their plans predict: the highest of all graphs that have run. A step of several graphs needs more than each
    of them: ``explain(...).step_peak_bytes``."""
    write_bytes_per_s: float | None = None
    """Rate of the disk in one direction while the other direction is idle, averaged over the last transfers; None until
    enough transfers were in flight together to keep it busy."""
    read_bytes_per_s: float | None = None
    io_path: str = NO_IO_PATH
    """The I/O path in use, such as "posix O_DIRECT"."""

    @property
    def stall_s(self) -> float:
        """Time for which the caller was blocked. A GPU computes meanwhile, so there a step loses less than that."""
        return self.release_stall_s + self.wait_stall_s

    def since(self, earlier: Statistics) -> Statistics:
        """The counters of an interval, such as a step: ``after.since(before)``. Gauges are those of ``self``."""
        changes = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _GAUGES
        }
        return dataclasses.replace(self, **changes)

    def __add__(self, other: Statistics) -> Statistics:
        """The sum of two engines. Rates are those of the faster one, because both may use the same disk."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
            if field.name != "io_path" and field.name not in _RATES
        }
        for name in _RATES:
            sums[name] = max((rate for rate in (getattr(self, name), getattr(other, name)) if rate), default=None)
        io_paths = sorted({self.io_path, other.io_path} - {NO_IO_PATH})
        return Statistics(**sums, io_path=", ".join(io_paths) or NO_IO_PATH)
