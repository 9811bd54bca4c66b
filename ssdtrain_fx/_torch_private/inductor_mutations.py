"""Kernels that write to a buffer in place stay in front of those that read it (see the table in ``_torch_private``).

Inductor renames a buffer that is written in place, so that whoever reads it afterwards depends on the writer::

    buf0 = zeros(...)
    buf1 = scatter_add(buf0, ...)     # in the memory of buf0
    buf2 = buf1 / 2                   # its loop body reads "buf0", its dependency is "buf1"

Torch 2.13 and earlier forget the new name when they compute the loops of a kernel again, to fuse it with others. The
reader may then run before the writer, and reads zeros: gradients behind an upsampling or a pooling are silently wrong
(pytorch/pytorch, issue 185509, mended by pull request 185873).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from torch._inductor.scheduler import SchedulerNode

__all__ = ["keeping_writers_in_front"]

_is_kept: ContextVar[bool] = ContextVar("keeping_writers_in_front", default=False)


@contextmanager
def keeping_writers_in_front() -> Generator[None]:
    """Compile graphs in which no kernel forgets that a buffer it reads was written in place."""
    _install()
    token = _is_kept.set(True)
    try:
        yield
    finally:
        _is_kept.reset(token)


def _install() -> None:
    """Once. What is compiled outside of the context is scheduled as before."""
    node: Any = SchedulerNode
    recompute = node.recompute_size_and_body
    if hasattr(recompute, "ssdtrain_original"):
        return

    def recompute_and_rename(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        old_names = self.mutation_renames.keys() & {dep.name for dep in self.read_writes.reads_and_writes()}
        if _is_kept.get() and old_names:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    cast(Any, recompute_and_rename).ssdtrain_original = recompute
    node.recompute_size_and_body = recompute_and_rename
