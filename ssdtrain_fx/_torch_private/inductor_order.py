"""When Inductor runs our ops (see the table in ``_torch_private``).

The scheduler knows data flow only. By itself, it hoists a wait to its reload (no time to hide the transfer), and sinks
a release to the end of forward (no memory freed). Lowering follows the order of the FX graph, so it shows between which
kernels the plan has each op. Only kernels that are never fused count: matrix products, convolutions, attention.

        mm1                        mm1
        t = release(t0, x)   ->    t = release(t0, x)    runs after mm1
        mm2                        mm2                   runs after t

On a CPU, dependencies fix that order, so that memory is as planned. On a GPU, they would cost equal bits: Triton adds
up in another order if a kernel is fused differently, or writes to other memory. There, Inductor chooses and orders all
kernels as if our ops did not exist. Then each op is put at its place between them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._inductor import config, ir, memory
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from ssdtrain_fx.accelerators import find_accelerator

__all__ = [
    "PinnedOrder",
    "PlacedOrder",
    "are_placed",
    "install_order",
    "lower_at_the_end",
    "order_of_graph",
    "views_that_were_saved",
]

_ORDER = "_ssdtrain_order"
"""Attribute of the graph that Inductor lowers."""
_POSITION = "_ssdtrain_position"
"""Key in the metadata of nodes of an FX graph: the position that the plan gave them."""


def lower_at_the_end(graph: fx.Graph, own_ops: frozenset[Any]) -> None:
    """Move ``own_ops`` to the end of a graph whose ops are placed, and note their positions."""
    if not _is_on_gpu(graph):
        return
    output = graph.output_node()
    for position, node in enumerate(graph.nodes):
        node.meta[_POSITION] = position
    for node in [node for node in graph.nodes if node.target in own_ops]:
        output.prepend(node)


def views_that_were_saved(graph: fx.Graph, viewed_at: str) -> list[fx.Node]:
    """One view of each node with the key ``viewed_at`` in its metadata. Inserts a view where it was, if it is erased.

    If forward returns a view, Inductor stores what it views, with the layout of the view, when it lowers the view. It
    would otherwise choose a layout for a result, and on a GPU realize it when everything is lowered, and compute it
    once more in kernels that read it earlier.
    """
    nodes = list(graph.nodes)
    position = {node.name: number for number, node in enumerate(nodes)}
    views: list[fx.Node] = []
    for node in nodes:
        if viewed_at not in node.meta:
            continue
        name, *before = node.meta[viewed_at]
        if name in position:
            views.append(nodes[position[name]])
            continue
        names = (name for name in before if position.get(name, -1) > position[node.name])
        with graph.inserting_after(nodes[position[next(names, node.name)]]):
            view = graph.call_function(torch.ops.aten.unsqueeze.default, (node, 0))
        view.meta["val"] = node.meta["val"].unsqueeze(0)
        views.append(view)
    return views


def order_of_graph() -> PinnedOrder | PlacedOrder:
    """That of the graph that is being lowered."""
    state = V.graph.__dict__
    if _ORDER not in state:
        state[_ORDER] = PlacedOrder() if _is_on_gpu(cast(fx.Graph, V.graph.graph)) else PinnedOrder()
    return state[_ORDER]


def _is_on_gpu(graph: fx.Graph) -> bool:
    """Whether Triton computes, and Inductor orders its kernels."""
    values = [node.meta.get("val") for node in graph.nodes if node.op in ("placeholder", "call_function")]
    return config.reorder_for_peak_memory and find_accelerator(values) is not None


def are_placed() -> bool:
    """Whether the graph that is being compiled has ops that are placed between finished kernels."""
    return isinstance(V.graph.__dict__.get(_ORDER), PlacedOrder)


class PinnedOrder:
    """Orders our ops by dependencies on the kernels around them. Pointwise ops remain free to fuse."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._last_kernel: str | None = None
        self._since_kernel: list[str] = []

    def lower(self, call: Callable[[], Any], *, before_kernel: bool, after_readers: bool) -> Any:
        """Run ``call``, which lowers one of our ops, and order the result after the kernel before it.

        Args:
            before_kernel: it also runs before the kernel after it.
            after_readers: not used. A tensor that is read later is freed later.
        """
        operations = V.graph.operations
        for operation in operations[self._num_seen :]:
            if _is_kernel(operation):
                V.graph.additional_buffer_deps[operation.get_operation_name()].update(self._since_kernel)
                self._since_kernel = []
                self._last_kernel = operation.get_name()
        start = len(operations)
        result = call()
        if self._last_kernel is not None:
            for operation in operations[start:]:
                if isinstance(operation, ir.FallbackKernel):  # operations that unpack its results follow it anyway
                    V.graph.additional_buffer_deps[operation.get_operation_name()].add(self._last_kernel)
        if before_kernel:
            self._since_kernel.append(result.get_name())
        self._num_seen = len(operations)
        return result


def _is_kernel(operation: Any) -> bool:
    """Whether the operation is a kernel that is never fused."""
    return isinstance(operation, (ir.ExternKernel, ir.TemplateBuffer))


