"""Memory that the disk reads into: whole pages, one owner, used again."""

from __future__ import annotations

import pytest
import torch

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.tensor_memory import TensorMemory

MIB = 1 << 20


def allocate(memory: TensorMemory, size: int) -> torch.Tensor:
    return memory.allocate((size // 4,), (1,), torch.float32, size)


@pytest.mark.parametrize("size", [4, 4096, 3 * MIB, 4 * MIB + 4])
def test_a_tensor_starts_on_a_page_and_can_be_written(size: int) -> None:
    x = allocate(TensorMemory(), size)
    assert x.data_ptr() % 4096 == 0
    assert x.storage_offset() == 0 and x.untyped_storage().nbytes() == size
    assert torch.equal(x.fill_(2.0), torch.full((size // 4,), 2.0))


def test_memory_is_used_again_when_the_last_view_has_died() -> None:
    memory = TensorMemory()
    x = allocate(memory, 4 * MIB)
    address, view = x.data_ptr(), x[1:]
    del x
    other = allocate(memory, 4 * MIB)
    assert other.data_ptr() != address, "a view still lives on it"
    del view
    assert allocate(memory, 4 * MIB).data_ptr() == address


def test_what_lies_idle_is_bounded() -> None:
    memory = TensorMemory(idle_bytes=8 * MIB)
    tensors = [allocate(memory, 4 * MIB) for _ in range(5)]
    tensors.clear()
    del tensors
    keep = allocate(memory, 4 * MIB)
    assert len(memory._idle) == 1  # pyright: ignore[reportPrivateUsage]
    memory.release_idle()
    assert not memory._idle  # pyright: ignore[reportPrivateUsage]
    keep.zero_()


def test_asking_for_aio_is_enough_to_get_it(ssd_dir: str) -> None:
    with Engine(EngineConfig(ssd_dir=ssd_dir, io="aio")) as engine:
        x = torch.randn(3 * MIB // 4)
        token = engine.release(engine.offload(x, "x"), x)
        y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
        engine.wait(y, token)
        assert torch.equal(x, y)
        if "O_DIRECT" in engine.statistics().io_path:
            assert engine.statistics().io_path == "posix O_DIRECT, native AIO"
