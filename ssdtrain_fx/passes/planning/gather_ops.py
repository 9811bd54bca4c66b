"""Let ops stand in rows, for devices whose compute thread runs them.

Why: an op that follows a kernel finds its code and its data gone from the caches of the processor, in the interpreter
and in the operating system. An op that follows another op finds them there, and takes a quarter of the time. So an
offload waits for the next ones, a wait comes with the wait before it, and releases and reloads go to where those are::

    planned     n1 |offload a| n2 |offload b| n3 |release a| n4 |release b| n5 |offload c| ...
    gathered    n1             n2 |offload a, b| n3          n4             n5 |release a, b, offload c, d| ...

Storages stay in memory a little longer for it, where memory is available: up to ``ROOM_SHARE`` of the peak. Neither the
peak nor the exposed time rises.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.passes.planning.place_transfers import SSD_SPEEDUPS, Choice
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.transfer_problem import Placement, TransferProblem

ROOM_SHARE = 0.9
"""Rows fill at most this share of the peak. The fuller memory is, the less it can be packed without gaps: a step of
GPT-2 (12 layers, 8 x 512) grows by 177 MiB with 0.8, by 179 with 0.9 and by 205 with 0.95 (2026-11-25)."""
MOST_IN_ROW = (8, 4, 2)
"""Rows of at most so many storages are tried. Each further storage saves less, and longer rows take more memory."""


def gather_ops(problem: TransferProblem, choice: Choice) -> Choice:
    """Return ``choice`` with its ops in rows, or itself if that saves no time."""
    best, limit_bytes = choice, int(ROOM_SHARE * choice.peak_bytes)
    if not problem.hardware.copies_block_compute or problem.hardware.next_offload_s is None:
        return best
    for most in MOST_IN_ROW:
        placements = _gather(problem, choice, most, limit_bytes)
        simulation = simulate(problem, placements)
        if simulation.exposed_s < best.simulation.exposed_s and simulation.peak_bytes <= choice.peak_bytes:
            best = dataclasses.replace(choice, placements=placements, simulation=simulation)
    return best


def _gather(problem: TransferProblem, choice: Choice, most: int, limit_bytes: int) -> dict[int, Placement]:
    chosen = [movable for movable in problem.movables if movable.idx in choice.placements]
    placements = [choice.placements[movable.idx] for movable in chosen]
    times = [problem.moving_times[movable.idx] for movable in chosen]
    size_bytes = [movable.size_bytes for movable in chosen]
    room_bytes = limit_bytes - np.array(choice.simulation.live_bytes, dtype=np.int64)
    reached_s = np.array((*choice.simulation.start_s, choice.simulation.step_s))
    end = len(problem.node_s)
    forward = _Half(
        outer=[movable.offload for movable in chosen],
        inner=[placement.release for placement in placements],
        last=problem.marker,
        transfer_s=[taken.write_s for taken in times],
        size_bytes=size_bytes,
        reached_s=reached_s.tolist(),
        room_bytes=room_bytes,
    )
    forward.gather(most)
    # Backward is forward seen from the end of the step: a wait is an offload there, and a reload is a release.
    backward = _Half(
        outer=[end - movable.wait for movable in chosen],
        inner=[end - placement.reload for placement in placements],
        last=end - problem.marker - 1,
        transfer_s=[taken.read_s for taken in times],
        size_bytes=size_bytes,
        reached_s=(reached_s[-1] - reached_s[::-1]).tolist(),
        room_bytes=room_bytes[::-1],  # a view of the same memory
    )
    backward.gather(most)
    return {
        movable.idx: dataclasses.replace(
            placement, release=release, reload=end - reload, offload=offload, wait=end - wait
        )
        for movable, placement, offload, release, wait, reload in zip(
            chosen, placements, forward.outer, forward.inner, backward.outer, backward.inner, strict=True
        )
    }


@dataclasses.dataclass(slots=True)
class _Half:
    """Half of a step, with values by storage. Each storage has an outer and an inner op, and both may move inwards."""

    outer: list[int]
    inner: list[int]
    last: int
    """The innermost position that an op may have."""
    transfer_s: list[float]
    size_bytes: list[int]
    reached_s: list[float]
    """When the stream reaches each position."""
    room_bytes: NDArray[np.int64]
    """What may still be added at each position. Written to."""

    def gather(self, most: int) -> None:
        """Move outer ops into rows of at most ``most``, and inner ops to where rows are."""
        rows: list[list[int]] = []
        for one in sorted(range(len(self.outer)), key=self.outer.__getitem__):
            if not (rows and len(rows[-1]) < most and self._extend(rows[-1], one)):
                rows.append([one])
        stands = [self.outer[row[-1]] for row in rows]
        for row, stand in zip(rows, stands, strict=True):
            for one in row:
                self.outer[one] = stand
        for one in sorted(range(len(self.inner)), key=self.inner.__getitem__):
            following = bisect.bisect_left(stands, self.inner[one])
            if following < len(stands):
                self._hold({one: stands[following]})
        row: list[int] = []  # of inner ops, each of which may come where the last of them is
        for one in sorted(range(len(self.inner)), key=self.inner.__getitem__):
            if not (len(row) < most and self._hold(dict.fromkeys(row, self.inner[one]))):
                row = []
            row.append(one)

    def _extend(self, row: list[int], one: int) -> bool:
        """Add ``one`` to ``row``, whose transfers then begin where its own begins, if there is memory for it."""
        if self.outer[one] > self.outer[row[-1]]:
            begin_s = self.reached_s[self.outer[one]]
            ends_s = itertools.accumulate(self.transfer_s[other] / SSD_SPEEDUPS[0] for other in (*row, one))
            left = {
                other: bisect.bisect_left(self.reached_s, begin_s + end_s)
                for other, end_s in zip((*row, one), ends_s, strict=True)
            }
            if not self._hold(left):
                return False
        row.append(one)
        return True

    def _hold(self, until: dict[int, int]) -> bool:
        """Move inner ops inwards to these positions if there is memory for all of them."""
        if max(until.values(), default=0) > self.last:
            return False
        longer = [(one, self.inner[one], position) for one, position in until.items() if position > self.inner[one]]
        for one, begin, end in longer:
            self.room_bytes[begin:end] -= self.size_bytes[one]
        has_room = all(self.room_bytes[begin:end].min() >= 0 for _, begin, end in longer)
        for one, begin, end in longer:
            if has_room:
                self.inner[one] = end
            else:
                self.room_bytes[begin:end] += self.size_bytes[one]
        return has_room
