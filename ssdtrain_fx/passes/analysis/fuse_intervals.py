"""How fusion changes live intervals: some storages never reach memory, and some reuse the memory of another one.

    0  a = mm(x, w)         8 MiB    a [0, 2)
    1  b = mul(a, 2)        8 MiB    b: lives inside one kernel, no interval
    2  c = tanh(b)          8 MiB    c [1, ...): the kernel reads a for the last time and writes c in its place
    3  return c                      peak 8 MiB instead of 24

Inductor writes a result in place of an argument of the same size that the kernel reads for the last time. A storage
that a later kernel reads again lives until that kernel. The groups come from ``fused_kernels``, so they match
Inductor's only approximately. Where Inductor fuses less, it needs more memory than is counted here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ssdtrain_fx.passes.analysis.fused_kernels import FusedKernel
from ssdtrain_fx.passes.analysis.liveness import LiveInterval
from ssdtrain_fx.passes.graph.alias_sets import AliasSets


def fuse_intervals(
    intervals: Mapping[int, LiveInterval], kernels: tuple[FusedKernel, ...], alias_sets: AliasSets
) -> dict[int, LiveInterval]:
    """The intervals of the storages that reach memory, by storage.

    Intervals of storages that are overwritten in place end earlier. Those of storages that are read again end later.

    Args:
        intervals: of the graph if its nodes run one by one.
        kernels: what ``find_fused_kernels`` returned for the same graph.
    """
    fused = dict(intervals)
    for kernel in kernels:
        for idx in kernel.inlined:
            fused.pop(idx, None)
    for kernel in kernels:
        for idx in kernel.reads_again:
            if idx in fused:
                fused[idx] = dataclasses.replace(fused[idx], end=max(fused[idx].end, kernel.last + 1))
    for kernel in kernels:
        dying = [
            fused[idx]
            for idx in kernel.reads
            if idx in fused and fused[idx].end <= kernel.last + 1 and not alias_sets.storages[idx].is_input
        ]
        for idx in kernel.writes:
            if idx not in fused:
                continue
            made = fused[idx]
            taken = next((old for old in dying if old.size_bytes == made.size_bytes and old.start < made.start), None)
            if taken is not None:
                dying.remove(taken)
                fused[taken.storage_idx] = dataclasses.replace(taken, end=min(taken.end, made.start))
    return fused
