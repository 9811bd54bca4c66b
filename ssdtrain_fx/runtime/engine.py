"""The four operations on one spill file.

Why an object: it is opened, asked and closed; two configurations in one process do not meet; a test can hand in a file
that fails.

Guarantees:

* ``offload`` and ``reload`` return at once; ``release`` and ``wait`` block only for what their contract needs, and the
  time is counted as stall.
* After ``release`` the engine reads the tensor no more.
* Data that ``offload`` took comes back from ``reload`` and ``wait`` bit by bit, or ``wait`` raises ActivationLostError.
  A full or broken disk costs memory, not data.
* Every operation may be called from any thread.
* The slot of a tensor is recycled when its last token has died and no transfer of it is in flight.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ssdtrain_fx.errors import ConfigError, InternalError
from ssdtrain_fx.runtime.aio import Aio, AioUnavailableError, KernelAio
from ssdtrain_fx.runtime.aio_lane import AIO_CHUNK_BYTES, AioLane
from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.cuda import CudaMover
from ssdtrain_fx.runtime.directory import check_directories
from ssdtrain_fx.runtime.kvikio_choice import Kvikio, choose_kvikio, may_use_kvikio
from ssdtrain_fx.runtime.kvikio_io import KvikioLane, KvikioMover
from ssdtrain_fx.runtime.lane import Lane
from ssdtrain_fx.runtime.layout import copy_elements, movable, same_layout, span_elements
from ssdtrain_fx.runtime.ledger import Entry, Fill, Ledger, lost
from ssdtrain_fx.runtime.movers import CpuMover
from ssdtrain_fx.runtime.spill_file import ChunkFile
from ssdtrain_fx.runtime.staging import CHUNK_BYTES, StagingPool
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.striped_file import open_spill_file
from ssdtrain_fx.runtime.thread_lane import ThreadLane
from ssdtrain_fx.runtime.tokens import Owner, handle_of, make_token
from ssdtrain_fx.runtime.trace import Trace, traced

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.05
"""How long to wait for one lane before the next one gets a turn."""


class Engine:
    """One spill file and what moves data to it and back, from construction to :meth:`close`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        handles: Iterator[int] | None = None,
        open_file: Callable[[Sequence[str]], ChunkFile] = open_spill_file,
        open_aio: Callable[[], Aio] | None = None,
        choose_kvikio: Callable[[IOPath, Sequence[str], Any], Kvikio | None] = choose_kvikio,
        cuda: Any = torch.cuda,
        chunk_bytes: int | None = None,
    ) -> None:
        """``handles`` yields numbers that no other engine of this process uses; ``cuda`` stands for ``torch.cuda``.

        ``open_aio`` is called when the first CPU tensor comes, if the file does direct I/O. Where it raises
        AioUnavailableError, threads do the work.
        """
        self.config = config
        self._handles = itertools.count(1) if handles is None else handles
        self._cuda = cuda
        self._open_aio = KernelAio if open_aio is None and config.io == "aio" else open_aio
        self._chunk_bytes = chunk_bytes
        may_use_kvikio(config.io, cuda)  # an error now rather than at the first CUDA tensor
        if config.checksum and config.io == "kvikio":
            raise ConfigError('checksum=True needs io="posix": with io="kvikio" the bytes never come by the processor.')
        self._choose_kvikio = choose_kvikio
        directories = check_directories(config.ssd_dir)
        self._directories = directories
        self._file = open_file(directories)
        self._ledger = Ledger(self._file)
        self._lanes: dict[str, Lane] = {}
        self._lanes_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    def owns(self, handle: int) -> bool:
        return handle in self._ledger.entries

    # -- the ops -------------------------------------------------------------------------------------------------------

    @traced
    def offload(self, x: Tensor, name: str) -> Tensor:
        """Start moving ``x`` to the file. ``x`` must stay allocated and unwritten until :meth:`release` returns."""
        ledger = self._ledger
        if x.layout is not torch.strided:
            raise InternalError(f"offload({name!r}): expected a strided tensor, got layout {x.layout}")
        if x.requires_grad:
            x = x.detach()
        lane = self._lane(x.device.type)
        source = movable(x)
        byte_count = span_elements(source.size(), source.stride()) * source.element_size()
        entry = Entry(x, name, source, byte_count, lane.mover.mark(x.device))
        handle = next(self._handles)
        owner = Owner(handle, ledger.dead_handles)
        entry.owner = weakref.ref(owner)
        with ledger.lock:
            ledger.check_usable(name)
            ledger.drain()
            ledger.enter(handle, entry, lane.chunk_bytes)
            lane.enlist_copies(entry)
        lane.begin_copies()
        ledger.tidy()
        return make_token(owner)

    @traced
    def release(self, token: Tensor, x: Tensor) -> Tensor:
        """Wait until every byte has left ``x``; its memory may be reused afterwards."""
        ledger = self._ledger
        entry = self._entry("release", token)
        if x.data_ptr() != entry.address or not same_layout(entry.size, entry.stride, x.stride()):
            raise InternalError(
                f"release({entry.name!r}) got a tensor at address {x.data_ptr():#x} with strides {x.stride()}; offload "
                f"got one at {entry.address:#x} with strides {entry.stride}. The compiler passed a copy to one of "
                "them, so the memory of the other one may already hold something else."
            )
        lane = self._lane(entry.device.type)
        with ledger.lock:
            ledger.check_usable(entry.name)
            ledger.drain()
            lane.make_progress()
            if entry.uncopied:
                start_s = time.perf_counter()
                while entry.uncopied:
                    self._wait_for_progress(lane, entry)
                stall_s = time.perf_counter() - start_s
                ledger.counters.release_stall_s += stall_s
                if ledger.trace is not None:
                    ledger.trace.add_stall(entry, stall_s)
            copied = [chunk.copied for chunk in entry.chunks if chunk.copied is not None]
            if not copied:
                ledger.drop_source(entry)
        if copied:
            for mark in copied:
                lane.mover.wait_stream(mark, entry.device)
            with ledger.lock:
                ledger.drop_source(entry)
        ledger.tidy()
        owner = entry.owner()
        assert owner is not None  # `token` holds it
        return make_token(owner)

    @traced
    def reload(
        self,
        token: Tensor,
        size: Sequence[int],
        stride: Sequence[int] | None,
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> Tensor:
        """A new tensor that is being filled; it may be used after :meth:`wait`.

        ``stride`` and ``dtype`` may be None: then they are those of the tensor that was offloaded.
        """
        ledger = self._ledger
        entry = self._entry("reload", token)
        stride = entry.stride if stride is None else stride
        dtype = entry.dtype if dtype is None else dtype
        if tuple(size) != entry.size or dtype != entry.dtype or device.type != entry.device.type:
            raise InternalError(
                f"reload({entry.name!r}) asks for {dtype}{list(size)} on {device}; "
                f"offload got {entry.dtype}{list(entry.size)} on {entry.device}."
            )
        lane = self._lane(entry.device.type)
        temporary = None
        if same_layout(entry.size, stride, entry.stored_stride):
            y = lane.allocate(size, stride, dtype, device, entry.byte_count)
        else:
            y = torch.empty_strided(size, stride, dtype=dtype, device=device)
            temporary = lane.allocate(entry.size, entry.stored_stride, dtype, device, entry.byte_count)
        if y.device != entry.device:
            raise InternalError(f"reload({entry.name!r}) asks for {y.device}; offload got {entry.device}.")
        fill = Fill(entry, y, temporary, lane.mover.mark(y.device))
        with ledger.lock:
            ledger.check_usable(entry.name)
            ledger.drain()
            ledger.counters.reloads += 1
            if entry.byte_count:
                entry.fills[y.data_ptr()] = fill
                lane.enlist_reads(fill)
        ledger.tidy()
        return y

    @traced
    def wait(self, y: Tensor, token: Tensor) -> None:
        """Return when ``y`` is filled, as seen by the current stream. Raises ActivationLostError if it cannot be."""
        ledger = self._ledger
        entry = self._entry("wait", token)
        if entry.byte_count == 0:
            return
        address = y.data_ptr()
        fill = entry.fills.get(address)
        if fill is None:
            if address in entry.waited_addresses:
                return
            raise InternalError(
                f"wait({entry.name!r}) got a tensor at address {address:#x}, which no reload returned: the compiler "
                "passed a copy, which nothing will fill."
            )
        lane = self._lane(entry.device.type)
        with ledger.lock:
            lane.make_progress()
            if fill.unissued:
                start_s = time.perf_counter()
                while fill.unissued:
                    self._wait_for_progress(lane, entry)
                stall_s = time.perf_counter() - start_s
                ledger.counters.wait_stall_s += stall_s
                if ledger.trace is not None:
                    ledger.trace.add_stall(entry, stall_s)
        ledger.tidy()
        if fill.error is not None:
            raise lost(entry, self._file.path, fill.error) from fill.error
        for mark in fill.marks:
            lane.mover.wait_stream(mark, entry.device)
        if fill.temporary is not None:
            copy_elements(fill.temporary, y)
        with ledger.lock:
            entry.waited_addresses.add(address)
            entry.fills.pop(address, None)

    # -- looking inside, closing ---------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        ledger = self._ledger
        with ledger.lock:
            ledger.drain()
            for lane in tuple(self._lanes.values()):
                lane.make_progress()
            counters = ledger.counters
            statistics = Statistics(
                offloads=counters.offloads,
                reloads=counters.reloads,
                bytes_written=counters.bytes_written,
                bytes_read=counters.bytes_read,
                forwarded=counters.forwarded,
                forwarded_bytes=counters.forwarded_bytes,
                kept=counters.kept,
                kept_bytes=counters.kept_bytes,
                cancelled_bytes=counters.cancelled_bytes,
                release_stall_s=counters.release_stall_s,
                wait_stall_s=counters.wait_stall_s,
                in_flight_bytes=counters.in_flight_bytes,
                slots_in_use=ledger.slots.slots_in_use,
                slot_bytes_in_use=ledger.slots.bytes_in_use,
                file_bytes=self._file.size_bytes,
                staging_bytes=sum(lane.pool.size_bytes for lane in self._lanes.values()),
                io_path=self._io_path(),
            )
        ledger.tidy()
        return statistics

    @property
    def trace(self) -> Trace | None:
        """What records the events of this engine."""
        return self._ledger.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._ledger.trace = trace

    def find_entry(self, token: Tensor) -> Entry | None:
        """What is known of the tensor behind ``token``."""
        return self._ledger.entries.get(handle_of(token))

    def wait_until_idle(self) -> None:
        """Return when nothing is in flight."""
        ledger = self._ledger
        with ledger.lock:
            ledger.drain()
            while ledger.counters.in_flight_bytes:
                ledger.check_usable("what is in flight")
                for lane in tuple(self._lanes.values()):
                    lane.make_progress()
                    if ledger.counters.in_flight_bytes:
                        lane.wait_for_progress(IDLE_POLL_S)
        ledger.tidy()

    def close(self) -> None:
        """Let what is under way end and give memory and disk space back.

        Tokens that are still alive cannot be reloaded.
        """
        ledger = self._ledger
        with ledger.lock:
            if ledger.closed:
                return
            ledger.closed = True
            ledger.progress.notify_all()
        with self._lanes_lock:
            lanes = tuple(self._lanes.values())
        for lane in lanes:
            lane.close()
        with ledger.lock:
            ledger.trash.extend(ledger.entries.values())
            ledger.entries.clear()
            ledger.dead_handles.clear()
        ledger.tidy()
        self._file.close()

    def _io_path(self) -> str:
        return ", ".join(dict.fromkeys(lane.io_path for lane in self._lanes.values())) or self._file.io_path

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _entry(self, op: str, token: Tensor) -> Entry:
        entry = self.find_entry(token)
        if entry is None:
            raise InternalError(f"{op}: the token holds handle {handle_of(token)}, which this engine does not know")
        return entry

    def _lane(self, device_type: str) -> Lane:
        lane = self._lanes.get(device_type)
        if lane is not None:
            return lane
        with self._lanes_lock:
            lane = self._lanes.get(device_type)
            if lane is None:
                lane = self._lanes[device_type] = self._make_lane(device_type)
            return lane

    def _make_lane(self, device_type: str) -> Lane:
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(f"ssdtrain_fx offloads tensors on cpu and cuda devices; got one on {device_type!r}.")
        drive_count = len(self._directories)
        if device_type == "cuda" and not self.config.checksum:
            kvikio = self._choose_kvikio(self.config.io, self._directories, self._cuda)
            if kvikio is not None:
                return KvikioLane(self._ledger, kvikio, KvikioMover(self._cuda), drive_count)
        mover = CpuMover() if device_type == "cpu" else CudaMover(self._cuda)
        budget_bytes = self.config.host_budget_bytes
        if budget_bytes is None:
            budget_bytes = mover.default_budget_bytes * drive_count
        checksum = self.config.checksum
        if device_type == "cpu" and self._file.direct and self._open_aio is not None:
            try:
                aio = self._open_aio()
            except AioUnavailableError as reason:
                log.info("native AIO is not available (%s): threads move CPU tensors instead.", reason)
            else:
                pool = StagingPool(budget_bytes, self._chunk_size(AIO_CHUNK_BYTES))
                return AioLane(self._ledger, aio, pool, checksum=checksum)
        pool = StagingPool(budget_bytes, self._chunk_size(CHUNK_BYTES))
        thread_count = mover.thread_count * drive_count
        return ThreadLane(self._ledger, mover, pool, thread_count=thread_count, checksum=checksum)

    def _chunk_size(self, default_bytes: int) -> int:
        """Bytes per chunk; none crosses from one file to the next."""
        chunk_bytes, stripe_bytes = self._chunk_bytes or default_bytes, self._file.stripe_bytes
        return chunk_bytes if stripe_bytes is None else math.gcd(chunk_bytes, stripe_bytes)

    def _wait_for_progress(self, lane: Lane, entry: Entry) -> None:
        """Needs the lock."""
        self._ledger.check_usable(entry.name)
        if not lane.wait_for_progress():
            raise InternalError(f"{entry.name!r}: nothing is under way that could be waited for")
