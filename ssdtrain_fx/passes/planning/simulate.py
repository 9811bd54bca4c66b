"""Simulate a placement: one compute stream, a write channel, a read channel, copies, staging and memory.

This is a discrete-event simulation. Events happen at the positions of their nodes; between events only the channels
make progress:

    compute   n0 |offload a| n1 | n2 |release a| ...          | reload a | n7 | wait a (stall) | n8
    write              [==== a ====]                          :
    read                                                      :      [======= a =======]

- A storage has *left* when its last byte is in staging. Its memory may then be reused. Writes free staging, so once
  staging is full, copies out are only as fast as the SSD.
- A storage takes whole chunks of staging.
- Writes are first in, first out. Writes that remain when backward begins share the SSD with the reads: each direction
  keeps ``share_when_both`` of its rate.
- A storage that is reloaded while it is still in staging is copied from there and not read.
- A storage in the host tier occupies staging from its copy out until its copy in has finished, which leaves less
  staging to the writes. All copies out share one channel and take turns; a copy in does not wait for reads.

The result depends only on the problem and the placement. No real clock and no random numbers are used.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.planning.transfer_problem import Movable, Placements, Step, TransferProblem

ChannelName = Literal["write", "read", "staging", "copy_out", "copy_in"]

NUM_STEPS = len(Step)
_RELEASES = (Step.RELEASE, Step.RELEASE_AT_ONCE)
ROUNDING = 1e-9
"""Upper bound, as a share of the step, on how much a sum of seconds depends on the order of its terms."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Time of the compute stream that one inserted op takes: a copy, the call itself, or a stall."""

    idx: int
    """The storage."""
    step: Step
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One storage on one channel. ``staging`` is a reload that is served from staging instead of the SSD. ``copy_out``
    and ``copy_in`` are the copies of the host tier."""

    idx: int
    channel: ChannelName
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """The predicted time and memory of a step with a placement."""

    live_bytes: tuple[int, ...]
    """Live bytes at every position."""
    start_s: tuple[float, ...]
    """Start time of the node at every position."""
    step_s: float
    exposed_s: float
    """Time that transfers and recomputation add to the step: stalls, the ops themselves, and nodes that run again."""
    release_stall_s: Mapping[int, float]
    wait_stall_s: Mapping[int, float]
    """Stalls by storage. Storages without a stall are left out."""
    write_busy_s: float
    read_busy_s: float
    forwarded_bytes: int
    """Bytes that are served from staging and never read."""
    staging_peak_bytes: int
    """Peak of staging in use: by writes and by the host tier."""
    host_peak_bytes: int
    """Peak of the host tier alone."""
    events: tuple[Event, ...]
    """In the order of the compute stream. Empty unless ``record`` was set."""
    transfers: tuple[Transfer, ...]
    """All writes in order, then all reads in order, then the copies of the host tier. Empty unless ``record`` was
    set."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def stall_s(self) -> float:
        return math.fsum((*self.release_stall_s.values(), *self.wait_stall_s.values()))


def simulate(problem: TransferProblem, placements: Placements, *, record: bool = False) -> Simulation:
    """Simulate one step in which the storages in ``placements`` are offloaded.

    Args:
        record: also record every event and every transfer. The planner, which simulates often, does without.

    Raises:
        ValueError: the placements put more into the host tier than its budget.
    """
    found = simulate_within(problem, placements, allowed_s=math.inf, record=record)
    assert found is not None
    return found


