"""Reloaded tensors equal the offloaded ones: every dtype, many layouts, any layout at reload. The oracle is a clone."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import fetch, no_aio, offload
from torch import Tensor

from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.aio.kernel import KernelAio
from ssdtrain_fx.runtime.lanes.call_sites import CallSite
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.sites import Site

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


LANES = {"aio": KernelAio, "threads": no_aio}


@pytest.fixture(scope="module", params=LANES)
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine on a real file; chunks are small, so that most tensors have several."""
    config = EngineConfig(ssd_dir=str(tmp_path_factory.mktemp("spill")), checksum=True)
    with Engine(config, Parts(open_aio=LANES[request.param], chunk_bytes=4096)) as engine:
        yield engine


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x``, for comparisons that include the sign of zero and the payload of NaN."""
    return (
        x.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
    )


def random_tensor(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(size) < 0.5
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*size, item_bytes), dtype=torch.uint8).view(dtype).reshape(size)


def check_round_trip(engine: Engine, x: Tensor, stride: tuple[int, ...] | None = None) -> None:
    expected, like = bits(x), torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    token = engine.release(engine.offload(x, "x"), x)
    y = fetch(engine, token, like, stride)
    assert y.stride() == (like.stride() if stride is None else stride)
    assert torch.equal(bits(y), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(engine: Engine, dtype: torch.dtype) -> None:
    x = random_tensor(7, 1300, dtype=dtype)
    check_round_trip(engine, x)
    check_round_trip(engine, x.t())
    check_round_trip(engine, x[3])
    check_round_trip(engine, x.t(), (1300, 1))


LAYOUTS = {
    "scalar": lambda: torch.tensor(3.5),
    "scalar from a bigger storage": lambda: random_tensor(50)[17],
    "empty": lambda: torch.empty(0, 3),
    "one element": lambda: random_tensor(1, 1, 1),
    "storage offset": lambda: random_tensor(5000)[13:4000],
    "transposed": lambda: random_tensor(60, 70).t(),
    "channels last": lambda: random_tensor(2, 3, 20, 20).to(memory_format=torch.channels_last),
    "small holes": lambda: random_tensor(40, 64)[:, :50],
    "large holes": lambda: random_tensor(40, 64)[:, :5],
    "q of qkv": lambda: random_tensor(4, 64, 3 * 6 * 8)[..., :48].view(4, 64, 6, 8).transpose(1, 2),
    "k of qkv": lambda: random_tensor(4, 64, 3 * 6 * 8)[..., 48:96].view(4, 64, 6, 8).transpose(1, 2),
    "expanded": lambda: random_tensor(40, 1, 30).expand(40, 50, 30),
    "overlapping": lambda: random_tensor(500).as_strided((40, 10), (5, 1)),
    "interleaved": lambda: random_tensor(500).as_strided((2, 3), (3, 2)),
    "every other": lambda: random_tensor(3000)[::2],
    "size 1 with an odd stride": lambda: random_tensor(600).as_strided((20, 1, 30), (30, 7, 1)),
    "lazily conjugated": lambda: random_tensor(30, 40, dtype=torch.complex64).conj(),
    "lazily negated": lambda: random_tensor(30, 40, dtype=torch.complex64).conj().imag,
    "needs gradients": lambda: random_tensor(100).nan_to_num().requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(engine: Engine, layout: str) -> None:
    x = LAYOUTS[layout]()
    check_round_trip(engine, x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_come_back_dense(engine: Engine, layout: str) -> None:
    x = LAYOUTS[layout]()
    check_round_trip(engine, x, torch.empty(x.size()).stride())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.lists(st.integers(1, 9), max_size=4))
def test_any_layout_out_and_any_other_back(engine: Engine, data: st.DataObject, size: list[int]) -> None:
    """The strides in the graph are not always those at run time; the values must still be correct."""

    def some_layout() -> Tensor:
        order = data.draw(st.permutations(range(len(size))))
        padded = [length + data.draw(st.integers(0, 2)) for length in size]
        storage = random_tensor(*(padded[dim] for dim in order))
        x = storage.permute([order.index(dim) for dim in range(len(size))])
        for dim, length in enumerate(size):
            x = x.narrow(dim, padded[dim] - length, length)
        return x

    check_round_trip(engine, some_layout(), some_layout().stride())


def test_hazard_9_dense_out_in_one_order_and_back_in_another(engine: Engine) -> None:
    """Hazard: the graph says (32, 128, 1), the tensor has (1024, 1, 32); both are dense."""
    x = random_tensor(4, 32, 32).transpose(1, 2)
    assert x.stride() == (1024, 1, 32)
    check_round_trip(engine, x, (32, 128, 1))


@pytest.mark.parametrize(
    ("layout", "elements"),
    [("small holes", 39 * 64 + 50), ("large holes", 40 * 5), ("expanded", 40 * 30), ("channels last", 2 * 3 * 20 * 20)],
)
def test_how_much_is_moved(engine: Engine, layout: str, elements: int) -> None:
    """Small holes are moved too, large ones are not, and repeated elements are moved once."""
    engine.wait_until_idle()
    before = engine.statistics()
    token = offload_as_it_is(engine, LAYOUTS[layout]())
    engine.wait_until_idle()
    assert engine.statistics().since(before).bytes_written == 4 * elements
    del token


def offload_as_it_is(engine: Engine, x: Tensor) -> Tensor:
    return engine.release(engine.offload(x, "x"), x)


def test_the_memory_may_be_overwritten_after_release(engine: Engine) -> None:
    """Hazard: Inductor reuses buffers in place, even if there are other references."""
    for size in (10, 100_000):
        x = random_tensor(size, dtype=torch.int64)
        expected = x.clone()
        assert torch.equal(fetch(engine, offload(engine, x), expected), expected)


def test_several_reloads_and_several_waits(engine: Engine) -> None:
    x = random_tensor(20_000, dtype=torch.int32)
    expected = x.clone()
    token = offload(engine, x)
    first = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
    second = engine.reload(token, x.size(), x.stride(), x.dtype, x.device)
    for y in (second, first, first, second):
        engine.wait(y, token)
        assert torch.equal(y, expected)


@pytest.mark.parametrize("backward", [False, True])
def test_many_tensors_in_either_order(engine: Engine, backward: bool) -> None:
    originals = [random_tensor(size, dtype=torch.int16) for size in range(1, 40_000, 2999)]
    tokens = [offload(engine, x.clone(), f"x{index}") for index, x in enumerate(originals)]
    pairs = list(zip(tokens, originals, strict=True))
    for token, original in reversed(pairs) if backward else pairs:
        assert torch.equal(fetch(engine, token, original), original)


def test_threads_do_not_meet(engine: Engine) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for round_number in range(15):
                original = torch.full((seed * 1000 + 17,), seed * 1000 + round_number)
                token = offload(engine, original.clone())
                assert torch.equal(fetch(engine, token, original), original)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_backward_on_another_thread(engine: Engine) -> None:
    x = random_tensor(9000, dtype=torch.int64)
    expected = x.clone()
    token = offload(engine, x)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(fetch(engine, token, expected)))
    thread.start()
    thread.join(60)
    assert torch.equal(results[0], expected)


def test_disk_use_is_bounded_over_200_rounds(tmp_path: Path) -> None:
    with Engine(EngineConfig(ssd_dir=str(tmp_path)), Parts(chunk_bytes=1 << 16)) as engine:
        for _ in range(200):
            tokens = [offload(engine, random_tensor(size, dtype=torch.int8)) for size in (70_000, 3, 130_000)]
            engine.wait_until_idle()
            assert engine.statistics().slot_bytes_in_use == 73728 + 4096 + 131072
            assert engine._ledger.slots.end_bytes == 73728 + 4096 + 131072
            del tokens
        statistics = engine.statistics()
        assert statistics.slots_in_use == statistics.slot_bytes_in_use == statistics.in_flight_bytes == 0
        assert statistics.offloads == 600


class Interleaved(torch.Tensor):
    """A tensor during whose inspection another thread offloads another tensor at the same call site."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    other: Callable[[], object]

    def is_neg(self) -> bool:
        self.other()
        return False


def test_threads_offload_other_shapes_at_the_same_call_site(tmp_path: Path) -> None:
    with Engine(EngineConfig(ssd_dir=str(tmp_path))) as engine:
        call_site = CallSite(Site(name="x"))
        original = torch.arange(5000)
        owners = [engine.offload(original, call_site)]
        x = original.clone().as_subclass(Interleaved)
        x.other = lambda: owners.append(engine.offload(torch.arange(10), call_site))
        owner = engine.offload(x, call_site)
        assert len(owners) > 1
        engine.release(owner, x)
        y = engine.reload(owner, original.size())
        engine.wait(y, owner)
        assert torch.equal(y, original)
