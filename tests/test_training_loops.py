"""Ways in which users call backward: twice, late, never, in other orders, from several threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.utils.checkpoint
from steps import compare_gradients, settled_statistics, small_model
from torch import Tensor, nn

from ssdtrain_fx import OffloadConfig, backend, statistics
from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.testing import assert_same_bits, gradients_of

pytestmark = pytest.mark.usefixtures("one_thread")

INNERS = ["inductor", "aot_eager"]


class Tower(nn.Module):
    """Six layers that are cheap to compile."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().sum()


def everything(inner: Any) -> OffloadConfig:
    return OffloadConfig(inner=inner, policy="all", min_tensor_bytes=0)


def compare(inner: str, loop: Callable[[Callable[..., Tensor], list[Tensor]], None]) -> None:
    """Run ``loop(model, batches)`` with and without offloading. The accumulated gradients must be equal."""
    torch.manual_seed(0)
    model = Tower()
    batches = [torch.randn(8, 32) for _ in range(4)]
    compare_gradients(
        model, inner, everything(inner), lambda compiler: loop(torch.compile(model, backend=compiler), batches)
    )


@pytest.mark.parametrize("inner", INNERS)
def test_second_backward_with_retain_graph(inner: str) -> None:
    def loop(model: Callable[..., Tensor], batches: list[Tensor]) -> None:
        loss = model(batches[0])
        loss.backward(retain_graph=True)
        loss.backward()

    # Inductor's cache may hold code that overwrites saved tensors.
    with functorch_config.patch(donated_buffer=False), inductor_config.patch(fx_graph_cache=False):
        compare(inner, loop)


@pytest.mark.parametrize("inner", INNERS)
def test_one_loss_used_twice(inner: str) -> None:
    def loop(model: Callable[..., Tensor], batches: list[Tensor]) -> None:
        loss = model(batches[0])
        (loss * 2 + loss.square()).backward()

    compare(inner, loop)


@pytest.mark.parametrize("inner", INNERS)
def test_loss_dropped_without_backward_gives_its_slots_back(inner: str) -> None:
    def loop(model: Callable[..., Tensor], batches: list[Tensor]) -> None:
        for batch in batches[:-1]:
            model(batch)
        model(batches[-1]).backward()

    compare(inner, loop)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_several_forwards_before_the_backwards(inner: str, order: str) -> None:
    def loop(model: Callable[..., Tensor], batches: list[Tensor]) -> None:
        losses = [model(batch) for batch in batches]
        for loss in losses if order == "first in, first out" else losses[::-1]:
            loss.backward()

    compare(inner, loop)


@pytest.mark.parametrize("inner", INNERS)
def test_gradient_accumulation(inner: str) -> None:
    def loop(model: Callable[..., Tensor], batches: list[Tensor]) -> None:
        for batch in batches:
            (model(batch) / len(batches)).backward()

    compare(inner, loop)


def test_gradients_of_inputs() -> None:
    model, x = Tower(), torch.randn(8, 32)
    found: list[Tensor] = []
    for compiler in ("inductor", backend(everything("inductor"))):
        torch._dynamo.reset()
        leaf = x.clone().requires_grad_()
        torch.compile(model, backend=compiler)(leaf).backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("inner", INNERS)
