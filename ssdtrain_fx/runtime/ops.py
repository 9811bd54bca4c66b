"""The four ops, registered when this module is imported.

::

    forward    token  = ssdtrain.offload(x, stride, name, engine, ...)         # starts moving x out
               token1 = ssdtrain.release(token, x, late, own)              # x may be reused from here on
    backward   ticket = ssdtrain.reload(token1, size, stride, dtype, device)   # memory is taken, the data on its way
               y      = ssdtrain.wait(ticket, size, stride, dtype, device)     # y may be read

The token is a CPU tensor of 8 bytes. It owns what was offloaded: when the last token of an offload dies, its slot is
recycled. ``stride`` of ``offload`` is a record for readers of the graph; the runtime goes by the tensor it gets.
``stride`` and ``dtype`` of ``reload`` and ``wait`` may be None where nothing is compiled for them: then they are those
of the tensor that was offloaded. ``out_s`` and ``back_s`` say how many seconds lie between ``offload`` and ``release``,
and between ``reload`` and ``wait``, by the plan: what the disk cannot do in that time stays in memory. ``stall_s`` says
how much of it the plan waits. ``host`` says that a CUDA tensor is to stay in pinned host memory, ``reload_order`` when
backward reloads it, compared with the other tensors of its graph, and ``first`` that it is the first of a forward;
``idle_bytes`` says how much memory of earlier reloads may lie idle until the next reload. See
:meth:`ssdtrain_fx.runtime.engine.Engine.offload` and ``reload``.

Guarantees: whatever the ops need is in their arguments, so a graph from a cache runs in a process that made no plan.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.handles.tickets import Reloading, Tickets
from ssdtrain_fx.runtime.handles.tokens import Owner, make_token
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.runtime.trace import record

EXIT_TIMEOUT_S = 5.0
"""Nobody needs the data at exit: when no transfer has ended for so long, the rest is left to the kernel."""

_engines = Engines()
_tickets = Tickets()
os.register_at_fork(after_in_child=_engines.forget_after_fork)
atexit.register(_engines.close, timeout_s=EXIT_TIMEOUT_S)

# flexible_layout: Inductor may pass tensors as they lie; without it, it may pass copies, to each op another one.
# cudagraph_unsafe: the ops run host code, which a replayed graph would skip.
_tags = tuple(getattr(torch.Tag, name) for name in ("flexible_layout", "cudagraph_unsafe") if hasattr(torch.Tag, name))

_library = torch.library.Library("ssdtrain", "DEF")
_library.define(
    "offload(Tensor x, SymInt[] stride, str name, str engine, float? out_s=None, float? back_s=None, "
    "str link='', bool held=False, bool host=False, int? reload_order=None, bool first=False, float stall_s=0.0) "
    "-> Tensor",
    tags=_tags,
)
_library.define("release(Tensor token, Tensor x, bool late=False, bool own=False) -> Tensor", tags=_tags)
_library.define(
    "reload(Tensor token, SymInt[] size, SymInt[]? stride, ScalarType? dtype, Device device, "
    "int? idle_bytes=None) -> Tensor",
    tags=_tags,
)
_library.define(
    "wait(Tensor ticket, SymInt[] size, SymInt[]? stride, ScalarType? dtype, Device device) -> Tensor", tags=_tags
)


def offload(
    x: Tensor,
    stride: Sequence[int],
    name: str,
    engine: str,
    out_s: float | None = None,
    back_s: float | None = None,
    link: str = "",
    held: bool = False,
    host: bool = False,
    reload_order: int | None = None,
    first: bool = False,
    stall_s: float = 0.0,
) -> Owner:
    """The op for code that knows of no dispatcher; the owner takes the place of the token."""
    return _engines.open(engine).offload(
        x,
        name,
        out_s=out_s,
        back_s=back_s,
        link=link,
        held=held,
        host=host,
        reload_order=reload_order,
        first=first,
        stall_s=stall_s,
    )


def _fake_offload(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _offload(x: Tensor, *rest: Any, **keywords: Any) -> Tensor:
    return make_token(offload(x, *rest, **keywords))


def release(owner: Owner, x: Tensor, late: bool = False, own: bool = False) -> Tensor:
    """The op for code that knows of no dispatcher. Its result is what autograd saves: a token."""
    owner.engine.release(owner, x, late=late, own=own)
    return make_token(owner)


def _release(token: Tensor, x: Tensor, late: bool = False, own: bool = False) -> Tensor:
    return release(_engines.owner_of(token), x, late, own)


def _fake_release(token: Tensor, x: Tensor, late: bool = False, own: bool = False) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def reload(
    token: Tensor,
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    idle_bytes: int | None = None,
) -> Reloading:
    """The op for code that knows of no dispatcher."""
    owner = _engines.owner_of(token)
    return Reloading(owner.engine.reload(owner, size, stride, dtype, device, idle_bytes), owner)


def _reload(token: Tensor, *rest: Any, **keywords: Any) -> Tensor:
    return _tickets.issue(reload(token, *rest, **keywords))


def _fake_reload(
    token: Tensor,
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device,
    idle_bytes: int | None = None,
) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def wait(reloading: Reloading) -> Tensor:
    """The op for code that knows of no dispatcher."""
    y, owner = reloading.take()
    engine = owner.engine
    engine.wait(y, owner)
    del owner  # without retain_graph nobody else holds it
    return engine.hand_over(y)


def _wait(ticket: Tensor, *_: object, **__: object) -> Tensor:
    return wait(_tickets.redeem(ticket))


def _fake_wait(
    ticket: Tensor,
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    assert stride is not None, "only graphs that are not traced again leave this open"
    assert dtype is not None, "only graphs that are not traced again leave this open"
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _real, _fake in (
    ("offload", _offload, _fake_offload),
    ("release", _release, _fake_release),
    ("reload", _reload, _fake_reload),
    ("wait", _wait, _fake_wait),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ssdtrain::{_name}", _fake, lib=_library)


def statistics() -> Statistics:
    """What all engines of this process did and hold."""
    return _engines.statistics()


def trace(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Record every offload, release, reload, wait and transfer of this process, for Perfetto or chrome://tracing.

        with ssdtrain_fx.trace("steps.json"):
            for batch in batches[:3]:
                model(batch).backward()

    The file is written when the body is left, also by an exception. Meant for a few steps: events are kept in memory.
    Times and threads are those of ``torch.profiler``, so the ``traceEvents`` of both may be put into one file.

    Raises:
        ConfigError: the file cannot be written, or another trace is being recorded. Nothing of the body has run.
    """
    return record(path, _engines)


def close() -> None:
    """Close all engines of this process, after the last backward. It also happens at exit."""
    _engines.close()
