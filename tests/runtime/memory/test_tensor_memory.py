"""Memory that is read into from the disk: whole pages, one owner, reused."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import fetch, offload

from ssdtrain_fx._torch_private.arena import ArenaLibrary
from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.memory.step_memory import step_memory
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory

MIB = 1 << 20
ALLOCATED = 0
"""The first number that the arena describes itself by."""


def allocate(memory: TensorMemory, size: int) -> torch.Tensor:
    return memory.allocate((size // 4,), (1,), torch.float32, size)


@contextlib.contextmanager
def compiled_code() -> Iterator[ArenaLibrary]:
    """What runs inside takes its memory as compiled code does: from the arena."""
    library = step_memory.library
    if library is None:
        pytest.skip("there is no arena here; a warning has said why")
    library.enter(0)
    try:
        yield library
    finally:
        library.leave(False)


def inside(is_compiled: bool) -> contextlib.AbstractContextManager[object]:
    return compiled_code() if is_compiled else contextlib.nullcontext()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("lead", [0, 4, 4092])
@pytest.mark.parametrize("size", [4, 4096, 3 * MIB, 4 * MIB + 4])
def test_a_tensor_lies_on_its_pages_as_asked_for_and_can_be_written(size: int, lead: int, is_compiled: bool) -> None:
    with inside(is_compiled):
        x = TensorMemory().allocate((size // 4,), (1,), torch.float32, size, lead)
    assert (x.data_ptr() + lead) % 4096 == 0
    assert x.storage_offset() == 0 and x.untyped_storage().nbytes() == size
    assert torch.equal(x.fill_(2.0), torch.full((size // 4,), 2.0))


def test_memory_is_used_again_when_the_last_view_has_died() -> None:
    memory = TensorMemory()
    x = allocate(memory, 4 * MIB)
    address, view = x.data_ptr(), x[1:]
    del x
    other = allocate(memory, 4 * MIB)
    assert other.data_ptr() != address, "a view still uses it"
    del view
    assert allocate(memory, 4 * MIB).data_ptr() == address


def test_memory_of_one_size_serves_others_that_nearly_fill_it() -> None:
    memory = TensorMemory()
    x, y = allocate(memory, 4 * MIB), allocate(memory, 8 * MIB)
    first, second = x.data_ptr(), y.data_ptr()
    del x, y
    assert allocate(memory, 7 * MIB).data_ptr() == second
    assert allocate(memory, 4 * MIB - 4).data_ptr() == first
    assert allocate(memory, 2 * MIB).data_ptr() not in (first, second)


def test_of_memory_of_one_size_what_was_used_last_is_used_again() -> None:
    memory = TensorMemory()
    x, y = allocate(memory, 4 * MIB), allocate(memory, 4 * MIB)
    del x
    assert memory.idle_bytes == 4 * MIB
    last = y.data_ptr()
    del y
    assert allocate(memory, 4 * MIB).data_ptr() == last


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3 * MIB // 4)), max_size=40),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_tensors_own_their_pages(steps: list[tuple[int, int]], compiled: list[bool]) -> None:
    """Each tensor keeps its bytes while others are allocated and freed, inside and outside of compiled code."""
    memory = TensorMemory(idle_bytes=MIB)
    living: dict[int, torch.Tensor] = {}
    for value, ((key, elements), is_compiled) in enumerate(zip(steps, compiled, strict=False)):
        living.pop(key, None)
        if value % 7 == 3:
            memory.release_idle()
        lead = value % 1024 * 4
        with inside(is_compiled):
            living[key] = memory.allocate((elements,), (1,), torch.float32, 4 * elements, lead).fill_(float(value))
        pages = [set(range(x.data_ptr() // 4096, (x.data_ptr() + x.nbytes - 1) // 4096 + 1)) for x in living.values()]
        assert len(set().union(*pages)) == sum(map(len, pages))
        values = {key: x[0].item() for key, x in living.items()}
        assert all(torch.equal(x, torch.full_like(x, values[key])) for key, x in living.items())


def resident_bytes(places: list[int]) -> int:
    """Bytes of physical memory in the runs of 4 MiB at these addresses."""
    pages = (ctypes.c_ubyte * 1024)()
    mincore = ctypes.CDLL(None).mincore

    def is_resident(place: int) -> bool:
        return mincore(ctypes.c_void_p(place), ctypes.c_size_t(4 * MIB), pages) == 0 and all(pages)

    return 4 * MIB * sum(map(is_resident, places))


def test_unused_reload_memory_is_bounded_and_returned_to_the_system() -> None:
    """Also between tensors that are still alive."""
    memory = TensorMemory(idle_bytes=8 * MIB)
    tensors = [allocate(memory, 4 * MIB).fill_(1.0) for _ in range(6)]
    places = [x.data_ptr() for x in tensors]
    assert resident_bytes(places) == 24 * MIB
    del tensors[1:5]
    assert allocate(memory, 4 * MIB).data_ptr() in places
    assert memory.idle_bytes == 12 * MIB, "4 MiB of it freed since the allocation"
    assert resident_bytes(places) == 20 * MIB
    memory.release_idle()
    assert memory.idle_bytes == 0
    assert resident_bytes(places) == 8 * MIB
    assert all(torch.equal(x, torch.ones(MIB)) for x in tensors)


@pytest.mark.parametrize("io", ["posix", "aio"])
def test_outside_of_compiled_code_reload_memory_lies_idle_for_the_next_reload(ssd_dir: str, io: IOPath) -> None:
    with Engine(EngineConfig(ssd_dir=ssd_dir, io=io)) as engine:
        x = torch.randn(MIB)
        source = x.clone()  # for both: where a page begins in it decides how much memory a reload needs
        token = offload(engine, source)
        assert torch.equal(fetch(engine, token, x), x)
        idle_bytes = engine.statistics().idle_bytes
        assert idle_bytes >= 4 * MIB
        token = offload(engine, source.copy_(x))
        y = fetch(engine, token, x)
        assert engine.statistics().idle_bytes < idle_bytes
        assert torch.equal(y, x)


def test_asking_for_aio_is_enough_to_get_it(ssd_dir: str) -> None:
    with Engine(EngineConfig(ssd_dir=ssd_dir, io="aio")) as engine:
        x = torch.randn(3 * MIB // 4)
        token = engine.release(engine.offload(x, "x"), x)
        y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
        engine.wait(y, token)
        assert torch.equal(x, y)
        if "O_DIRECT" in engine.statistics().io_path:
            assert engine.statistics().io_path == "posix O_DIRECT, native AIO"
