"""Training on a GPU under Inductor: equal bits, less memory, and no thread waits for the device unasked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from steps import settled_statistics
from torch import Tensor, nn

from ssdtrain_fx import OffloadConfig, Statistics, backend
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.testing import assert_same_bits, gradients_of, toy_hardware

FAMILIES = ("gpt2", "bert", "t5", "llama", "mixtral", "vit", "resnet", "mamba")
FAST_DISK: Hardware = toy_hardware(disk_bytes_per_s=1e12, device="gpu", kernel_s=1e-3)
HOST_BYTES = 256 << 20

Batch = tuple[Tensor, ...]
Loop = Callable[[Callable[..., Tensor], Sequence[Batch], torch.optim.Optimizer], None]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def ordinary(model: Callable[..., Tensor], batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    sequence = 128 if name in ("vit", "resnet") else 256
    model, make_batch = zoo.build(name, layers=2, hidden=256, batch=8, sequence=sequence, vocab=1024, dropout=0.1)
    generator = torch.Generator().manual_seed(1)
    batches = [
        tuple(value.to("cuda", dtype if value.is_floating_point() else value.dtype) for value in make_batch(generator))
        for _ in range(3)
    ]
    return model.to("cuda", dtype), batches


def train(
    name: str, compiler: Any, dtype: torch.dtype = torch.float32, loop: Loop = ordinary, **compile_options: Any
) -> tuple[dict[str, Tensor], int]:
    """Gradients of the last step, and the peak of the device's memory in it."""
    torch._dynamo.reset()
    model, batches = build(name, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=compiler, dynamic=False, **compile_options)
    loop(compiled, batches, optimizer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loop(compiled, batches, optimizer)
    torch.cuda.synchronize()
    return gradients_of(model), torch.cuda.max_memory_allocated() - before


def compare(
    name: str,
    ssd_dir: str,
    dtype: torch.dtype = torch.float32,
    loop: Loop = ordinary,
    *,
    moves: bool = True,
    **options: Any,
) -> Statistics:
    """Train with and without offloading. Returns what was moved."""
    expected, plain_bytes = train(name, "inductor", dtype, loop)
    before = settled_statistics()
    config = OffloadConfig(
        **{
            "policy": "all",
            "min_tensor_bytes": 0,
            "hardware": FAST_DISK,
            "io": "posix",
            "ssd_dir": ssd_dir,
            "host_budget_bytes": HOST_BYTES,
            **options,
        }
    )
    found, moved_bytes = train(name, backend(config), dtype, loop)
    done = settled_statistics().since(before)
    assert_same_bits(found, expected)
    assert (done.offloads > 0) == moves
    assert not moves or moved_bytes < plain_bytes
    return done


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_everything_is_offloaded(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    compare(name, str(tmp_path), dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_planner_chooses_with_measured_costs(name: str, tmp_path: Any) -> None:
    compare(name, str(tmp_path), torch.bfloat16, policy="auto", max_slowdown=1.0, costs="measured")


def test_the_host_tier(tmp_path: Any) -> None:
    done = compare("gpt2", str(tmp_path), policy="auto", max_slowdown=1.0, recompute=False, hardware=None)
    assert done.host_bytes > 0


def test_the_default_options(tmp_path: Any) -> None:
    expected, _ = train("gpt2", "inductor", torch.bfloat16)
    found, _ = train("gpt2", backend(OffloadConfig(ssd_dir=str(tmp_path))), torch.bfloat16)
    assert_same_bits(found, expected)


def test_checksums(tmp_path: Any) -> None:
    compare("gpt2", str(tmp_path), checksum=True)


def test_kvikio_in_its_compatibility_mode(tmp_path: Any) -> None:
    pytest.importorskip("kvikio")
    compare("gpt2", str(tmp_path), io="kvikio")


def test_accumulated_gradients(tmp_path: Any) -> None:
    def loop(model: Callable[..., Tensor], batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for batch in batches:
            model(*batch).backward()
        optimizer.step()

    compare("gpt2", str(tmp_path), loop=loop)


def test_retain_graph(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functorch_config, "donated_buffer", False)

    def loop(model: Callable[..., Tensor], batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss = model(*batches[0])
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    compare("gpt2", str(tmp_path), loop=loop)


def test_a_full_disk(tmp_path: Any) -> None:
    done = compare("gpt2", str(tmp_path), disk_reserve_bytes=1 << 60, host_budget_bytes=8 << 20, moves=True)
    assert done.kept_bytes > 0


def test_a_step_waits_for_nothing_unasked(tmp_path: Any) -> None:
    """torch raises where an operation makes the host wait for the device."""

    def loop(model: Callable[..., Tensor], batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> None:
        ordinary(model, batches, optimizer)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ordinary(model, batches, optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    compare("gpt2", str(tmp_path), loop=loop)
