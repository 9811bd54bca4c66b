"""The four ops in the process that runs them: each finds its engine, and a token or a ticket stands for its result.

:mod:`ssdtrain_fx.runtime.op_contract` has their schemas and says what they promise. They are implemented when this
module is imported.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.handles.tickets import Reloading, Tickets
from ssdtrain_fx.runtime.handles.tokens import Owner, make_token
from ssdtrain_fx.runtime.memory.step_memory import memory_stats, step_memory
from ssdtrain_fx.runtime.op_contract import LIBRARY
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.trace import record

EXIT_TIMEOUT_S = 5.0
"""The data is not needed at exit: after this long without a finished transfer, the rest is left to the kernel."""

_engines = Engines()
_tickets = Tickets()
os.register_at_fork(after_in_child=_engines.forget_after_fork)
atexit.register(_engines.close, timeout_s=EXIT_TIMEOUT_S)


def offload(x: Tensor, stride: Sequence[int], site: str) -> Owner:
    """The op, called without the dispatcher. It returns the owner instead of a token."""
    found = _engines.offloadings.get(site)
    if found is None or found.engine.has_failed:  # then it opens another engine
        found = _engines.at(site)
    return found.engine.offload(x, found.call_site)


def _offload(x: Tensor, stride: Sequence[int], site: str) -> Tensor:
    return make_token(offload(x, stride, site))


def release(owner: Owner, x: Tensor, deferred: bool = False, exclusive: bool = False) -> Tensor:
    """The op, called without the dispatcher. It returns what autograd saves: a token."""
    owner.engine.release(owner, x, deferred=deferred, exclusive=exclusive)
    return make_token(owner)


def _release(token: Tensor, x: Tensor, deferred: bool = False, exclusive: bool = False) -> Tensor:
    return release(_engines.owner_of(token), x, deferred, exclusive)


def reload(
    token: Tensor,
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Reloading:
    """The op, called without the dispatcher. It returns the reloading instead of a ticket."""
    owner = _engines.owner_of(token)
    return Reloading(owner.engine.reload(owner, size, stride, dtype, device), owner)


def _reload(token: Tensor, *rest: Any, **keywords: Any) -> Tensor:
    return _tickets.issue(reload(token, *rest, **keywords))


def wait(reloading: Reloading) -> Tensor:
    """The op, called without the dispatcher."""
    y, owner = reloading.take()
    engine = owner.engine
    engine.wait(y, owner)
    del owner  # without retain_graph, this is the last reference
    return engine.hand_over(y)


def _wait(ticket: Tensor, *_: object, **__: object) -> Tensor:
    return wait(_tickets.redeem(ticket))


for _name, _real in (("offload", _offload), ("release", _release), ("reload", _reload), ("wait", _wait)):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")


def statistics() -> Statistics:
    """What all engines of this process have done and hold now."""
    memory = memory_stats()
    return dataclasses.replace(
        _engines.statistics(),
        allocated_peak_bytes=memory.allocated_peak_bytes,
        planned_peak_bytes=memory.planned_peak_bytes,
    )


def empty_cache() -> None:
    """Return the memory of compiled steps that is free to the system: on a CPU, and what engines keep for reloads.

    The next step takes it again, page by page. ``torch.cuda.empty_cache`` does the same for GPUs.
    """
    _engines.release_idle()
    step_memory.trim()


def trace(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Record every offload, release, reload, wait and transfer of this process, for Perfetto or chrome://tracing.

        with ssdtrain_fx.trace("steps.json"):
            for batch in batches[:3]:
                model(batch).backward()

    The file is written at the end of the block, also after an exception. Record only a few steps: events are kept in
    memory. Times and thread numbers are those of ``torch.profiler``, so the ``traceEvents`` of both can be merged into
    one file.

    Raises:
        ConfigError: the file cannot be written, or another trace is being recorded. Raised before the block runs.
    """
    return record(path, _engines)


def close() -> None:
    """Close all engines of this process. Call it after the last backward; it is also called at exit."""
    _engines.close()
