"""Memory at an address, without a ctypes type per size."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from runtime_fakes import MemoryFile, each_file, engine_on, fetch, offload

from ssdtrain_fx.runtime.memory.raw_memory import bytes_at

file = each_file("aio", "threads")


def test_bytes_at_an_address_can_be_read_and_written() -> None:
    x = torch.arange(8, dtype=torch.uint8)
    view = bytes_at(x.data_ptr() + 2, 3)
    assert (view.nbytes, view.format, view.readonly) == (3, "B", False)
    assert view.tobytes() == bytes([2, 3, 4])
    view[0] = 9
    assert x[2] == 9


def array_type_count() -> int:
    gc.collect()
    return len(ctypes.Array.__subclasses__())


@pytest.mark.parametrize("checksum", [False, True])
def test_many_sizes_leave_no_types_behind(file: MemoryFile, tmp_path: Path, checksum: bool) -> None:
    with engine_on(file, str(tmp_path), checksum=checksum) as engine:
        before = array_type_count()
        for size in range(1, 40):
            x = torch.arange(size)
            assert torch.equal(fetch(engine, offload(engine, x), x), torch.arange(size))
        assert array_type_count() == before
