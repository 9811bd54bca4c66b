"""The dependencies between the nodes and the storages of a schedule, as one networkx graph.

    a = mm(x, w)                mm ---makes---> mm.0
    b = view(a)                 mm.0 -views---> view
    c = relu(b)                 mm.0 -reads---> relu      frees: the last node that needs mm.0
                                mm --feeds--> view --feeds--> relu --makes--> relu.0

An edge leads from the dependency to what depends on it. So ``networkx.descendants`` of a storage is everything that
cannot be computed without it, and every topological order follows the data flow. In-place writes are not data flow:
only positions show that a reader runs before the node that overwrites what it reads.
"""

from __future__ import annotations

import itertools

import networkx as nx

from ssdtrain_fx.passes.analysis.describe_schedule import Schedule


def find_dependencies(schedule: Schedule) -> nx.DiGraph[str]:
    """Build the dependency graph of ``schedule``.

    Its vertices are nodes and storages, by name. Names of storages contain a dot. Both have the attributes ``kind``
    (``node`` or ``storage``), ``position`` (of the node, or of the node that makes the storage) and ``phase``
    (``forward`` or ``backward``).

    Nodes also have ``seconds`` (until the next node starts, including stalls), ``start_s``, ``op``, ``module``,
    ``source``, and ``storage``: the storage that an inserted node moves or recomputes, by its name in the plan.

    Storages also have ``size_bytes``, ``is_input`` (the caller owns it) and ``saved`` (it is in memory when backward
    begins, and backward reads it).

    Edges have a ``relation``: ``feeds`` between two nodes, ``makes`` from node to storage, and from storage to node
    ``views`` (the node's value is on the storage) and ``reads``. One edge of every storage has ``frees``: its node is
    the last one that needs the storage.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    ends_s = itertools.chain((node.start_s for node in schedule.nodes[1:]), [schedule.step_s])
    for position, (node, end_s) in enumerate(zip(schedule.nodes, ends_s, strict=True)):
        graph.add_node(
            node.name,
            kind="node",
            position=position,
            phase=_phase(schedule, position),
            seconds=end_s - node.start_s,
            start_s=node.start_s,
            op=node.op,
            module=node.module,
            source=node.source,
            storage=node.storage,
        )
    for node in schedule.nodes:
        graph.add_edges_from(((source, node.name) for source in node.inputs), relation="feeds")
    position_of = {node.name: position for position, node in enumerate(schedule.nodes)}
    readers_of = {node.name: list(graph.successors(node.name)) for node in schedule.nodes}
    for storage in schedule.storages:
        maker, *views = storage.holders
        found = {reader for holder in storage.holders for reader in readers_of[holder]}
        readers = sorted(found.difference(views), key=position_of.__getitem__)
        made = position_of[maker]
        graph.add_node(
            storage.name,
            kind="storage",
            position=made,
            phase=_phase(schedule, made),
            size_bytes=storage.size_bytes,
            is_input=schedule.nodes[made].op in ("placeholder", "get_attr"),
            saved=storage.saved,
        )
        graph.add_edge(maker, storage.name, relation="makes", frees=False)
        graph.add_edges_from(((storage.name, view) for view in views), relation="views", frees=False)
        graph.add_edges_from(((storage.name, reader) for reader in readers), relation="reads", frees=False)
        last = max((maker, *views, *readers), key=position_of.__getitem__)
        graph.edges[(maker, storage.name) if last == maker else (storage.name, last)]["frees"] = True
    return graph


def _phase(schedule: Schedule, position: int) -> str:
    return "forward" if position < schedule.marker else "backward"
