"""How long steps compute: what counts, what does not, and who is told when."""

from __future__ import annotations

import pytest

from ssdtrain_fx.runtime import step_clock
from ssdtrain_fx.runtime.step_clock import FIRST_COUNT, LAST_COUNT, WARM_UP_COUNT, StepClock, TimedHalf

FORWARD = TimedHalf("graph", "forward", 1.0, 0.5)
BACKWARD = FORWARD._replace(phase="backward")


class Told:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def add(self, ratio: float) -> None:
        self.ratios.append(ratio)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def clock(told: Told) -> StepClock:
    clock = StepClock()
    clock.watch("graph", told)
    return clock


def run_steps(clock: StepClock, count: int, forward_s: float, backward_s: float) -> None:
    for _ in range(count):
        clock.add(FORWARD, forward_s)
        clock.add(BACKWARD, backward_s)


def test_results_follow_after_8_16_and_32_steps_without_those_that_warm_up(clock: StepClock, told: Told) -> None:
    run_steps(clock, WARM_UP_COUNT, 100.0, 100.0)
    assert told.starts == 1
    run_steps(clock, FIRST_COUNT - 1, 1.0, 2.0)
    assert told.ratios == []
    run_steps(clock, 1, 1.0, 2.0)
    assert told.ratios == [2.5], "both halves, less what the ops take"
    run_steps(clock, 32 - FIRST_COUNT, 1.0, 2.0)
    assert told.ratios == [2.5] * 3
    assert told.starts == 1


def test_most_steps_may_be_disturbed(clock: StepClock, told: Told) -> None:
    run_steps(clock, WARM_UP_COUNT + 2, 1.0, 2.0)
    run_steps(clock, 1, 1.5, 2.5)
    run_steps(clock, 5, 50.0, 70.0)
    assert told.ratios == [3.5]


def test_old_steps_do_not_count(clock: StepClock, told: Told) -> None:
    run_steps(clock, WARM_UP_COUNT + LAST_COUNT, 1.0, 2.0)
    run_steps(clock, LAST_COUNT, 2.0, 4.0)
    assert told.ratios[-1] == 5.5


def test_stalls_do_not_count(clock: StepClock, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def compute(args: list[float]) -> str:
        nonlocal now_s
        now_s += 1.0 + args[0]
        clock.waited_s += args[0]
        return "result"

    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now_s)
    for step in range(WARM_UP_COUNT + FIRST_COUNT):
        assert clock.run(FORWARD, compute, [0.25 * step]) == "result"
        clock.run(BACKWARD, compute, [0.5])
    assert told.ratios == [1.5]


def test_a_step_that_raises_does_not_count(clock: StepClock, told: Told) -> None:
    def fail(args: object) -> None:
        raise MemoryError

    for _ in range(10 * FIRST_COUNT):
        with pytest.raises(MemoryError):
            clock.run(BACKWARD, fail, [])
    assert (told.starts, told.ratios) == (0, [])


def test_other_graphs_and_other_plans_of_a_graph_are_apart(clock: StepClock, told: Told) -> None:
    run_steps(clock, WARM_UP_COUNT + FIRST_COUNT - 1, 1.0, 2.0)
    for half in (FORWARD, BACKWARD):
        for _ in range(FIRST_COUNT):
            clock.add(half._replace(graph="another"), 10.0)
            clock.add(half._replace(roofline_s=2.0), 10.0)
    assert told.ratios == []
    run_steps(clock, 1, 1.0, 2.0)
    assert told.ratios == [2.5]


def test_a_new_watcher_begins_anew(clock: StepClock, told: Told) -> None:
    run_steps(clock, WARM_UP_COUNT + FIRST_COUNT - 1, 1.0, 2.0)
    other = Told()
    clock.watch("graph", other)
    run_steps(clock, WARM_UP_COUNT + FIRST_COUNT, 2.0, 2.0)
    assert (other.starts, other.ratios) == (1, [3.5])
    assert told.ratios == []


def test_no_ratio_without_a_forward_without_kernels_or_below_what_the_ops_should_take(
    clock: StepClock, told: Told
) -> None:
    for _ in range(WARM_UP_COUNT + FIRST_COUNT):
        clock.add(BACKWARD, 1.0)
    for half in (FORWARD._replace(roofline_s=0.0), FORWARD._replace(ops_s=9.0)):
        for _ in range(WARM_UP_COUNT + FIRST_COUNT):
            clock.add(half, 1.0)
            clock.add(half._replace(phase="backward"), 1.0)
    assert told.ratios == []
