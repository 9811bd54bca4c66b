"""torch's auto-chunker, which computes a loss head in chunks of rows (see the table in ``_torch_private``).

    before   logits = mm(x, w)                # [4096, 32768]  512 MiB, and their gradient as much
             loss = cross_entropy(logits, t)
    after    for every chunk of rows: the product, the loss, and the gradients of x and w, as if the gradient of the
             loss were 1. Backward multiplies these gradients by the real one.

It is one of the passes on the joint graph. By itself, it says only in a debug log whether it has changed anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import fx
from torch._inductor import compile_fx as _compile_fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from ssdtrain_fx._torch_private import copy_graph

__all__ = ["KeepRawGraph", "LossChunker", "LossHead", "chunking", "partition_from_raw"]

LARGE_RATIO = 2
"""torch's own value of 8 misses ordinary heads: 4096 tokens, 768 features and 32768 words give 4.7."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossHead:
    """The matrix product of a loss head: ``[rows, features] @ [features, columns]``."""

    rows: int
    features: int
    columns: int


class LossChunker:
    """Lets the auto-chunker work on the graphs of one compilation, and records what becomes of it."""

    def __init__(self, count_chunks: Callable[[LossHead], int]) -> None:
        """
        Args:
            count_chunks: how many chunks a head should have.
        """
        self._count_chunks = count_chunks
        self.num_chunks = 0
        """0: no loss is computed in chunks."""
        self.refusal = ""
        """Why not. Empty also if no graph with a backward was seen."""

    @staticmethod
    def settings(*, enabled: bool = True) -> dict[str, Any]:
        """Inductor's settings while it compiles."""
        return {
            "auto_chunker.enable": enabled,
            "auto_chunker.num_chunk": None,
            "auto_chunker.amplify_ratio_threshold": LARGE_RATIO,
        }

    def run(self, gm: fx.GraphModule, chunk: Callable[[fx.GraphModule], fx.GraphModule]) -> fx.GraphModule:
        """Call ``chunk``. It raises CantChunk in more cases than by itself, and the graph then stays as it is."""
        from torch._inductor.fx_passes.auto_chunker.common import CantChunk

        try:
            num_chunks = self._feasible_count(gm)
            with cast(Any, config).patch({"auto_chunker.num_chunk": num_chunks}):
                chunked = chunk(gm)
            _check(gm)
        except Exception as error:  # its assertions too; it changes only marks of the graph, and a copy
            for node in gm.graph.nodes:
                node.meta.pop("chunking", None)
            text = str(error) if isinstance(error, CantChunk) else f"{type(error).__name__}: {error}"
            self.refusal = text.splitlines()[0].removesuffix(".")
            raise CantChunk(self.refusal) from error
        if chunked is not gm:
            self.num_chunks, self.refusal = num_chunks, ""
        return chunked

    def _feasible_count(self, gm: fx.GraphModule) -> int:
        """How many chunks the head of ``gm`` can have: the auto-chunker fails if ``torch.chunk`` makes fewer."""
        from torch._inductor.fx_passes.auto_chunker import core
        from torch._inductor.fx_passes.auto_chunker.common import CantChunk

        product = cast(Any, core).find_amplifier_node(gm.graph)
        if product is None:
            return 0
        dtype = product.meta["val"].dtype
        if dtype not in (torch.float32, torch.bfloat16):
            raise CantChunk(f"The logits are {dtype}; only float32 and bfloat16 are safe{_WHY_UNSAFE.get(dtype, '')}")
        left, right = (node.meta["val"] for node in product.args[-2:])
        rows, features, columns = (*left.shape, right.shape[1])
        if not all(isinstance(size, int) for size in (rows, features, columns)):
            raise CantChunk("The sizes of the logits are symbolic")
        wanted = min(self._count_chunks(LossHead(rows, features, columns)), rows)
        if wanted < 2:
            raise CantChunk(f"The logits have only {rows} rows")
        return -(-rows // -(-rows // wanted))


_WHY_UNSAFE = {
    torch.float16: ": the gradients of a chunk are computed before a GradScaler scales them, and would become zero",
    torch.float64: ": torch's auto-chunker sums losses in float32",
}
_ALONG_A_DIM = ("aten.gather", "aten.scatter", "aten.scatter_add")


def _check(gm: fx.GraphModule) -> None:
    """Refuse what the auto-chunker accepts although its result would be wrong.

    Its marks are still on the nodes of ``gm``, which it has copied. It computes the marked part for every chunk with a
    gradient of 1 in place of the real one (``scale_by``), and adds up results marked ``need_sum``. So:

    - That gradient is one number. With several, a product of the results with them would mean something else.
    - Only the marked part reads the 1. Anything else would miss the real gradient.
    - No node of the marked part reads a sum over rows, which is complete only after the last chunk.
    - No node picks or reduces along the dimension that is cut, except for sums.
    - What is multiplied afterwards is linear: floating point, and no maximum.

    Raises:
        CantChunk: one of these is not so.
    """
    from torch._inductor.fx_passes.auto_chunker.common import CantChunk

    for node in gm.graph.nodes:
        mark = node.meta.get("chunking")
        if mark is None:
            continue
        value = node.meta.get("val")
        is_gradient = node.op == "placeholder" and mark.scale_by is not None
        inside = [user for user in node.users if user.meta.get("chunking") is not None]
        if is_gradient and (value.numel() != 1 or len(inside) < len(node.users)):
            raise CantChunk(f"The gradient {node.name} of a result is also needed outside of the chunks")
        if is_gradient and any(_is_outside(user) for user in inside):
            raise CantChunk(f"A node before the chunks reads the gradient {node.name} of a result")
        if mark.need_sum and inside:
            raise CantChunk(f"{inside[0].name} reads {node.name}, a sum over all rows, within a chunk")
        if mark.scale_by is not None and (not value.is_floating_point() or "amax" in str(node.target)):
            raise CantChunk(f"{node.name} is not linear in the gradient of the loss")
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        cut = source.meta.get("chunking")
        if cut is not None and cut.chunk_dim is not None and not _is_outside(node) and not mark.need_sum:
            name, dims = str(node.target).rpartition(".")[0], node.args[1] if len(node.args) > 1 else ()
            reduces = name in ("aten.amax", "aten.sum")
            if (reduces or name in _ALONG_A_DIM) and _covers(dims, cut.chunk_dim, source.meta["val"].dim()):
                raise CantChunk(f"{node.name} works along the dimension that is cut")


def _is_outside(node: fx.Node) -> bool:
    """Is a marked node computed once, before the chunks? It is if it reads a node without a mark."""
    return any(source.meta.get("chunking") is None for source in node.all_input_nodes)


def _covers(dims: Any, dim: int, num_dims: int) -> bool:
    listed = cast("Sequence[int]", dims if isinstance(dims, (list, tuple)) else [dims])
    return dim in {one % num_dims for one in listed}


_chunker: ContextVar[LossChunker | None] = ContextVar("ssdtrain_chunker", default=None)
_raw_graph: ContextVar[list[fx.GraphModule] | None] = ContextVar("ssdtrain_raw_graph", default=None)


@contextlib.contextmanager
def chunking(chunker: LossChunker) -> Generator[None]:
    """Compile with ``chunker``. Inductor must have its settings."""
    _ask_the_chunker()
    token = _chunker.set(chunker)
    try:
        yield
    finally:
        _chunker.reset(token)


@functools.cache
def _ask_the_chunker() -> None:
    """Let the joint-graph passes call the auto-chunker through the chunker of the compilation, if there is one."""
    from torch._inductor.fx_passes import auto_chunker

    chunk = auto_chunker.chunk

    @functools.wraps(chunk)
    def chunk_and_record(gm: fx.GraphModule) -> fx.GraphModule:
        chunker = _chunker.get()
        is_chunk = gm.meta.get("produced_by_chunker", False)
        return chunk(gm) if chunker is None or is_chunk else chunker.run(gm, chunk)

    auto_chunker.chunk = chunk_and_record


class KeepRawGraph(CustomGraphPass):
    """Keeps a copy of the joint graph as it is before Inductor's passes, for ``partition_from_raw``."""

    def __call__(self, graph: fx.Graph) -> None:
        kept = _raw_graph.get()
        if kept is not None and not any(node.op == "get_attr" for node in graph.nodes):
            kept[:] = [copy_graph(cast(fx.GraphModule, graph.owning_module))[0]]

    def uuid(self) -> str:
        return "ssdtrain_fx: changes nothing"

    @staticmethod
    @contextlib.contextmanager
    def keeping() -> Generator[None]:
        """Keep the graph of what is compiled in this block. It is forgotten afterwards."""
        token = _raw_graph.set([])
        try:
            yield
        finally:
            _raw_graph.reset(token)


def partition_from_raw(
    gm: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """Run Inductor's passes on the raw graph of ``gm`` with other settings than before, and partition it.

    None if there is no raw graph: ``gm`` calls other graphs.
    """
    kept = _raw_graph.get()
    if not kept or _placeholders(kept[0]) != _placeholders(gm):
        return None
    compiler = {"compiler": kwargs.pop("compiler")} if "compiler" in kwargs else {}
    partition = functools.partial(partition, **compiler)
    return cast(Any, _compile_fx).partition_fn(kept.pop(), joint_inputs, partitioner_fn_override=partition, **kwargs)


def _placeholders(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]
