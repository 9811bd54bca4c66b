"""Kernels of a rewritten step are computed in the loops, and with the vectors, of plain Inductor.

The first tests record the choices for one function and compile a part of it, which Inductor would fuse and vectorize in
another way. The results have the bits of the whole function, and would not have them without the recorded choices.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as functional
from mixed_precision import Mixed
from steps import FAST_DISK, Autocast, small_model
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op  # pyright: ignore[reportPrivateUsage]
from torch._inductor import metrics
from torch._inductor.codecache import FxGraphCache
from torch._inductor.codegen import cpp
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache as fresh_inductor_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ssdtrain_fx import OffloadConfig, backend
from ssdtrain_fx._torch_private import functorch_config_patch, inductor_loops
from ssdtrain_fx._torch_private import inductor as private
from ssdtrain_fx._torch_private.guards import forgetting_guards
from ssdtrain_fx._torch_private.inductor_loops import PLAIN_NODE, LoopChoices, _Choice, _Recorded, choosing_loops  # pyright: ignore[reportPrivateUsage]
from ssdtrain_fx.compiler import plain_step
from ssdtrain_fx.compiler.inductor import KeepLayouts
from ssdtrain_fx.compiler.plain_step import PlainStep
from ssdtrain_fx.passes.graph.joint_graph import SAVED
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELEASE, RELOAD, WAIT
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.testing import assert_same_bits, train

Function = Callable[..., tuple[Tensor, ...]]

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_cache")


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    private.install_lowerings(offload=OFFLOAD, release=RELEASE, reload=RELOAD, wait=WAIT, saved=SAVED)
    with inductor_config.patch(force_disable_caches=True):
        yield


Selected = dict[Any, tuple[tuple[Any, ...], tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> Selected:
    """What Inductor generates code with: loops, elements per vector, and the vectorized loops, by node."""
    found: Selected = {}
    select: Any = cast(Any, cpp.TilingSelect).select_tiling

    def note(self: Any, fn_list: Any, var_sizes_list: Any) -> Any:
        result = select(self, fn_list, var_sizes_list)
        group, reduction_group = max(var_sizes_list, key=lambda sizes: len(sizes[1]))
        for function in fn_list:
            node = getattr(function, "original_fn", function).args[0]
            key = inductor_loops._key_of(node)  # pyright: ignore[reportPrivateUsage]
            found[key] = ((*group, *reduction_group), tuple(result[0]), tuple(result[1]))
        return result

    monkeypatch.setattr(cpp.TilingSelect, "select_tiling", note)
    return found


def traced(function: Function, inputs: list[Tensor]) -> Any:
    return make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*inputs)


def run(function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
    values = list(inputs)
    return tuple(compile_fx_inner(traced(function, values), values)(list(values)))


def recorded(function: Function, *inputs: Tensor) -> LoopChoices:
    choices = LoopChoices()
    choices.record(traced(function, list(inputs)), list(inputs))
    return choices


def found(choices: LoopChoices) -> Selected:
    """What is recorded, in the form of ``selected``."""
    recorded = choices._recorded.items()  # pyright: ignore[reportPrivateUsage]
    return {key: (one.choice.ranges, one.choice.factors, one.choice.indices) for key, one in recorded}


def run_alike(choices: LoopChoices, function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
    with choosing_loops(choices):
        return run(function, *inputs)


def values(*size: int) -> Tensor:
    return torch.linspace(-3, 3, torch.Size(size).numel()).reshape(size)


def backwards(x: Tensor, m: Tensor) -> Tensor:
    """Reads so much of ``m`` from its end that Inductor generates scalar code."""
    return x + m.flip(1) * m.flip(0, 1)


def test_scalar_code_stays_scalar() -> None:
    def whole(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        return x.exp(), backwards(x, m)

    def part(x: Tensor) -> tuple[Tensor, ...]:
        return (x.exp(),)

    x, m = values(64, 256), values(64, 256)
    expected, _ = run(whole, x, m)
    assert not run(part, x)[0].equal(expected)
    assert run_alike(recorded(whole, x, m), part, x)[0].equal(expected)


def test_a_kernel_is_not_fused_into_loops_without_vectors() -> None:
    def whole(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        exp = x.exp()
        return exp, backwards((x + 1).exp(), exp @ w)

    def part(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        return x.exp(), backwards((x + 1).exp(), m)

    x, w = values(64, 256), values(256, 256)
    expected = run(whole, x, w)
    m = expected[0] @ w
    assert not all(map(torch.equal, run(part, x, m), expected))
    assert all(map(torch.equal, run_alike(recorded(whole, x, w), part, x, m), expected))


ROWS = _Choice(ranges=(64, 256), depth=1, factors=(16,), indices=(1,), is_tail_scalar=False)
COLUMNS = ROWS._replace(indices=(0,))


def make_record(choice: _Choice, width: str | None, kernel: str) -> _Recorded:
    return _Recorded(choice, width, tiling=(), constraints=({}, []), kernel=kernel)


@pytest.mark.parametrize(
    ("first", "second", "may_share"),
    [
        pytest.param((ROWS, None, "1"), (COLUMNS, None, "1"), True, id="one kernel with two nests"),
        pytest.param((ROWS, None, "1"), (ROWS, None, "2"), True, id="equal loops"),
        pytest.param((ROWS, "vector", "1"), (COLUMNS, "vector", "2"), True, id="both vectorized, no sums"),
        pytest.param((ROWS, "vector", "1"), (COLUMNS, "scalar", "2"), False, id="vectorized and scalar"),
        pytest.param((ROWS, None, "1"), (COLUMNS, None, "2"), False, id="sums in different loops"),
        pytest.param((ROWS, None, "1"), (COLUMNS, "vector", "2"), False, id="a sum and other vectors"),
        pytest.param((ROWS, None, "1"), None, True, id="bits of one do not depend on loops"),
    ],
)
def test_which_kernels_may_share_loops(first: Any, second: Any, may_share: bool) -> None:
    choices = LoopChoices()
    choices._choice_of = lambda node: node  # pyright: ignore[reportPrivateUsage]
    nodes = [None if one is None else make_record(*one) for one in (first, second)]
    kernels = [SimpleNamespace(get_nodes=lambda node=node: [node]) for node in nodes]
    assert choices.can_fuse(*kernels) is choices.can_fuse(*reversed(kernels)) is may_share


def test_loops_of_a_sum_are_not_merged() -> None:
    def whole(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return ((a * b.transpose(1, 2)).sum(2),)

    def part(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        product = a * b.transpose(1, 2)
        matrix_product = product @ w  # which stores the first product, so that its sum could have two loops
        return product.sum(2), matrix_product

    a, b, w = values(4, 32, 96), values(4, 96, 32), values(96, 1)
    (expected,) = run(whole, a, b)
    assert not run(part, a, b, w)[0].equal(expected)
    assert run_alike(recorded(whole, a, b), part, a, b, w)[0].equal(expected)


def test_a_sum_keeps_the_width_of_its_vectors() -> None:
    def whole(low: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (low.float() * a).sum(-1), (b * a).sum(-1)

    def part(low: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        return ((low.float() * a).sum(-1),)

    low, a, b = values(16, 256).bfloat16(), values(16, 256).flip(0).contiguous(), values(16, 256)
    expected, _ = run(whole, low, a, b)
    assert not run(part, low, a)[0].equal(expected)
    assert run_alike(recorded(whole, low, a, b), part, low, a)[0].equal(expected)


def test_elements_that_fill_no_vector_stay_scalar() -> None:
    """With so many selections, Inductor computes the last four elements of a row one by one."""

    def whole(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        m = m[:, :20]
        return x.exp(), torch.where(x > 0, m, torch.where(x > 1, x, m + 1))

    def part(x: Tensor) -> tuple[Tensor, ...]:
        return (x.exp(),)

    x, m = values(64, 20), values(64, 32)
    expected, _ = run(whole, x, m)
    if hasattr(cpp, "KernelOpStats"):  # before torch 2.13, the rest of a loop is always a vector
        assert not run(part, x)[0].equal(expected)
    assert run_alike(recorded(whole, x, m), part, x)[0].equal(expected)


def test_what_is_the_same_in_all_loops_is_not_bound(selected: Selected) -> None:
    def whole(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        return x * 2, backwards(x, m)

    def part(x: Tensor) -> tuple[Tensor, ...]:
        return (x * 2,)

    x, m = values(64, 256), values(64, 256)
    choices = recorded(whole, x, m)
    selected.clear()
    run_alike(choices, part, x)
    assert [indices for _, _, indices in selected.values()] == [(0,)]


def test_loops_that_cannot_be_met_are_named() -> None:
    def add_up(x: Tensor) -> tuple[Tensor, ...]:
        return (x.sum(-1),)

    choices = recorded(add_up, values(16, 256))
    run_alike(choices, add_up, values(16, 256))
    assert not choices.missed
    run_alike(choices, add_up, values(16, 128))
    assert choices.missed == {"forward sum_1"}


def test_other_loops_will_do_if_all_elements_are_vectorized() -> None:
    def vectorized(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x.exp() * y,)

    def partly(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        row = x[:, :1].expand(x.shape)  # does not change in the vectorized loop, so neither does its exponential
        return (row.exp() * y,)

    for function, missed in ((vectorized, set[str]()), (partly, {"forward mul"})):
        choices = recorded(function, values(16, 256), values(16, 256))
        run_alike(choices, function, values(16, 128), values(16, 128))
        assert choices.missed == missed


def test_a_kernel_with_a_dtype_without_vectors_stays_scalar() -> None:
    def whole(x: Tensor) -> tuple[Tensor, ...]:
        return (x.exp(),)

    def part(x: Tensor) -> tuple[Tensor, ...]:
        return x.exp(), x.to(torch.int16) + 1

    x = values(64, 256)
    choices = recorded(whole, x)
    exp, added = run_alike(choices, part, x)
    assert torch.allclose(exp, x.exp()) and added.equal(x.to(torch.int16) + 1)
    assert choices.missed == {"forward exp"}


def test_recording_asks_no_cache_which_would_lower_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        inductor_loops, "compile_fx_inner", lambda *_, **__: asked.append(cast(Any, inductor_config).fx_graph_cache)
    )
    with inductor_config.patch(fx_graph_cache=True):
        LoopChoices().record(traced(lambda x: (x.exp(),), [values(4, 4)]), [values(4, 4)])
    assert asked == [False]


def repeated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Inductor splits the second loop in two, so that it need not divide."""
    return ((x + y[:, :, None].expand(16, 8, 30).reshape(16, 240)).exp(),)


