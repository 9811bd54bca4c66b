"""Linux native AIO: submit a transfer to the kernel, continue, and ask later what has completed. It uses no threads.

Why: threads that call ``pread`` and ``pwrite`` take the interpreter lock and a core from the computation, which needs
both; handing a transfer to a thread costs more than the transfer. One ``io_submit`` of 3 MiB takes about 0.1 ms of the
caller's time, most of it for pinning pages.

Guarantees:

* A request that :meth:`KernelAio.submit` accepted is answered exactly once: with the number of bytes moved, which may
  be fewer than requested, or with a negative errno.
* If a signal handler raises an exception within :meth:`KernelAio.reap`, such as KeyboardInterrupt, no answer is lost:
  :meth:`KernelAio.answers` still returns it. This is why there are two methods.
* On x86-64, answers need no system call, unless the caller blocks for them: they are read from the ring that the kernel
  shares with the process, as fio does with ``userspace_reap``.
* :meth:`KernelAio.close` returns when the kernel has finished all requests.

The caller must ensure:

* The memory and the file of a request live until the request is answered or the context is closed.
* At most one thread at a time submits, and at most one reaps. These may be different threads.
* Cookies are not 0, and ``answers`` is called before the next ``reap``.

The kernel works asynchronously on files opened with O_DIRECT, on the common file systems. Elsewhere, and always for
buffered files, it does the transfer within ``submit``: the result is correct, but the caller waits. A context belongs
to the process that opened it: in a forked child, :meth:`KernelAio.close` does nothing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from typing import Protocol

READ = 0
WRITE = 1

RING_MAGIC = 0xA10A10A1

QUEUE_DEPTH = 128
"""Maximum number of requests in flight; enough for hundreds of megabytes. The system allows 65536 for all processes."""

_SYSCALLS = {  # io_setup, io_destroy, io_submit, io_getevents
    "x86_64": (206, 207, 209, 208),
    "aarch64": (0, 1, 2, 4),
}


class AioUnavailableError(Exception):
    """Native AIO cannot be used on this system; the message says why."""


class Aio(Protocol):
    """The interface of an AIO context, as a lane uses it. Tests implement it to inject faults."""

    depth: int

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, cookie: int) -> bool: ...

    def reap(self, timeout_s: float) -> None: ...

    def answers(self) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


_REQUEST = struct.Struct("<QIIHhIQQqQII")
"""``struct iocb`` on a little-endian machine: cookie, key, flags, opcode, priority, descriptor, address, length,
offset, reserved, flags, event descriptor. One call packs it, where a ctypes structure takes one per field."""


class _Event(ctypes.Structure):
    """``struct io_event``."""

    _fields_ = (
        ("cookie", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class _Ring(ctypes.Structure):
    """``struct aio_ring``, the header of the ring; its address is the number of the context. The kernel advances
    ``tail``, and the reader of answers advances ``head``."""

    _fields_ = (
        ("number", ctypes.c_uint32),
        ("length", ctypes.c_uint32),
        ("head", ctypes.c_uint32),
        ("tail", ctypes.c_uint32),
        ("magic", ctypes.c_uint32),
        ("compatible_features", ctypes.c_uint32),
        ("incompatible_features", ctypes.c_uint32),
        ("header_bytes", ctypes.c_uint32),
    )


class _Timeout(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class KernelAio:
    """One AIO context in the kernel."""

    def __init__(self, depth: int = QUEUE_DEPTH) -> None:
        """Raises AioUnavailableError if the kernel, the sandbox or the machine does not support native AIO."""
        self.depth = depth
        self._process = os.getpid()
        machine = platform.machine()
        if not sys.platform.startswith("linux") or machine not in _SYSCALLS or sys.byteorder != "little":
            raise AioUnavailableError(f"native AIO is not supported for {sys.platform} on {machine}")
        setup, self._destroy_number, self._submit_number, self._getevents_number = _SYSCALLS[machine]

        def syscall(argument_count: int) -> ctypes._NamedFuncPointer:
            function = _c_library()["syscall"]  # each look-up returns a new object with its own argtypes
            function.restype = ctypes.c_long
            function.argtypes = [ctypes.c_long] * (1 + argument_count)
            return function

        context = ctypes.c_ulong(0)
        if syscall(2)(setup, depth, ctypes.addressof(context)) < 0:
            number = ctypes.get_errno()
            raise AioUnavailableError(f"io_setup: {errno.errorcode.get(number, number)}, {os.strerror(number)}")
        self._context = context.value
        self._destroy = syscall(1)
        self._submit = syscall(3)
        self._getevents = syscall(5)
        # The kernel copies a request within io_submit, so one buffer is enough.
        self._request = ctypes.create_string_buffer(_REQUEST.size)
        self._request_list = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._request_list_address = ctypes.addressof(self._request_list)
        # Other machines may reorder reads: they could read the events before the tail that announces them.
        self._ring = _ring_of(self._context) if machine == "x86_64" else None
        if self._ring is not None:
            self._ring_events = (_Event * self._ring.length).from_address(self._context + self._ring.header_bytes)
        self._events = (_Event * (depth if self._ring is None else 1))()
        self._events_address = ctypes.addressof(self._events)
        self._timeout = _Timeout()
        self._timeout_address = ctypes.addressof(self._timeout)

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, cookie: int) -> bool:
        """Submit a read or write. Returns False if the queue is full, and raises OSError if the kernel refuses it."""
        _REQUEST.pack_into(self._request, 0, cookie, 0, 0, opcode, 0, descriptor, address, length, offset, 0, 0, 0)
        while self._submit(self._submit_number, self._context, 1, self._request_list_address) != 1:
            number = ctypes.get_errno()
            if number == errno.EAGAIN:
                return False
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))
        return True

    def reap(self, timeout_s: float) -> None:
        """Collect answers for :meth:`answers`. Blocks until there is one, for at most ``timeout_s``; a signal may end
        the wait early, without an answer."""
        ring = self._ring
        if ring is not None and (timeout_s == 0 or ring.head != ring.tail):
            return  # `answers` reads them from the ring
        if self._events[0].cookie:
            return  # an exception kept the caller from asking for them
        ctypes.memset(self._events_address, 0, ctypes.sizeof(self._events))
        self._timeout.seconds = int(timeout_s)
        self._timeout.nanoseconds = int(timeout_s % 1 * 1e9)
        count = self._getevents(
            self._getevents_number,
            self._context,
            1,
            len(self._events),
            self._events_address,
            self._timeout_address,
        )
        if count < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, f"io_getevents: {os.strerror(number)}")

    def answers(self) -> list[tuple[int, int]]:
        """Return the cookies and results that the last :meth:`reap` collected, or that have arrived since.

        If a signal handler raises an exception here, the next call may repeat answers, but none is lost.
        """
        answers: list[tuple[int, int]] = []
        for event in self._events:
            cookie = event.cookie
            if cookie == 0:
                break
            answers.append((cookie, event.result))
        ring = self._ring
        if ring is None:
            self._events[0].cookie = 0  # a store and no call, for the reason below
            return answers
        head = ring.head
        while head != ring.tail:
            event = self._ring_events[head]
            answers.append((event.cookie, event.result))
            head = (head + 1) % ring.length
        # Python checks signals at calls and at loop ends; there are none from here to the end, so both stores happen.
        self._events[0].cookie = 0
        ring.head = head
        return answers

    def close(self) -> None:
        """Wait until the kernel has finished all requests. Answers that were not reaped are discarded."""
        context, self._context, self._ring = self._context, 0, None
        if context and self._process == os.getpid():
            self._destroy(self._destroy_number, context)


@functools.cache
def _c_library() -> ctypes.CDLL:
    """Loaded once, because ctypes makes a class for it, which only the collector can free."""
    return ctypes.CDLL(None, use_errno=True)


def _ring_of(context: int) -> _Ring | None:
    """The ring of a context; None if the kernel, or a sandbox that emulates it, uses another ring layout."""
    ring = _Ring.from_address(context)
    return ring if ring.magic == RING_MAGIC and ring.incompatible_features == 0 else None
