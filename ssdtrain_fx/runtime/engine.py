"""The four operations on one spill file.

An engine is an object because it has a lifetime. Several configurations can coexist in one process, and tests can
inject a failing file.

Guarantees:

* ``offload`` and ``reload`` return at once. ``release`` and ``wait`` block only for what their contract needs, and the
  time they block counts as a stall.
* The engine does not read the tensor after ``release``. If waiting for the remaining bytes would stall the step for
  longer than the configuration allows, the tensor is copied to other memory and stays there. The exception is a tensor
  with ``exclusive`` memory: the engine then holds the tensor itself for as long as it needs it.
* ``reload`` and ``wait`` return the offloaded data bit for bit, or ``wait`` raises ActivationLostError. A full or
  broken disk costs memory, not data.
* No method waits longer than ``io_timeout_s`` for a disk that hangs: ``wait`` raises ActivationLostError, other methods
  raise StalledDiskError, and all can be called again. There is no timeout for what the kernel does within a call on the
  caller's thread: under native AIO, growing the file and submitting requests.
* Every operation may be called from any thread.
* The slot of a tensor is recycled when its owner has died and no transfer of it is in flight.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ssdtrain_fx._torch_private import storage_key
from ssdtrain_fx.errors import ConfigError, InternalError
from ssdtrain_fx.runtime.book.admission import Admission
from ssdtrain_fx.runtime.book.ledger import Ledger, lost
from ssdtrain_fx.runtime.book.records import Ahead, Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Traffic
from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.handles.tokens import Owner, OwnerRef
from ssdtrain_fx.runtime.lanes.aio import Aio, AioUnavailableError, KernelAio
from ssdtrain_fx.runtime.lanes.aio_lane import DIRECT_CHUNK_BYTES, FROM_SOURCE_BYTES, AioLane
from ssdtrain_fx.runtime.lanes.kvikio_choice import Kvikio, choose_kvikio, may_use_kvikio
from ssdtrain_fx.runtime.lanes.kvikio_io import KvikioLane, KvikioMover
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.lanes.thread_lane import ThreadLane
from ssdtrain_fx.runtime.memory.cuda import CudaMover
from ssdtrain_fx.runtime.memory.layout import copy_elements, copy_with_layout, movable, same_layout, span_bytes
from ssdtrain_fx.runtime.memory.movers import CpuMover, Region
from ssdtrain_fx.runtime.memory.staging import CHUNK_BYTES, StagingPool
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory
from ssdtrain_fx.runtime.policy.external_tensors import Content, ExternalTensors, content_of
from ssdtrain_fx.runtime.policy.graph_runs import GraphRuns
from ssdtrain_fx.runtime.policy.patience import Clock, Patience
from ssdtrain_fx.runtime.policy.stalls import Stalls
from ssdtrain_fx.runtime.shield import is_mine, shielded
from ssdtrain_fx.runtime.sites import Site
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile, SpillFile
from ssdtrain_fx.runtime.storage.striped_file import open_spill_file
from ssdtrain_fx.runtime.trace import Trace, record_calls

log = logging.getLogger(__name__)

_abandoned: list[Engine] = []
"""Engines that were closed while their disk hung. Threads or the kernel may still use their memory."""

IDLE_POLL_S = 0.05
"""How long ``wait_until_idle`` waits for one lane before it turns to the next."""

AFTER_FAILURE_S = 1.0
"""How long ``close`` waits for the next transfer to end after an unexpected exception, such as that of a device that
answers no more."""


class _Moved(NamedTuple):
    """A CPU tensor that was moved as it is. Immutable: threads may offload other shapes at the same call site."""

    lane: Lane
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    byte_count: int

    def is_like(self, x: Tensor) -> bool:
        return (
            x.is_cpu
            and self.size == x.size()
            and self.stride == x.stride()
            and self.dtype is x.dtype
            and not x.is_neg()  # complex tensors are never recorded
        )


class Recipe:
    """What one call site of ``offload`` needs, and what it has learned about its tensor."""

    __slots__ = ("engine", "last", "site")

    def __init__(self, engine: Engine, site: Site) -> None:
        self.engine = engine
        self.site = site
        self.last: _Moved | None = None


class Engine:
    """One spill file and what moves data to and from it, from construction to :meth:`close`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        handles: Iterator[int] | None = None,
        open_file: Callable[[Sequence[str]], ChunkFile] | None = None,
        open_aio: Callable[[], Aio] | None = None,
        choose_kvikio: Callable[[IOPath, Sequence[str], Any], Kvikio | None] = choose_kvikio,
        cuda: Any = torch.cuda,
        chunk_bytes: int | None = None,
        from_source_bytes: int = FROM_SOURCE_BYTES,
        clock: Clock = time.perf_counter,
    ) -> None:
        """``handles`` yields numbers that no other engine of this process uses. ``cuda`` replaces ``torch.cuda``, and
        ``clock`` returns seconds.

        Native AIO writes tensors of at least ``from_source_bytes`` without staging.

        ``open_aio`` is called for the first CPU tensor if the file does direct I/O. If it raises AioUnavailableError,
        threads do the work.
        """
        self.config = config
        self._handles = itertools.count(1) if handles is None else handles
        self._cuda = cuda
        self._open_aio = KernelAio if open_aio is None and config.io in ("auto", "aio") else open_aio
        self._chunk_bytes = chunk_bytes
        self._from_source_bytes = from_source_bytes
        self._clock = clock
        may_use_kvikio(config.io, cuda)  # raise now rather than at the first CUDA tensor
        if config.checksum and config.io == "kvikio":
            raise ConfigError('checksum=True needs io="posix": with io="kvikio" the bytes never pass through the CPU.')
        self._choose_kvikio = choose_kvikio
        directories = check_directories(config.ssd_dir)
        self._directories = directories
        if open_file is None:
            open_one = functools.partial(SpillFile, reserve_bytes=config.disk_reserve_bytes)
            self._file = open_spill_file(directories, open_one)
        else:
            self._file = open_file(directories)
        self._ledger = Ledger(self._file, Admission(config.max_stall_share, clock), Traffic(clock))
        self._stalls = Stalls(self._ledger, config.io_timeout_s, clock, self._describe_transfers)
        self._runs = GraphRuns(self._ledger)
        self._external = ExternalTensors()
        self._lanes: dict[str, Lane] = {}
        self._lanes_lock = threading.Lock()
        self._closing = threading.Lock()
        self._is_gone = False
        self._trace: Trace | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    # -- the ops -------------------------------------------------------------------------------------------------------

    def offload(self, x: Tensor, recipe: Recipe | str, **plan: Any) -> Owner:
        """Start moving ``x`` to the file. ``x`` must stay allocated and unwritten until :meth:`release` returns.

        Instead of a ``recipe``, give the name of its :class:`Site`, and what else that contains as keywords.

        ``out_s`` is the planned time from ``offload`` to ``release``, and ``back_s`` that from ``reload`` to ``wait``;
        None: unknown. ``stall_s`` of both together is planned waiting. If moving ``x`` would stall the step for longer,
        and by more than the configuration allows, ``x`` stays in memory.

        ``graph_name`` is the name of the graph within a chain of graphs. An ``external`` tensor comes from outside the
        graph and its caller holds it: if another graph has already offloaded the same bytes from the same CPU memory,
        the owner of these is returned.

        ``host`` asks for the host tier: the bytes stay in the staging buffers of a CUDA device and are written to the
        file only if something else needs the buffers. It has no effect on CPU tensors and under KvikIO.

        ``reload_order`` is the position of ``x`` in the order in which backward reloads the tensors of its graph,
        lowest first. None: unknown.
        """
        ledger = self._ledger
        if isinstance(recipe, str):
            recipe = Recipe(self, Site(name=recipe, **plan))
        site = recipe.site
        name = site.name
        if x.layout is not torch.strided:
            raise InternalError(f"offload({name!r}): expected a strided tensor, got layout {x.layout}")
        source = x.detach() if x.requires_grad else x
        last = recipe.last
        if last is not None and last.is_like(x):
            lane, byte_count = last.lane, last.byte_count
        else:
            lane = self._lane("cpu" if x.is_cpu else x.device.type)
            moved = movable(source)
            byte_count = span_bytes(moved)
            if moved is source and x.is_cpu and not x.dtype.is_complex:
                recipe.last = _Moved(lane, x.size(), x.stride(), x.dtype, byte_count)
            source = moved
        content = None
        if site.external and byte_count and x.is_cpu:
            content = content_of(x, Region(source, byte_count))
            known = self._find_external(content, name)
            if known is not None:
                return known
        entry = Entry(x, name, source, byte_count, lane.mover.mark(x.device))
        if site.host and lane.has_host_tier:
            entry.host = True
        if site.reload_order is not None:
            entry.reload_order = site.reload_order
        if byte_count >= lane.from_source_bytes:
            entry.cut_at_pages()
        handle = next(self._handles)
        owner = Owner(self, handle, ledger.note_death)
        entry.owner = OwnerRef(owner, ledger.dead_owners.append)
        entry.owner.handle = handle
        with ledger.lock, ledger.change:
            ledger.begin_op(name)
            unplanned_s = self._stalls.predict_s(lane, entry, site.out_s, site.back_s)
            if unplanned_s:  # earlier transfers may have finished unnoticed
                lane.make_progress()
                unplanned_s = self._stalls.predict_s(lane, entry, site.out_s, site.back_s)
            moves = byte_count == 0 or ledger.admission.admits(unplanned_s)
            if site.graph_name:
                self._runs.add(entry, handle, site.graph_name)
            if moves:
                if unplanned_s:
                    ledger.admission.charge(unplanned_s)
                if unplanned_s or site.stall_s:
                    entry.prepaid_s = unplanned_s + site.stall_s
                ledger.enter(handle, entry, lane.direct_chunk_bytes if entry.from_source else lane.chunk_bytes)
                lane.enlist_copies(entry)
            else:
                ledger.enter_resident(handle, entry)
            if content is not None:
                self._external.add(content, handle, ledger.entries.__contains__)
        if moves and lane.mover.enqueues:
            lane.begin_copies()
        ledger.tidy()
        return owner

    def release(self, owner: Owner, x: Tensor, *, deferred: bool = False, exclusive: bool = False) -> Owner:
        """Wait until every byte has left ``x``; its memory may be reused afterwards.

        If that would take longer than the configuration allows, ``x`` is copied to other memory instead.

        ``exclusive`` says that nobody else holds or writes the memory of ``x`` while a reference to ``x`` exists. The
        engine may then hold ``x`` and makes no copy.

        A ``deferred`` release is only for tensors with ``exclusive`` memory. It waits only for tensors of the previous
        graph run that have not left memory yet. The engine holds ``x`` until every byte has left.
        """
        ledger = self._ledger
        entry = ledger.entries.get(owner.handle) or self._entry("release", owner)
        source = entry.source
        if (source is None or source.tensor is not x) and (
            x.data_ptr() != entry.address or not same_layout(entry.size, entry.stride, x.stride())
        ):
            raise InternalError(
                f"release({entry.name!r}) got a tensor at address {x.data_ptr():#x} with strides {x.stride()}; offload "
                f"got one at {entry.address:#x} with strides {entry.stride}. The compiler passed a copy to one of "
                "them, so the memory of the other one may already hold other data."
            )
        lane = self._lanes[entry.device.type]
        with ledger.lock, ledger.change:
            ledger.begin_op(entry.name)
            if entry.uncopied:
                lane.make_progress()
            awaited = self._runs.must_leave(entry) if deferred else [entry]
            # A tensor that stayed in memory after an earlier release, for another graph, has been copied.
            must_wait = entry.resident is None and any(other.uncopied for other in awaited)
        if must_wait:
            self._stalls.wait_until_copied(self._lane_of, entry, awaited)
        with ledger.lock, ledger.change:
            copied = []
            if lane.mover.enqueues:
                copied = [chunk.copied for chunk in entry.chunks if chunk.copied is not None]
            staying = None
            if entry.stays and entry.resident is None and entry.source is not None:
                staying = entry.source.tensor
            leaves_later = deferred and staying is None and entry.uncopied > 0
            if leaves_later:
                ledger.counters.late_bytes += entry.byte_count
            elif staying is None and not copied and not entry.unsafe:
                ledger.drop_source(entry)
            entry.released = True
        if staying is not None:
            self._keep(entry, x, staying, exclusive=exclusive or deferred)
        elif copied and not leaves_later:
            for mark in copied:
                lane.mover.wait_stream(mark, entry.device)
            with ledger.lock, ledger.change:
                ledger.drop_source(entry)
        ledger.tidy()
        return owner

    def reload(
        self,
        owner: Owner,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return a new tensor that is being filled; it may be used after :meth:`wait`.

        ``stride``, ``dtype`` and ``device`` default to those of the offloaded tensor.
        """
        ledger = self._ledger
        entry = ledger.entries.get(owner.handle) or self._entry("reload", owner)
        stride = entry.stride if stride is None else tuple(stride)
        if tuple(size) != entry.size or not (
            (dtype is None or dtype == entry.dtype) and (device is None or device.type == entry.device.type)
        ):
            raise InternalError(
                f"reload({entry.name!r}) asks for {dtype or entry.dtype}{list(size)} on {device or entry.device}; "
                f"offload got {entry.dtype}{list(entry.size)} on {entry.device}."
            )
        if device is None:
            device = entry.device
        if entry.stays:
            return self._reload_from_memory(entry, stride)
        lane = self._lanes[entry.device.type]
        if entry.ahead is not None:
            y = self._take_ahead(entry, tuple(stride), device, lane)
            if y is not None:
                return y
        temporary = None
        if same_layout(entry.size, stride, entry.stored_stride):
            y = lane.allocate(entry, stride, device)
        else:
            y = torch.empty_strided(size, stride, dtype=entry.dtype, device=device)
            temporary = lane.allocate(entry, entry.stored_stride, device)
        if y.device != entry.device:
            raise InternalError(f"reload({entry.name!r}) asks for {y.device}; offload got {entry.device}.")
        fill = Fill(entry, y, temporary, lane.mover.mark(y.device))
        with ledger.lock, ledger.change:
            ledger.begin_op(entry.name)
            stays = entry.stays  # a release on another thread may have decided so meanwhile
            if not stays:
                ledger.counters.reloads += 1
                if entry.run is not None:
                    self._runs.reloaded(entry)
                entry.reloaded = True
                if entry.byte_count:
                    entry.fills[y.data_ptr()] = fill
                    lane.enlist_reads(fill)
        ledger.tidy()
        return self._reload_from_memory(entry, stride) if stays else y

    def wait(self, y: Tensor, owner: Owner) -> None:
        """Return when ``y`` is filled, as seen by the current stream. Raises ActivationLostError if it cannot be.

        Call :meth:`hand_over` before writing to ``y``.
        """
        ledger = self._ledger
        entry = ledger.entries.get(owner.handle) or self._entry("wait", owner)
        if entry.byte_count == 0:
            return
        address = y.data_ptr()
        fill = entry.fills.get(address)
        if fill is None:
            if address in entry.waited_addresses:
                return
            raise InternalError(
                f"wait({entry.name!r}) got a tensor at address {address:#x}, which no reload returned: the compiler "
                "passed a copy, which is never filled."
            )
        lane = self._lanes[entry.device.type]
        with ledger.lock, ledger.change:
            if fill.unissued:
                lane.make_progress()
            is_ready = not fill.unissued and fill.error is None and not fill.marks and fill.temporary is None
            next_entries = self._note_filled(entry, address) if is_ready else []
        if not is_ready:
            error = self._stalls.wait_until_filled(lane, fill) if fill.unissued else fill.error
            if error is not None:
                ledger.tidy()
                raise lost(entry, self._file.path, error) from error
            for mark in fill.marks:
                lane.mover.wait_stream(mark, entry.device)
            if fill.temporary is not None:
                copy_elements(fill.temporary, y)
            with ledger.lock, ledger.change:
                next_entries = self._note_filled(entry, address)
        ledger.tidy()
        for next_entry in next_entries:
            self._begin_ahead(next_entry)

    def hand_over(self, y: Tensor) -> Tensor:
        """Return ``y``, after :meth:`wait`, to a caller that may write to it and has dropped its owner.

        A tensor that stayed in memory is returned itself; if its owner is still alive, another backward could request
        the same data, so a copy is returned.
        """
        ledger = self._ledger
        if not ledger.residents:
            return y
        with ledger.lock, ledger.change:
            ledger.drain()
            shared = storage_key(y) in ledger.residents
        ledger.tidy()
        return copy_with_layout(y) if shared else y

    # -- looking inside, closing ---------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """What this engine has done and holds now.

        In a signal handler or a finaliser that interrupts an op of this thread, they are what they were at that moment.
        """
        ledger = self._ledger
        if is_mine(ledger.lock):
            return self._snapshot()
        with ledger.lock, ledger.change:
            ledger.drain()
            if not ledger.closed and ledger.change.failure is None:
                for lane in tuple(self._lanes.values()):
                    lane.make_progress()
            statistics = self._snapshot()
        ledger.tidy()
        return statistics

    def _snapshot(self) -> Statistics:
        """The statistics as they are, without any lock: each number is right, but they may differ in time."""
        ledger = self._ledger
        counters, lanes = ledger.counters, tuple(self._lanes.values())
        return Statistics(
            offloads=counters.offloads,
            reloads=counters.reloads,
            bytes_written=counters.bytes_written,
            bytes_read=counters.bytes_read,
            forwarded=counters.forwarded,
            forwarded_bytes=counters.forwarded_bytes,
            kept=counters.kept,
            kept_bytes=counters.kept_bytes,
            kept_for_time=counters.kept_for_time,
            kept_for_time_bytes=counters.kept_for_time_bytes,
            read_ahead_bytes=counters.read_ahead_bytes,
            host_bytes=counters.host_bytes,
            demoted_bytes=counters.demoted_bytes,
            cancelled_bytes=counters.cancelled_bytes,
            deduplicated_bytes=counters.deduplicated_bytes,
            late_bytes=counters.late_bytes,
            ahead_bytes=counters.ahead_bytes,
            release_stall_s=counters.release_stall_s,
            wait_stall_s=counters.wait_stall_s,
            in_flight_bytes=counters.in_flight_bytes,
            slots_in_use=ledger.slots.slots_in_use,
            slot_bytes_in_use=ledger.slots.bytes_in_use,
            file_bytes=self._file.size_bytes,
            staging_bytes=sum(lane.pool.size_bytes for lane in lanes),
            idle_bytes=sum(lane.idle_bytes for lane in lanes),
            write_bytes_per_s=ledger.traffic.meters[Direction.WRITE].bytes_per_s,
            read_bytes_per_s=ledger.traffic.meters[Direction.READ].bytes_per_s,
            io_path=self._io_path(),
        )

    def release_idle(self) -> None:
        """Return the memory to the system that is kept for reloads and unused."""
        for lane in tuple(self._lanes.values()):
            lane.release_idle()

    @property
    def trace(self) -> Trace | None:
        """What records the events of this engine; None while nothing is recorded."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = self._ledger.trace = trace
        record_calls(self, ("offload", "release", "reload", "wait"), trace)

    def planned_staging_bytes(self, device_type: str) -> int:
        """How many bytes a plan may have between tensors and the file; 0 if the disk accesses tensors directly."""
        return self._lane(device_type).planned_staging_bytes

    def find_owner(self, handle: int) -> Owner | None:
        """The owner with this handle, if it is alive."""
        entry = self._ledger.entries.get(handle)
        return None if entry is None else entry.owner()

    def find_entry(self, owner: Owner) -> Entry | None:
        """The entry of the tensor that ``owner`` stands for."""
        return self._ledger.entries.get(owner.handle)

    def wait_until_idle(self) -> None:
        """Block until nothing is in flight, and nothing is about to be read ahead. Raises StalledDiskError."""
        ledger = self._ledger

        def is_busy() -> bool:
            return ledger.counters.in_flight_bytes > 0 or any(
                lane.will_read_ahead for lane in tuple(self._lanes.values())
            )

        with ledger.lock, ledger.change:
            ledger.drain()
            patience = self._stalls.patience()
            ledger.idle_waiters += 1
        try:
            while True:
                with ledger.lock, ledger.change:
                    for lane in self._lanes.values():
                        lane.make_progress()
                    if not is_busy():
                        break
                    seen = ledger.progress.count
                self._wait_for_any_lane(patience, seen)
        finally:
            with ledger.lock:
                ledger.idle_waiters -= 1
        ledger.tidy()

    def _wait_for_any_lane(self, patience: Patience, seen: int) -> None:
        """Block until something has changed. Raises StalledDiskError, and InternalError if nothing can change."""
        ledger = self._ledger
        with ledger.lock:
            ledger.check_usable("the transfers in flight")
            self._stalls.check(patience, "the transfers in flight")
        if any(lane.wait_for_progress(seen, IDLE_POLL_S) for lane in self._lanes.values()):
            return
        with ledger.lock:
            if seen == ledger.progress.count:
                raise InternalError(f"bytes are in flight that no lane moves: {self._describe_transfers()}")

    def close(self, *, timeout_s: float = math.inf) -> None:
        """Let transfers in flight finish, then free memory and disk space. May be called again, until it has succeeded.

        Tensors that still have an owner cannot be reloaded afterwards. If no transfer finishes for ``timeout_s``, or
        for ``io_timeout_s`` if that is shorter, the remaining transfers keep their memory and their file, and an error
        is logged.
        """
        shielded(functools.partial(self._close, timeout_s))

    def _close(self, timeout_s: float) -> None:
        """Close, or go on with closing. Everything that can be closed is closed, whatever raises."""
        ledger = self._ledger
        if self._is_gone:
            return
        with ledger.lock:
            ledger.change.check()
            ledger.closed = True
            ledger.progress.notify_all()
        if not self._closing.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            return  # another thread has closed this engine for as long as this one may wait
        try:
            self._close_parts(timeout_s)
        finally:
            self._closing.release()

    def _close_parts(self, timeout_s: float) -> None:
        ledger = self._ledger
        failure = ledger.change.failure
        if failure is not None and not failure.is_interrupt:
            timeout_s = min(timeout_s, AFTER_FAILURE_S)
        with self._lanes_lock:
            lanes = tuple(self._lanes.values())
        errors: list[BaseException] = []
        are_closed = True
        for lane in lanes:
            try:
                are_closed &= lane.close(self._stalls.patience(timeout_s))
            except BaseException as error:
                errors.append(error)
        with ledger.lock:
            left_over = self._describe_transfers()
            ledger.trash.extend(ledger.entries.values())
            ledger.entries.clear()
            ledger.residents.clear()
            ledger.dead_handles.clear()
        ledger.tidy()
        if all(lane.has_stopped for lane in lanes):
            self._file.close()
        elif self not in _abandoned:
            _abandoned.append(self)
            log.error(
                "closed an engine although its transfers do not finish. Its memory and its file stay allocated until "
                "the process ends. %s",
                left_over,
            )
        if errors:
            raise errors.pop(0)
        if are_closed:
            self._is_gone = True
            if self in _abandoned:
                _abandoned.remove(self)

    @property
    def is_gone(self) -> bool:
        """It was closed, and holds nothing any more."""
        return self._is_gone

    @property
    def has_failed(self) -> bool:
        """An op was interrupted in the midst of a change, or met a bug: no op can succeed any more."""
        return self._ledger.has_failed

    @property
    def failure(self) -> str:
        """Why it :attr:`has_failed`."""
        failure = self._ledger.change.failure
        return "" if failure is None else failure.text

    def forget_after_fork(self) -> None:
        """In a forked child: leave everything to the parent, in whatever state it was at the fork."""
        self._is_gone = True
        self._ledger.forget_after_fork()

    def _io_path(self) -> str:
        return ", ".join(dict.fromkeys(lane.io_path for lane in self._lanes.values())) or self._file.io_path

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _entry(self, op: str, owner: Owner) -> Entry:
        entry = self._ledger.entries.get(owner.handle)
        if entry is None:
            self._ledger.check_usable(op)
            raise InternalError(f"{op}: this engine does not know the handle {owner.handle}")
        return entry

    def _find_external(self, content: Content, name: str) -> Owner | None:
        """The owner of the tensor with this content, if another graph has offloaded it."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            ledger.begin_op(name)
            handle = self._external.find(content)
            entry = None if handle is None else ledger.entries.get(handle)
            owner = None if entry is None else entry.owner()
            if entry is not None and owner is not None:
                ledger.counters.deduplicated_bytes += entry.byte_count
                entry.run = None  # two graphs reload it, so it says nothing about their order
        ledger.tidy()
        return owner

    def _note_filled(self, entry: Entry, address: int) -> list[Entry]:
        """Record that backward has received the tensor at ``address``. Returns the entries to read ahead now. Needs the
        lock."""
        entry.waited_addresses.add(address)
        entry.fills.pop(address, None)
        return [] if entry.run is None else self._runs.waited(entry)

    def _begin_ahead(self, entry: Entry) -> None:
        """Begin to reload ``entry`` before backward requests it. If that is not possible, :meth:`reload` does it."""
        if not entry.byte_count or not same_layout(entry.size, entry.stride, entry.stored_stride):
            return
        ledger, lane = self._ledger, self._lane_of(entry)
        try:
            y = lane.allocate(entry, entry.stride, entry.device)
        except (RuntimeError, MemoryError, OSError) as error:  # no memory now
            log.debug("%s is not read ahead: %s", entry.name, error)
            return
        fill = Fill(entry, y, None, lane.mover.mark(y.device))
        with ledger.lock, ledger.change:
            if not entry.dead and not entry.stays and not entry.reloaded and entry.ahead is None and not ledger.closed:
                entry.ahead = Ahead(y, fill, lane.mover.stream(y.device))
                lane.enlist_reads(fill)
        ledger.tidy()

    def _take_ahead(self, entry: Entry, stride: tuple[int, ...], device: torch.device, lane: Lane) -> Tensor | None:
        """The tensor of a reload that was begun ahead, if it is what backward requests."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            ahead = entry.ahead
            if ahead is None:
                return None
            ledger.check_usable(entry.name)
            entry.ahead = None
            # The allocator may reuse memory of another stream while this stream still uses it. A failed read may
            # succeed on the next try.
            fits = stride == entry.stride and ahead.stream == lane.mover.stream(device) and ahead.fill.error is None
            if fits:
                ledger.counters.reloads += 1
                ledger.counters.ahead_bytes += entry.byte_count
                self._runs.reloaded(entry)
                entry.reloaded = True
                entry.fills[ahead.tensor.data_ptr()] = ahead.fill
            else:
                ledger.trash.append(ahead)
        tensor = ahead.tensor if fits else None
        del ahead
        ledger.tidy()
        return tensor

    def _lane(self, device_type: str) -> Lane:
        lane = self._lanes.get(device_type)
        return shielded(functools.partial(self._open_lane, device_type)) if lane is None else lane

    def _open_lane(self, device_type: str) -> Lane:
        with self._lanes_lock:
            lane = self._lanes.get(device_type)
            if lane is None:
                self._lanes = {**self._lanes, device_type: (lane := self._make_lane(device_type))}
            return lane

    def _lane_of(self, entry: Entry) -> Lane:
        return self._lanes[entry.device.type]

    def _make_lane(self, device_type: str) -> Lane:
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(f"ssdtrain_fx offloads tensors on cpu and cuda devices; got one on {device_type!r}.")
        drive_count = len(self._directories)
        if device_type == "cuda" and not self.config.checksum:
            kvikio = self._choose_kvikio(self.config.io, self._directories, self._cuda)
            if kvikio is not None:
                return KvikioLane(self._ledger, kvikio, KvikioMover(self._cuda), drive_count)
        tensor_memory = TensorMemory() if device_type == "cpu" else None
        mover = CpuMover() if device_type == "cpu" else CudaMover(self._cuda)
        budget_bytes = self.config.host_budget_bytes
        if budget_bytes is None:
            budget_bytes = mover.default_budget_bytes * drive_count
        checksum = self.config.checksum
        if tensor_memory is not None and self._file.direct and self._open_aio is not None:
            try:
                aio = self._open_aio()
            except AioUnavailableError as reason:
                log.info("native AIO is not available (%s): threads move CPU tensors instead.", reason)
            else:
                return AioLane(
                    self._ledger,
                    aio,
                    StagingPool(budget_bytes, self._chunk_size(CHUNK_BYTES)),
                    tensor_memory,
                    checksum=checksum,
                    from_source_bytes=self._from_source_bytes,
                    direct_chunk_bytes=self._chunk_size(DIRECT_CHUNK_BYTES),
                )
        pool = StagingPool(budget_bytes, self._chunk_size(CHUNK_BYTES))
        thread_count = mover.thread_count * drive_count
        return ThreadLane(
            self._ledger, mover, pool, thread_count=thread_count, checksum=checksum, tensor_memory=tensor_memory
        )

    def _chunk_size(self, default_bytes: int) -> int:
        """Bytes per chunk; no chunk crosses from one file to the next."""
        chunk_bytes, stripe_bytes = self._chunk_bytes or default_bytes, self._file.stripe_bytes
        return chunk_bytes if stripe_bytes is None else math.gcd(chunk_bytes, stripe_bytes)

    def _keep(self, entry: Entry, x: Tensor, source: Tensor, *, exclusive: bool) -> None:
        """Keep a copy of ``x`` in memory, or ``x`` itself if its memory is ``exclusive`` and fills most of its storage.

        In other cases a reference to ``x`` does not protect its memory: a compiler may write the next tensor to it
        after its last reader (``buf55 = buf42  # reuse``), no matter what else holds it.
        """
        ledger = self._ledger
        is_copy = source.data_ptr() != x.data_ptr()
        holds_more = source.untyped_storage().nbytes() >= 2 * entry.byte_count
        resident = source if is_copy or (exclusive and not holds_more) else copy_with_layout(source)
        with ledger.lock, ledger.change:
            if entry.resident is None:  # otherwise another thread has released it meanwhile
                ledger.settle_in(entry, resident)
            if entry.unsafe == 0:
                ledger.drop_source(entry)
        ledger.tidy()

    def _reload_from_memory(self, entry: Entry, stride: Sequence[int]) -> Tensor:
        """The tensor that stayed in memory, or a copy of it if another layout is requested."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            ledger.begin_op(entry.name)
            ledger.counters.reloads += 1
            resident = entry.resident
            source = entry.source
        if resident is not None and same_layout(entry.size, stride, resident.stride()):
            y = resident.as_strided(entry.size, stride)
        else:
            y = torch.empty_strided(entry.size, stride, dtype=entry.dtype, device=entry.device)
            if resident is None:  # not released yet
                assert source is not None
                resident = source.tensor
            copy_elements(resident, y)
        with ledger.lock, ledger.change:
            entry.waited_addresses.add(y.data_ptr())
        ledger.tidy()
        return y

    def _describe_transfers(self) -> str:
        """Describe what is queued and in flight. Needs the ledger's lock."""
        staging = ", ".join(
            f"{kind}: {lane.pool.available} of {lane.pool.buffer_limit}" for kind, lane in self._lanes.items()
        )
        return f"{self._file.path}: {self._ledger.describe_transfers()}; free staging buffers, {staging}"
