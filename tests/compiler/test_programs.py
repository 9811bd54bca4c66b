"""Programs that use ``torch.compile`` in every way that people do: the same numbers as the inner compiler alone gives.

Each program trains a little and returns what it has computed. Everything that may be offloaded is.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import settled_statistics
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ssdtrain_fx import OffloadConfig, backend
from ssdtrain_fx.testing import assert_same_bits

WIDTH = 32
pytestmark = [pytest.mark.usefixtures("one_thread")]

Compile = Callable[..., Any]
Program = Callable[[Compile], list[Tensor]]
PROGRAMS: dict[str, Program] = {}
MOVES_NOTHING = {
    "a_graph_break_in_a_loop": "Dynamo runs the function without a compiler",
    "checkpoints_inside-aot_eager": "backward recomputes everything from the input",
    "gradients_by_torch_func": "Dynamo compiles no function under torch.func.grad",
    "a_recurrent_network": "Dynamo runs LSTM without a compiler",
}
"""Programs in which no tensor is offloaded, and why; a name may be followed by the inner compiler."""
REFUSED = {
    "attention_with_a_score_function": "FlexAttention does not support backward on CPU",
    "a_gradient_of_a_gradient": "does not currently support double backward|requires create_graph=False",
    "a_scan-inductor": "scan might be aliasing the input or the output",
}
"""Programs that torch 2.13 refuses on a CPU with the inner compiler alone, and its words."""


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH)


def gradients(*modules: nn.Module) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


# -- several models, several forwards ----------------------------------------------------------------------------------


@program
def a_gan(compile_: Compile) -> list[Tensor]:
    generator, critic = Net(), Net()
    make, judge = compile_(generator), compile_(critic)
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (generator, critic)]
    losses: list[Tensor] = []
    for _ in range(3):
        critic.zero_grad()
        fake = make(batch())
        loss = F.softplus(-judge(batch())).mean() + F.softplus(judge(fake.detach())).mean()
        loss.backward()
        optimizers[1].step()
        generator.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        optimizers[0].step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in generator.parameters())]


@program
def a_contrastive_loss(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled = compile_(net)
    for _ in range(2):
        F.cross_entropy(compiled(batch()) @ compiled(batch()).t(), torch.arange(8)).backward()
    return gradients(net)


@program
def a_moving_average_as_teacher(compile_: Compile) -> list[Tensor]:
    net = Net()
    teacher = copy.deepcopy(net)
    student, teach = compile_(net), compile_(teacher)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        x = batch()
        with torch.no_grad():
            target = teach(x)
        optimizer.zero_grad()
        F.mse_loss(student(x), target).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return [p.detach() for p in (*net.parameters(), *teacher.parameters())]


@program
def a_copy_of_a_compiled_model(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled = compile_(net)
    other = copy.deepcopy(compiled)
    for model in (compiled, other):
        model(torch.ones(8, WIDTH)).sum().backward()
    return gradients(net, other)


@program
def inference_before_training(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled, x = compile_(net), batch()
    with torch.inference_mode():
        compiled(x)
    compiled(x).sum().backward()
    return gradients(net)


# -- what is compiled --------------------------------------------------------------------------------------------------


@program
def dynamic_shapes(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled = compile_(net, dynamic=True)
    for rows in (4, 7, 8, 3):
        compiled(batch(rows)).square().mean().backward()
    return gradients(net)


@program
def marked_dimensions(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled = compile_(net)
    for rows in (4, 7, 8):
        x = batch(rows)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x).square().mean().backward()
    return gradients(net)


@program
def one_whole_graph(compile_: Compile) -> list[Tensor]:
    net = Net()
    compile_(net, fullgraph=True)(batch()).sum().backward()
    return gradients(net)


@program
def a_graph_break_in_a_loop(compile_: Compile) -> list[Tensor]:
    net = Net()

    def loss(x: Tensor) -> Tensor:
        for layer in net.layers:
            x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return x.square().mean()

    compile_(loss)(batch()).backward()
    return gradients(net)


@program
def a_graph_break_between_two_parts(compile_: Compile) -> list[Tensor]:
    first, second = Net(), Net()

    def loss(x: Tensor) -> Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x).square().mean()

    compile_(loss)(batch()).backward()
    return gradients(first, second)


@program
def model_and_loss_apart(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled, loss = compile_(net), compile_(F.cross_entropy)
    for _ in range(2):
        loss(compiled(batch()), torch.randint(0, WIDTH, (8,))).backward()
    return gradients(net)


@program
def the_step_of_the_optimizer_too(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled, optimizer = compile_(net), torch.optim.AdamW(net.parameters())
    step = compile_(optimizer.step)
    for _ in range(3):
        optimizer.zero_grad()
        compiled(batch()).square().mean().backward()
        step()
    return [p.detach() for p in net.parameters()]


@program
def an_exported_program(compile_: Compile) -> list[Tensor]:
    x = batch()
    exported = torch.export.export(Net(), (x,), strict=False).module()
    compile_(exported)(x).square().mean().backward()
    return gradients(exported)


@program
def several_results_in_a_tree(compile_: Compile) -> list[Tensor]:
    net = Net()

    def forward(x: Tensor) -> Any:
        y = net(x)
        return {"y": y, "rest": (y.mean(), y.detach(), 3), "none": None}

    results = compile_(forward)(batch())
    (results["y"].sum() + results["rest"][0]).backward()
    return gradients(net)


@program
def a_result_that_is_not_used(compile_: Compile) -> list[Tensor]:
    net = Net()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = net(x)
        return y.sum(), (y * y).sum()

    compile_(forward)(batch())[1].backward()
    return gradients(net)


# -- precision and layout ----------------------------------------------------------------------------------------------


@program
def autocast_around(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled = compile_(net)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(batch()).float().square().mean()
        loss.backward()
    return gradients(net)


@program
def autocast_inside(compile_: Compile) -> list[Tensor]:
    net = Net()

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    compile_(forward)(batch()).float().square().mean().backward()
    return gradients(net)


@program
def double_precision(compile_: Compile) -> list[Tensor]:
    net = Net().double()
    compile_(net)(batch().double()).sum().backward()
    return gradients(net)


@program
def complex_numbers(compile_: Compile) -> list[Tensor]:
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.complex64, requires_grad=True)
    x = torch.randn(4, WIDTH, dtype=torch.complex64)
    compile_(lambda weight, x: (x @ weight).abs().square().mean())(weight, x).backward()
    assert weight.grad is not None
    return [weight.grad]


@program
def a_nested_tensor(compile_: Compile) -> list[Tensor]:
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.nested.nested_tensor([batch(3), batch(5)], layout=torch.jagged)
    compile_(lambda x: torch.tanh(linear(torch.tanh(linear(x)))))(x).values().square().mean().backward()
    return gradients(linear)


@program
def sparse_gradients(compile_: Compile) -> list[Tensor]:
    embedding, net = nn.Embedding(50, WIDTH, sparse=True), Net()
    compile_(lambda tokens: net(embedding(tokens)).square().mean())(torch.randint(0, 50, (8,))).backward()
    (gradient,) = gradients(embedding)
    return [*gradients(net), gradient.to_dense()]


# -- modules -----------------------------------------------------------------------------------------------------------


@program
def norms_with_statistics(compile_: Compile) -> list[Tensor]:
    norm = nn.BatchNorm1d(WIDTH)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    compiled = compile_(net)
    for _ in range(2):
        compiled(batch()).square().mean().backward()
    assert norm.running_mean is not None and norm.running_var is not None
    return [*gradients(net), norm.running_mean, norm.running_var]


@program
def tied_and_frozen_parameters(compile_: Compile) -> list[Tensor]:
    net = Net()
    first, second = (layer for layer in net.layers if isinstance(layer, nn.Linear))
    second.weight = first.weight
    first.bias.requires_grad_(False)
    compile_(net)(batch()).square().mean().backward()
    return gradients(net)


@program
def hooks(compile_: Compile) -> list[Tensor]:
    net = Net()
    net.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
    y = compile_(net)(batch())
    y.register_hook(lambda gradient: gradient * 3)
    y.sum().backward()
    return gradients(net)


@program
def hooks_that_take_gradients(compile_: Compile) -> list[Tensor]:
    net, taken = Net(), list[Tensor]()

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        taken.append(parameter.grad)
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    compile_(net)(batch()).sum().backward()
    return taken


@program
def a_function_with_its_own_backward(compile_: Compile) -> list[Tensor]:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * gradient

    net = Net()
    compile_(lambda x: Square.apply(net(x)).mean())(batch()).backward()
    return gradients(net)


@program
def a_recurrent_network(compile_: Compile) -> list[Tensor]:
    net = nn.LSTM(WIDTH, WIDTH, 2)
    compile_(net)(torch.randn(5, 4, WIDTH))[0].sum().backward()
    return gradients(net)


# -- checkpoints and hooks of saved tensors ----------------------------------------------------------------------------


@program
def checkpoints_inside(compile_: Compile) -> list[Tensor]:
    net = Net(depth=4)

    def forward(x: Tensor) -> Tensor:
        for layer in net.layers:
            x = checkpoint(lambda x, layer=layer: net.dropout(torch.tanh(layer(x))), x, use_reentrant=False)
        return x

    compile_(forward)(batch()).square().mean().backward()
    return gradients(net)


def selective(policy: CheckpointPolicy, compile_: Compile) -> list[Tensor]:
    """Matrix products get ``policy``; all other ops are recomputed."""

    def decide(context: Any, op: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        return policy if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    net, contexts = Net(depth=4), functools.partial(create_selective_checkpoint_contexts, decide)

    def forward(x: Tensor) -> Tensor:
        for layer in net.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False, context_fn=contexts)
        return x

    compile_(forward)(batch()).square().mean().backward()
    return gradients(net)


@program
def selective_checkpoints(compile_: Compile) -> list[Tensor]:
    return selective(CheckpointPolicy.MUST_SAVE, compile_)


@program
def checkpoints_that_offload_to_the_host(compile_: Compile) -> list[Tensor]:
    return selective(getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", CheckpointPolicy.MUST_SAVE), compile_)


@program
def reentrant_checkpoints_inside(compile_: Compile) -> list[Tensor]:
    """Dynamo breaks the graph at each of them."""
    net = Net(depth=4)

    def forward(x: Tensor) -> Tensor:
        for part in (net.layers[:2], net.layers[2:]):
            x = checkpoint(nn.Sequential(*part, nn.Tanh()), x, use_reentrant=True)
        return x.square().mean()

    compile_(forward)(batch().requires_grad_()).backward()
    return gradients(net)


@program
def checkpoints_around(compile_: Compile) -> list[Tensor]:
    net = Net()
    compiled = compile_(net)
    found: list[Tensor] = []
    for reentrant in (False, True):
        x = batch().requires_grad_()
        checkpoint(compiled, x, use_reentrant=reentrant).square().mean().backward()
        assert x.grad is not None
        found.append(x.grad)
    return [*gradients(net), *found]


@program
def saved_tensors_on_the_host(compile_: Compile) -> list[Tensor]:
    net = Net()
    with torch.autograd.graph.save_on_cpu():
        loss = compile_(net)(batch()).square().mean()
    loss.backward()
    return gradients(net)


# -- torch.func and higher-order operators -----------------------------------------------------------------------------


@program
def a_gradient_inside(compile_: Compile) -> list[Tensor]:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        gradient: Any = torch.func.grad(lambda x: torch.tanh(x @ weight).square().sum())(x)
        return gradient.square().mean()

    compile_(loss)(weight, batch()).backward()
    assert weight.grad is not None
    return [weight.grad]


@program
def a_vmap_inside(compile_: Compile) -> list[Tensor]:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda x: torch.tanh(x @ weight))(x).square().mean()

    compile_(loss)(weight, batch()).backward()
    assert weight.grad is not None
    return [weight.grad]


@program
def gradients_by_torch_func(compile_: Compile) -> list[Tensor]:
    net = Net()
    loss = compile_(lambda parameters, x: torch.func.functional_call(net, parameters, (x,)).square().mean())
    found: Any = torch.func.grad(loss)(dict(net.named_parameters()), batch())
    return list(found.values())


@program
def parameters_from_outside(compile_: Compile) -> list[Tensor]:
    net = Net()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    loss = compile_(lambda parameters, x: torch.func.functional_call(net, parameters, (x,)).square().mean())
    loss(parameters, batch()).backward()
    return [p.grad for p in parameters.values() if p.grad is not None]


@program
def a_branch_on_data(compile_: Compile) -> list[Tensor]:
    net = Net()

    def forward(x: Tensor) -> Tensor:
        y = net(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)).square().mean()

    compile_(forward)(batch()).backward()
    return gradients(net)


@program
def a_loop_on_data(compile_: Compile) -> list[Tensor]:
    net = Net()

    def forward(x: Tensor) -> Tensor:
        state = (torch.tensor(0), net(x))
        _, y = while_loop(lambda turn, y: turn < 3, lambda turn, y: (turn + 1, torch.sin(y)), state)
        return y.square().mean()

    compile_(forward)(batch()).backward()
    return gradients(net)


@program
def a_scan(compile_: Compile) -> list[Tensor]:
    net = Net()

    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(state + x), state * x

    def forward(x: Tensor) -> Tensor:
        state, products = scan(step, torch.zeros(WIDTH), net(x))
        return state.sum() + products.square().mean()

    compile_(forward)(batch()).backward()
    return gradients(net)


@program
def attention_with_a_score_function(compile_: Compile) -> list[Tensor]:
    net = Net()

    def forward(x: Tensor) -> Tensor:
        heads = net(x).view(1, 2, 128, 16)
        attended: Any = flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: score - (q - k).abs())
        return attended.square().mean()

    compile_(forward)(batch(128)).backward()
    return gradients(net)


@program
def a_gradient_of_a_gradient(compile_: Compile) -> list[Tensor]:
    net, x = Net(), batch().requires_grad_()
    (gradient,) = torch.autograd.grad(compile_(net)(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return gradients(net)


@program
def a_penalty_on_a_gradient(compile_: Compile) -> list[Tensor]:
    """As the one before, but the gradient is made inside."""
    net = Net()

    def penalty(x: Tensor) -> Tensor:
        gradient: Any = torch.func.grad(lambda x: net(x).sum())(x)
        return gradient.square().sum()

    compile_(penalty)(batch()).backward()
    return gradients(net)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_same(name: str, inner: Any) -> None:
    def run(compiler: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return PROGRAMS[name](functools.partial(torch.compile, backend=compiler))

    ours = backend(OffloadConfig(policy="all", min_tensor_bytes=0, inner=inner))
    refused = REFUSED.get(name) or REFUSED.get(f"{name}-{inner}")
    if refused:
        for compiler in (inner, ours):
            with pytest.raises(Exception, match=refused):
                run(compiler)
        gc.collect()  # the traceback holds the model
        assert settled_statistics().slots_in_use == 0
        return
    expected = run(inner)
    before = settled_statistics()
    found = run(ours)
    assert_same_bits(dict(enumerate(found)), dict(enumerate(expected)))
    moved = settled_statistics().since(before)
    assert (moved.offloads > 0) == MOVES_NOTHING.keys().isdisjoint((name, f"{name}-{inner}"))
    del found, expected
    assert settled_statistics().slots_in_use == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_a_mode_computes_the_same(mode: str) -> None:
    def run(compiler: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return norms_with_statistics(functools.partial(torch.compile, backend=compiler, mode=mode))

    expected, before = run("inductor"), settled_statistics()
    found = run(backend(OffloadConfig(policy="all", min_tensor_bytes=0)))
    assert_same_bits(dict(enumerate(found)), dict(enumerate(expected)))
    assert settled_statistics().since(before).offloads > 0


def test_an_export_of_a_compiled_model_is_the_plain_model() -> None:
    net, x = Net().eval(), batch()
    compiled = torch.compile(net, backend=backend(OffloadConfig(policy="all", min_tensor_bytes=0)))
    compiled(x).sum().backward()
    exported = torch.export.export(compiled, (x,), strict=False)
    assert not [node for node in exported.graph.nodes if "ssdtrain" in str(node.target)]
    assert_same_bits({"": exported.module()(x).detach()}, {"": net(x).detach()})


def test_of_modules_compiled_in_place_torch_skips_its_own_containers() -> None:
    """In torch 2.13, ``nn.Sequential(...).compile()`` compiles nothing, with every backend."""
    seen: list[str] = []

    def note(graph: Any, _: Any) -> Any:
        seen.append("graph")
        return graph

    for module, graphs in ((nn.Sequential(nn.Linear(WIDTH, WIDTH)), 0), (Net(), 1)):
        torch._dynamo.reset()
        seen.clear()
        module.compile(backend=note)
        module(batch()).sum().backward()
        assert len(seen) == graphs
