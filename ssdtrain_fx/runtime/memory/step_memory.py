"""The memory of compiled steps on a CPU: an arena of this package instead of the heap of the C library.

Why: offloading frees activations early and in pieces. The heap keeps such pieces, up to gigabytes of them, or returns
them and lets the next layer touch fresh pages. So what a step saves would not show in the process, or cost time.

While compiled code runs, the tensors of its thread come from the arena: intermediates, saved tensors, workspaces of
kernels, and reloaded tensors. What the caller receives keeps its block for as long as it lives. Tensors of other
threads, of code that is not compiled by this backend, and of less than 64 KiB come from torch's own allocator.
``_torch_private/arena.cpp`` says what the arena guarantees.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private.arena import ArenaLibrary, ArenaUnavailableError, load_arena_library
from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES, round_up

log = logging.getLogger(__name__)

MIN_BYTES = 64 << 10
"""The same as in ``arena.cpp``."""
RESERVED_RATIO = 2
"""Addresses that are set aside, relative to the memory of the machine. A block cannot be moved, so holes count."""


class StepMemory:
    """The arena of this process, built on first use."""

    def __init__(self, load: Callable[[], ArenaLibrary] = load_arena_library) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._is_loaded = False
        self._library: ArenaLibrary | None = None

    @property
    def library(self) -> ArenaLibrary | None:
        """None if the arena cannot be built here; that is logged once."""
        if not self._is_loaded:
            with self._lock:
                if not self._is_loaded:
                    self._library = self._load_or_warn()
                    self._is_loaded = True
        return self._library

    def _load_or_warn(self) -> ArenaLibrary | None:
        try:
            library = self._load()
            library.install(RESERVED_RATIO * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except ArenaUnavailableError as reason:
            log.warning(
                "compiled steps use the heap of the C library, which keeps much of the memory that offloading frees: "
                "%s.",
                reason,
            )
            return None
        return library


step_memory = StepMemory()


def allocate_block(byte_count: int) -> Tensor | None:
    """Allocate ``byte_count`` bytes on pages of their own; None outside of compiled code."""
    library = step_memory.library
    if library is None or not library.is_inside():
        return None
    block = _torch_private.empty_cpu(max(round_up(byte_count), MIN_BYTES))
    # If the system grants the arena no memory, the block is from the heap.
    return block if block.data_ptr() % ALIGNMENT_BYTES == 0 else None


def in_step_memory(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``call``, a compiled graph, with its memory from the arena. Code that Inductor generates calls this."""

    @functools.wraps(call)
    def run(args: Any) -> Any:
        library = step_memory.library
        if library is None:
            return call(args)
        try:
            library.enter()
            return call(args)
        finally:
            library.leave()

    return run
