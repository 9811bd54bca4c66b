"""Turn an analysed graph into the numbers that the planner decides about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.analysis.candidates import Candidate
from ssdtrain_fx.passes.analysis.checkpoint_wishes import prefers_host
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval, memory_profile
from ssdtrain_fx.passes.planning.transfer_problem import HostTier, Movable, TransferProblem, add_up


def pose_problem(
    analysis: Analysis, *, hardware: Hardware, step_s: float | None = None, host: HostTier | None = None
) -> TransferProblem:
    """Turn the analysis into a planning problem.

    Args:
        host: the host tier. None if there is none, as on every CPU. It is ignored for a graph of a chain: all graphs
            would use the tier at the same time, and their number is unknown.
        step_s: time of the step without recomputation, if recomputations have been inserted into the graph.
    """
    intervals = analysis.intervals
    positions = analysis.joint.positions()
    marker = positions[analysis.joint.marker]
    movables = [
        _describe_movable(
            candidate,
            intervals[candidate.storage.idx],
            positions,
            analysis.reads.get(candidate.storage.idx, ()),
            marker,
            must_move=analysis.wishes.get(candidate.storage.idx) == "offload",
        )
        for candidate in analysis.candidates
        if candidate.representative is not None
    ]
    moving = {movable.idx for movable in movables}
    fixed = [interval for idx, interval in intervals.items() if idx not in moving]
    fixed += analysis.extras.values()
    return TransferProblem(
        node_s=analysis.node_s,
        marker=marker,
        fixed_live_bytes=memory_profile(fixed, len(positions)).live_bytes,
        movables=tuple(sorted(movables, key=lambda movable: (movable.offload, movable.idx))),
        hardware=hardware,
        recompute_s=0.0 if step_s is None else add_up(analysis.node_s) - step_s,
        host=None if analysis.is_link else host,
    )


def _describe_movable(
    candidate: Candidate,
    interval: LiveInterval,
    positions: Mapping[fx.Node, int],
    reads: Sequence[int],
    marker: int,
    *,
    must_move: bool,
) -> Movable:
    representative = candidate.representative
    assert representative is not None
    # Forward often ends with views that only backward reads. These views are removed later, so they do not count as
    # reads.
    last_forward_read = positions[representative]
    first_backward_read = len(positions)
    only_for_backward: set[fx.Node] = set()
    for node in reversed(candidate.storage.holders):
        forward_users = [user for user in node.users if positions[user] < marker and user not in only_for_backward]
        if not forward_users and node is not representative:
            only_for_backward.add(node)
        for user in node.users:
            if positions[user] > marker:
                first_backward_read = min(first_backward_read, positions[user])
        last_forward_read = max([last_forward_read, *(positions[user] for user in forward_users)])
    first_backward_read = min([first_backward_read, *(at for at in reads if at > marker)])
    last_forward_read = min(max([last_forward_read, *(at for at in reads if at <= marker)]), marker - 1)
    if candidate.storage.is_input:
        last_forward_read = marker - 1  # the caller holds it until forward returns
    return Movable(
        idx=interval.storage_idx,
        size_bytes=interval.size_bytes,
        # The offload needs it in memory.
        live_start=min(interval.start, positions[representative] + 1),
        offload=positions[representative] + 1,
        earliest_release=last_forward_read + 1,
        wait=first_backward_read,
        live_end=interval.end,
        must_move=must_move,
        prefers_host=prefers_host(candidate),
    )
