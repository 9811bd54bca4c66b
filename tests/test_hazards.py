"""Silent corruptions that have really happened, each with a separate test. See also test_numerics.py."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

import pytest
import torch
from steps import FAST_DISK, counted, generated_code, settled_statistics, small_model
from torch import Tensor, nn

from ssdtrain_fx import OffloadConfig, backend
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.runtime.book.admission import Admission
from ssdtrain_fx.runtime.memory.layout import copy_with_layout
from ssdtrain_fx.runtime.policy import residents
from ssdtrain_fx.testing import assert_same_bits, train

pytestmark = pytest.mark.usefixtures("one_thread")

TIMELY = OffloadConfig(
    min_tensor_bytes=0,
    hardware=dataclasses.replace(FAST_DISK, kernel_s=0.0, flops_per_s={"float32": 2e9}, read=Channel(bytes_per_s=5e7)),
)
"""Only matrix products take time, 1 ms each. Reading an activation of 64 KiB takes 1.3 ms and is hidden by two of them,
because Inductor may move one product when it turns mm and add into addmm."""
EVERYTHING = OffloadConfig(policy="all", min_tensor_bytes=0)


class Blocks(nn.Module):
    """Six blocks of two matrix products: enough anchors to show the order, and all activations have the same size."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + second(torch.nn.functional.gelu(first(x)))
        return x.square().mean()


def calls(code: str) -> list[tuple[str, list[str]]]:
    """The calls in the generated ``call`` function, in order: name of the function and its arguments as text."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            for statement in node.body:
                value = getattr(statement, "value", None)
                if isinstance(value, ast.Call):
                    found.append((ast.unparse(value.func), [ast.unparse(argument) for argument in value.args]))
    return found


OFFLOAD, RELEASE, RELOAD, WAIT = (f"ssdtrain_{name}" for name in ("offload", "release", "reload", "wait"))
PRODUCTS = ("extern_kernels.mm", "extern_kernels.addmm")


def test_hazard_1_memory_is_reused_only_after_the_release() -> None:
    """Inductor reuses the memory of a dead tensor, so an offloaded tensor must count as alive until its release."""
    forward, _ = generated_code(Blocks(), torch.randn(16, 64), compiler=EVERYTHING)
    lines = forward.splitlines()
    for name, arguments in calls(forward):
        if name == OFFLOAD:
            moved = re.match(r"\w+|reinterpret_tensor\((\w+)", arguments[0])
            assert moved is not None
            buffer = moved.group(1) or moved.group(0)
            release = next(number for number, line in enumerate(lines) if RELEASE in line and f"{buffer}" in line)
            deaths = [number for number, line in enumerate(lines) if re.search(rf"\bdel {buffer}\b", line)]
            assert all(number > release for number in deaths), f"{buffer} dies before its release"
    assert any(name == OFFLOAD for name, _ in calls(forward))


@pytest.mark.parametrize("model", ["blocks", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_hazard_1_what_stays_is_given_to_no_other_kernel(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is too slow for any offload: the engine keeps every tensor in its memory while kernels go on writing."""
    monkeypatch.setattr(Admission, "admits", lambda self, stall_s: False)
    copied: list[Tensor] = []
    monkeypatch.setattr(residents, "copy_with_layout", lambda x: copied.append(x) or copy_with_layout(x))
    torch.manual_seed(0)
    module, batches = (Blocks(), [(torch.randn(16, 64),)] * 2) if model == "blocks" else small_model(model)
    expected = train(module, batches, backend="inductor")
    before = settled_statistics()
    found = train(module, batches, backend=backend(dataclasses.replace(EVERYTHING, hardware=FAST_DISK)))
    done = settled_statistics().since(before)
    assert_same_bits(found, expected)
    assert done.kept_for_time == done.offloads > 0
    assert done.bytes_written == 0
    assert not copied


@pytest.mark.parametrize(
    ("setting", "release"), [("memory_planning", RELEASE), ("triton.cudagraphs", "torch.ops.ssdtrain.release.default")]
)
def test_hazard_1_where_memory_is_planned_or_replayed_nothing_is_held(setting: str, release: str) -> None:
    """There, kernels write to retained memory all the same, so the engine must copy what stays."""
    with torch._inductor.config.patch({setting: True}):
        forward, _ = generated_code(Blocks(), torch.randn(16, 64), compiler=EVERYTHING)
    releases = [arguments for name, arguments in calls(forward) if name == release]
    assert releases
    assert all(len(arguments) == 2 for arguments in releases)


def test_hazard_2_views_of_one_storage_are_one_offload() -> None:
    """GPT-2 saves q, k and v as strided views of one product. Each layer has one offload; the views are rebuilt."""
    model, batches = small_model("gpt2")
    import ssdtrain_fx

    report = ssdtrain_fx.explain(model, *batches[0], config=EVERYTHING)
    fused = [storage for storage in report.graphs[0].plan.offloaded if len(storage.saved_nodes) == 3]
    assert len(fused) == 2
    assert all(storage.op == "aten.addmm.default" for storage in fused)


def test_hazard_3_offload_and_release_get_the_same_memory() -> None:
    forward, _ = generated_code(Blocks(), torch.randn(16, 64), compiler=EVERYTHING)
    token_to_tensor = {}
    release_count = 0
    for line in forward.splitlines():
        if match := re.search(rf"(\w+) = {re.escape(OFFLOAD)}\((\w+|reinterpret_tensor\(.*?\)), \[", line):
            token_to_tensor[match.group(1)] = match.group(2)
        if match := re.match(r"\s*(\w+) = (\w+)$", line):
            token_to_tensor[match.group(1)] = token_to_tensor.get(match.group(2), "")
        if match := re.search(rf"{re.escape(RELEASE)}\((\w+), (\w+|reinterpret_tensor\(.*?\))[,)]", line):
            assert token_to_tensor[match.group(1)] == match.group(2)
            release_count += 1
    assert release_count == forward.count(f"{RELEASE}(") >= 6


