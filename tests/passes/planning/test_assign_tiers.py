"""Host or SSD: the assignment, compared with all others on small instances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain_fx.passes.planning.assign_tiers import assign_tiers
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval, memory_profile
from ssdtrain_fx.passes.planning.plan import Offload
from ssdtrain_fx.testing import analyse, capture_toy, save_all

POSITIONS = 12
MARKER = 6


def absences(*, sizes: st.SearchStrategy[int], across_marker: bool = False) -> st.SearchStrategy[list[LiveInterval]]:
    """Up to eight storages with the spans in which they are away. With ``across_marker``, every span has ``MARKER``."""
    last_start = MARKER if across_marker else POSITIONS - 1
    places = st.integers(0, last_start).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(max(start, MARKER * across_marker) + 1, POSITIONS))
    )
    drawn = st.lists(st.tuples(places, sizes), max_size=8)
    return drawn.map(
        lambda all_of_them: [
            LiveInterval(storage_idx=idx, start=start, end=end, size_bytes=size_bytes)
            for idx, ((start, end), size_bytes) in enumerate(all_of_them)
        ]
    )


def peak_bytes(held: Sequence[LiveInterval]) -> int:
    return memory_profile(held, POSITIONS).peak_bytes


def bytes_of(held: Sequence[LiveInterval]) -> int:
    return sum(absence.size_bytes for absence in held)


def most_bytes(all_of_them: Sequence[LiveInterval], budget_bytes: int) -> int:
    """The most bytes of any subset that stays within the budget at every position."""
    subsets = (
        subset
        for count in range(len(all_of_them) + 1)
        for subset in itertools.combinations(all_of_them, count)
        if peak_bytes(subset) <= budget_bytes
    )
    return max(map(bytes_of, subsets))


def split(all_of_them: Sequence[LiveInterval], budget_bytes: int) -> tuple[list[LiveInterval], list[LiveInterval]]:
    """The storages on the host, and those on the SSD."""
    tiers = assign_tiers(all_of_them, host_budget_bytes=budget_bytes)
    assert tiers.keys() == {absence.storage_idx for absence in all_of_them}
    on_host = [absence for absence in all_of_them if tiers[absence.storage_idx] == "host"]
    return on_host, [absence for absence in all_of_them if tiers[absence.storage_idx] == "ssd"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(all_of_them=absences(sizes=st.just(8)), budget_bytes=st.integers(0, 40))
def test_of_equal_sizes_none_writes_less(all_of_them: list[LiveInterval], budget_bytes: int) -> None:
    on_host, _ = split(all_of_them, budget_bytes)
    assert peak_bytes(on_host) <= budget_bytes
    assert bytes_of(on_host) == most_bytes(all_of_them, budget_bytes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(all_of_them=absences(sizes=st.integers(0, 9)), budget_bytes=st.integers(0, 30))
def test_the_budget_holds_and_nothing_else_fits(all_of_them: list[LiveInterval], budget_bytes: int) -> None:
    on_host, on_ssd = split(all_of_them, budget_bytes)
    assert peak_bytes(on_host) <= budget_bytes
    for absence in on_ssd:
        assert peak_bytes([*on_host, absence]) > budget_bytes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(all_of_them=absences(sizes=st.integers(1, 9), across_marker=True), budget_bytes=st.integers(0, 30))
def test_soonest_reuse_stays_nearest(all_of_them: list[LiveInterval], budget_bytes: int) -> None:
    """Between forward and backward all storages are away."""
    on_host, on_ssd = split(all_of_them, budget_bytes)
    for far, near in itertools.product(on_ssd, on_host):
        assert far.size_bytes > near.size_bytes or far.end >= near.end
    if on_ssd:
        smallest_bytes = min(absence.size_bytes for absence in on_ssd)
        assert bytes_of(on_host) > budget_bytes - smallest_bytes
        assert bytes_of(on_host) > most_bytes(all_of_them, budget_bytes) - smallest_bytes


def test_of_other_sizes_more_may_be_possible() -> None:
    """The rule is soonest reuse: it puts 1 byte on the host where 8 would fit."""
    small = LiveInterval(storage_idx=0, start=2, end=8, size_bytes=1)
    large = LiveInterval(storage_idx=1, start=1, end=9, size_bytes=8)
    assert assign_tiers([small, large], host_budget_bytes=8) == {0: "host", 1: "ssd"}
    assert most_bytes([small, large], 8) == 8


def test_what_is_preferred_comes_first() -> None:
    """By the rule alone, the host holds what is needed soonest."""
    absences = [LiveInterval(storage_idx=idx, start=idx, end=9 - idx, size_bytes=8) for idx in range(3)]
    assert assign_tiers(absences, host_budget_bytes=8) == {0: "ssd", 1: "ssd", 2: "host"}
    assert assign_tiers(absences, host_budget_bytes=8, preferred={0}) == {0: "host", 1: "ssd", 2: "ssd"}


def test_memory_is_free_again_where_a_storage_is_back() -> None:
    first = LiveInterval(storage_idx=0, start=0, end=4, size_bytes=8)
    second = LiveInterval(storage_idx=1, start=4, end=6, size_bytes=8)
    assert assign_tiers([first, second], host_budget_bytes=8) == {0: "host", 1: "host"}
    assert assign_tiers([], host_budget_bytes=8) == {}


@pytest.mark.parametrize("count", [0, 2, 4])
def test_of_equal_layers_the_last_ones_stay_on_the_host(count: int) -> None:
    """The storages that a plan offloads from the toy with six layers, all of the same size."""
    plan = analyse(capture_toy("deep", partition=save_all), min_tensor_bytes=2048).plan(policy="all", disk=1e9)
    moved: list[LiveInterval] = []
    for idx, saved in enumerate(plan.offloaded):
        decision = saved.decision
        assert isinstance(decision, Offload)
        moved.append(
            LiveInterval(storage_idx=idx, start=decision.offload, end=decision.wait, size_bytes=saved.size_bytes)
        )
    assert len(moved) > 4
    assert {absence.size_bytes for absence in moved} == {2048}
    tiers = assign_tiers(moved, host_budget_bytes=2048 * count)
    on_host = [idx for idx, tier in tiers.items() if tier == "host"]
    assert sorted(on_host) == list(range(len(moved)))[len(moved) - count :]
