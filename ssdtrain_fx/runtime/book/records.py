"""The records of one engine: offloaded tensors, their chunks, their reloads, and the runs of graphs they belong to.

docs/architecture.md lists the states of a chunk and of an entry, and the transitions between them.

Only the ledger and the lanes change a record, with the ledger's lock held.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from typing import TypeAlias

from torch import Tensor

from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES
from ssdtrain_fx.runtime.handles.tokens import OwnerRef
from ssdtrain_fx.runtime.memory.movers import Mark, Region
from ssdtrain_fx.runtime.memory.staging import StagingBuffer
from ssdtrain_fx.runtime.storage.slots import Slot

MicroBatch: TypeAlias = "int | str | tuple[MicroBatch, ...]"
"""What a training loop calls one. Comparing two executes no code of the user, which matters: the lock is held."""


class ChunkState(enum.Enum):
    SOURCE = enum.auto()
    COPYING = enum.auto()
    STAGED = enum.auto()
    HELD = enum.auto()
    WRITING = enum.auto()
    ON_DISK = enum.auto()
    KEPT = enum.auto()
    CANCELLED = enum.auto()


class Chunk:
    """``length`` bytes of an entry, from byte ``start`` on."""

    state = ChunkState.SOURCE
    staging: StagingBuffer | None = None
    copied: Mark = None
    """The mark after which the bytes are in ``staging``."""
    kept: Tensor | None = None
    checksum = 0
    leading = b""
    trailing = b""
    """Its bytes before the first and after the last whole page, which are not written."""
    arriving = False
    """It is being read ahead."""

    def __init__(self, entry: Entry, start: int, length: int) -> None:
        self.entry = entry
        self.start = start
        self.length = length
        self.waiting_fills: list[Fill] = []
        """Reloads issued before the bytes left the tensor, or while they were being read ahead."""

    @property
    def pages(self) -> tuple[int, int]:
        """Which bytes of the slot hold the bytes between ``leading`` and ``trailing``: offset and length."""
        lead_bytes = len(self.leading)
        return self.start + lead_bytes - self.entry.lead_bytes, self.length - lead_bytes - len(self.trailing)


class Entry:
    """One offloaded tensor."""

    # Defaults are class attributes: with cold caches, every attribute set on an instance costs time.
    slot: Slot | None = None
    from_source = False
    """Its whole pages are written straight from the tensor."""
    lead_bytes = 0
    trail_bytes = 0
    """Bytes before the first and after the last of these pages."""
    uncopied = 0
    """Chunks whose copy out of the tensor has not been issued; ``release`` waits for 0."""
    unsafe = 0
    """Chunks whose copy out of the tensor may not have finished; ``source`` must live until 0."""
    released = False
    """The engine holds ``source`` until ``release``, which drops it on the caller's thread: an I/O thread could drop it
    after ``release`` has returned."""
    busy = 0
    """Chunks being moved to the file, and reads; the slot is in use until 0."""
    has_kept = False
    stays = False
    """It stays in memory: chunks that are not in the file yet will not be written."""
    resident: Tensor | None = None
    """The tensor that stays in memory; set by ``release``."""
    prepaid_s = 0.0
    """Stalls that are planned, or predicted and charged, and have not happened yet."""
    dead = False
    host = False
    """It is to stay in staging buffers instead of going to the file."""
    reload_order: int | None = None
    """Its position in the order in which backward reloads the tensors of its graph; None if unknown."""
    run: GraphRun | None = None
    """The run of a graph that it belongs to, if the graph is one of a chain."""
    lead_s: float | None = None
    """How long before its backward its reload should begin, while another one runs; None: as early as possible."""
    left_s: float | None = None
    """How much of its backward is left at the wait after its own; None: unknown."""
    ahead: Ahead | None = None
    """A reload that was begun before backward requested it."""
    reloaded = False
    """Backward has requested it."""
    owner: OwnerRef

    def __init__(self, x: Tensor, name: str, source: Tensor, byte_count: int, ready: Mark) -> None:
        self.name = name
        self.address = x.data_ptr()
        self.size: tuple[int, ...] = x.size()
        self.stride = x.stride()
        self.stored_stride = self.stride if source is x else source.stride()
        self.dtype = x.dtype
        self.device = x.device
        self.byte_count = byte_count
        self.source: Region | None = Region(source, byte_count)
        self.ready = ready
        """The mark after which the tensor is complete."""
        self.chunks: list[Chunk] = []
        self.fills: dict[int, Fill] = {}
        """Keyed by the address of the tensor that ``reload`` returned; removed once ``wait`` has succeeded."""
        self.waited_addresses: set[int] = set()

    def cut_at_pages(self) -> None:
        """Write it straight from the tensor, cut at pages: direct I/O moves whole pages only."""
        assert self.source is not None
        self.from_source = True
        self.lead_bytes = -self.source.address % ALIGNMENT_BYTES
        self.trail_bytes = (self.source.address + self.byte_count) % ALIGNMENT_BYTES

    @property
    def unneeded_on_disk(self) -> bool:
        """Its bytes will not be read from the file."""
        return self.dead or self.stays


class Fill:
    """One reload, which moves the bytes of ``entry`` into ``target``."""

    error: Exception | None = None
    forwarded = False

    def __init__(self, entry: Entry, target: Tensor, temporary: Tensor | None, ready: Mark) -> None:
        self.entry = entry
        self.target: Region | None = Region(target if temporary is None else temporary, entry.byte_count)
        self.temporary = temporary
        """The bytes in their stored layout, if ``reload`` requested another one."""
        self.ready = ready
        """The mark after which the memory of ``target`` may be written."""
        self.marks: list[Mark] = []
        self.unissued = len(entry.chunks)
        """Chunks that ``wait`` has to wait for."""
        self.unfinished = self.unissued
        """Chunks that still need ``target``."""

    def fail(self, error: Exception) -> None:
        """Record that the bytes cannot be reloaded. The first error counts.

        The error is stored without its traceback. That holds the frames of the op that failed, these hold the token,
        and the token would keep the entry, which holds this fill, alive forever. Frames of an I/O thread hold the
        tensor and the error.
        """
        error = error.with_traceback(None)
        if self.error is None:
            self.error = error


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """A reload that backward has not requested yet."""

    tensor: Tensor
    fill: Fill
    stream: object
    """The stream that ``tensor`` was allocated for; None on the CPU."""


class GraphRun:
    """One run of the forward of the graph ``graph_name``, and the tensors it has offloaded."""

    __slots__ = (
        "__weakref__",
        "_after",
        "_before",
        "follows_forward",
        "graph_name",
        "handles",
        "last_waited_bytes",
        "micro_batch",
        "names",
        "reload_count",
        "used_bytes",
    )

    def __init__(self, graph_name: str, before: GraphRun | None, micro_batch: MicroBatch | None) -> None:
        self.graph_name = graph_name
        self.micro_batch = micro_batch
        """What the training loop calls it; None: nobody has said."""
        self._before = None if before is None else weakref.ref(before)
        self._after: weakref.ref[GraphRun] | None = None
        if before is not None:
            before._after = weakref.ref(self)
        self.handles: list[int] = []
        self.names: set[str] = set()
        self.reload_count = 0
        self.follows_forward = False
        """A forward ran between its backward and the one before."""
        self.used_bytes = 0
        """Bytes that backward has reloaded and already used."""
        self.last_waited_bytes = 0

    @property
    def before(self) -> GraphRun | None:
        """The run before this one; None once all its entries have died."""
        return None if self._before is None else self._before()

    @property
    def after(self) -> GraphRun | None:
        """The run after this one; None if there is none yet, or once all its entries have died."""
        return None if self._after is None else self._after()