def selecting(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    """Inductor gives both results the same loops, although one loop would do for the first."""
    m = m[:, :20]
    return x.exp(), torch.where(x > 0, m, torch.where(x > 1, x, m + 1))


def rounding(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    return (x.bfloat16().exp() * m.bfloat16()).sum(-1), x.bfloat16().tanh()


def normalizing(x: Tensor) -> tuple[Tensor, ...]:
    return (x.softmax(-1), torch.nn.functional.layer_norm(x, x.shape[-1:]))


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (repeated, [(16, 240), (16, 8)]),
        (selecting, [(64, 20), (64, 32)]),
        (rounding, [(64, 250), (64, 250)]),
        (normalizing, [(64, 250)]),
    ],
)
def test_recorded_loops_are_those_of_the_code(
    function: Function, sizes: list[tuple[int, ...]], selected: Selected
) -> None:
    inputs = [values(*size) for size in sizes]
    count = metrics.generated_kernel_count
    choices = recorded(function, *inputs)
    assert metrics.generated_kernel_count == count  # users of these metrics see what is generated, no more
    selected.clear()
    expected = run(function, *inputs)
    of_plain = dict(selected)
    assert found(choices) and found(choices).items() <= of_plain.items()
    assert all(map(torch.equal, run_alike(choices, function, *inputs), expected))
    assert selected == of_plain and not choices.missed


