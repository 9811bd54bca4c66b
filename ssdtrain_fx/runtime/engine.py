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

import itertools
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.runtime.book.admission import Admission
from ssdtrain_fx.runtime.book.ledger import Ledger, lost
from ssdtrain_fx.runtime.book.records import Entry, Fill
from ssdtrain_fx.runtime.book.traffic import Direction, Traffic
from ssdtrain_fx.runtime.closing import Closing
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.handles.tokens import Owner, OwnerRef
from ssdtrain_fx.runtime.lanes.call_sites import CallSite, Moved
from ssdtrain_fx.runtime.lanes.open_lanes import Lanes, Parts
from ssdtrain_fx.runtime.lanes.read_ahead import ReadAhead
from ssdtrain_fx.runtime.memory.layout import copy_elements, movable, same_layout, span_bytes
from ssdtrain_fx.runtime.memory.movers import Region
from ssdtrain_fx.runtime.policy.external_tensors import Content, ExternalTensors, content_of
from ssdtrain_fx.runtime.policy.graph_runs import GraphRuns
from ssdtrain_fx.runtime.policy.residents import Residents
from ssdtrain_fx.runtime.policy.room import Room
from ssdtrain_fx.runtime.policy.stalls import Stalls
from ssdtrain_fx.runtime.shield import is_mine
from ssdtrain_fx.runtime.sites import Site
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.runtime.trace import Trace, record_calls


