"""Several spill files that look like one, so that their drives work at the same time.

::

    offset    0       2 MiB   4 MiB   6 MiB   8 MiB
    2 files   |  A: 0  |  B: 0  |  A: 2  |  B: 2  |       2 MiB are in one file, the next 2 MiB in the next file

Why stripes rather than one drive per tensor: each tensor moves at the rate of all drives together, which is the rate in
the hardware profile. Equal drives are best: the slowest and the fullest drive limit all of them.

Guarantees:

* A transfer that ends before the next multiple of ``stripe_bytes`` uses one file.
* All files grow, or none: if one drive is full, the others free what they had reserved.
* An error names the file that it comes from.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

from ssdtrain_fx.runtime.storage.spill_file import ChunkFile, SpillFile

STRIPE_BYTES = 2 << 20


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

    def __init__(self, parts: Sequence[ChunkFile], stripe_bytes: int = STRIPE_BYTES) -> None:
        self.stripe_bytes: int | None = stripe_bytes
        self._stripe_bytes = stripe_bytes
        self.path = ", ".join(part.path for part in parts)
        self.direct = all(part.direct for part in parts)
        self.io_path = " + ".join(dict.fromkeys(part.io_path for part in parts)) + f", {len(parts)} directories"
        self._parts = tuple(parts)
        self._growth_lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return min(part.size_bytes for part in self._parts) * len(self._parts)

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        part, part_offset_bytes = self._part_at(offset_bytes)
        return part.locate(part_offset_bytes)

    def grow(self, size_bytes: int) -> OSError | None:
        if size_bytes <= self.size_bytes:
            return None
        with self._growth_lock:
            before_bytes = [part.size_bytes for part in self._parts]
            for part in self._parts:
                error = part.grow(self._part_bytes(size_bytes))
                if error is not None:
                    error.filename = part.path
                    for grown, old_bytes in zip(self._parts, before_bytes, strict=True):
                        with contextlib.suppress(OSError):
                            grown.shrink(old_bytes, grown.size_bytes)
                    return error
        return None

    def shrink(self, size_bytes: int, from_bytes: int) -> None:
        for part in self._parts:
            part.shrink(self._part_bytes(size_bytes), from_bytes // len(self._parts))

    def write(self, data: memoryview, offset_bytes: int) -> None:
        for part, piece, part_offset_bytes in self._pieces(data, offset_bytes):
            with _named(part):
                part.write(piece, part_offset_bytes)

    def read(self, data: memoryview, offset_bytes: int) -> None:
        for part, piece, part_offset_bytes in self._pieces(data, offset_bytes):
            with _named(part):
                part.read(piece, part_offset_bytes)

    def close(self) -> None:
        for part in self._parts:
            part.close()

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
