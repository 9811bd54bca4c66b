"""The rates of a disk, measured by transfers that share it. The tests move the clock: nothing depends on real time."""

from __future__ import annotations

import random

import pytest
from runtime_fakes import HandClock

from ssdtrain_fx.runtime.book.traffic import BUSY_BYTES, HALF_LIFE_BYTES, Direction, RateMeter, Traffic, Transfer


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_a_rate_is_that_of_the_disk() -> None:
    meter = RateMeter()
    assert meter.bytes_per_s is None
    assert meter.s_per_byte == 0
    meter.note(1000, 1.0, busy=True)
    assert meter.bytes_per_s == pytest.approx(1000)
    assert meter.s_per_byte == pytest.approx(0.001)


@pytest.mark.parametrize("seed", range(5))
def test_however_many_transfers_share_the_disk_each_measures_its_rate(seed: int) -> None:
    """The disk moves 1000 bytes per second, shared equally. Transfers begin and end at random."""
    clock, chance = HandClock(), random.Random(seed)
    traffic = Traffic(clock)
    left: dict[Transfer, tuple[float, int]] = {}
    for _ in range(100):
        duration_s = chance.choice((0.0, 0.1, 1.0))
        while left and duration_s > 0:
            soonest = min(left, key=lambda transfer: left[transfer][0])
            passed_s = min(duration_s, left[soonest][0] * len(left) / 1000)
            clock.move(passed_s)
            left = {one: (rest - passed_s * 1000 / len(left), length) for one, (rest, length) in left.items()}
            duration_s -= passed_s
            if left[soonest][0] <= 1e-9:
                traffic.end(soonest, left.pop(soonest)[1], clock())
                assert traffic.meters[Direction.WRITE].bytes_per_s == pytest.approx(1000)
        length = chance.randrange(100, 2000)
        left[traffic.begin(Direction.WRITE)] = (length, length)
    assert traffic.meters[Direction.WRITE].bytes_per_s


def test_an_end_that_a_thread_reports_late_changes_nothing_for_the_others(clock: HandClock) -> None:
    """The first of two ends before the second one begins, but reports it afterwards."""
    traffic = Traffic(clock)
    first = traffic.begin(Direction.WRITE)
    clock.move(2.0)
    second = traffic.begin(Direction.WRITE)
    traffic.end(first, 0, clock() - 1.0)
    clock.move(1.0)
    traffic.end(second, 1000, clock())
    assert traffic.meters[Direction.WRITE].bytes_per_s == pytest.approx(1000)


@pytest.mark.parametrize("ended", [0, 1])
def test_a_transfer_that_was_alone_for_a_while_did_not_keep_the_disk_busy(clock: HandClock, ended: int) -> None:
    """It takes two. The first one began alone, the second one ended alone."""
    traffic = Traffic(clock)
    both: list[Transfer] = []
    for _ in range(2):
        both.append(traffic.begin(Direction.WRITE))
        clock.move(1.0)
    traffic.end(both[0], 1000 * (ended == 0), clock(), busy_with=2)
    clock.move(1.0)
    traffic.end(both[1], 1000 * (ended == 1), clock(), busy_with=2)
    assert traffic.meters[Direction.WRITE].bytes_per_s is None
    for _ in range(2):
        both.append(traffic.begin(Direction.WRITE))
    clock.move(1.0)
    traffic.end(both[3], 500, clock(), busy_with=2)
    assert traffic.meters[Direction.WRITE].bytes_per_s == pytest.approx(1000)


def test_a_read_within_a_write_is_noticed(clock: HandClock) -> None:
    traffic = Traffic(clock)
    write = traffic.begin(Direction.WRITE)
    clock.move(1.0)
    read = traffic.begin(Direction.READ)
    clock.move(1.0)
    traffic.end(read, 500, clock())
    traffic.end(write, 1500, clock())
    assert all(meter.bytes_per_s is None for meter in traffic.meters)


def test_an_idle_disk_tells_only_that_it_is_at_least_so_fast() -> None:
    meter = RateMeter()
    meter.note(1000, 1.0, busy=False)
    assert meter.bytes_per_s is None
    meter.note(1000, 0.5, busy=True)
    meter.note(1000, 4.0, busy=False)
    assert meter.bytes_per_s == pytest.approx(2000)
    meter.note(2000, 0.5, busy=False)
    assert (meter.bytes_per_s or 0) > 2000


def test_a_rate_follows_the_disk() -> None:
    meter = RateMeter()
    for _ in range(8):
        meter.note(HALF_LIFE_BYTES, 0.5, busy=True)
    for _ in range(8):
        meter.note(HALF_LIFE_BYTES, 5.0, busy=True)
    assert meter.bytes_per_s == pytest.approx(2 * HALF_LIFE_BYTES / 10, rel=0.01)


def test_transfers_in_both_directions_tell_nothing(clock: HandClock) -> None:
    traffic = Traffic(clock)
    first, second = traffic.begin(Direction.WRITE), traffic.begin(Direction.WRITE)
    read = traffic.begin(Direction.READ)
    clock.move(1.0)
    traffic.end(first, 1000, clock(), busy_with=1)
    traffic.end(read, 1000, clock(), busy_with=1)
    traffic.end(second, 0, clock(), busy_with=1)  # it failed
    assert all(meter.bytes_per_s is None for meter in traffic.meters)
    traffic.end(traffic.begin(Direction.READ), 1000, clock() + 0.5, busy_with=1)
    assert traffic.meters[Direction.READ].bytes_per_s == pytest.approx(2000)


