import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain_fx.runtime.alignment import ALIGNMENT_BYTES
from ssdtrain_fx.runtime.storage.slots import Slot, SlotAllocator

Calls = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 5 * ALIGNMENT_BYTES)),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("tail"), st.integers(0, 30)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(Calls)
def test_agrees_with_a_map_of_blocks(calls: list[tuple[str, int]]) -> None:
    """The model is a set of used block numbers. A slot must be the lowest run of free blocks that is long enough."""
    slots = SlotAllocator()
    used: set[int] = set()
    live: list[Slot] = []
    for call, number in calls:
        if call == "free" and live:
            slot = live.pop(number % len(live))
            slots.free(slot)
            used -= blocks(slot)
        elif call == "tail":
            until = number * ALIGNMENT_BYTES
            start = max(slots.end_bytes, until // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
            slot_or_none = slots.allocate_tail(until // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES, until)
            assert (slot_or_none is None) == (until <= start)
            if slot_or_none is not None:
                assert slot_or_none == Slot(start, until - start)
                used |= blocks(slot_or_none)
                live.append(slot_or_none)
        elif call == "allocate":
            slot = slots.allocate(number)
            count = -(-number // ALIGNMENT_BYTES)
            first = next(b for b in range(len(used) + 61 * 5) if used.isdisjoint(range(b, b + count)))
            assert slot == Slot(first * ALIGNMENT_BYTES, count * ALIGNMENT_BYTES)
            used |= blocks(slot)
            live.append(slot)
        assert slots.slots_in_use == len(live)
        assert slots.bytes_in_use == len(used) * ALIGNMENT_BYTES
        assert slots.end_bytes == (max(used) + 1 if used else 0) * ALIGNMENT_BYTES
        holes = {block for hole in slots.free_ranges for block in blocks(hole)}
        assert holes == set(range(slots.end_bytes // ALIGNMENT_BYTES)) - used
    for slot in live:
        slots.free(slot)
    assert slots.end_bytes == 0
    assert slots.free_ranges == ()


def blocks(slot: Slot) -> set[int]:
    return set(range(slot.offset_bytes // ALIGNMENT_BYTES, slot.end_bytes // ALIGNMENT_BYTES))


def test_neighbours_merge() -> None:
    slots = SlotAllocator()
    a, b, c, d = (slots.allocate(4096) for _ in range(4))
    slots.free(a)
    slots.free(c)
    assert slots.free_ranges == (a, c)
    slots.free(b)
    assert slots.free_ranges == (Slot(0, 3 * 4096),)
    slots.free(d)
    assert slots.free_ranges == ()


def test_freeing_twice_is_refused() -> None:
    slots = SlotAllocator()
    slot = slots.allocate(1)
    slots.free(slot)
    with pytest.raises(ValueError, match="not in use"):
        slots.free(slot)


def test_an_empty_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        SlotAllocator().allocate(0)
