"""The lanes of one engine: one per kind of device, opened when its first tensor comes.

:class:`Parts` lists what tests and benchmarks replace.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ssdtrain_fx.accelerators import Accelerator, reason_to_refuse
from ssdtrain_fx.errors import ConfigError, InternalError
from ssdtrain_fx.memory_limit import MemoryLimit, read_memory_limit
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Entry
from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.lanes.aio.aio_lane import DIRECT_CHUNK_BYTES, FROM_SOURCE_BYTES, AioLane
from ssdtrain_fx.runtime.lanes.aio.kernel import Aio, AioUnavailableError, KernelAio
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.lanes.threads.kvikio import KvikioLane, KvikioMover
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import Kvikio, choose_kvikio, may_use_kvikio
from ssdtrain_fx.runtime.lanes.threads.thread_lane import ThreadLane
from ssdtrain_fx.runtime.memory.accelerator import AcceleratorMover
from ssdtrain_fx.runtime.memory.cuda import CudaMover
from ssdtrain_fx.runtime.memory.movers import CpuMover, Mover
from ssdtrain_fx.runtime.memory.staging import StagingPool
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory
from ssdtrain_fx.runtime.policy.patience import Clock
from ssdtrain_fx.runtime.policy.stalls import Stalls
from ssdtrain_fx.runtime.shield import shielded
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile, SpillFile
from ssdtrain_fx.runtime.storage.striped_file import open_spill_file

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.05
"""How long ``wait_until_idle`` waits for one lane before it turns to the next."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What an engine is made of. The defaults are the real parts."""

    open_file: Callable[[Sequence[str]], ChunkFile] | None = None
    """Opens the spill file in these directories. None: a :class:`SpillFile` in each of them."""
    open_aio: Callable[[], Aio] | None = None
    """Called for the first CPU tensor if the file does direct I/O. If it raises AioUnavailableError, threads do the
    work. None: :class:`KernelAio`, unless the configuration names another path."""
    choose_kvikio: Callable[[IOPath, Sequence[str], Any], Kvikio | None] = choose_kvikio
    cuda: Any = torch.cuda
    """Replaces ``torch.cuda``."""
    make_lane: Callable[[Lanes, str], Lane] | None = None
    """Makes the lane for a kind of device. None: :meth:`Lanes.make`."""
    chunk_bytes: int | None = None
    from_source_bytes: int = FROM_SOURCE_BYTES
    """Native AIO writes tensors of at least this size without staging."""
    clock: Clock = time.perf_counter
    """Returns seconds."""
    read_memory_limit: Callable[[], MemoryLimit | None] = read_memory_limit
    """Asked before a tensor stays in memory to save time."""

    def open(self, config: EngineConfig, directories: Sequence[str]) -> ChunkFile:
        """The spill file. Raises ConfigError if ``config`` asks for a path that this machine does not have."""
        may_use_kvikio(config.io, self.cuda)  # raise now rather than at the first CUDA tensor
        if config.checksum and config.io == "kvikio":
            raise ConfigError('checksum=True needs io="posix": with io="kvikio" the bytes never pass through the CPU.')
        if self.open_file is not None:
            return self.open_file(directories)
        return open_spill_file(directories, functools.partial(SpillFile, reserve_bytes=config.disk_reserve_bytes))


