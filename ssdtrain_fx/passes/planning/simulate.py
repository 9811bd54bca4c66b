"""Run a placement on the clock: one compute stream, a write channel, a read channel, copies, staging and memory.

A discrete-event simulation. Events happen where their nodes stand; between them only the channels work:

    compute   n0 |offload a| n1 | n2 |release a| ...          | reload a | n7 | wait a (stall) | n8
    write              [==== a ====]                          :
    read                                                      :      [======= a =======]

- A storage has *left* when its last byte is in staging, and its memory may be reused then. Staging gives room as the
  SSD takes bytes from it, so far behind the SSD the copy out is as slow as the SSD.
- Writes go first in, first out. What of them is left when backward begins shares the SSD with the reads:
  each direction keeps ``share_when_both`` of its rate.
- A storage that is asked for while it is still in staging is served from there and not read.
- What is in the host tier stays in staging from its copy out until its copy in is over, and leaves less of it to the
  writes. It takes its turn among the copies out, which all share one channel; its copy in waits for no read.

The result is a function of the placement alone: no clock, no random numbers.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placements, Step, TransferProblem

ChannelName = Literal["write", "read", "staging", "copy_out", "copy_in"]

NUM_STEPS = len(Step)
ROUNDING = 1e-9
"""Share of the step by which sums of seconds may differ."""
"""Share of the step that sums of seconds in another order may differ by, at the very most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What one of our ops takes of the compute stream: a copy, the call itself, or a stall."""

    idx: int
    """The storage."""
    step: Step
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One storage on one channel. ``staging`` is a reload that never reached the SSD, ``copy_out`` and ``copy_in`` are
    the ways of the host tier."""

    idx: int
    channel: ChannelName
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """What a placement costs and what it reaches."""

    live_bytes: tuple[int, ...]
    """At every position."""
    start_s: tuple[float, ...]
    """When the node at every position starts."""
    step_s: float
    exposed_s: float
    """What the step takes longer than without any transfer: stalls and the time of the ops themselves."""
    release_stall_s: Mapping[int, float]
    wait_stall_s: Mapping[int, float]
    """By storage; storages without a stall are left out."""
    write_busy_s: float
    read_busy_s: float
    forwarded_bytes: int
    """Served from staging, never read."""
    staging_peak_bytes: int
    """On the way to the SSD, and in the host tier."""
    host_peak_bytes: int
    """In the host tier alone."""
    events: tuple[Event, ...]
    """In the order of the compute stream; empty unless they were to be recorded."""
    transfers: tuple[Transfer, ...]
    """Writes in their order, then reads in theirs, then the copies of the host tier; empty unless they were to be
    recorded."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def stall_s(self) -> float:
        return math.fsum((*self.release_stall_s.values(), *self.wait_stall_s.values()))


def simulate(problem: TransferProblem, placements: Placements, *, record: bool = False) -> Simulation:
    """Run the step once with the storages in ``placements`` moved.

    Args:
        record: tell every event and every transfer too; the planner, which simulates often, asks for neither.

    Raises:
        ValueError: the host tier is asked to hold more than its budget.
    """
    found = simulate_within(problem, placements, allowed_s=math.inf, record=record)
    assert found is not None
    return found


def simulate_within(
    problem: TransferProblem, placements: Placements, *, allowed_s: float, record: bool = False
) -> Simulation | None:
    """The same if it exposes at most ``allowed_s``; None, as soon as that is known, if it exposes more."""
    if problem.recompute_s + sum(_blocked_s(problem, placements)) > allowed_s + ROUNDING * problem.step_s:
        return None
    give_up_s = allowed_s - problem.recompute_s + ROUNDING * problem.step_s
    elapsed_s = problem.elapsed_s
    channels = _Channels(problem)
    left_s: dict[int, float] = {}
    back_s: dict[int, float] = {}
    release_stall_s: dict[int, float] = {}
    wait_stall_s: dict[int, float] = {}
    start_s: list[float] = []
    recorded: list[Event] = []
    now = 0.0
    position = 0
    node_s = problem.node_s
    for at, step, movable in _events(problem, placements):
        if at > position:
            # The nodes in front of this event run one after the other.
            start_s += itertools.accumulate(node_s[position:at], initial=now)
            now = start_s.pop()
            position = at
        idx, size_bytes = movable.idx, movable.size_bytes
        begin = now
        if step is Step.OFFLOAD:
            now += problem.blocks_out_s(size_bytes)
            leave = channels.stage if placements[idx].tier == "host" else channels.write
            left_s[idx] = leave(movable, begin, now)
        elif step in (Step.RELEASE, Step.RELEASE_AT_ONCE):
            if left_s[idx] > now:
                release_stall_s[idx] = left_s[idx] - now
                now = left_s[idx]
                if now - elapsed_s[at] > give_up_s:
                    return None
        elif step is Step.WAIT:
            if back_s[idx] > now:
                wait_stall_s[idx] = back_s[idx] - now
                now = back_s[idx]
                if now - elapsed_s[at] > give_up_s:
                    return None
        else:
            now += problem.blocks_in_s(size_bytes)
            bring = channels.unstage if placements[idx].tier == "host" else channels.read
            back_s[idx] = bring(movable, now)
        if record:
            recorded.append(Event(idx, step, begin, now))
    start_s += itertools.accumulate(node_s[position:], initial=now)
    now = start_s.pop()
    if now - problem.step_s > allowed_s:
        return None
    return Simulation(
        live_bytes=live_bytes(problem, placements),
        start_s=tuple(start_s),
        step_s=now,
        exposed_s=now - problem.step_s,
        release_stall_s=release_stall_s,
        wait_stall_s=wait_stall_s,
        write_busy_s=channels.write_busy_s,
        read_busy_s=channels.read_busy_s,
        forwarded_bytes=channels.forwarded_bytes,
        staging_peak_bytes=channels.staging_peak_bytes,
        host_peak_bytes=channels.host_bytes,
        events=tuple(recorded),
        transfers=(
            *channels.writes(),
            *itertools.starmap(Transfer, channels.reads),
            *itertools.starmap(Transfer, channels.copies),
        )
        if record
        else (),
    )


def _blocked_s(problem: TransferProblem, placements: Placements) -> Iterator[float]:
    """What moving takes of the compute stream even if nothing stalls."""
    for movable in problem.movables:
        if movable.idx in placements:
            yield problem.blocks_out_s(movable.size_bytes) + problem.blocks_in_s(movable.size_bytes)


def live_bytes(problem: TransferProblem, placements: Placements) -> tuple[int, ...]:
    """Live bytes at every position when the storages in ``placements`` are moved."""
    return tuple(_live_bytes(problem, placements).tolist())


def peak_bytes(problem: TransferProblem, placements: Placements) -> int:
    """Their maximum, in less time."""
    return int(_live_bytes(problem, placements).max(initial=0))


def _live_bytes(problem: TransferProblem, placements: Placements) -> NDArray[np.int64]:
    moved = [
        (placement.release, placement.reload, movable.size_bytes)
        for movable in problem.movables
        if (placement := placements.get(movable.idx)) is not None
    ]
    if not moved:
        return problem.kept_live_bytes
    release, reload, size_bytes = np.array(moved, dtype=np.int64).T
    change = np.zeros(len(problem.node_s) + 1, dtype=np.int64)
    np.subtract.at(change, release, size_bytes)
    np.add.at(change, reload, size_bytes)
    return problem.kept_live_bytes + np.cumsum(change[:-1])


def host_bytes(problem: TransferProblem, placements: Placements) -> tuple[int, ...]:
    """What the host tier holds at every position: all of it where backward begins."""
    change = [0] * (len(problem.node_s) + 1)
    for movable in problem.movables:
        placement = placements.get(movable.idx)
        if problem.host is not None and placement is not None and placement.tier == "host":
            held_bytes = problem.host.held_bytes(movable.size_bytes)
            change[movable.complete] += held_bytes
            change[movable.wait] -= held_bytes
    return tuple(itertools.accumulate(change[:-1]))


def _events(problem: TransferProblem, placements: Placements) -> list[tuple[int, Step, Movable]]:
    events: list[tuple[int, Step, Movable]] = []
    for movable in problem.movables:
        placement = placements.get(movable.idx)
        if placement is None:
            continue
        at_once = placement.release == movable.complete
        needed_at_once = placement.reload == movable.wait
        events += (
            (movable.complete, Step.OFFLOAD, movable),
            (placement.release, Step.RELEASE_AT_ONCE if at_once else Step.RELEASE, movable),
            (placement.reload, Step.RELOAD_AT_ONCE if needed_at_once else Step.RELOAD, movable),
            (movable.wait, Step.WAIT, movable),
        )
    # The sort is stable: equal keys stay in the order of the movables, as insert_offloads has it.
    events.sort(key=_place_in_order)
    return events


def _place_in_order(event: tuple[int, Step, Movable]) -> int:
    """One number is compared faster than two."""
    return event[0] * NUM_STEPS + event[1]


class _Channels:
    """The SSD, staging and the copies: when is a storage out, when is it back?

    The write queue is counted in seconds of work that an undisturbed SSD needs for it.
    """

    def __init__(self, problem: TransferProblem) -> None:
        self._hardware: Hardware = problem.hardware
        self._host = problem.host
        self._queued_bytes = [0]
        """Of every write: all bytes queued up to its end ..."""
        self._queued_s = [0.0]
        """... and all work."""
        self._turn_of: dict[int, int] = {}
        """Place of a storage in these lists."""
        self._written_s = 0.0
        """Work that is done ..."""
        self._written_until_s = 0.0
        """... by this time."""
        self._progress = [(0.0, 0.0)]
        """Moments and the work done by then; between two of them it goes on evenly."""
        self._copied_s = 0.0
        """When the last copy out is over ..."""
        self._copied_in_s = 0.0
        """... and the last copy in of the host tier."""
        self._read_s = 0.0
        self.write_busy_s = 0.0
        self.read_busy_s = 0.0
        self.forwarded_bytes = 0
        self.staging_peak_bytes = 0
        self.host_bytes = 0
        """Held by the host tier. Everything that leaves does so before anything comes back."""
        self.reads: list[tuple[int, ChannelName, float, float]] = []
        self.copies: list[tuple[int, ChannelName, float, float]] = []

    def write(self, movable: Movable, begin_s: float, end_s: float) -> float:
        """Put a storage into the write queue. Returns when it has left its tensor.

        The compute stream spends ``begin_s`` to ``end_s`` on it; where copies run beside compute, they only start then.
        """
        hardware, size_bytes = self._hardware, movable.size_bytes
        self._write_until(begin_s)
        write_s = hardware.write.transfer_s(size_bytes)
        self.write_busy_s += write_s
        self._turn_of[movable.idx] = len(self._queued_bytes)
        self._queued_bytes.append(self._queued_bytes[-1] + size_bytes)
        self._queued_s.append(self._queued_s[-1] + write_s)
        return self._copy_out(size_bytes, end_s)

    def stage(self, movable: Movable, begin_s: float, end_s: float) -> float:
        """Put a storage into the host tier; otherwise as :meth:`write`."""
        host, size_bytes = self._host, movable.size_bytes
        self._write_until(begin_s)
        self.host_bytes += 0 if host is None else host.held_bytes(size_bytes)
        if host is None or self.host_bytes > host.budget_bytes:
            found = f"no host tier, but storage {movable.idx} in it" if host is None else f"{self.host_bytes} in {host}"
            raise ValueError(f"a placement is for another problem: {found}.")
        copied_s = self._copy_out(size_bytes, end_s)
        copy_s = 0.0 if self._hardware.copies_block_compute else self._hardware.copy_out.transfer_s(size_bytes)
        self.copies.append((movable.idx, "copy_out", copied_s - copy_s, copied_s))
        return copied_s

    def _copy_out(self, size_bytes: int, at_s: float) -> float:
        """Returns when a storage has been copied to staging: after those before it, and as there is room."""
        hardware = self._hardware
        copied_s = at_s
        if not hardware.copies_block_compute:
            copied_s = max(self._copied_s, at_s) + hardware.copy_out.transfer_s(size_bytes)
        # Of what was ever queued, no more may be missing on the SSD than there is room for beside the host tier.
        room_bytes = max(0, hardware.staging_bytes - self.host_bytes)
        missing_s = self._work_s(self._queued_bytes[-1] - room_bytes) - self._written_s
        if missing_s > 0:
            copied_s = max(copied_s, self._written_until_s + missing_s)
        self._copied_s = copied_s
        staged_bytes = min(self._queued_bytes[-1] - self._bytes_written(), room_bytes)
        self.staging_peak_bytes = max(self.staging_peak_bytes, self.host_bytes + staged_bytes)
        return copied_s

    def unstage(self, movable: Movable, at_s: float) -> float:
        """Copy a storage back from the host tier. Returns when it is back."""
        hardware = self._hardware
        begin_s = max(at_s, self._copied_in_s)
        copy_s = 0.0 if hardware.copies_block_compute else hardware.copy_in.transfer_s(movable.size_bytes)
        self._copied_in_s = begin_s + copy_s
        self.copies.append((movable.idx, "copy_in", begin_s, self._copied_in_s))
        return self._copied_in_s

    def read(self, movable: Movable, at_s: float) -> float:
        """Put a storage into the read queue. Returns when it is back."""
        hardware, size_bytes = self._hardware, movable.size_bytes
        begin_s = max(at_s, self._read_s)
        self._write_until(begin_s)
        if self._written_s < self._queued_s[self._turn_of[movable.idx]]:
            self.forwarded_bytes += size_bytes
            copy_s = 0.0 if hardware.copies_block_compute else hardware.copy_in.transfer_s(size_bytes)
            self.reads.append((movable.idx, "staging", begin_s, begin_s + copy_s))
            return begin_s + copy_s
        need_s = hardware.read.transfer_s(size_bytes)
        self.read_busy_s += need_s
        share = hardware.share_when_both
        both_s = min(self._queued_s[-1] - self._written_s, need_s) / share
        self._written_s += both_s * share
        self._read_s = self._written_until_s = begin_s + both_s + (need_s - both_s * share)
        self._progress += [(begin_s + both_s, self._written_s), (self._read_s, self._written_s)]
        self.reads.append((movable.idx, "read", begin_s, self._read_s))
        return self._read_s

    def writes(self) -> Iterator[Transfer]:
        """When every write begins and ends, once all have been queued."""
        rest_s = self._queued_s[-1] - self._written_s
        progress = [*self._progress, (self._written_until_s + rest_s, self._queued_s[-1])]
        done_s = [work_s for _, work_s in progress]

        def moment(work_s: float, following: int) -> float:
            (begin_s, before_s), (end_s, after_s) = progress[following - 1], progress[following]
            share = (work_s - before_s) / (after_s - before_s) if after_s > before_s else 1.0
            return begin_s + share * (end_s - begin_s)

        for idx, turn in self._turn_of.items():
            first_s, last_s = self._queued_s[turn - 1], self._queued_s[turn]
            # The last moment at which all writes before it were done, and the first at which it is done itself.
            begins = min(bisect.bisect_right(done_s, first_s), len(progress) - 1)
            ends = max(1, bisect.bisect_left(done_s, last_s))
            yield Transfer(idx, "write", moment(first_s, begins), moment(last_s, ends))

    def _write_until(self, now_s: float) -> None:
        """Let the writes go on, with the SSD to themselves, until ``now_s``."""
        if now_s > self._written_until_s:
            busy_s = min(self._queued_s[-1] - self._written_s, now_s - self._written_until_s)
            self._written_s = min(self._queued_s[-1], self._written_s + now_s - self._written_until_s)
            self._progress += [(self._written_until_s + busy_s, self._written_s), (now_s, self._written_s)]
            self._written_until_s = now_s

    def _work_s(self, byte_count: int) -> float:
        """Work until that many of all bytes are written."""
        turn = bisect.bisect_left(self._queued_bytes, byte_count)
        return self._queued_s[turn] - (self._queued_bytes[turn] - byte_count) / self._hardware.write.bytes_per_s

    def _bytes_written(self) -> int:
        turn = bisect.bisect_right(self._queued_s, self._written_s)
        return self._queued_bytes[turn - 1]