def test_hazard_4_the_prefetch_distance_survives_the_scheduler() -> None:
    """A matrix product runs between each reload and its wait, except for what backward needs at its very start."""
    _, backward = generated_code(Blocks(), torch.randn(256, 64), compiler=TIMELY)
    order = [name for name, _ in calls(backward) if name in (*PRODUCTS, RELOAD, WAIT)]
    first_product = next(idx for idx, name in enumerate(order) if name in PRODUCTS)
    reloads = [idx for idx, name in enumerate(order) if name == RELOAD]
    waits = [idx for idx, name in enumerate(order) if name == WAIT]
    assert len(reloads) == len(waits) >= 6
    spread = [idx for idx in reloads if idx > first_product]
    assert len(spread) >= len(reloads) // 2, f"reloads are not spread over backward: {order}"
    for reload, wait in zip(reloads, waits, strict=True):
        if wait > first_product:
            between = order[reload:wait]
            assert any(name in PRODUCTS for name in between), f"nothing hides a reload: {order}"


def test_hazard_4_releases_are_spread_over_forward() -> None:
    forward, _ = generated_code(Blocks(), torch.randn(256, 64), compiler=TIMELY)
    order = [name for name, _ in calls(forward) if name in (*PRODUCTS, OFFLOAD, RELEASE)]
    last_product = max(idx for idx, name in enumerate(order) if name in PRODUCTS)
    releases = [idx for idx, name in enumerate(order) if name == RELEASE]
    early = [idx for idx in releases if idx < last_product]
    assert len(early) >= len(releases) // 2, f"releases sank to the end of forward: {order}"


def test_hazard_6_tokens_own_their_slots() -> None:
    import ssdtrain_fx

    compiled = torch.compile(Blocks(), backend=backend(EVERYTHING))
    loss = compiled(torch.randn(16, 64))
    assert ssdtrain_fx.statistics().slots_in_use > 0
    del loss
    assert settled_statistics().slots_in_use == 0


def test_hazard_9_strides_at_run_time_differ_from_those_in_the_graph() -> None:
    """nn.TransformerEncoder with dropout saves a permuted tensor. It was reloaded with other strides than offloaded."""
    model, batches = small_model("encoder", dropout=0.1)
    expected = train(model, batches, "inductor")
    done = counted(lambda: assert_same_bits(train(model, batches, backend(EVERYTHING)), expected))
    assert done.offloads > 0


@pytest.mark.parametrize("name", ["encoder", pytest.param("bert", marks=pytest.mark.slow)])
def test_hazard_10_random_numbers_keep_their_order(name: str) -> None:
    """Only our ops are moved: eager-style generators draw in the same order, and recomputed masks are the same."""
    model, batches = small_model(name, dropout=0.1)
    with torch._inductor.config.patch(fallback_random=True):
        expected = train(model, batches, "inductor")
        assert_same_bits(train(model, batches, backend(EVERYTHING)), expected)


def test_hazard_11_reading_after_the_wait_is_data_flow() -> None:
    """Inductor 2.13 forgets the order of a mutation when it aligns the loops of fused CPU kernels.

    With a ``wait`` that wrote into its argument, BERT with dropout read masks before they were reloaded. So each tensor
    that backward reads is a result of ``wait``, and no generated code may read what ``reload`` returned.
    """
    _, backward = generated_code(Blocks(), torch.randn(16, 64), compiler=EVERYTHING)
    tickets = set(re.findall(rf"(\w+) = {re.escape(RELOAD)}\(", backward))
    assert tickets
    for ticket in tickets:
        readers = re.findall(rf"^.*\b{ticket}\b.*$", backward, flags=re.MULTILINE)
        others = [line for line in readers if RELOAD not in line and WAIT not in line and "del " not in line]
        assert all("assert" in line or re.match(rf"\s*\w+ = {ticket}$", line) for line in others), others


def test_hazard_12_metadata_that_is_wrong_about_the_dtype() -> None:
    """Under autocast on CPU, native_layer_norm returns bfloat16 statistics where the graph says float32."""
    model, batches = small_model("bert", dropout=0.1)

    class UnderAutocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(*inputs)

    wrapped = UnderAutocast()
    expected = train(wrapped, batches, "aot_eager")
    config = OffloadConfig(inner="aot_eager", policy="all", min_tensor_bytes=0)
    assert_same_bits(train(wrapped, batches, backend(config)), expected)


class ReadByAll(nn.Module):
    """Every layer reads a normalised tensor in 16 bits, as T5's decoder reads the encoder under autocast."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(width, width))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table
        read = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        h = x.bfloat16()
        for idx, layer in enumerate(self.layers):
            h = torch.tanh(h @ layer.weight.bfloat16())
            if idx in (5, 9):
                h = h * (read.bfloat16() @ layer.weight.bfloat16())
        return h.float().square().sum()


def test_hazard_13_a_sum_that_is_stored_changes_the_vectors_of_its_reader() -> None:
    """The gradients of ``read`` are 16-bit products, added up in float32, and a norm's backward reduces their rows.

    When the sum was stored, that reduction no longer read 16-bit values. Its vectors then had half as many elements,
    and the partial sums were other ones.
    """
    torch.manual_seed(0)
    model, batches = ReadByAll(), [(torch.randn(64, 64),)]
    expected = train(model, batches, "inductor")
    done = counted(lambda: assert_same_bits(train(model, batches, backend(EVERYTHING)), expected))
    assert done.offloads > 0