class Queue:
    """Requests of one direction that a disk with 1000 bytes per second serves."""

    def __init__(
        self, clock: HandClock, direction: Direction = Direction.WRITE, traffic: Traffic | None = None
    ) -> None:
        self.clock = clock
        self.direction = direction
        self.traffic = Traffic(clock) if traffic is None else traffic
        self.began: list[tuple[Transfer, int]] = []

    def begin(self, *lengths: int) -> None:
        self.began += [(self.traffic.begin(self.direction, length), length) for length in lengths]

    def end(self, count: int, *, is_late: bool = False, is_cut_short: bool = False) -> None:
        """The oldest ``count`` requests have ended."""
        ended, self.began = self.began[:count], self.began[count:]
        for transfer, length in ended:
            self.traffic.end(transfer, length - is_cut_short, self.clock())
        self.traffic.measure(self.clock(), is_late=is_late)

    @property
    def bytes_per_s(self) -> float | None:
        return self.traffic.meters[self.direction].bytes_per_s


def test_requests_that_end_together_tell_the_rate_by_all_their_bytes(clock: HandClock) -> None:
    """By its own bytes, each of them would be five times too slow."""
    queue = Queue(clock)
    queue.begin(*[1000] * 5)
    clock.move(5.0)
    queue.end(5)
    assert queue.bytes_per_s == pytest.approx(1000)


@pytest.mark.parametrize("first_s", [1.0, 7.93])
def test_it_does_not_matter_how_much_later_than_the_first_request_the_others_end(
    first_s: float, clock: HandClock
) -> None:
    queue = Queue(clock)
    queue.begin(*[1000] * 8)
    clock.move(first_s)
    for _ in range(8):
        queue.end(1)
        clock.move((8.0 - first_s) / 7)
    assert queue.bytes_per_s == pytest.approx(1000)


def test_a_queue_that_never_empties_is_measured_when_half_of_it_has_ended(clock: HandClock) -> None:
    queue = Queue(clock)
    queue.begin(*[1000] * 4)
    rates: list[float | None] = []
    for _ in range(9):
        clock.move(1.0)
        queue.end(1, is_late=True)  # the disk had others to serve since
        queue.begin(1000)
        rates.append(queue.bytes_per_s)
    assert rates[:3] == [None] * 3
    assert rates[3:] == [pytest.approx(1000)] * 6


def test_one_small_request_does_not_keep_the_disk_busy(clock: HandClock) -> None:
    for lengths, rate in (((1000,), None), ((500, 500), 1000), ((BUSY_BYTES,), BUSY_BYTES)):
        queue = Queue(clock)
        queue.begin(*lengths)
        clock.move(1.0)
        queue.end(len(lengths))
        assert queue.bytes_per_s == (None if rate is None else pytest.approx(rate))


def test_a_request_that_is_cut_short_tells_nothing(clock: HandClock) -> None:
    queue = Queue(clock)
    queue.begin(1000, 1000)
    clock.move(1.0)
    queue.end(2, is_cut_short=True)
    assert queue.bytes_per_s is None
    queue.begin(1000, 1000)
    clock.move(2.0)
    queue.end(2)
    assert queue.bytes_per_s == pytest.approx(1000)


def test_while_both_queues_are_busy_they_tell_nothing(clock: HandClock) -> None:
    writes = Queue(clock)
    reads = Queue(clock, Direction.READ, writes.traffic)
    writes.begin(*[1000] * 6)
    clock.move(1.0)
    reads.begin(500, 500)
    clock.move(4.0)
    writes.end(1)
    clock.move(4.0)
    writes.end(3)
    reads.end(2)
    writes.begin(1000, 1000)
    clock.move(0.1)  # the disk had served most of the two that were left
    writes.end(2)
    assert writes.bytes_per_s is reads.bytes_per_s is None
    clock.move(2.0)
    writes.end(2)
    assert writes.bytes_per_s == pytest.approx(1000)
    assert reads.bytes_per_s is None


def test_requests_that_began_before_the_disk_was_shared_again_tell_nothing(clock: HandClock) -> None:
    """The two writes that were left count neither before the second read nor after it."""
    writes = Queue(clock)
    reads = Queue(clock, Direction.READ, writes.traffic)
    writes.begin(1000, 1000, 1000)
    for _ in range(2):
        reads.begin(500)
        clock.move(1.0)
        reads.end(1)
        clock.move(0.1)
        writes.end(1)
    clock.move(0.1)
    writes.end(1)
    assert writes.bytes_per_s is None
    writes.begin(1000, 1000)
    clock.move(2.0)
    writes.end(2)
    assert writes.bytes_per_s == pytest.approx(1000)


def test_an_end_that_was_noticed_late_can_only_make_the_disk_faster(clock: HandClock) -> None:
    """1000 bytes per second, measured as 100 during a hiccup. An end noticed after 4 s shows: at least 250."""
    queue = Queue(clock)
    queue.begin(500, 500)
    clock.move(10.0)
    queue.end(2)
    assert queue.bytes_per_s == pytest.approx(100)
    for _ in range(60):
        queue.begin(HALF_LIFE_BYTES)
        clock.move(HALF_LIFE_BYTES / 250)
        queue.end(1, is_late=True)
    assert queue.bytes_per_s == pytest.approx(250)
    queue.begin(500, 500)
    clock.move(1000.0)
    queue.end(2, is_late=True)
    assert queue.bytes_per_s == pytest.approx(250)
