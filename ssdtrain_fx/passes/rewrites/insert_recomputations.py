"""Recompute storages in backward, right before their first read there, instead of saving them.

    before   h = mm(x, w)                       # f32[4096, 4096]  64 MiB  saved for backward
             a = h * h                          #                  64 MiB  saved for backward
             backward_starts()
             gw = mm(gy, a)
             gh = ga * h

    after    h = mm(x, w)
             a = h * h                          # dies in forward
             backward_starts()
             a1 = h * h
             gw = mm(gy, a1)
             gh = ga * h

This pass runs before offloads are planned: the new nodes read storages in backward as all other nodes do. The caller
has to analyse the new graph. A storage that a recomputation reads (``h``) may be offloaded, or itself be recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.passes.analysis.candidates import base_of
from ssdtrain_fx.passes.analysis.find_recomputations import Recomputation
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.copy_nodes import COPY_OF, copy_nodes, erase_unread
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, find_saved


def insert_recomputations(
    joint: ScheduledJointGraph, *, alias_sets: AliasSets, recomputations: Sequence[Recomputation]
) -> ScheduledJointGraph:
    """Rewrite ``joint.gm`` in place, and return ``joint`` with ``saved`` updated.

    Without recomputations nothing changes.

    Args:
        alias_sets: the alias sets of this graph. They and ``joint`` itself are out of date afterwards.
        recomputations: found in this graph. One may read a storage that another one recomputes.

    Raises:
        InternalError: two recomputations make the same storage, or backward does not read it.
    """
    if not recomputations:
        return joint
    if len({recomputation.storage_idx for recomputation in recomputations}) < len(recomputations):
        raise InternalError("two recomputations make the same storage.")
    for recomputation in recomputations:
        first = alias_sets.storages[recomputation.storage_idx].members[0]
        # Inductor must treat it as if forward still returned it, otherwise readers may get another layout. The copies
        # inherit the mark: in backward they replace the saved tensor.
        first.meta[_torch_private.REALIZE_TO_STRIDES] = True
    nodes = list(joint.graph.nodes)
    in_backward = set(nodes[nodes.index(joint.marker) + 1 :])
    # The storage made last in forward comes first: its copied nodes then count as readers of its sources.
    for recomputation in sorted(recomputations, key=lambda one: one.storage_idx, reverse=True):
        on_storage = [node for node in recomputation.nodes if recomputation.storage_idx in alias_sets.by_node[node]]
        readers = {user for node in on_storage for user in node.users if user in in_backward}
        if not readers:
            raise InternalError(f"nothing in backward reads storage {recomputation.storage_idx} ({on_storage}).")
        with joint.graph.inserting_before(min(readers)):  # nodes compare by their place in the graph
            copies = copy_nodes(joint.graph, recomputation.nodes, alias_sets)
        made = alias_sets.storages[recomputation.storage_idx].members[0].name
        for node, copy in copies.items():
            copy.meta[COPY_OF] = (node.name, made)
        in_backward.update(copies.values())
        for node in on_storage:
            for user in [user for user in node.users if user in readers]:  # in an order that is equal in every process
                user.replace_input_with(node, copies[node])
        erase_unread(copies.values())
    made_in_forward = {node for recomputation in recomputations for node in recomputation.nodes}
    erase_unread(node for node in nodes if node in made_in_forward)
    _take_views_from_saved_bases(joint, alias_sets, in_backward)
    joint.gm.recompile()
    return dataclasses.replace(joint, saved=find_saved(joint))


def _take_views_from_saved_bases(joint: ScheduledJointGraph, alias_sets: AliasSets, in_backward: set[fx.Node]) -> None:
    """Save a base and not also its views: backward takes the views from it.

    A recomputation may read the base of a view that was saved so far. The compiler of backward would not know that
    the two share memory. Inductor writes a result over a saved tensor after the last read of it ("donated buffers"),
    and would overwrite a view that is read later.
    """
    saved = set(find_saved(joint))
    for view in sorted(saved, reverse=True):  # a view comes after its base
        for idx in alias_sets.by_node[view]:
            base = base_of(view, alias_sets.storages[idx], alias_sets)
            path = [view]
            while base is not None and base not in saved:
                path.append(base)
                base = base_of(base, alias_sets.storages[idx], alias_sets)
            if base is None:
                continue
            readers = [user for user in view.users if user in in_backward]
            with joint.graph.inserting_before(min(readers)):
                copies = copy_nodes(joint.graph, reversed(path), alias_sets)
            in_backward.update(copies.values())
            for reader in readers:
                reader.replace_input_with(view, copies[view])
            erase_unread(reversed(path))  # a view in forward that nothing reads could come after a release
