"""Several spill files that look like one, so that their drives work at the same time.

::

    offset    0       16      32      48      64 MiB
    2 files   |  A: 0  |  B: 0  |  A: 16 |  B: 16 |       16 MiB are in one file, the next 16 MiB in the next file

Why stripes rather than one drive per tensor: each tensor moves at the rate of all drives together, which is the rate in
the hardware profile. Equal drives are best: the slowest and the fullest drive limit all of them.

How long a stripe is. No chunk crosses a stripe, and every chunk costs the computing thread some Python, so stripes
should be long. But a tensor that is shorter than a stripe for each drive does not use all drives. The stripe is the
longest power of two with which ``ROW_BYTES`` lie on all drives, from ``MIN_STRIPE_BYTES`` to ``MAX_STRIPE_BYTES``::

    drives                                             2        4       8
    stripe                                             16 MiB   8 MiB   4 MiB
    chunks of 24 MiB (12 with stripes of 2 MiB)        2        3       6
    their time, relative to equal shares               1.33     1.33    1.33

Tensors are next to each other in the file, so those that are in flight together fill the gaps.

Guarantees:

* A transfer that ends before the next multiple of ``stripe_bytes`` uses one file.
* All files grow, or none: if one drive is full, the others free what they had reserved. The drive that was full is
  asked first the next time, so while it is full, the others reserve nothing.
* An error names the file that it comes from.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

from ssdtrain_fx.runtime.storage.spill_file import ChunkFile, SpillFile

ROW_BYTES = 32 << 20
"""A tensor of this size lies on all drives. A guess: about the saved tensors of one layer."""
MAX_STRIPE_BYTES = 16 << 20
"""Longer chunks gain nothing: see ``DIRECT_CHUNK_BYTES`` in :mod:`ssdtrain_fx.runtime.lanes.aio.aio_lane`."""
MIN_STRIPE_BYTES = 4 << 20


def stripe_bytes_for(drive_count: int) -> int:
    """The length of a stripe on this many drives."""
    longest = MAX_STRIPE_BYTES
    while longest > MIN_STRIPE_BYTES and longest * drive_count > ROW_BYTES:
        longest //= 2
    return longest


def open_spill_file(directories: Sequence[str], open_one: Callable[[str], ChunkFile] = SpillFile) -> ChunkFile:
    """Open one spill file over all ``directories``. If one cannot be used, raises OSError and leaves no file open."""
    with contextlib.ExitStack() as opened:
        parts: list[ChunkFile] = []
        for directory in directories:
            parts.append(open_one(directory))
            opened.callback(parts[-1].close)
        opened.pop_all()
    return parts[0] if len(parts) == 1 else StripedFile(parts)


class StripedFile:
    """A ChunkFile over other ChunkFiles, which it owns."""

    def __init__(self, parts: Sequence[ChunkFile], stripe_bytes: int | None = None) -> None:
        self._stripe_bytes = stripe_bytes_for(len(parts)) if stripe_bytes is None else stripe_bytes
        self.stripe_bytes: int | None = self._stripe_bytes
        self.path = ", ".join(part.path for part in parts)
        self.direct = all(part.direct for part in parts)
        self.io_path = " + ".join(dict.fromkeys(part.io_path for part in parts)) + f", {len(parts)} directories"
        self._parts = tuple(parts)
        self._growth_order = list(self._parts)
        self._growth_lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """In whole rows of stripes: where there is little room, a file may grow to a size that is no whole stripe."""
        rows = min(part.size_bytes for part in self._parts) // self._stripe_bytes
        return rows * self._stripe_bytes * len(self._parts)

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        part, part_offset_bytes = self._part_at(offset_bytes)
        return part.locate(part_offset_bytes)

    def grow(self, size_bytes: int) -> OSError | None:
        if size_bytes <= self.size_bytes:
            return None
        with self._growth_lock:
            before = [(part, part.size_bytes) for part in self._parts]
            for part in self._growth_order:
                error = part.grow(self._part_bytes(size_bytes))
                if error is not None:
                    error.filename = part.path
                    for grown, old_bytes in before:
                        with contextlib.suppress(OSError):
                            grown.shrink(old_bytes, grown.size_bytes)
                    self._growth_order.remove(part)
                    self._growth_order.insert(0, part)
                    return error
        return None

    def shrink(self, size_bytes: int, from_bytes: int) -> None:
        with self._growth_lock:
            if size_bytes < self.size_bytes == from_bytes:
                for part in self._parts:
                    part.shrink(self._part_bytes(size_bytes), part.size_bytes)

    def write(self, data: memoryview, offset_bytes: int) -> None:
        for part, piece, part_offset_bytes in self._pieces(data, offset_bytes):
            with _named(part):
                part.write(piece, part_offset_bytes)

    def read(self, data: memoryview, offset_bytes: int) -> None:
        for part, piece, part_offset_bytes in self._pieces(data, offset_bytes):
            with _named(part):
                part.read(piece, part_offset_bytes)

    def close(self) -> None:
        with contextlib.ExitStack() as parts:  # closes all of them, whatever one of them raises
            for part in self._parts:
                parts.callback(part.close)

    def _part_at(self, offset_bytes: int) -> tuple[ChunkFile, int]:
        stripe, within_bytes = divmod(offset_bytes, self._stripe_bytes)
        row, column = divmod(stripe, len(self._parts))
        return self._parts[column], row * self._stripe_bytes + within_bytes

    def _part_bytes(self, size_bytes: int) -> int:
        """The size of each file if together they hold ``size_bytes`` in whole rows of stripes."""
        return -(-size_bytes // (self._stripe_bytes * len(self._parts))) * self._stripe_bytes

    def _pieces(self, data: memoryview, offset_bytes: int) -> Iterator[tuple[ChunkFile, memoryview, int]]:
        done = 0
        while done < len(data):
            part, part_offset_bytes = self._part_at(offset_bytes + done)
            length = min(len(data) - done, self._stripe_bytes - part_offset_bytes % self._stripe_bytes)
            yield part, data[done : done + length], part_offset_bytes
            done += length


@contextlib.contextmanager
def _named(part: ChunkFile) -> Generator[None]:
    """Add the path of ``part`` to an OSError that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = part.path
        raise
