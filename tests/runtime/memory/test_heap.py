"""The memory that tensors are written from: it gets huge pages, and the heap keeps it."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runtime_fakes import offload

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.memory import huge_pages
from ssdtrain_fx.runtime.memory.heap import _is_set_up
from ssdtrain_fx.runtime.memory.huge_pages import GRANT_S, MADV_COLLAPSE, MAPS, SETTING, SHARE, HugePages
from ssdtrain_fx.runtime.memory.staging import HUGE_PAGE_BYTES


def huge_bytes(address: int) -> int:
    """Bytes on huge pages in the mapping around ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.skipif("[never]" in SETTING.read_text(), reason="this system has huge pages switched off")
def test_whole_huge_pages_within_a_tensor_become_one_page_each() -> None:
    memory = mmap.mmap(-1, 5 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(memory, dtype=torch.uint8)
    x.copy_(torch.arange(x.numel()).to(torch.uint8))
    expected = x.clone()
    first = -x.data_ptr() % HUGE_PAGE_BYTES
    pages = HugePages()
    pages.put_under(x.data_ptr() + first + 4096, 3 * HUGE_PAGE_BYTES)  # contains two whole ones
    assert huge_bytes(x.data_ptr() + first + HUGE_PAGE_BYTES) == 2 * HUGE_PAGE_BYTES
    pages.put_under(x.data_ptr() + first, HUGE_PAGE_BYTES)
    assert huge_bytes(x.data_ptr() + first + HUGE_PAGE_BYTES) == 3 * HUGE_PAGE_BYTES
    assert torch.equal(x, expected)


class SlowKernel:
    """A kernel that takes a second of its clock for every place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.collapsed: list[int] = []
        self.advised: list[tuple[int, int]] = []
        monkeypatch.setattr(huge_pages, "_find_madvise", lambda: self._madvise)
        monkeypatch.setattr(huge_pages, "_are_allowed", lambda setting: True)

    def clock(self) -> float:
        return self.now_s

    def _madvise(self, address: int, length: int, advice: int) -> int:
        if advice == MADV_COLLAPSE:
            self.collapsed.append(address)
            self.now_s += 1.0
        else:
            self.advised.append((address, length))
        return 0


def test_huge_pages_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SlowKernel(monkeypatch)
    pages = HugePages(clock=kernel.clock)
    pages.put_under(0, 100 * HUGE_PAGE_BYTES)
    assert len(kernel.collapsed) == GRANT_S + 1
    kernel.now_s += 1 / SHARE
    pages.put_under(0, 100 * HUGE_PAGE_BYTES)
    assert len(kernel.collapsed) == GRANT_S + 2
    for _ in range(100):
        kernel.now_s += 1 / SHARE
        pages.put_under(0, 100 * HUGE_PAGE_BYTES)
    assert len(kernel.collapsed) == 100, "every place is tried in the end, and none twice"


def test_what_the_first_forward_leaves_of_the_grant_goes_to_the_heap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = SlowKernel(monkeypatch)
    maps = tmp_path / "maps"
    first = 1000 * HUGE_PAGE_BYTES
    maps.write_text(
        f"{first + 1:x}-{first + 100 * HUGE_PAGE_BYTES:x} rw-p 00000000 00:00 0          [heap]\n"
        f"{first * 2:x}-{first * 3:x} rw-p 00000000 00:00 0 \n"
    )
    pages = HugePages(maps=maps, clock=kernel.clock)
    pages.put_under(0, HUGE_PAGE_BYTES)
    assert pages.has_grant
    pages.put_under_heap()
    assert kernel.collapsed == [0, first + HUGE_PAGE_BYTES, first + 2 * HUGE_PAGE_BYTES], (
        "one place more than there is time for"
    )
    assert (first + HUGE_PAGE_BYTES, 99 * HUGE_PAGE_BYTES) in kernel.advised, "pages touched later are huge at once"
    assert not pages.has_grant
    pages.put_under(0, 100 * HUGE_PAGE_BYTES)
    assert len(kernel.collapsed) == 4, "a new budget: one place now, and the rest when there is time"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not have this heap")
def test_the_heap_of_this_process_is_found() -> None:
    end_of_heap = ctypes.CDLL(None)["sbrk"]
    end_of_heap.restype = ctypes.c_void_p
    address = end_of_heap(0)
    assert any(start < address <= end for start, end in huge_pages._heap(MAPS))


@pytest.mark.parametrize("setting", ["always madvise [never]", None])
def test_a_system_without_huge_pages_is_left_alone(tmp_path: Path, setting: str | None) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    x = torch.zeros(5 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    before = huge_bytes(x.data_ptr())
    HugePages(file).put_under(x.data_ptr(), x.nbytes)
    assert huge_bytes(x.data_ptr()) == before


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on"}, False),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on:glibc.malloc.trim_threshold=1"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False),  # does not set how much is kept
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "1"}, True),
        ({"MALLOC_CONF": "thp:always"}, False),  # a setting of another heap
    ],
)
def test_what_the_user_set_stays(environment: dict[str, str], expected: bool) -> None:
    assert _is_set_up(environment) is expected


KEEPS = """
import ctypes, platform, resource
from ssdtrain_fx.runtime.memory.heap import HEAP_BELOW_BYTES, prepare_heap
import torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(3 << 20) for _ in range(8)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = prepare_heap()
assert kept == (HEAP_BELOW_BYTES if platform.libc_ver()[0] == "glibc" else 0), kept
for _ in range(4):  # until the heap has grown to its size
    last = faults()
assert not kept or last < 1000, "96 MiB were returned to the system: 24,576 pages"
"""


def test_the_heap_keeps_what_tensors_leave() -> None:
    environment = {"PATH": "/usr/bin:/bin"}  # without the heap's variables
    done = subprocess.run(
        [sys.executable, "-c", KEEPS], env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupt_while_the_heap_is_prepared_stops_the_engine(
    ssd_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread may wait forever for the interrupted reload."""

    def interrupt(pages: HugePages) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HugePages, "put_under_heap", interrupt)
    with Engine(EngineConfig(ssd_dir=ssd_dir)) as engine:
        x = torch.randn(1 << 20)
        token = offload(engine, x.clone())
        if "native AIO" not in engine.statistics().io_path:
            pytest.skip("this system has no native AIO")
        with pytest.raises(KeyboardInterrupt):
            engine.reload(token, x.shape, x.stride(), x.dtype, x.device)
        with pytest.raises(InternalError, match="stopped"):
            engine.reload(token, x.shape, x.stride(), x.dtype, x.device)