class Lanes:
    """The lanes that one engine has opened."""

    def __init__(self, config: EngineConfig, parts: Parts, ledger: Ledger, directories: Sequence[str]) -> None:
        self.by_type: dict[str, Lane] = {}
        """By the type of the device. Replaced, never changed: threads iterate over it."""
        self._config = config
        self._parts = parts
        self.ledger = ledger
        self._directories = directories
        self._lock = threading.Lock()

    def of(self, device_type: str) -> Lane:
        """The lane for this kind of device, which is opened if there is none. Raises ConfigError for another kind."""
        lane = self.by_type.get(device_type)
        return shielded(functools.partial(self._open, device_type)) if lane is None else lane

    def of_entry(self, entry: Entry) -> Lane:
        """The lane that has moved ``entry``."""
        return self.by_type[entry.device.type]

    def opened(self) -> tuple[Lane, ...]:
        """All of them, also one that another thread is opening now."""
        with self._lock:
            return tuple(self.by_type.values())

    @property
    def io_path(self) -> str:
        """The paths in use; that of the file before the first tensor."""
        paths = dict.fromkeys(lane.io_path for lane in self.by_type.values())
        return ", ".join(paths) or self.ledger.file.io_path

    def wait_until_idle(self, stalls: Stalls) -> None:
        """Block until nothing is in flight, and nothing is about to be read ahead. Raises StalledDiskError."""
        ledger = self.ledger
        with ledger.lock, ledger.change:
            ledger.drain()
            patience = stalls.patience()
            ledger.idle_waiters += 1
        try:
            while True:
                with ledger.lock, ledger.change:
                    lanes = tuple(self.by_type.values())
                    for lane in lanes:
                        lane.make_progress()
                    if not ledger.counters.in_flight_bytes and not any(lane.will_read_ahead for lane in lanes):
                        break
                    seen = ledger.progress.count
                with ledger.lock:
                    ledger.check_usable("the transfers in flight")
                    stalls.check(patience, "the transfers in flight")
                if not any(lane.wait_for_progress(seen, IDLE_POLL_S) for lane in lanes):
                    with ledger.lock:
                        if seen == ledger.progress.count:
                            raise InternalError(f"bytes are in flight that no lane moves: {self.describe_transfers()}")
        finally:
            with ledger.lock:
                ledger.idle_waiters -= 1
        ledger.tidy()

    def describe_transfers(self) -> str:
        """Describe what is queued and in flight. Needs the ledger's lock."""
        ledger = self.ledger
        staging = ", ".join(
            f"{kind}: {lane.pool.available} of {lane.pool.buffer_limit}" for kind, lane in self.by_type.items()
        )
        return f"{ledger.file.path}: {ledger.describe_transfers()}; free staging buffers, {staging}"

    def _open(self, device_type: str) -> Lane:
        with self._lock:
            lane = self.by_type.get(device_type)
            if lane is None:
                lane = (self._parts.make_lane or Lanes.make)(self, device_type)
                self.by_type = {**self.by_type, device_type: lane}
            return lane

    def make(self, device_type: str) -> Lane:
        """Make a lane by the configuration and the machine. Only :meth:`of` opens one for use."""
        refused = reason_to_refuse(device_type)
        if refused:
            raise ConfigError(f"ssdtrain_fx cannot offload a tensor on {device_type!r}: {refused}.")
        config, parts, ledger = self._config, self._parts, self.ledger
        drive_count = len(self._directories)
        if device_type == "cuda" and not config.checksum:
            kvikio = parts.choose_kvikio(config.io, self._directories, parts.cuda)
            if kvikio is not None:
                return KvikioLane(ledger, kvikio, KvikioMover(parts.cuda), drive_count)
        tensor_memory = TensorMemory() if device_type == "cpu" else None
        mover = self._make_mover(device_type)
        budget_bytes = config.host_budget_bytes
        if budget_bytes is None:
            budget_bytes = mover.default_budget_bytes * drive_count
        pool = StagingPool(budget_bytes, self._chunk_size(mover.chunk_bytes(budget_bytes)), mover.make_buffer)
        aio = None if tensor_memory is None else self._open_aio()
        if tensor_memory is not None and aio is not None:
            return AioLane(
                ledger,
                aio,
                pool,
                tensor_memory,
                checksum=config.checksum,
                from_source_bytes=parts.from_source_bytes,
                direct_chunk_bytes=self._chunk_size(DIRECT_CHUNK_BYTES),
            )
        thread_count = mover.thread_count * drive_count
        return ThreadLane(
            ledger, mover, pool, thread_count=thread_count, checksum=config.checksum, tensor_memory=tensor_memory
        )

    def _make_mover(self, device_type: str) -> Mover:
        if device_type == "cpu":
            return CpuMover()
        return CudaMover(self._parts.cuda) if device_type == "cuda" else AcceleratorMover(Accelerator(device_type))

    def _open_aio(self) -> Aio | None:
        """None: threads have to do the work."""
        open_aio = self._parts.open_aio
        if open_aio is None and self._config.io in ("auto", "aio"):
            open_aio = KernelAio
        if open_aio is None or not self.ledger.file.direct:
            return None
        try:
            return open_aio()
        except AioUnavailableError as reason:
            log.info("native AIO is not available (%s): threads move CPU tensors instead.", reason)
            return None

    def _chunk_size(self, default_bytes: int) -> int:
        """Bytes per chunk; no chunk crosses from one file to the next."""
        chunk_bytes, stripe_bytes = self._parts.chunk_bytes or default_bytes, self.ledger.file.stripe_bytes
        return chunk_bytes if stripe_bytes is None else math.gcd(chunk_bytes, stripe_bytes)
