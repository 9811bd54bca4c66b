"""Aligned chunk buffers between tensors and the file.

Why: direct I/O requires addresses aligned to 4096 bytes, and torch aligns CPU tensors to 64. The buffers are reused
because a copy into fresh memory takes four times as long as one into warm memory (page faults). They use huge pages if
the kernel has them: direct I/O then pins one page instead of 512. ``python benchmarks/io.py --rounds 7`` on 2026-11-21
(2 cores, Linux 6.18, virtio disk with ext4, other work on the machine), blocks of 2 MiB, 4 KiB pages -> huge pages::

    native AIO   write 0.041 -> 0.008 CPU seconds per GB, 3.6 -> 6.8 GB/s    read 0.051 -> 0.009, 1.7 -> 3.5 GB/s
    threads      write 0.039 -> 0.011 CPU seconds per GB, 5.1 -> 8.7 GB/s    read 0.051 -> 0.012, 1.7 -> 3.9 GB/s

Guarantees:

* A buffer starts on a (huge) page and holds ``chunk_bytes``.
* At least two buffers exist, so that one can be kept free for reads.
* Memory is allocated when a buffer is first used, and reused until :meth:`StagingPool.close`.
* A forked child does not inherit the buffers, so copy-on-write never disturbs direct I/O in the parent. Otherwise 1. a
  read into a buffer is in flight, 2. the process forks and writes to the page, so that it gets a copy, 3. the device
  continues to fill the old page, and the data is lost.

The pool itself takes no lock: the lane that owns it calls it with the engine's lock held.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_BYTES = 2 << 20
CPU_BUDGET_BYTES = 16 << 20
HUGE_PAGE_BYTES = 2 << 20
PINNED_BUDGET_BYTES = 1 << 30
PINNED_CHUNK_BYTES = 8 << 20
"""The largest chunk of pinned staging. Python takes as long for a chunk of any size. With 2 MiB, what it takes limits
the rate of several drives: see ``benchmarks/replayed_plans.py --times-slower 4 --chunk-mib 2``."""
PINNED_BUFFERS = 64
"""Chunks are smaller where there would be fewer buffers than this: a small tensor takes a whole buffer."""
MIN_BUFFERS = 2


def pinned_chunk_bytes(budget_bytes: int) -> int:
    """The size of chunks in ``budget_bytes`` of pinned staging: a power of two."""
    chunk_bytes = PINNED_CHUNK_BYTES
    while chunk_bytes > CHUNK_BYTES and budget_bytes < PINNED_BUFFERS * chunk_bytes:
        chunk_bytes //= 2
    return chunk_bytes


class StagingBuffer:
    """One chunk of page-aligned memory. ``users`` counts the uses that still need its content."""

    __slots__ = ("address", "pinned", "size_bytes", "users", "view")

    def __init__(self, size_bytes: int) -> None:
        memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        skip = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
        self.size_bytes = size_bytes
        self.view = memoryview(memory)[skip : skip + size_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory, skip))
        self.users = 0
        self.pinned: Tensor | None = None
        """The same memory as a tensor that a device can copy to and from; set once a mover has registered it."""

    def as_bytes(self, byte_count: int) -> Tensor:
        """The first ``byte_count`` bytes as a uint8 tensor over the same memory. ``byte_count`` is at least 1."""
        return torch.frombuffer(self.view, dtype=torch.uint8, count=byte_count)


class StagingPool:
    """Up to ``budget_bytes`` of buffers, created on demand."""

    def __init__(
        self,
        budget_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        make_buffer: Callable[[int], StagingBuffer] = StagingBuffer,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._make_buffer = make_buffer
        self.buffer_limit = max(MIN_BUFFERS, budget_bytes // chunk_bytes)
        self._free: list[StagingBuffer] = []
        self._all: list[StagingBuffer] = []

    @property
    def available(self) -> int:
        """Buffers that can be acquired now."""
        return len(self._free) + self.buffer_limit - len(self._all)

    @property
    def size_bytes(self) -> int:
        """Memory that the pool holds."""
        return len(self._all) * self.chunk_bytes

    @property
    def used_bytes(self) -> int:
        """Memory of the buffers that are acquired."""
        return (len(self._all) - len(self._free)) * self.chunk_bytes

    def acquire(self) -> StagingBuffer | None:
        """Return a buffer with one user, the most recently used first; None if all are in use."""
        if self._free:
            buffer = self._free.pop()
        elif len(self._all) < self.buffer_limit:
            buffer = self._make_buffer(self.chunk_bytes)
            self._all.append(buffer)
        else:
            return None
        buffer.users = 1
        return buffer

    def drop_user(self, buffer: StagingBuffer) -> None:
        """Remove one user; a buffer without users is free."""
        buffer.users -= 1
        if buffer.users == 0:
            self._free.append(buffer)

    def close(self) -> list[StagingBuffer]:
        """Forget all buffers and return them; their memory is freed with the last reference. None may be in use."""
        buffers = self._all
        self._free, self._all = [], []
        return buffers