class Engine:
    """One spill file and what moves data to and from it, from construction to :meth:`close`."""

    def __init__(
        self, config: EngineConfig, parts: Parts | None = None, *, handles: Iterator[int] | None = None
    ) -> None:
        """``parts`` replaces what the engine is made of. ``handles`` yields numbers that no other engine of the process
        uses.

        Raises:
            ConfigError: a directory cannot be used, or this machine does not have what ``config`` asks for.
        """
        parts = Parts() if parts is None else parts
        self.config = config
        self._handles = itertools.count(1) if handles is None else handles
        directories = check_directories(config.ssd_dir)
        file = parts.open(config, directories)
        clock = parts.clock
        self._ledger = Ledger(file, Admission(config.max_stall_share, clock), Traffic(clock))
        self._lanes = Lanes(config, parts, self._ledger, directories)
        self._room = Room(parts.read_memory_limit, clock)
        self._stalls = Stalls(self._ledger, config.io_timeout_s, clock, self._room, self._lanes.describe_transfers)
        self._runs = GraphRuns(self._ledger)
        self._read_ahead = ReadAhead(self._ledger, self._lanes, self._runs)
        self._residents = Residents(self._ledger)
        self._external = ExternalTensors()
        self._closing = Closing(self._ledger, self._lanes, self._stalls)
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

    def offload(self, x: Tensor, call_site: CallSite | str, **plan: Any) -> Owner:
        """Start moving ``x`` to the file. ``x`` must stay allocated and unwritten until :meth:`release` returns.

        Instead of a ``call_site``, give the name of its :class:`Site`, and what else that contains as keywords.

        ``out_s`` is the planned time from ``offload`` to ``release``, and ``back_s`` that from ``reload`` to ``wait``;
        None: unknown. ``stall_s`` of both together is planned waiting. If moving ``x`` would stall the step for longer,
        and by more than the configuration allows, ``x`` stays in memory if the memory limit of the process leaves room.

        ``graph_name`` is the name of the graph within a chain of graphs. An ``external`` tensor comes from outside the
        graph and its caller holds it: if another graph has already offloaded the same bytes from the same CPU memory,
        the owner of these is returned.

        ``host`` asks for the host tier: the bytes stay in the staging buffers of a CUDA device and are written to the
        file only if something else needs the buffers. It has no effect on CPU tensors and under KvikIO.

        ``reload_order`` is the position of ``x`` in the order in which backward reloads the tensors of its graph,
        lowest first. None: unknown.
        """
        ledger = self._ledger
        if isinstance(call_site, str):
            call_site = CallSite(Site(name=call_site, **plan))
        site = call_site.site
        name = site.name
        if x.layout is not torch.strided:
            raise InternalError(f"offload({name!r}): expected a strided tensor, got layout {x.layout}")
        source = x.detach() if x.requires_grad else x
        last = call_site.last
        if last is not None and last.is_like(x):
            lane, byte_count = last.lane, last.byte_count
        else:
            lane = self._lanes.of("cpu" if x.is_cpu else x.device.type)
            moved = movable(source)
            byte_count = span_bytes(moved)
            if moved is source and x.is_cpu and not x.dtype.is_complex:
                call_site.last = Moved(lane, x.size(), x.stride(), x.dtype, byte_count)
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
        is_ahead = self._stalls.is_ahead(entry)
        with ledger.lock, ledger.change:
            ledger.begin_op(name)
            unplanned_s = self._stalls.predict_s(lane, entry, site.out_s, site.back_s, is_ahead=is_ahead)
            if unplanned_s:  # earlier transfers may have finished unnoticed
                lane.make_progress()
                unplanned_s = self._stalls.predict_s(lane, entry, site.out_s, site.back_s, is_ahead=is_ahead)
            moves = byte_count == 0 or ledger.admission.admits(unplanned_s) or not self._room.has(entry)
            if site.graph_name:
                entry.lead_s, entry.left_s = site.lead_s, site.left_s
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
        lane = self._lanes.by_type[entry.device.type]
        with ledger.lock, ledger.change:
            ledger.begin_op(entry.name)
            if entry.uncopied:
                lane.make_progress()
            awaited = self._runs.must_leave(entry) if deferred else [entry]
            # A tensor that stayed in memory after an earlier release, for another graph, has been copied.
            must_wait = entry.resident is None and any(other.uncopied for other in awaited)
        if must_wait:
            self._stalls.wait_until_copied(self._lanes.of_entry, entry, awaited)
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
            self._residents.keep(entry, x, staying, exclusive=exclusive or deferred)
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
            return self._residents.reload(entry, stride)
        lane = self._lanes.by_type[entry.device.type]
        if entry.ahead is not None:
            y = self._read_ahead.take(entry, tuple(stride), device, lane)
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
        return self._residents.reload(entry, stride) if stays else y

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
        lane = self._lanes.by_type[entry.device.type]
        with ledger.lock, ledger.change:
            if fill.unissued:
                lane.make_progress()
            is_ready = not fill.unissued and fill.error is None and not fill.marks and fill.temporary is None
            next_entries = self._note_filled(entry, address) if is_ready else []
        if not is_ready:
            error = self._stalls.wait_until_filled(lane, fill) if fill.unissued else fill.error
            if error is not None:
                ledger.tidy()
                raise lost(entry, ledger.file.path, error) from error
            for mark in fill.marks:
                lane.mover.wait_stream(mark, entry.device)
            if fill.temporary is not None:
                copy_elements(fill.temporary, y)
            with ledger.lock, ledger.change:
                next_entries = self._note_filled(entry, address)
        ledger.tidy()
        if next_entries:
            self._read_ahead.begin(next_entries)

    def hand_over(self, y: Tensor) -> Tensor:
        """Return ``y``, after :meth:`wait`, to a caller that may write to it and has dropped its owner.

        A tensor that stayed in memory is returned itself; if its owner is still alive, another backward could request
        the same data, so a copy is returned.
        """
        return self._residents.hand_over(y) if self._ledger.residents else y

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
                for lane in tuple(self._lanes.by_type.values()):
                    lane.make_progress()
            statistics = self._snapshot()
        ledger.tidy()
        return statistics

    def _snapshot(self) -> Statistics:
        """The statistics as they are, without any lock: each number is right, but they may differ in time."""
        ledger = self._ledger
        lanes, meters = tuple(self._lanes.by_type.values()), ledger.traffic.meters
        return Statistics(
            **ledger.counters.shown(),
            slots_in_use=ledger.slots.slots_in_use,
            slot_bytes_in_use=ledger.slots.bytes_in_use,
            file_bytes=ledger.file.size_bytes,
            staging_bytes=sum(lane.pool.size_bytes for lane in lanes),
            idle_bytes=sum(lane.idle_bytes for lane in lanes),
            write_bytes_per_s=meters[Direction.WRITE].bytes_per_s,
            read_bytes_per_s=meters[Direction.READ].bytes_per_s,
            io_path=self._lanes.io_path,
        )

    def release_idle(self) -> None:
        """Return the memory to the system that is kept for reloads and unused."""
        for lane in tuple(self._lanes.by_type.values()):
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
        return self._lanes.of(device_type).planned_staging_bytes

    def find_owner(self, handle: int) -> Owner | None:
        """The owner with this handle, if it is alive."""
        entry = self._ledger.entries.get(handle)
        return None if entry is None else entry.owner()

    def find_entry(self, owner: Owner) -> Entry | None:
        """The entry of the tensor that ``owner`` stands for."""
        return self._ledger.entries.get(owner.handle)

    def wait_until_idle(self) -> None:
        """Block until nothing is in flight, and nothing is about to be read ahead. Raises StalledDiskError."""
        self._lanes.wait_until_idle(self._stalls)

    def close(self, *, timeout_s: float = math.inf) -> None:
        """Let transfers in flight finish, then free memory and disk space. May be called again, until it has succeeded.

        Tensors that still have an owner cannot be reloaded afterwards. If no transfer finishes for ``timeout_s``, or
        for ``io_timeout_s`` if that is shorter, the remaining transfers keep their memory and their file, and an error
        is logged.
        """
        self._closing.close(timeout_s)

    @property
    def is_gone(self) -> bool:
        """It was closed, and holds nothing any more."""
        return self._closing.is_done

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
        self._closing.forget_after_fork()

    # -- parts of the ops ----------------------------------------------------------------------------------------------

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
