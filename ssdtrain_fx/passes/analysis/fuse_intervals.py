"""How fusion changes live intervals: some storages never reach memory, and some reuse the memory of another one.

    0  a = mm(x, w)         8 MiB    a [0, 3)
    1  b = mul(a, 2)        8 MiB    b: lives inside one kernel, no interval
    2  c = tanh(b)          8 MiB    c: made by the same kernel
    3  d = mm(c, w)         8 MiB    c [3, 4): the kernel runs here, reads a for the last time and writes c in its place

All that a kernel reads lives until it runs, and all its results from there on. Inductor writes a result in place of an
argument of the same size that the kernel reads for the last time, and for this result alone. A concatenation on a CPU
is filled by several kernels, so it takes over nothing. The groups come from
``fused_kernels``, so they match Inductor's only approximately. Where Inductor fuses less, it needs more memory than is
counted here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from ssdtrain_fx.passes.analysis.fused_kernels import FusedKernel, NodeFacts
from ssdtrain_fx.passes.analysis.liveness import WAIT_FOR_COLLECTIVE, LiveInterval, find_live_intervals
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.op_kinds import FUSIBLE


def find_reads(found: NodeFacts, kernels: Sequence[FusedKernel]) -> dict[int, list[int]]:
    """For each storage, by index: where it is read, once for each result that is computed from it."""
    reads: dict[int, list[int]] = {}
    for position, fact in enumerate(found.facts):
        if fact.needs_memory:
            # A collective's result is complete, and becomes another storage, where it is waited for.
            read_at = position - 1 if str(fact.node.target) == WAIT_FOR_COLLECTIVE else position
            for idx in dict.fromkeys(idx for idx, _ in fact.read):
                reads.setdefault(idx, []).append(read_at)
    for kernel in kernels:
        for result in kernel.results:
            for idx in result.reads:
                reads.setdefault(idx, []).append(kernel.runs_at)
    return reads


def fuse_intervals(
    graph: fx.Graph,
    alias_sets: AliasSets,
    found: NodeFacts,
    kernels: Sequence[FusedKernel],
    reads: Mapping[int, Sequence[int]],
    activations: Collection[fx.Node] = (),
) -> dict[int, LiveInterval]:
    """The intervals of the storages that reach memory, by storage.

    Args:
        kernels: what ``find_fused_kernels`` returned for the same graph.
        reads: what ``find_reads`` returned for them.
        activations: as for ``find_live_intervals``.
    """
    stored_at = {idx: kernel.begins_at for kernel in kernels for idx in kernel.writes}
    inlined = {idx for fact in found.facts if fact.kind in FUSIBLE for idx in fact.made} - stored_at.keys()
    until = {kernel.runs_at: kernel.ends_at for kernel in kernels}
    fused: dict[int, LiveInterval] = {}
    for idx, interval in find_live_intervals(graph, alias_sets, activations).items():
        if idx not in inlined:
            start = stored_at.get(idx, interval.start)
            end = max([start, *(until.get(at, at) for at in reads.get(idx, ()))]) + 1
            fused[idx] = dataclasses.replace(interval, start=start, end=end)
    for kernel in kernels:
        for result in kernel.results:
            if found.facts[result.made_at].is_filled_in_parts:
                continue
            last = [
                fused[idx]
                for idx in sorted(result.reads & fused.keys())
                if sum(at >= kernel.runs_at for at in reads[idx]) == 1 and not alias_sets.storages[idx].is_input
            ]
            for made in (fused[idx] for idx in result.writes if idx in fused):
                for taken in last:
                    if taken.size_bytes == made.size_bytes and taken.start < made.start < taken.end:
                        fused[taken.storage_idx] = dataclasses.replace(taken, end=made.start)
                        last.remove(taken)
                        break
    return fused