def test_a_node_that_is_computed_again_is_the_same_node() -> None:
    def whole(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        return x.exp(), backwards(x, m)

    def part(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return y.exp(), x.exp()

    x, m = values(64, 256), values(64, 256)
    expected, _ = run(whole, x, m)
    graph = traced(part, [x, m])
    first, again = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    first.meta[PLAIN_NODE], again.meta[PLAIN_NODE] = "forward another", "forward exp"
    with choosing_loops(recorded(whole, x, m)):
        _, found = compile_fx_inner(graph, [x, m])([x, m])
    assert found.equal(expected)


def test_a_step_marks_its_nodes_and_passes_on_which_layouts_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = [traced(function, [values(4, 4)]) for function in (lambda x: (x.sin(),), lambda x: (x.cos(),))]
    PlainStep.mark(*halves)
    assert halves[0].graph.output_node().all_input_nodes[0].meta[PLAIN_NODE] == "forward sin"
    assert halves[1].graph.output_node().all_input_nodes[0].meta[PLAIN_NODE] == "backward cos"
    rewritten = traced(lambda x: (x.sin(),), [values(4, 4)])
    rewritten.graph.output_node().meta["user_visible_output_idxs"] = [0]
    recorded: list[Any] = []
    monkeypatch.setattr(LoopChoices, "record", lambda self, gm, *_, **__: recorded.append(gm) or [])
    with PlainStep(*halves).computing_alike(rewritten, [values(4, 4)]):
        run(lambda x: (x.sin(),), values(4, 4))
        assert recorded == [halves[0]]
    assert recorded[0].graph.output_node().meta["user_visible_output_idxs"] == [0]


def test_loops_in_branches_are_recorded() -> None:
    def whole(x: Tensor, m: Tensor, flag: Tensor) -> tuple[Tensor, ...]:
        def first(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
            return x.exp(), backwards(x, m)

        def second(x: Tensor, m: Tensor) -> tuple[Tensor, ...]:
            return x - 1, m - 1

        return torch.cond(flag, first, second, (x, m))

    choices = recorded(whole, values(64, 256), values(64, 256), torch.tensor(True))
    assert [key[1:] for key in found(choices)] == [("forward exp", "Pointwise", 0)]


def config(**options: Any) -> OffloadConfig:
    return OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK, **options)


@pytest.fixture
def choices_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[LoopChoices]:
    """The choices of all steps that are compiled."""
    found: list[LoopChoices] = []

    def choosing(choices: LoopChoices) -> Any:
        found.append(choices)
        return choosing_loops(choices)

    monkeypatch.setattr(plain_step, "choosing_loops", choosing)
    return found


def test_bits_in_mixed_precision() -> None:
    torch.manual_seed(0)
    model, batches = Mixed(64), [(torch.randn(128, 64), torch.randn(128, 64))]
    assert_same_bits(train(model, batches, backend(config())), train(model, batches, "inductor"))


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_bits_of_a_state_space_model(autocast: bool) -> None:
    """From two layers on, offloading changes what is fused with an ``exp`` of Mamba-2, and how sums are computed."""
    torch.manual_seed(0)
    model, make_batch = zoo.build("mamba", layers=2, hidden=64, sequence=128, vocab=64, batch=2)
    if autocast:
        model = Autocast(model)
    batches = [make_batch(torch.Generator().manual_seed(0))]
    assert_same_bits(train(model, batches, backend(config())), train(model, batches, "inductor"))


class TwoConvolutions(torch.nn.Module):
    """What is saved between the convolutions has other strides than in the graph.

    For dynamic image sizes, plain Inductor finds out in backward that they equal numbers, after lowering a division by
    one of them. It cannot lower that once it knows the numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 6, 3), torch.nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sigmoid()).exp().flatten(2).var(2).mean()


@pytest.mark.parametrize("sizes", [(12,), pytest.param((12, 16), marks=pytest.mark.slow)])
def test_strides_of_saved_tensors_may_be_symbols(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, batches = TwoConvolutions(), [(torch.randn(2, 3, size, size),) for size in sizes]
    of_plain = train(model, batches, "inductor", dynamic=True)
    assert_same_bits(train(model, batches, backend(config()), dynamic=True), of_plain)


class Rescaled(torch.nn.Module):
    """Sums over a tensor that is saved with symbolic strides, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 6, 3), torch.nn.Conv2d(6, 4, 3, stride=2)
        self.norm = torch.nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        z = functional.interpolate(functional.max_pool2d(self.norm(h).relu(), 2), scale_factor=2)
        z = z + h[..., : z.shape[2], : z.shape[3]]
        return self.second(z).square().mean() + z.permute(0, 2, 3, 1).log_softmax(-1).mean()


@pytest.mark.slow
def test_a_reloaded_tensor_gets_symbolic_strides() -> None:
    torch.manual_seed(0)
    model, batches = Rescaled(), [(torch.randn(count, 3, size, size),) for count, size in ((2, 12), (3, 14))]
    of_plain = train(model, batches, "inductor", dynamic=True)
    assert_same_bits(train(model, batches, backend(config()), dynamic=True), of_plain)


@torch.library.custom_op("ssdtrain_tests::noted_sine", mutates_args=())
def noted_sine(x: Tensor) -> Tensor:
    return x.sin()


noted_sine.register_fake(torch.empty_like)
noted_sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
_register_effectful_op(torch.ops.ssdtrain_tests.noted_sine.default, _EffectType.ORDERED)


class Noted(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(noted_sine(super().forward(x).tanh())).log_softmax(-1).square().mean()


def test_steps_with_side_effects_are_recorded(
    choices_of_steps: list[LoopChoices], caplog: pytest.LogCaptureFixture
) -> None:
    """A token goes from each op with a side effect to the next. AOTAutograd removes the tokens from the graphs that a
    partitioner returns, but not from those that are kept for the recording."""
    torch.manual_seed(0)
    model, batches = Noted(32, 32), [(torch.randn(8, 32),)]
    assert_same_bits(train(model, batches, backend(config())), train(model, batches, "inductor"))
    assert not [record for record in caplog.records if record.name == plain_step.__name__]
    assert choices_of_steps


def test_steps_are_recorded_for_a_bundled_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Then Inductor collects what it generates for the cache, and cannot do so for two graphs at the same time."""
    model, batches = Mixed(64), [(values(16, 64), values(16, 64))]
    caches: Any = inductor_config.patch(force_disable_caches=False)
    with caches, fresh_inductor_cache(), functorch_config_patch(bundled_autograd_cache=True):
        train(model, batches, backend(config()))
    assert not [record for record in caplog.records if record.name == plain_step.__name__]


def test_additions_to_the_same_element_are_a_sum() -> None:
    def add(x: Tensor, index: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (torch.index_put(x, [index], y.t(), accumulate=True),)

    choices = recorded(add, values(4), torch.tensor([[0, 0, 1], [1, 2, 0]]), values(3, 2))
    assert [key[1] for key in found(choices)] == ["forward index_put"]


def test_guards_of_recording_are_forgotten_until_they_are_added() -> None:
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    shape_env = ShapeEnv()
    size: Any = FakeTensorMode(shape_env=shape_env).from_tensor(torch.empty(12), symbolic_context=context).shape[0]
    symbol = size.node.expr
    guards: list[Any] = []
    with forgetting_guards(shape_env, guards):
        assert size * 2 == 24
        assert size.node.expr == 12
    assert size.node.expr == symbol
    assert not shape_env.guards
    (guard,) = guards
    assert shape_env.evaluate_expr(guard)
    assert size.node.expr == 12
    assert len(shape_env.guards) == 1


def test_a_step_is_recorded_unless_its_code_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    record, add_guards = LoopChoices.record, LoopChoices.add_guards
    cache: Any = FxGraphCache
    save, load = cache._save_graph, cache.load_with_key
    forgotten: list[str] = []

    def note_record(self: LoopChoices, *args: Any, **keywords: Any) -> Any:
        events.append("record backward" if keywords.get("is_backward") else "record forward")
        return record(self, *args, **keywords)

    def note_guards(self: LoopChoices) -> None:
        events.append("add guards")
        add_guards(self)

    def note_save(*args: Any) -> None:
        events.append("save")
        save(*args)

    def load_or_forget(*args: Any, **keywords: Any) -> Any:
        if keywords["is_backward"] and forgotten:
            return None, {"cache_state": "miss"}
        return load(*args, **keywords)

    def compile_and_note() -> list[str]:
        events.clear()
        train(Mixed(64), [(values(16, 64), values(16, 64))], backend(config()))
        return [*events]

    monkeypatch.setattr(LoopChoices, "record", note_record)
    monkeypatch.setattr(LoopChoices, "add_guards", note_guards)
    monkeypatch.setattr(cache, "_save_graph", note_save)
    monkeypatch.setattr(cache, "load_with_key", load_or_forget)
    caches: Any = inductor_config.patch(force_disable_caches=False, fx_graph_cache=True)
    with caches, fresh_inductor_cache(), functorch_config_patch(enable_autograd_cache=False):
        compiled = ["add guards", "save"]
        assert compile_and_note() == ["record forward", *compiled, "record backward", *compiled]
        assert compile_and_note() == []
        forgotten.append("backward")  # which may compute nodes of forward again
        assert compile_and_note() == ["record forward", "record backward", *compiled]


def test_a_step_that_cannot_be_recorded_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no loops")

    model, batches = TwoConvolutions(), [(torch.randn(2, 3, 8, 8),)]
    of_plain = train(model, batches, "inductor")
    monkeypatch.setattr(LoopChoices, "record", fail)
    (found,) = train(model, batches, backend(config()))
    warnings = [record for record in caplog.records if record.name == plain_step.__name__]
    assert [record.args for record in warnings] == [("forward",), ("backward",)]
    assert "no loops" in caplog.text
    torch.testing.assert_close(found.gradients, of_plain[0].gradients)


class SavedAsAView(torch.nn.Module):
    """Saves a view with three dimensions of a tensor with four, which Inductor lays out as convolutions like it.

    The tensor is a sum of so many others that Inductor stores it at once if it has two readers.
    """

    def __init__(self, *, is_read_as_view: bool) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv1d(8, 8, 1) for _ in range(6))
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.is_read_as_view = is_read_as_view

    def forward(self, x: Tensor) -> Tensor:
        four = sum(convolution(x).view(2, 8, 4, 4) for convolution in self.convolutions)
        assert isinstance(four, Tensor)
        three = four.view(2, 8, 16)
        return (three * self.scale).sum() if self.is_read_as_view else (four * self.scale.view(4, 4)).sum()


@pytest.mark.parametrize("is_read_as_view", [True, False])
def test_what_is_saved_as_a_view_has_the_layout_of_the_view(
    is_read_as_view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = SavedAsAView(is_read_as_view=is_read_as_view), [(torch.randn(2, 8, 16),)]
    of_plain: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        if x.shape == ((2, 8, 16) if is_read_as_view else (2, 8, 4, 4)) and x is not batches[0][0]:
            of_plain.append(x.stride())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        train(model, batches, "inductor")
    of_offloaded: dict[str, tuple[int, ...]] = {}
    find = private.offload_strides_in

    def note(*args: Any) -> dict[str, tuple[int, ...]]:
        of_offloaded.update(find(*args))
        return of_offloaded

    monkeypatch.setattr(private, "offload_strides_in", note)
    train(model, batches, backend(config()))
    (stride,) = of_offloaded.values()
    offloaded = torch.empty_strided((2, 8, 4, 4), stride)
    assert of_plain == [(offloaded.view(2, 8, 16) if is_read_as_view else offloaded).stride()]


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["conv", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_choices_are_those_of_plain_inductor(
    name: str, autocast: bool, selected: Selected, choices_of_steps: list[LoopChoices]
) -> None:
    """What is recorded before code generation is what plain Inductor generates code with."""
    model, batches = small_model(name, layers=1)
    if autocast:
        model = Autocast(model)
    train(model, batches, backend(config()))
    choices = choices_of_steps[0]
    assert choices is choices_of_steps[1]  # forward and backward
    assert not choices.missed
    selected.clear()
    train(model, batches, "inductor")
    assert len(found(choices)) > 10
    assert found(choices).items() <= selected.items()


def test_a_graph_that_moves_nothing_is_compiled_once(choices_of_steps: list[LoopChoices]) -> None:
    model, batches = Mixed(64), [(torch.randn(16, 64), torch.randn(16, 64))]
    train(model, batches, backend(OffloadConfig(hardware=FAST_DISK)))
    assert not choices_of_steps


def test_a_step_that_misses_loops_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tiling = LoopChoices.tiling

    def miss(self: LoopChoices, nodes: Any, ranges: Any, depth: Any, default: Any) -> Any:
        self.missed.add("backward sum_1")
        return tiling(self, nodes, ranges, depth, default)

    monkeypatch.setattr(LoopChoices, "tiling", miss)
    with caplog.at_level(logging.INFO, logger="ssdtrain_fx"):
        train(Mixed(64), [(torch.randn(16, 64), torch.randn(16, 64))], backend(config()))
    assert "the last bits of backward sum_1" in caplog.text


def test_inductor_looks_up_a_step_by_the_digest_of_its_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    uuid = KeepLayouts.uuid

    def note(self: KeepLayouts) -> str:
        asked.append(self.plain_digest)
        return uuid(self)

    monkeypatch.setattr(KeepLayouts, "uuid", note)
    with fresh_inductor_cache(), inductor_config.patch(force_disable_caches=False, fx_graph_cache=True):
        train(Mixed(64), [(torch.randn(16, 64), torch.randn(16, 64))], backend(config()))
    assert len(asked[-1]) == 64 and asked[-1] == asked[-2]  # for both halves


def test_the_key_of_the_compile_cache_depends_on_the_plain_step() -> None:
    passes = [KeepLayouts() for _ in range(3)]
    for one, function in zip(passes, (torch.sin, torch.sin, torch.cos), strict=True):
        graph = traced(cast(Any, function), [values(4, 4)])
        one.plain_digest = PlainStep(graph, graph).digest
    first, same, other = (one.uuid() for one in passes)
    assert first == same != other
    assert copy.deepcopy(passes[0]) is passes[0]  # Inductor copies its settings before the digest is known
