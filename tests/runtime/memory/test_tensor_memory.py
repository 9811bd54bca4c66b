"""Memory that is read into from the disk: whole pages, one owner, reused."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import fetch, offload

from ssdtrain_fx.runtime import engine as engine_module
from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.memory.tensor_memory import TensorMemory

MIB = 1 << 20


def allocate(memory: TensorMemory, size: int) -> torch.Tensor:
    return memory.allocate((size // 4,), (1,), torch.float32, size)


ON_THE_HEAP = 1 << 40
"""A limit above the size of every tensor."""


@pytest.mark.parametrize("heap_below_bytes", [0, ON_THE_HEAP])
@pytest.mark.parametrize("lead", [0, 4, 4092])
@pytest.mark.parametrize("size", [4, 4096, 3 * MIB, 4 * MIB + 4])
def test_a_tensor_lies_on_its_pages_as_asked_for_and_can_be_written(
    size: int, lead: int, heap_below_bytes: int
) -> None:
    x = TensorMemory(heap_below_bytes=heap_below_bytes).allocate((size // 4,), (1,), torch.float32, size, lead)
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
    st.sampled_from([0, 2 * MIB, ON_THE_HEAP]),
)
def test_tensors_own_their_pages(steps: list[tuple[int, int]], heap_below_bytes: int) -> None:
    """Each tensor keeps its bytes while others are allocated and freed."""
    memory = TensorMemory(idle_bytes=MIB, heap_below_bytes=heap_below_bytes)
    living: dict[int, torch.Tensor] = {}
    for value, (key, elements) in enumerate(steps):
        living.pop(key, None)
        if value % 7 == 3:
            memory.release_idle()
        lead = value % 1024 * 4
        living[key] = memory.allocate((elements,), (1,), torch.float32, 4 * elements, lead).fill_(float(value))
        pages = [set(range(x.data_ptr() // 4096, (x.data_ptr() + x.nbytes - 1) // 4096 + 1)) for x in living.values()]
        assert len(set().union(*pages)) == sum(map(len, pages))
        values = {key: x[0].item() for key, x in living.items()}
        assert all(torch.equal(x, torch.full_like(x, values[key])) for key, x in living.items())


@pytest.mark.parametrize("lead", [0, 4, 2048, 4092])
@pytest.mark.parametrize("size", [4, 4092, 4096, 4100, MIB])
def test_all_pages_of_a_tensor_on_the_heap_are_its_own(size: int, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk writes whole pages: they must not hold any other data of the heap."""
    taken: list[range] = []

    def storage(size_bytes: int) -> torch.UntypedStorage:
        heap = make_storage(size_bytes)
        taken.append(range(heap.data_ptr(), heap.data_ptr() + size_bytes))
        return heap

    make_storage = torch.UntypedStorage
    monkeypatch.setattr(torch, "UntypedStorage", storage)
    memory = TensorMemory(heap_below_bytes=ON_THE_HEAP)
    tensors = [memory.allocate((size // 4,), (1,), torch.float32, size, lead) for _ in range(8)]
    assert len(taken) == len(tensors)
    for x, owned in zip(tensors, taken, strict=True):
        first_page, end = x.data_ptr() // 4096 * 4096, -(-(x.data_ptr() + size) // 4096) * 4096
        assert owned.start <= first_page and end <= owned.stop


def test_large_tensors_do_not_come_from_the_heap() -> None:
    """On the heap, each would get a separate mapping, which is fresh memory every time."""
    memory = TensorMemory(heap_below_bytes=2 * MIB)
    small, large = allocate(memory, MIB), allocate(memory, 2 * MIB)
    del small
    assert memory.idle_bytes == 0
    del large
    assert memory.idle_bytes == 2 * MIB


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


def test_an_allocation_may_allow_less_to_lie_idle() -> None:
    memory = TensorMemory()
    tensors = [allocate(memory, 4 * MIB) for _ in range(5)]
    del tensors[1:]
    assert memory.idle_bytes == 16 * MIB
    second = memory.allocate((MIB,), (1,), torch.float32, 4 * MIB, idle_bytes=6 * MIB)
    assert memory.idle_bytes == 4 * MIB
    del second
    tensors += [allocate(memory, 4 * MIB) for _ in range(4)]
    del tensors[1:]
    tensors.append(allocate(memory, 4 * MIB))
    assert memory.idle_bytes == 12 * MIB, "the limit was for one allocation"


def test_a_tensor_on_the_heap_leaves_little_idle_too() -> None:
    memory = TensorMemory(heap_below_bytes=2 * MIB)
    large = allocate(memory, 4 * MIB)
    del large
    assert memory.idle_bytes == 4 * MIB
    small = memory.allocate([MIB // 4], [1], torch.float32, MIB, idle_bytes=0)
    assert memory.uses_heap(small.nbytes)
    assert memory.idle_bytes == 0


@pytest.fixture
def no_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "prepare_heap", lambda: 0)


@pytest.mark.usefixtures("no_heap")
@pytest.mark.parametrize("io", ["posix", "aio"])
def test_reload_memory_lies_idle_until_the_next_forward_begins(ssd_dir: str, io: IOPath) -> None:
    """Several backwards may follow one another; the tensors that forward saves need the memory."""
    with Engine(EngineConfig(ssd_dir=ssd_dir, io=io)) as engine:
        x = torch.randn(MIB)
        token = offload(engine, x.clone())
        assert torch.equal(fetch(engine, token, x), x)
        idle_bytes = engine.statistics().idle_bytes
        assert idle_bytes >= 4 * MIB
        second = offload(engine, x.clone())
        assert engine.statistics().idle_bytes == idle_bytes
        first = offload(engine, x.clone(), first=True)
        assert engine.statistics().idle_bytes == 0
        assert torch.equal(fetch(engine, first, x), fetch(engine, second, x))


@pytest.mark.parametrize("io", ["posix", "aio"])
def test_reloads_take_what_the_heap_keeps(ssd_dir: str, io: IOPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "prepare_heap", lambda: 32 * MIB)
    with Engine(EngineConfig(ssd_dir=ssd_dir, io=io)) as engine:
        x = torch.randn(MIB)
        for _ in range(3):
            assert torch.equal(fetch(engine, offload(engine, x.clone()), x), x)
            assert engine.statistics().idle_bytes == 0


def test_asking_for_aio_is_enough_to_get_it(ssd_dir: str) -> None:
    with Engine(EngineConfig(ssd_dir=ssd_dir, io="aio")) as engine:
        x = torch.randn(3 * MIB // 4)
        token = engine.release(engine.offload(x, "x"), x)
        y = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
        engine.wait(y, token)
        assert torch.equal(x, y)
        if "O_DIRECT" in engine.statistics().io_path:
            assert engine.statistics().io_path == "posix O_DIRECT, native AIO"


@pytest.mark.usefixtures("no_heap")
@pytest.mark.parametrize("io", ["posix", "aio"])
def test_a_reload_near_the_peak_leaves_little_idle(ssd_dir: str, io: IOPath) -> None:
    with Engine(EngineConfig(ssd_dir=ssd_dir, io=io)) as engine:
        x = torch.randn(MIB)
        tokens = [offload(engine, x.clone()) for _ in range(3)]
        tensors = [fetch(engine, token, x) for token in tokens[:2]]
        del tensors
        assert engine.statistics().idle_bytes >= 8 * MIB
        y = engine.reload(tokens[2], x.shape, x.stride(), x.dtype, x.device, 2 * MIB)
        assert engine.statistics().idle_bytes <= 2 * MIB
        engine.wait(y, tokens[2])
        assert torch.equal(y, x)
