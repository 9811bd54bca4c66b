"""What one graph of a chain should move: the most bytes that can be away between its forward and its backward.

See :mod:`ssdtrain_fx.passes.analysis.chains` for what a chain is, and why its graphs do not minimise their own peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS, Choice, place
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem, add_up


def choose_most(problem: TransferProblem, *, max_slowdown: float) -> Choice:
    """Offload as many bytes as possible between forward and backward, exposing at most ``max_slowdown`` of the step.

    Among storages that cost the same per byte, those that are out of memory longest come first, because backward needs
    them last. The simulation in the result is that of the graph alone, but its ``exposed_s`` is that of the chain.
    """
    allowed_s = max_slowdown * problem.step_s

    def price(movable: Movable) -> tuple[float, ...]:
        cost_s = problem.blocks_out_s(movable.size_bytes) + problem.blocks_in_s(movable.size_bytes)
        return (cost_s / max(1, movable.size_bytes), movable.earliest_release - movable.wait, movable.idx)

    chosen = list(problem.wished)
    for movable in sorted(problem.movables, key=price):
        if not movable.must_move and exposed_in_chain_s(problem, [*chosen, movable]) <= allowed_s:
            chosen.append(movable)
    placements = place(problem, chosen, SSD_SPEEDUPS[0])
    alone = simulate(problem, placements)
    forward_s = alone.start_s[problem.marker]
    in_chain = dataclasses.replace(
        alone,
        exposed_s=exposed_in_chain_s(problem, chosen),
        # A storage that is released at the end of forward has until the end of the next forward to be written.
        release_stall_s={
            movable.idx: 2 * forward_s - alone.start_s[movable.offload]
            for movable in chosen
            if placements[movable.idx].release == problem.marker
        },
        wait_stall_s={},
    )
    return Choice(placements, in_chain, SSD_SPEEDUPS[0])


def exposed_in_chain_s(problem: TransferProblem, chosen: Sequence[Movable]) -> float:
    """How much longer each graph in a chain of equal graphs takes if ``chosen`` are offloaded in each."""
    hardware = problem.hardware
    sizes = [movable.size_bytes for movable in chosen]
    write_s, read_s = add_up(map(hardware.write.transfer_s, sizes)), add_up(map(hardware.read.transfer_s, sizes))
    forward_s, backward_s = add_up(problem.node_s[: problem.marker]), add_up(problem.node_s[problem.marker :])
    longer_forward_s = max(add_up(map(problem.blocks_out_s, sizes)), write_s - forward_s)
    longer_backward_s = max(add_up(map(problem.blocks_in_s, sizes)), read_s - backward_s)
    return longer_forward_s + longer_backward_s + problem.recompute_s
