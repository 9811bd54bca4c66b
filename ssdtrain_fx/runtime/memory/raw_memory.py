"""Memory at an address, as an object with the buffer protocol.

ctypes makes a new type for every array length, which costs more than the use of it, and keeps it until the garbage
collector runs. So all memory has one type here, whose length says nothing: the user of the memory states the length.
"""

from __future__ import annotations

import ctypes
import sys


class RawMemory(ctypes.Array[ctypes.c_char]):
    """Memory from an address on, made with ``RawMemory.from_address``. Its length is not known: state how many bytes
    you use. The memory lives as long as the object if ``lease`` keeps it alive, otherwise as the caller says."""

    _type_ = ctypes.c_char  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    _length_ = sys.maxsize  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    lease: object


def bytes_at(address: int, byte_count: int) -> memoryview:
    """The ``byte_count`` bytes at ``address``, which the caller keeps alive."""
    return memoryview(RawMemory.from_address(address)).cast("B")[:byte_count]
