"""Who depends on whom: the nodes and the storages of a schedule as one networkx graph.

    a = mm(x, w)                mm ---makes---> mm.0
    b = view(a)                 mm.0 -views---> view
    c = relu(b)                 mm.0 -reads---> relu      frees: the last one that needs it
                                mm --feeds--> view --feeds--> relu --makes--> relu.0

Edges lead from what must be there first, so whatever ``networkx.descendants`` tells of a storage is lost with it, and
every topological order keeps to the data flow. In-place writes are no data flow: that a reader stands before the node
that overwrites what it reads follows from positions only.
"""

from __future__ import annotations

import itertools

import networkx as nx

from ssdtrain_fx.passes.analysis.describe_schedule import Schedule


def find_dependencies(schedule: Schedule) -> nx.DiGraph[str]:
    """Nodes under their names and storages under theirs, which have a dot in them; edges with their ``relation``.

    Of both, ``kind`` is ``node`` or ``storage``, ``position`` that of the node or of what makes the storage, and
    ``phase`` is ``forward`` or ``backward``.

    Nodes also carry ``seconds`` (until the next one starts, stalls included), ``start_s``, ``op``, ``module``,
    ``source``, and ``storage``: what an inserted node moves or makes again, by its name in the plan.

    Storages also carry ``size_bytes``, ``is_input`` (it belongs to the caller) and ``saved`` (it is there when backward
    begins, and backward reads it).

    Relations are ``feeds`` between two nodes, ``makes`` from node to storage, ``views`` (the value lies in the storage)
    and ``reads`` from storage to node. One edge of every storage has ``frees``: its node is the last that needs it.
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
