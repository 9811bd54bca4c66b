"""The peak of a step is the peak since its reset, and a course is not longer than what it samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssdtrain_fx.studies import process_memory
from ssdtrain_fx.studies.process_memory import Course, peak_bytes, reset_peak, return_unused_memory, used_bytes

BLOCK_BYTES = 256 << 20
SMALL_BYTES = 32 << 20


def touch(size_bytes: int) -> None:
    torch.ones(size_bytes, dtype=torch.uint8)


def test_a_peak_is_that_since_its_reset() -> None:
    touch(BLOCK_BYTES)
    return_unused_memory()  # what earlier tests left would be given back at any time
    if not reset_peak("cpu"):
        pytest.skip("this system does not let a process reset its peak")
    began_bytes = used_bytes("cpu")
    touch(SMALL_BYTES)
    grown_bytes = peak_bytes("cpu") - began_bytes
    assert 0.5 * SMALL_BYTES < grown_bytes < BLOCK_BYTES / 2
    touch(BLOCK_BYTES)
    assert peak_bytes("cpu") - began_bytes > BLOCK_BYTES / 2


def test_a_peak_that_cannot_be_reset_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    touch(BLOCK_BYTES)
    highest_bytes = peak_bytes("cpu")
    assert not reset_peak("cpu")
    assert peak_bytes("cpu") >= highest_bytes


def test_unused_memory_is_given_back_before_the_rest_is_read() -> None:
    blocks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(SMALL_BYTES >> 16)]  # small: on the heap
    full_bytes = used_bytes("cpu")
    last = blocks[-1]
    blocks.clear()  # the last one keeps the end of the heap in use
    return_unused_memory()
    assert full_bytes - used_bytes("cpu") > SMALL_BYTES / 2
    assert last[0] == 1


def test_a_course_begins_and_ends_with_the_block() -> None:
    with Course("cpu") as course:
        touch(SMALL_BYTES)
    times_ms = [ms for ms, _ in course.samples]
    assert len(times_ms) >= 2
    assert times_ms == sorted(times_ms) and times_ms[0] < 1000
    assert all(size > 0 for _, size in course.samples)
