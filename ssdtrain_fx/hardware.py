"""The hardware profile: rates and latencies of a machine, as one frozen value that is stored as JSON.

A profile belongs to one device and one directory. ``ssdtrain_fx.machine.probe`` measures it. The planner only reads it,
so the same profile and the same graph give the same plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """A transfer path: a transfer of n bytes takes ``latency_s + n / bytes_per_s``."""

    bytes_per_s: float
    latency_s: float = 0.0

    def transfer_s(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


def convolution_key(dtype_name: str) -> str:
    """The key of convolutions in :attr:`Hardware.flops_per_s`. They use another library than matrix products."""
    return f"{dtype_name} convolution"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Measured rates of one device and one directory on an SSD."""

    device: str
    """``cpu``, or the name of the GPU."""
    flops_per_s: Mapping[str, float]
    """Matrix products by dtype name (``float32``), and convolutions under :func:`convolution_key` if they differ."""
    memory_bytes_per_s: float
    """Reads plus writes of a streaming pointwise kernel."""
    elements_per_s: Mapping[str, float]
    """Elements per second of an expensive pointwise op (``exp``, ``tanh``, ``erf``), by dtype name."""
    kernel_s: float
    """Time of a kernel that does no work."""
    write: Channel
    """Staging to SSD."""
    read: Channel
    """SSD to where the tensor is needed."""
    share_when_both: float
    """Share of its rate that each direction keeps while the other is busy too: 0.5 if both share one resource."""
    copy_out: Channel
    """Tensor to staging (on a GPU: device to host)."""
    copy_in: Channel
    """Staging to tensor (on a GPU: host to device)."""
    copies_block_compute: bool
    """Whether the compute thread makes the copies, as for CPU tensors. On a GPU, copies overlap with computation."""
    offload_s: float
    """Compute-thread time of one ``offload`` and its ``release``, regardless of size."""
    reload_s: float
    """Compute-thread time of one ``reload`` and its ``wait``, regardless of size."""
    next_offload_s: float | None = None
    """``offload_s`` of a storage whose ops directly follow those of another one: their code and data are still in the
    caches of the processor. None: not measured."""
    next_reload_s: float | None = None
    """The same for ``reload_s``."""
    staging_bytes: int
    """Maximum number of bytes between tensor and SSD at one time."""
    staging_chunk_bytes: int = 1
    """Staging is handed out in chunks of this size. A profile does not hold it: it depends on what the engine gets."""

    @property
    def is_gpu(self) -> bool:
        """Whether graphs are planned for a GPU. With the profile of one, even a graph of CPU tensors is."""
        return self.device != "cpu"

    @property
    def has_host_tier(self) -> bool:
        """Whether staging is separate memory, and copies to it overlap with computation: pinned memory for a GPU.

        On a CPU, staging is the same memory that storages should leave.
        """
        return self.is_gpu and not self.copies_block_compute

    def staged_bytes(self, size_bytes: int) -> int:
        """Bytes of staging that a storage of ``size_bytes`` takes: whole chunks."""
        return -(-size_bytes // self.staging_chunk_bytes) * self.staging_chunk_bytes

    def offload_seconds(self, *, is_next: bool) -> float:
        """``offload_s``, or ``next_offload_s`` if that is measured."""
        return self.offload_s if not is_next or self.next_offload_s is None else self.next_offload_s

    def reload_seconds(self, *, is_next: bool) -> float:
        """``reload_s``, or ``next_reload_s`` if that is measured."""
        return self.reload_s if not is_next or self.next_reload_s is None else self.next_reload_s

    def computing_slower(self, times: float) -> Hardware:
        """The same disk, with computation that takes ``times`` times as long by roofline.

        For a machine whose step time is known: a roofline has no cold caches, page faults or other processes.
        """
        return dataclasses.replace(
            self,
            flops_per_s={name: rate / times for name, rate in self.flops_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s / times,
            elements_per_s={name: rate / times for name, rate in self.elements_per_s.items()},
            kernel_s=self.kernel_s * times,
        )

    def shared_by(self, ranks: int) -> Hardware:
        """What is left of the drives for each of so many ``ranks``, which use them at the same time."""
        write, read = (
            dataclasses.replace(channel, bytes_per_s=channel.bytes_per_s / ranks) for channel in (self.write, self.read)
        )
        return dataclasses.replace(self, write=write, read=read)

    def __post_init__(self) -> None:
        if self.staging_chunk_bytes < 1:
            raise ValueError(f"staging_chunk_bytes is {self.staging_chunk_bytes}; expected a number above 0.")
        rates = [self.memory_bytes_per_s, *self.flops_per_s.values(), *self.elements_per_s.values()]
        rates += [channel.bytes_per_s for channel in (self.write, self.read, self.copy_out, self.copy_in)]
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"every rate of a hardware profile must be finite and above 0, got {self}")
        times = [self.kernel_s, self.offload_s, self.reload_s, self.next_offload_s or 0.0, self.next_reload_s or 0.0]
        times += [channel.latency_s for channel in (self.write, self.read, self.copy_out, self.copy_in)]
        if not all(0 <= seconds < math.inf for seconds in times):
            raise ValueError(f"every time of a hardware profile must be finite and at least 0, got {self}")
        if not 0 < self.share_when_both <= 1:
            raise ValueError(f"share_when_both is {self.share_when_both}; expected a number in (0, 1].")

    def to_json(self) -> str:
        """Stable text: equal profiles give equal bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Inverse of :meth:`to_json`."""
        raw: dict[str, Any] = json.loads(text)
        for name in ("write", "read", "copy_out", "copy_in"):
            raw[name] = Channel(**raw[name])
        return cls(**raw)

    def digest(self) -> str:
        """Identifies this profile in the keys of compile caches: a plan for other hardware must not be reused."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
