"""The memory of compiled steps on a CPU: an arena of this package instead of the heap of the C library.

Why: offloading frees activations early and in pieces. The heap keeps such pieces, up to gigabytes of them, or returns
them and lets the next layer touch fresh pages. So what a step saves would not show in the process, or cost time.

While compiled code runs, the tensors of its thread come from the arena: intermediates, saved tensors, workspaces of
kernels, and reloaded tensors. What the caller receives keeps its block for as long as it lives. Tensors of other
threads, of code that is not compiled by this backend, and of less than 64 KiB come from torch's own allocator. If no
graph of the process moves tensors, all do.
``_torch_private/arena_cpp/`` says what the arena guarantees.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import logging
import os
import resource
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private.arena import MIN_BYTES, ArenaLibrary, ArenaUnavailableError, load_arena_library
from ssdtrain_fx.fork_safe_lock import ForkSafeLock
from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES, round_up
from ssdtrain_fx.runtime.step_clock import TimedHalf, step_clock

log = logging.getLogger(__name__)

RESERVED_RATIO = 2
"""Addresses that are set aside, relative to the memory of the machine. A block cannot be moved, so holes count."""

Step = TypeVar("Step")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStats:
    """Memory of compiled steps on a CPU. All zero if there is no arena."""

    allocated_bytes: int = 0
    """Bytes of tensors that are alive, in whole pages."""
    allocated_peak_bytes: int = 0
    """Highest ``allocated_bytes`` since the start, or since ``reset_peak_memory_stats()``."""
    reserved_bytes: int = 0
    """Memory that the arena holds, in use or free: at most this much of it is resident."""
    reserved_peak_bytes: int = 0
    planned_peak_bytes: int = 0
    """The largest peak that the plans of the graphs predict that have run over the same time. In a chain of graphs,
    each counts alone."""
    fragmentation: float = 0.0
    """How much of the highest end of a tensor was more than ``allocated_peak_bytes``, as a share: holes between
    tensors."""
    page_faults: int = 0
    """Pages that this process has touched for the first time: of 4 KiB, unless they are huge."""


class StepMemory:
    """The arena of this process, built on first use."""

    def __init__(self, load: Callable[[], ArenaLibrary] = load_arena_library) -> None:
        self._load = load
        self._lock = ForkSafeLock()
        self._is_loaded = False
        self._library: ArenaLibrary | None = None
        self._steps: set[int] = set()
        self.planned_peak_bytes = 0
        self.is_needed = False
        """Whether a graph that moves tensors has been loaded in this process."""

    @property
    def library(self) -> ArenaLibrary | None:
        """None if the arena cannot be built here; that is logged once."""
        if not self._is_loaded:
            with self._lock.current:
                if not self._is_loaded:
                    self._library = self._load_or_warn()
                    self._is_loaded = True
        return self._library

    def keep_for(self, step: object) -> None:
        """Return free memory to the system when the last of these objects has died."""
        self._steps.add(id(step))
        weakref.finalize(step, self._forget, id(step)).atexit = False

    @contextlib.contextmanager
    def inside(self) -> Generator[None]:
        """A block in which the tensors of this thread come from the arena, as in compiled code."""
        library = self.library
        if library is None:
            yield
            return
        was_inside = False
        try:
            was_inside = library.enter(0)
            yield
        finally:
            library.leave(was_inside)

    def trim(self) -> None:
        """Return free memory to the system."""
        if self._library is not None:
            self._library.trim()

    def reset_peaks(self) -> None:
        self.planned_peak_bytes = 0
        if self._library is not None:
            self._library.reset_peaks()

    def statistics(self) -> MemoryStats:
        page_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if self._library is None:
            return MemoryStats(page_faults=page_faults)
        described = self._library.describe()
        return MemoryStats(
            allocated_bytes=described.allocated_bytes,
            allocated_peak_bytes=described.allocated_peak_bytes,
            reserved_bytes=described.committed_bytes,
            reserved_peak_bytes=described.committed_peak_bytes,
            planned_peak_bytes=self.planned_peak_bytes,
            fragmentation=1 - described.allocated_peak_bytes / max(1, described.end_peak_bytes),
            page_faults=page_faults,
        )

    def _forget(self, step: int) -> None:
        self._steps.discard(step)
        if not self._steps:
            self.trim()

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
_graphs = itertools.count(1)
"""Numbers for compiled graphs. The arena learns the layout of a step from the order in which they run."""


def keep_memory_for(step: Step) -> Step:
    """``step``, a compiled step. What the arena has free stays mapped until Dynamo has dropped the last of them."""
    step_memory.keep_for(_torch_private.innermost(cast(Callable[..., Any], step)))
    return step


def in_step_memory(
    call: Callable[[Any], Any], *, planned_peak_bytes: int, timed: Sequence[Any] | None = None, moves: bool = True
) -> Callable[[Any], Any]:
    """``call``, a compiled graph, with its memory from the arena. Code that Inductor generates calls this.

    Args:
        planned_peak_bytes: the peak that the plan predicts for the step.
        timed: the fields of a ``TimedHalf``: then its time is measured. None: it is not.
        moves: whether the graph moves tensors. If none of the process does, they run on the heap, as with Inductor.
            Else this one fills what the others have left free in the arena.
    """
    run_graph = call if timed is None else functools.partial(step_clock.run, TimedHalf(*timed), call)
    is_first, graph = True, next(_graphs)
    step_memory.is_needed |= moves

    @functools.wraps(call)
    def run(args: Any) -> Any:
        nonlocal is_first
        if not step_memory.is_needed:
            return call(args)
        library = step_memory.library
        if library is None:
            return run_graph(args)
        if planned_peak_bytes > step_memory.planned_peak_bytes:
            step_memory.planned_peak_bytes = planned_peak_bytes
        if is_first:
            is_first = False
            if graph & (graph - 1) == 0:  # a tenth of a second each: for graphs 1, 2, 4, 8, ... of many
                _return_garbage_of_compiling()
        was_inside = False
        try:
            was_inside = library.enter(graph)
            return run_graph(args)
        finally:
            library.leave(was_inside)

    return run


def _return_garbage_of_compiling() -> None:
    """Return to the system what the compilation has freed on the heap: 120 MiB for a GPT-2 of 12 layers.

    Steps would not use it, because their tensors come from the arena. No setting of the heap changes. If jemalloc or
    tcmalloc replaces the heap of the C library, nothing happens.
    """
    if gc.isenabled():
        gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def allocate_block(byte_count: int) -> Tensor | None:
    """Allocate ``byte_count`` bytes on pages of their own; None outside of compiled code."""
    library = step_memory.library
    if library is None or not library.is_inside():
        return None
    block = _torch_private.empty_cpu(max(round_up(byte_count), MIN_BYTES))
    # If the system grants the arena no memory, the block is from the heap.
    return block if block.data_ptr() % ALIGNMENT_BYTES == 0 else None


def allocate_on_pages(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, byte_count: int) -> Tensor | None:
    """Allocate a tensor that fills ``byte_count`` bytes of whole pages; None outside of compiled code."""
    library = step_memory._library
    if library is None or byte_count < MIN_BYTES or not library.is_inside():
        return None
    tensor = _torch_private.empty_strided_cpu(size, stride, dtype)
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else None


def memory_stats() -> MemoryStats:
    """The memory of compiled steps on a CPU: what they use and hold now, and at most so far.

    ``torch.cuda.memory_stats`` says the same for GPUs.
    """
    return step_memory.statistics()


def reset_peak_memory_stats() -> None:
    """Let the peaks of ``memory_stats()`` begin anew."""
    step_memory.reset_peaks()