class PlacedOrder:
    """Notes where the plan has our ops, and puts them there once everything else is fused and ordered."""

    def __init__(self) -> None:
        self._own: dict[str, int] = {}
        """Our operations, each with its position in the FX graph."""
        self._late: set[str] = set()
        """Those that run as late as their readers permit."""
        self._after_readers: set[str] = set()
        """Those that run after every kernel that reads what they read."""

    def lower(self, call: Callable[[], Any], *, before_kernel: bool, after_readers: bool) -> Any:
        """Run ``call``, which lowers one of our ops.

        Args:
            before_kernel: it runs at its position. Otherwise, it runs just before the kernel that reads its result.
            after_readers: it runs after every kernel that reads what it reads.
        """
        start = len(V.graph.operations)
        result = call()
        for operation in V.graph.operations[start:]:
            if isinstance(operation, ir.ExternKernel):  # not a copy that an op asked for
                self._own[operation.get_operation_name()] = V.graph.current_node.meta.get(_POSITION, -1)
                if not before_kernel:
                    self._late.add(operation.get_operation_name())
                if after_readers:
                    self._after_readers.add(operation.get_operation_name())
        return result

    def arrange(
        self,
        nodes: Sequence[Any],
        name_to_buf: dict[str, Any],
        name_to_fused_node: dict[str, Any],
        graph_inputs: Iterable[str],
        graph_outputs: Iterable[str],
        reorder: Callable[..., list[Any]],
    ) -> list[Any]:
        """The order in which all ``nodes`` run.

        Args:
            reorder: Inductor's function with these arguments. It gets the kernels alone. As in a graph without our ops,
                what is offloaded is an output, and what is reloaded is an input.
        """
        own = [node for node in nodes if node.get_first_name() in self._own]
        own.sort(key=lambda node: self._own[node.get_first_name()])
        own_set = set(own)
        made_by_own = {buffer.get_name() for node in own for buffer in node.get_outputs()}
        read_by_own = {dep.name for node in own for dep in node.read_writes.reads}
        kernels = reorder(
            [node for node in nodes if node not in own_set],
            {name: buffer for name, buffer in name_to_buf.items() if name not in made_by_own},
            name_to_fused_node,
            OrderedSet([*graph_inputs, *made_by_own]),
            OrderedSet([*graph_outputs, *(name for name in read_by_own if name in name_to_buf)]),
        )
        index = {node: number for number, node in enumerate(kernels)}
        starts = sorted(map(_position_of, kernels))
        last_reader = {dep.name: kernel for kernel in kernels for dep in kernel.read_writes.reads}

        def readers(buffers: Iterable[Any]) -> list[Any]:
            names = (user.node.get_name() for buffer in buffers for user in buffer.users)
            return [name_to_fused_node[name] for name in names if name in name_to_fused_node]

        def read_by(node: Any) -> list[Any]:
            return [name_to_buf[dep.name] for dep in node.read_writes.reads if dep.name in name_to_buf]

        last_place = len(kernels)
        latest: dict[Any, int] = {}
        for node in reversed(own):
            places = [latest.get(reader, index.get(reader, last_place)) for reader in readers(node.get_outputs())]
            latest[node] = min(places, default=last_place)
        place: dict[Any, int] = {}
        """The number of kernels that run before each of our ops."""
        for node in own:
            planned = bisect.bisect_left(starts, self._own[node.get_first_name()])
            before = [name_to_fused_node[buffer.defining_op_name()] for buffer in read_by(node)]
            if node.get_first_name() in self._after_readers:
                names = (dep.name for dep in node.read_writes.reads)
                before += [last_reader[name] for name in names if name in last_reader]
            earliest = max((place[one] if one in place else index[one] + 1 for one in before), default=0)
            if node.get_first_name() in self._late:
                planned = last_place
            place[node] = max(earliest, min(planned, latest[node]))
        waiting = sorted(own, key=lambda node: place[node])  # stable: the order of the plan
        arranged: list[Any] = []
        for number, kernel in enumerate([*kernels, None]):
            while waiting and place[waiting[0]] <= number:
                arranged.append(waiting.pop(0))
            if kernel is not None:
                arranged.append(kernel)
        return arranged


def _position_of(kernel: Any) -> int:
    """The position in the FX graph of the last op that ``kernel`` computes; in a fused template, of the product."""
    parts = [part for part in kernel.get_nodes() if part.node is not None]
    products = [part for part in parts if _is_kernel(part.node)]
    origins = (origin for part in products or parts for origin in part.node.origins)
    return max((origin.meta.get(_POSITION, -1) for origin in origins), default=-1)


def install_order() -> None:
    """Let :class:`PlacedOrder` put our ops between the kernels that Inductor has ordered."""
    module = cast(Any, memory)
    reorder = module.reorder_for_peak_memory

    def reorder_and_place(
        nodes: Any, name_to_buf: Any, name_to_fused_node: Any, graph_inputs: Any, graph_outputs: Any, *rest: Any
    ) -> Any:
        order = V.graph.__dict__.get(_ORDER)
        if not isinstance(order, PlacedOrder):
            return reorder(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, *rest)
        return order.arrange(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, reorder)

    module.reorder_for_peak_memory = reorder_and_place
