"""What the four ops take and return: schemas and shapes, registered when this module is imported.

Graphs are rewritten and traced with this alone. :mod:`ssdtrain_fx.runtime.ops` implements them.

::

    forward    token  = ssdtrain.offload(x, stride, site)                       # starts moving x out
               token1 = ssdtrain.release(token, x, deferred, exclusive)     # x may be reused from here on
    backward   ticket = ssdtrain.reload(token1, size, stride, dtype, device)   # allocates y and starts to fill it
               y      = ssdtrain.wait(ticket, size, stride, dtype, device)     # y may be read

The token is a CPU tensor of 8 bytes. It owns the offloaded data: when the last token of an offload dies, its slot is
recycled. ``stride`` of ``offload`` is a record for readers of the graph; the runtime uses the layout of the tensor it
gets. ``stride`` and ``dtype`` of ``reload`` and ``wait`` may be None in graphs that are not traced again: they default
to those of the offloaded tensor. ``site`` is a :class:`ssdtrain_fx.runtime.sites.Site` as a string: the name of ``x``,
what the plan expects, and the engine.

Memory is ``exclusive`` if nobody else holds or writes it. A ``deferred`` release does not wait for ``x``: the engine
holds it until its bytes have left. See :meth:`ssdtrain_fx.runtime.engine.Engine.release`.

Guarantees: everything the ops need is in their arguments, so a graph from a cache runs in a process that made no plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssdtrain_fx.errors import ConfigError

# flexible_layout: Inductor may pass tensors in any layout; without it, it may pass a different copy to each op.
# cudagraph_unsafe: the ops run host code, which a replayed graph would skip.
_tags = tuple(getattr(torch.Tag, name) for name in ("flexible_layout", "cudagraph_unsafe") if hasattr(torch.Tag, name))

LIBRARY = torch.library.Library("ssdtrain", "DEF")
LIBRARY.define("offload(Tensor x, SymInt[] stride, str site) -> Tensor", tags=_tags)
LIBRARY.define("release(Tensor token, Tensor x, bool deferred=False, bool exclusive=False) -> Tensor", tags=_tags)
LIBRARY.define(
    "reload(Tensor token, SymInt[] size, SymInt[]? stride, ScalarType? dtype, Device device) -> Tensor", tags=_tags
)
LIBRARY.define(
    "wait(Tensor ticket, SymInt[] size, SymInt[]? stride, ScalarType? dtype, Device device) -> Tensor", tags=_tags
)


def _fake_offload(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _fake_release(token: Tensor, x: Tensor, deferred: bool = False, exclusive: bool = False) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _fake_reload(
    token: Tensor,
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _fake_wait(
    ticket: Tensor,
    size: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Tensor:
    if stride is None or dtype is None:
        raise ConfigError(
            "backward is traced again, for example by compiled autograd, but with inner='aot_eager' the layouts of "
            "reloaded tensors are known only when it runs. Use inner='inductor', or leave compiled autograd off."
        )
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _fake in (
    ("offload", _fake_offload),
    ("release", _fake_release),
    ("reload", _fake_reload),
    ("wait", _fake_wait),
):
    torch.library.register_fake(f"ssdtrain::{_name}", _fake, lib=LIBRARY)
