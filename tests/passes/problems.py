"""Transfer problems like those of layered networks, from a seed or as a hypothesis strategy.

forward    every layer makes one or two storages that backward reads, with nodes between; a few storages are read
           again layers later
backward   reads them in reverse order and makes gradients, so the fixed bytes have a separate profile
peak       at the end of forward, in the middle of forward (a workspace), or late in backward
disk       from one that hides almost no time to one that hides all of it
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

from hypothesis import strategies as st

from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem, add_up
from ssdtrain_fx.testing import toy_hardware

MIB = 1 << 20


def make_hardware(*, copy_bytes_per_s: float = 1e12, share_when_both: float = 1.0, **changes: Any) -> Hardware:
    """A hardware profile in which only the values that a TransferProblem uses are meaningful."""
    copy = Channel(bytes_per_s=copy_bytes_per_s)
    return toy_hardware(copy_out=copy, copy_in=copy, share_when_both=share_when_both, **changes)


def random_problem(rng: random.Random, *, num_movables: int, num_positions: int) -> TransferProblem:
    """A problem with ``num_positions`` positions, or more if the movables need them."""
    num_positions = max(num_positions, 2 * num_movables + 3)
    marker = max(num_movables + 1, min(num_positions - num_movables - 1, round(num_positions * rng.uniform(0.35, 0.5))))
    draw = rng.choice([rng.sample, lambda places, count: rng.choices(places, k=count)])  # positions may repeat, or not
    made_at = sorted(draw(range(marker), num_movables))
    read_at = sorted(draw(range(marker + 1, num_positions), num_movables), reverse=True)
    step = rng.choice([MIB, MIB, 1])  # a few equal sizes, or all different ones
    movables: list[Movable] = []
    for idx, (start, wait) in enumerate(zip(made_at, read_at, strict=True)):
        offload = min(start + rng.choice([1, 1, 1, 2]), marker)
        last_read = rng.choice([offload, offload, offload + 1, rng.randint(offload, marker)])
        movables.append(
            Movable(
                idx=3 * idx,
                size_bytes=step * rng.choice([1, 2, 4, 4, 8]) if step == MIB else rng.randint(MIB, 8 * MIB),
                live_start=start,
                offload=offload,
                earliest_release=min(last_read, marker),
                wait=wait,
                live_end=min(wait + rng.choice([1, 1, 2, 4]), num_positions),
            )
        )
    movables.sort(key=lambda movable: (movable.offload, movable.idx))
    node_s = [rng.choice([0.1, 1.0, 1.0, 3.0]) * rng.uniform(0.5, 1.5) * 1e-3 for _ in range(num_positions)]
    node_s[marker] = 0.0
    moved_bytes = sum(movable.size_bytes for movable in movables)
    return TransferProblem(
        node_s=tuple(node_s),
        marker=marker,
        fixed_live_bytes=tuple(_fixed_live_bytes(rng, num_positions, marker, moved_bytes)),
        movables=tuple(movables),
        hardware=_random_hardware(rng, moved_bytes, add_up(node_s)),
    )


def _fixed_live_bytes(rng: random.Random, num_positions: int, marker: int, moved_bytes: int) -> list[int]:
    """Short-lived temporaries, gradients that accumulate, and sometimes a workspace at a random position."""
    gradient = rng.choice([0, 0, moved_bytes // max(1, num_positions)])
    live = [rng.randint(0, 2 * MIB) for _ in range(num_positions)]
    for position in range(marker + 1, num_positions):
        live[position] += gradient * (position - marker)
    if rng.random() < 0.3:
        live[rng.randrange(num_positions)] += rng.randint(0, moved_bytes)
    return live


def _random_hardware(rng: random.Random, moved_bytes: int, step_s: float) -> Hardware:
    hidden = 10 ** rng.uniform(-1, 1)  # how many times everything could be written during forward
    bytes_per_s = max(1.0, hidden * moved_bytes / (step_s / 2))
    latency_s = rng.choice([0.0, step_s * 1e-3])
    copies_block_compute = rng.random() < 0.5
    return make_hardware(
        write=Channel(bytes_per_s=bytes_per_s, latency_s=latency_s),
        read=Channel(bytes_per_s=bytes_per_s * rng.uniform(0.5, 2), latency_s=latency_s),
        copy_bytes_per_s=moved_bytes / step_s * rng.choice([20.0, 100.0, 1000.0]) + 1.0,
        copies_block_compute=copies_block_compute,
        offload_s=step_s * rng.choice([0.0, 0.0, 1e-4, 2e-3]),
        reload_s=step_s * rng.choice([0.0, 0.0, 1e-4, 2e-3]),
        staging_bytes=rng.choice([0, MIB, moved_bytes // 4, 2 * moved_bytes]),
        share_when_both=rng.choice([0.5, 0.8, 1.0]),
    )


def seeded_problems(
    count: int, *, max_movables: int, max_positions: int, min_movables: int = 0, seed: int = 0
) -> list[TransferProblem]:
    """Random problems. The same arguments give the same list."""
    rng = random.Random(seed)
    problems: list[TransferProblem] = []
    for _ in range(count):
        num_movables = rng.randint(min_movables, max_movables)
        num_positions = rng.randint(min(2 * num_movables + 3, max_positions), max_positions)
        problems.append(random_problem(rng, num_movables=num_movables, num_positions=num_positions))
    return problems


@st.composite
def transfer_problems(draw: st.DrawFn, *, max_movables: int = 6, max_positions: int = 30) -> TransferProblem:
    """Random problems that shrink to fewer movables and positions. The rest depends on one seed."""
    num_movables = draw(st.integers(0, max_movables))
    num_positions = draw(st.integers(min(2 * num_movables + 3, max_positions), max_positions))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    problem = random_problem(rng, num_movables=num_movables, num_positions=num_positions)
    hardware = dataclasses.replace(problem.hardware, staging_chunk_bytes=rng.choice([1, 1, 2 * MIB]))
    return dataclasses.replace(problem, hardware=hardware)


def layered_problem(
    num_layers: int, *, nodes_per_layer: int = 4, storages_per_layer: int = 2, hidden: float = 0.5, seed: int = 0
) -> TransferProblem:
    """A deep network of equal layers. ``hidden`` is the share of all bytes that can be written during forward."""
    rng = random.Random(seed)
    forward = num_layers * nodes_per_layer
    marker = forward + 1
    num_positions = marker + 1 + 2 * forward
    movables: list[Movable] = []
    for layer, slot in itertools.product(range(num_layers), range(storages_per_layer)):
        start = layer * nodes_per_layer + slot * nodes_per_layer // storages_per_layer
        wait = marker + 1 + 2 * (forward - 1 - start)
        movables.append(
            Movable(
                idx=len(movables),
                size_bytes=(4 if slot == 0 else 16) * MIB + rng.randrange(MIB) // 4096 * 4096,
                live_start=start,
                offload=start + 1,
                earliest_release=min(start + 1 + rng.choice([0, 1, 1, nodes_per_layer]), marker),
                wait=wait,
                live_end=wait + 2,
            )
        )
    node_s = [1e-3 * rng.uniform(0.2, 2.0) for _ in range(num_positions)]
    node_s[marker] = 0.0
    moved_bytes = sum(movable.size_bytes for movable in movables)
    bytes_per_s = hidden * moved_bytes / add_up(node_s[:marker])
    return TransferProblem(
        node_s=tuple(node_s),
        marker=marker,
        fixed_live_bytes=tuple(rng.randrange(32) * MIB for _ in range(num_positions)),
        movables=tuple(movables),
        hardware=make_hardware(
            write=Channel(bytes_per_s=bytes_per_s, latency_s=1e-5),
            read=Channel(bytes_per_s=bytes_per_s * 1.3, latency_s=1e-5),
            copy_bytes_per_s=20 * bytes_per_s,
            offload_s=1e-5,
            reload_s=1e-5,
            staging_bytes=moved_bytes // 50,
            share_when_both=0.5,
        ),
    )