def simulate_within(
    problem: TransferProblem, placements: Placements, *, allowed_s: float, record: bool = False
) -> Simulation | None:
    """Simulate, and return None as soon as the exposed time is known to exceed ``allowed_s``."""
    ops_s = blocked_s(problem, placements)
    least_s = problem.recompute_s + sum(itertools.chain.from_iterable(ops_s.values()))
    if least_s > allowed_s + ROUNDING * problem.step_s:
        return None
    give_up_s = allowed_s - problem.recompute_s + ROUNDING * problem.step_s
    elapsed_s = problem.elapsed_s
    channels = _Channels(problem)
    left_s: dict[int, float] = {}
    back_s: dict[int, float] = {}
    release_stall_s: dict[int, float] = {}
    wait_stall_s: dict[int, float] = {}
    recorded: list[Event] = []
    delays: list[tuple[int, float]] = []
    """Positions where the delay changes, and the delay from there on."""
    delay_s = 0.0
    """How much later than without transfers the stream runs."""
    for at, step, movable in ops_in_order(problem, placements):
        idx, began_with_s = movable.idx, delay_s
        now = elapsed_s[at] + delay_s
        if step is Step.OFFLOAD:
            delay_s += ops_s[idx][0]
            leave = channels.stage if placements[idx].tier == "host" else channels.write
            left_s[idx] = leave(movable, now, elapsed_s[at] + delay_s)
        elif step in _RELEASES:
            if left_s[idx] > now:
                release_stall_s[idx] = left_s[idx] - now
                delay_s = left_s[idx] - elapsed_s[at]
        elif step is Step.WAIT:
            if back_s[idx] > now:
                wait_stall_s[idx] = back_s[idx] - now
                delay_s = back_s[idx] - elapsed_s[at]
        else:
            delay_s += ops_s[idx][1]
            bring = channels.unstage if placements[idx].tier == "host" else channels.read
            back_s[idx] = bring(movable, elapsed_s[at] + delay_s)
        if delay_s > give_up_s:
            return None
        delays.append((at, delay_s))
        if record:
            recorded.append(Event(idx, step, elapsed_s[at] + began_with_s, elapsed_s[at] + delay_s))
    step_s = elapsed_s[-1] + delay_s
    if step_s - problem.step_s > allowed_s:
        return None
    return Simulation(
        live_bytes=live_bytes(problem, placements),
        start_s=_delayed(problem.start_s, delays),
        step_s=step_s,
        exposed_s=step_s - problem.step_s,
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


def _delayed(starts_s: NDArray[np.float64], delays: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """``starts_s``, each with the last delay up to its position."""
    if not delays:
        return tuple(starts_s.tolist())
    positions, delay_s = zip(*delays, strict=True)
    last = np.searchsorted(positions, np.arange(len(starts_s)), side="right")
    return tuple((starts_s + np.array((0.0, *delay_s))[last]).tolist())


def blocked_s(problem: TransferProblem, placements: Placements) -> dict[int, tuple[float, float]]:
    """Compute-stream time of each offloaded storage without stalls: out and back. Ops that were moved are in a row."""
    found: dict[int, tuple[float, float]] = {}
    for movable in problem.movables:
        placement = placements.get(movable.idx)
        if placement is not None:
            taken = problem.moving_times[movable.idx]
            out_s = taken.out_s if placement.offload_of(movable) == movable.offload else taken.next_out_s
            in_s = taken.in_s if placement.wait_of(movable) == movable.wait else taken.next_in_s
            found[movable.idx] = out_s, in_s
    return found


def live_bytes(problem: TransferProblem, placements: Placements) -> tuple[int, ...]:
    """Live bytes at every position when the storages in ``placements`` are offloaded."""
    return tuple(_live_bytes(problem, placements).tolist())


def peak_bytes(problem: TransferProblem, placements: Placements) -> int:
    """The maximum of :func:`live_bytes`, computed faster."""
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
    """Bytes that the host tier holds at every position. All its storages are there where backward begins."""
    change = [0] * (len(problem.node_s) + 1)
    for movable in problem.movables:
        placement = placements.get(movable.idx)
        if placement is not None and placement.tier == "host":
            held_bytes = problem.hardware.staged_bytes(movable.size_bytes)
            change[placement.offload_of(movable)] += held_bytes
            change[placement.wait_of(movable)] -= held_bytes
    return tuple(itertools.accumulate(change[:-1]))


def ops_in_order(problem: TransferProblem, placements: Placements) -> list[tuple[int, Step, Movable]]:
    """The ops of all offloaded storages, each with its position, in the order in which they run."""
    events: list[tuple[int, Step, Movable]] = []
    for movable in problem.movables:
        placement = placements.get(movable.idx)
        if placement is None:
            continue
        offload, wait = placement.offload_of(movable), placement.wait_of(movable)
        events += (
            (offload, Step.OFFLOAD, movable),
            (placement.release, Step.RELEASE_AT_ONCE if placement.release == offload else Step.RELEASE, movable),
            (placement.reload, Step.RELOAD_AT_ONCE if placement.reload == wait else Step.RELOAD, movable),
            (wait, Step.WAIT, movable),
        )
    # The sort is stable: equal keys keep the order of the movables, as in insert_offloads.
    events.sort(key=_place_in_order)
    return events


def _place_in_order(event: tuple[int, Step, Movable]) -> int:
    """The sort key as one number, which is compared faster than a pair."""
    return event[0] * NUM_STEPS + event[1]


class _Channels:
    """The SSD, staging and the copies. They determine when a storage has left and when it is reloaded.

    The write queue is measured as work: the seconds that an SSD without reads needs for it.
    """

    def __init__(self, problem: TransferProblem) -> None:
        self._hardware: Hardware = problem.hardware
        self._times = problem.moving_times
        self._host = problem.host
        self._queued_bytes = [0]
        """Staging that each write and all before it take."""
        self._filled = [1.0]
        """The share of its own staging that each write fills."""
        self._queued_s = [0.0]
        """Work queued up to and including each write."""
        self._turn_of: dict[int, int] = {}
        """Index of each storage in these lists."""
        self._written_s = 0.0
        """Work done by ``_written_until_s``."""
        self._written_until_s = 0.0
        """The time up to which writes are simulated."""
        self._progress = [(0.0, 0.0)]
        """Points (time, work done by then). Work proceeds at a constant rate between two points."""
        self._copied_s = 0.0
        """When the last copy out finishes."""
        self._copied_in_s = 0.0
        """When the last copy in of the host tier finishes."""
        self._read_s = 0.0
        self.write_busy_s = 0.0
        self.read_busy_s = 0.0
        self.forwarded_bytes = 0
        self.staging_peak_bytes = 0
        self.host_bytes = 0
        """Bytes held by the host tier. It never shrinks, because all offloads come before all reloads."""
        self.reads: list[tuple[int, ChannelName, float, float]] = []
        self.copies: list[tuple[int, ChannelName, float, float]] = []

    def write(self, movable: Movable, begin_s: float, end_s: float) -> float:
        """Add a storage to the write queue. Return the time at which it has left its tensor.

        The offload takes the compute stream from ``begin_s`` to ``end_s``. Copies that run beside compute start at
        ``end_s``.
        """
        size_bytes, write_s = movable.size_bytes, self._times[movable.idx].write_s
        staged_bytes = self._hardware.staged_bytes(size_bytes)
        self._write_until(begin_s)
        self.write_busy_s += write_s
        self._turn_of[movable.idx] = len(self._queued_bytes)
        self._queued_bytes.append(self._queued_bytes[-1] + staged_bytes)
        self._filled.append(size_bytes / staged_bytes)
        self._queued_s.append(self._queued_s[-1] + write_s)
        return self._copy_out(size_bytes, end_s)

    def stage(self, movable: Movable, begin_s: float, end_s: float) -> float:
        """Add a storage to the host tier. Arguments and result are those of :meth:`write`."""
        host, size_bytes = self._host, movable.size_bytes
        self._write_until(begin_s)
        self.host_bytes += self._hardware.staged_bytes(size_bytes)
        if host is None or self.host_bytes > host.budget_bytes:
            found = f"no host tier for storage {movable.idx}" if host is None else f"{self.host_bytes} bytes in {host}"
            raise ValueError(f"the placements do not fit this problem: {found}.")
        copied_s = self._copy_out(size_bytes, end_s)
        copy_s = 0.0 if self._hardware.copies_block_compute else self._hardware.copy_out.transfer_s(size_bytes)
        self.copies.append((movable.idx, "copy_out", copied_s - copy_s, copied_s))
        return copied_s

    def _copy_out(self, size_bytes: int, at_s: float) -> float:
        """Return the time at which a storage is in staging: after all earlier copies, and once staging has room."""
        hardware = self._hardware
        copied_s = at_s
        if not hardware.copies_block_compute:
            copied_s = max(self._copied_s, at_s) + hardware.copy_out.transfer_s(size_bytes)
        # What is queued but not yet written must fit into staging beside the host tier.
        room_bytes = max(0, hardware.staging_bytes - self.host_bytes)
        missing_s = self._work_until_free(self._queued_bytes[-1] - room_bytes) - self._written_s
        if missing_s > 0:
            copied_s = max(copied_s, self._written_until_s + missing_s)
        self._copied_s = copied_s
        staged_bytes = min(self._queued_bytes[-1] - self._freed_bytes(), room_bytes)
        self.staging_peak_bytes = max(self.staging_peak_bytes, self.host_bytes + staged_bytes)
        return copied_s

    def unstage(self, movable: Movable, at_s: float) -> float:
        """Reload a storage from the host tier. Return the time at which the copy has finished."""
        hardware = self._hardware
        begin_s = max(at_s, self._copied_in_s)
        copy_s = 0.0 if hardware.copies_block_compute else hardware.copy_in.transfer_s(movable.size_bytes)
        self._copied_in_s = begin_s + copy_s
        self.copies.append((movable.idx, "copy_in", begin_s, self._copied_in_s))
        return self._copied_in_s

    def read(self, movable: Movable, at_s: float) -> float:
        """Add a storage to the read queue. Return the time at which it is reloaded."""
        hardware, size_bytes = self._hardware, movable.size_bytes
        begin_s = max(at_s, self._read_s)
        self._write_until(begin_s)
        if self._written_s < self._queued_s[self._turn_of[movable.idx]]:
            self.forwarded_bytes += size_bytes
            copy_s = 0.0 if hardware.copies_block_compute else hardware.copy_in.transfer_s(size_bytes)
            self.reads.append((movable.idx, "staging", begin_s, begin_s + copy_s))
            return begin_s + copy_s
        need_s = self._times[movable.idx].read_s
        self.read_busy_s += need_s
        share = hardware.share_when_both
        both_s = min(self._queued_s[-1] - self._written_s, need_s) / share
        self._written_s += both_s * share
        self._read_s = self._written_until_s = begin_s + both_s + (need_s - both_s * share)
        self._progress += [(begin_s + both_s, self._written_s), (self._read_s, self._written_s)]
        self.reads.append((movable.idx, "read", begin_s, self._read_s))
        return self._read_s

    def writes(self) -> Iterator[Transfer]:
        """When each write begins and ends. Call it after all writes have been queued."""
        rest_s = self._queued_s[-1] - self._written_s
        progress = [*self._progress, (self._written_until_s + rest_s, self._queued_s[-1])]
        done_s = [work_s for _, work_s in progress]

        def moment(work_s: float, following: int) -> float:
            (begin_s, before_s), (end_s, after_s) = progress[following - 1], progress[following]
            share = (work_s - before_s) / (after_s - before_s) if after_s > before_s else 1.0
            return begin_s + share * (end_s - begin_s)

        for idx, turn in self._turn_of.items():
            first_s, last_s = self._queued_s[turn - 1], self._queued_s[turn]
            # A write begins at the last moment with only the earlier writes done, and ends when it is done itself.
            begins = min(bisect.bisect_right(done_s, first_s), len(progress) - 1)
            ends = max(1, bisect.bisect_left(done_s, last_s))
            yield Transfer(idx, "write", moment(first_s, begins), moment(last_s, ends))

    def _write_until(self, now_s: float) -> None:
        """Continue the writes until ``now_s``, without reads on the SSD."""
        if now_s > self._written_until_s:
            busy_s = min(self._queued_s[-1] - self._written_s, now_s - self._written_until_s)
            self._written_s = min(self._queued_s[-1], self._written_s + now_s - self._written_until_s)
            self._progress += [(self._written_until_s + busy_s, self._written_s), (now_s, self._written_s)]
            self._written_until_s = now_s

    def _work_until_free(self, byte_count: int) -> float:
        """Work until ``byte_count`` bytes of the staging of the queue are free."""
        turn = bisect.bisect_left(self._queued_bytes, byte_count)
        unwritten_bytes = (self._queued_bytes[turn] - byte_count) * self._filled[turn]
        return self._queued_s[turn] - unwritten_bytes / self._hardware.write.bytes_per_s

    def _freed_bytes(self) -> int:
        turn = bisect.bisect_right(self._queued_s, self._written_s)
        return self._queued_bytes[turn - 1]