def test_checkpointing_inside_the_model(inner: Any) -> None:
    """The partitioner recomputes what the tags request. What it still saves is offloaded."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Tower):
        def forward(self, x: Tensor) -> Tensor:
            for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):

                def block(x: Tensor, first: nn.Module = first, second: nn.Module = second) -> Tensor:
                    return torch.nn.functional.dropout(second(torch.nn.functional.gelu(first(x))), 0.1)

                x = checkpoint(block, x, use_reentrant=False)
            return x.square().sum()

    model, x = Checkpointed(), torch.randn(8, 32)
    found: list[dict[str, Tensor]] = []
    for compiler in (inner, backend(everything(inner))):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        before = statistics()
        torch.compile(model, backend=compiler)(x).backward()
        if compiler != inner and inner == "inductor":  # node by node, the partitioner recomputes everything
            assert statistics().since(before).offloads > 0
        found.append(gradients_of(model))
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("inner", INNERS)
def test_checkpointed_attention_whose_random_state_is_saved(inner: Any) -> None:
    """A checkpoint within another one saves the state of the generator, which is no data of the model."""
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    weight = nn.Parameter(torch.eye(32) + 0.1)
    model = nn.Module()
    model.weight = weight

    def attend(x: Tensor) -> Tensor:
        heads = (x @ weight).view(2, 16, 2, 16).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 16, 32)

    def loss(x: Tensor) -> Tensor:
        return checkpoint(attend, checkpoint(attend, (x @ weight).tanh())).square().sum()

    x = torch.randn(2, 16, 32)
    compare_gradients(
        model, inner, everything(inner), lambda compiler: torch.compile(loss, backend=compiler)(x).backward()
    )


def test_two_models_share_one_engine() -> None:
    models = [Tower(), Tower()]
    x = torch.randn(8, 32)
    found: list[list[dict[str, Tensor]]] = []
    for compiler in ("inductor", backend(everything("inductor"))):
        torch._dynamo.reset()
        compiled = [torch.compile(model, backend=compiler) for model in models]
        losses = [model(x) for model in compiled]
        for loss in losses:
            loss.backward()
        found.append([gradients_of(model) for model in models])
        for model in models:
            model.zero_grad(set_to_none=True)
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
    assert statistics().file_bytes > 0
    assert settled_statistics().slots_in_use == 0


def test_training_from_several_threads() -> None:
    """Each thread has its own model and data; all share one engine. Models are compiled first: Dynamo is not tested."""
    torch.manual_seed(0)
    models = [Tower() for _ in range(3)]
    batches = [[torch.randn(8, 32) for _ in range(5)] for _ in models]
    expected: list[dict[str, Tensor]] = []
    for model, mine in zip(models, batches, strict=True):
        compiled = torch.compile(model, backend="inductor")
        for batch in mine:
            compiled(batch).backward()
        expected.append(gradients_of(model))
        model.zero_grad(set_to_none=True)

    torch._dynamo.reset()
    compiled_models = [torch.compile(model, backend=backend(everything("inductor"))) for model in models]
    for model, compiled in zip(models, compiled_models, strict=True):
        compiled(torch.randn(8, 32)).backward()
        model.zero_grad(set_to_none=True)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            torch.set_num_threads(1)
            for batch in batches[number]:
                compiled_models[number](batch).backward()
        except BaseException as error:  # handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model, gradients in zip(models, expected, strict=True):
        assert_same_bits(gradients_of(model), gradients)
    assert settled_statistics().slots_in_use == 0


def test_exception_in_backward_leaves_the_engine_usable() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError("no gradient today")

    model, x = Tower(), torch.randn(8, 32)
    compiled = torch.compile(model, backend=backend(everything("inductor")))
    with pytest.raises(RuntimeError, match="no gradient today"):
        Fails.apply(compiled(x)).backward()
    assert settled_statistics().slots_in_use == 0
    compiled(x).backward()
    assert settled_statistics().slots_in_use == 0


@pytest.mark.parametrize("inner", INNERS)
def test_saved_tensor_hooks_that_keep_what_they_get(inner: str) -> None:
    """Of a CPU tensor, ``save_on_cpu`` makes no copy. A copied token works as long as the original lives."""

    def loop(model: Callable[..., Tensor], batches: list[Tensor]) -> None:
        with torch.autograd.graph.save_on_cpu():
            model(batches[0]).backward()
        kept: list[Tensor] = []

        def pack(saved: Tensor) -> Tensor:
            kept.append(saved)
            return saved.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            loss = model(batches[1])
        loss.backward()
        assert kept

    compare(inner, loop)


@pytest.mark.parametrize("inner", INNERS)
def test_a_saved_tensor_hook_that_copies_the_token_and_drops_it(inner: Any) -> None:
    torch.manual_seed(0)
    model, x = torch.compile(Tower(), backend=backend(everything(inner))), torch.randn(8, 32)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = model(x)
    with pytest.raises(ActivationLostError, match=r"is a copy, and its original has been dropped.*save_on_cpu"):
        loss.backward()
    del loss
    model(x).backward()  # the engine remains usable
    assert settled_statistics().slots_in_use == 0


@torch.fx.wrap
def to_bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16) if x.dtype == torch.float32 else x


@torch.fx.wrap
def to_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype == torch.bfloat16 else x


@pytest.mark.parametrize("inner", INNERS)
def test_saved_tensor_hooks_that_become_part_of_the_graphs(inner: str, caplog: pytest.LogCaptureFixture) -> None:
    """They would get tokens, and a hook that leaves integers alone would do nothing."""
    model, x = Tower(), torch.randn(8, 32)
    pack, unpack = torch.fx.symbolic_trace(lambda x: to_bfloat16(x)), torch.fx.symbolic_trace(lambda x: to_float32(x))

    def train(compiler: Any) -> dict[str, Tensor]:
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        compiled = torch.compile(model, backend=compiler)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = compiled(x)
        loss.backward()
        return gradients_of(model)

    before = statistics()
    assert_same_bits(train(inner), train(backend(everything(inner))))
    assert statistics().since(before).offloads == 0
    assert "nothing is moved" in caplog.text


def test_inference_and_no_grad_offload_nothing() -> None:
    model, x = Tower(), torch.randn(8, 32)
    compiled = torch.compile(model, backend=backend(everything("inductor")))
    before = statistics()
    with torch.no_grad():
        without_gradients = compiled(x)
    with torch.inference_mode():
        inference = compiled(x)
    assert statistics().since(before).offloads == 0
    expected = model(x)
    torch.testing.assert_close(without_gradients, expected)
    torch.testing.assert_close(inference, expected)


@pytest.mark.slow
def test_disk_use_is_bounded_over_200_steps(ssd_dir: str) -> None:
    model, batches = small_model("gpt2")
    config = OffloadConfig(policy="all", min_tensor_bytes=0, ssd_dir=ssd_dir)
    compiled = torch.compile(model, backend=backend(config))
    compiled(*batches[0]).backward()
    first = statistics()
    for number in range(200):
        model.zero_grad(set_to_none=True)
        compiled(*batches[number % len(batches)]).backward()
        assert settled_statistics().slot_bytes_in_use == 0
        assert statistics().file_bytes == first.file_bytes
