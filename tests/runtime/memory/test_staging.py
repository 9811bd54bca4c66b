import re
from pathlib import Path

import pytest

from ssdtrain_fx.runtime.memory.staging import StagingPool, pinned_chunk_bytes


def test_buffers_are_aligned_warm_first_and_bounded() -> None:
    pool = StagingPool(3 * 8192, chunk_bytes=8192)
    assert (pool.available, pool.size_bytes) == (3, 0)
    first, second = pool.acquire(), pool.acquire()
    assert first is not None
    assert second is not None
    assert first.address % 4096 == second.address % 4096 == 0
    assert (len(first.view), pool.available, pool.size_bytes) == (8192, 1, 16384)
    pool.drop_user(first)
    assert pool.acquire() is first
    assert pool.acquire() is not None
    assert pool.acquire() is None
    assert pool.available == 0


def test_a_buffer_is_free_when_its_last_user_is_gone() -> None:
    pool = StagingPool(0, chunk_bytes=4096)
    assert pool.available == 2  # the minimum
    buffer = pool.acquire()
    assert buffer is not None
    buffer.users += 1
    pool.drop_user(buffer)
    assert pool.available == 1
    pool.drop_user(buffer)
    assert pool.available == 2


def test_close_returns_the_buffers() -> None:
    pool = StagingPool(0, chunk_bytes=4096)
    buffer = pool.acquire()
    assert pool.close() == [buffer]
    assert pool.size_bytes == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system has no /proc")
def test_a_forked_child_does_not_share_the_pages() -> None:
    """Hazard: copy-on-write during a direct read. The flag "dc" means "do not copy on fork"."""
    buffer = StagingPool(0, chunk_bytes=4096).acquire()
    assert buffer is not None
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    [flags] = [
        mapping.split("VmFlags:")[1].split()
        for mapping in mappings
        if int(mapping.split("-")[0], 16) <= buffer.address < int(mapping.split()[0].split("-")[1], 16)
    ]
    assert "dc" in flags


@pytest.mark.parametrize(
    ("budget_mib", "chunk_mib"), [(1, 2), (255, 2), (256, 4), (511, 4), (512, 8), (1024, 8), (1 << 20, 8)]
)
def test_pinned_chunks_are_large_where_there_are_many(budget_mib: int, chunk_mib: int) -> None:
    assert pinned_chunk_bytes(budget_mib << 20) == chunk_mib << 20
