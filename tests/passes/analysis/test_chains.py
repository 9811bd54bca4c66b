"""Which graphs are links of a chain, which of their inputs may move, and how many bytes of a link move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import transfer_problems
from torch import Tensor, fx, nn

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.compiler.aot_eager import compile_with_aot_eager
from ssdtrain_fx.passes.analysis.chains import find_activation_inputs
from ssdtrain_fx.passes.pipeline import OffloadedStep
from ssdtrain_fx.passes.planning.chains import choose_most, exposed_in_chain_s
from ssdtrain_fx.passes.planning.plan import Offload
from ssdtrain_fx.passes.planning.simulate import live_bytes
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem
from ssdtrain_fx.testing import toy_hardware


def test_an_activation_is_a_float_with_a_history() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    inputs = [leaf * 2, leaf, nn.Parameter(torch.zeros(3)), torch.zeros(3), torch.zeros(3, dtype=torch.int64), 7]
    assert find_activation_inputs(inputs) == {0}


def compile_once(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> OffloadedStep:
    steps: list[OffloadedStep] = []

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        config = OffloadConfig(**{"inner": "aot_eager", "policy": "all", "min_tensor_bytes": 0, **options})
        return compile_with_aot_eager(gm, example_inputs, config, observe=steps.append)

    torch.compile(function, backend=compiler)(*inputs).sum().backward()
    (step,) = steps
    return step


def moved_inputs(step: OffloadedStep) -> list[tuple[str, ...]]:
    return [
        storage.shape for storage in step.plan.storages if storage.is_input and isinstance(storage.decision, Offload)
    ]


@pytest.fixture
def x() -> Tensor:
    """An input that is the result of an operator between graphs."""
    return torch.randn(4, 6, requires_grad=True) * 2


def layer(x: Tensor, w: Tensor) -> Tensor:
    return x + (x @ w).tanh()


def test_of_a_link_the_activation_that_comes_in_moves_and_the_parameter_stays(x: Tensor) -> None:
    step = compile_once(layer, x, nn.Parameter(torch.randn(6, 6)))
    assert moved_inputs(step) == [("4", "6")]


def test_data_of_the_user_stays() -> None:
    step = compile_once(layer, torch.randn(4, 6, requires_grad=True), nn.Parameter(torch.randn(6, 6)))
    assert moved_inputs(step) == []
    assert step.plan.offloaded


def test_a_graph_that_ends_in_a_loss_is_not_part_of_a_chain(x: Tensor) -> None:
    step = compile_once(lambda x, w: layer(x, w).sum(), x, nn.Parameter(torch.randn(6, 6)))
    assert moved_inputs(step) == []
    assert step.plan.offloaded


def test_an_activation_that_is_written_to_stays(x: Tensor) -> None:
    def write(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(2)
        return (x @ w).tanh()

    step = compile_once(write, x, nn.Parameter(torch.randn(6, 6)))
    assert moved_inputs(step) == []


def test_the_release_of_an_input_is_not_deferred(x: Tensor) -> None:
    """The owner of an input may overwrite it as soon as forward has returned."""
    step = compile_once(layer, x, nn.Parameter(torch.randn(6, 6)))
    releases = [line for line in step.joint_after.splitlines() if "ssdtrain.release" in line]
    (of_input,) = (line for line in releases if "primals_1" in line)
    assert "True" not in of_input


def stage(x: Tensor, w: Tensor) -> Tensor:
    """A stage of a pipeline: data comes in and an activation goes out. One micro-batch has its peak at the beginning,
    in a result that backward does not need."""
    wide = x.repeat(1, 32).view(-1, 32, x.shape[1]) + 1
    x = x + wide.amax(1).detach()
    for _ in range(3):
        x = (x @ w).tanh()
    return x


def plan_of_stage(**options: Any) -> OffloadedStep:
    hardware = toy_hardware(1e9, kernel_s=1e-3)
    x, w = torch.randn(64, 64, requires_grad=True), nn.Parameter(torch.randn(64, 64))
    return compile_once(stage, x, w, policy="auto", recompute=False, hardware=hardware, max_slowdown=0.5, **options)


def test_micro_batches_in_flight_let_a_stage_move_what_it_holds() -> None:
    alone, of_four = plan_of_stage(), plan_of_stage(forwards_in_flight=4)
    assert alone.plan.offloaded_bytes == 0
    assert of_four.plan.offloaded_bytes >= 3 * 64 * 64 * 4
    assert moved_inputs(of_four) == []


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_micro_batches_may_come_back_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    w = nn.Parameter(torch.randn(64, 64) / 8)
    gradients: list[Tensor] = []
    for backend in ("aot_eager", ssdtrain_fx.backend(micro_batch_config(tmp_path))):
        torch._dynamo.reset()
        compiled = torch.compile(stage, backend=backend)
        w.grad = None
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            batches = [torch.randn(64, 64, generator=generator).requires_grad_() for _ in order]
            results = [compiled(batch, w) for batch in batches]
            for number in order:
                results[number].backward(torch.full((64, 64), 1.0 + number))
            gradients += [batch.grad for batch in batches if batch.grad is not None]
        assert w.grad is not None
        gradients.append(w.grad.clone())
    half = len(gradients) // 2
    assert half == 9
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients[:half], gradients[half:], strict=True))


def micro_batch_config(directory: Path) -> OffloadConfig:
    return OffloadConfig(
        inner="aot_eager",
        ssd_dir=str(directory),
        min_tensor_bytes=0,
        hardware=toy_hardware(1e9, kernel_s=1e-3),
        max_slowdown=0.5,
        forwards_in_flight=4,
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=transfer_problems(), max_slowdown=st.sampled_from([0.0, 0.02, 0.5]))
def test_as_many_bytes_move_as_time_allows(problem: TransferProblem, max_slowdown: float) -> None:
    choice = choose_most(problem, max_slowdown=max_slowdown)
    allowed_s = max_slowdown * problem.step_s
    chosen = [movable for movable in problem.movables if movable.idx in choice.placements]
    assert choice.simulation.exposed_s == pytest.approx(exposed_in_chain_s(problem, chosen))
    assert choice.simulation.exposed_s <= allowed_s
    for movable in problem.movables:
        if movable not in chosen:
            assert exposed_in_chain_s(problem, [*chosen, movable]) > allowed_s * (1 - 1e-9)
    left_behind = live_bytes(problem, choice.placements)[problem.marker]
    moved_bytes = sum(movable.size_bytes for movable in chosen)
    assert left_behind == live_bytes(problem, {})[problem.marker] - moved_bytes


def seconds_per_link(problem: TransferProblem, chosen: Sequence[Movable]) -> float:
    """Simulate a long chain. A forward waits for the writes that the forward before it left unfinished. A backward
    waits for its reads, which begin when the backward before it begins."""
    hardware, length = problem.hardware, 400
    forward_s = sum(problem.node_s[: problem.marker]) + sum(problem.blocks_out_s(one.size_bytes) for one in chosen)
    backward_s = sum(problem.node_s[problem.marker :]) + sum(problem.blocks_in_s(one.size_bytes) for one in chosen)
    ended_s, written_s = [0.0], [0.0]
    for _ in range(length):
        write_s = sum(hardware.write.transfer_s(one.size_bytes) for one in chosen)
        begun_s, written_before_s = ended_s[-1], written_s[-1]
        written_s.append(max(begun_s, written_before_s) + write_s)
        ended_s.append(max(begun_s + forward_s, written_before_s))
    done_s, read_s = [0.0, 0.0], [0.0]
    for _ in range(length):
        read_s.append(max(read_s[-1], done_s[-2]) + sum(hardware.read.transfer_s(one.size_bytes) for one in chosen))
        done_s.append(max(done_s[-1], read_s[-1]) + backward_s)
    half = length // 2
    return (ended_s[-1] - ended_s[-1 - half] + done_s[-1] - done_s[-1 - half]) / half


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=transfer_problems())
def test_in_a_long_chain_every_link_takes_what_the_formula_says(problem: TransferProblem) -> None:
    expected_s = problem.step_s + exposed_in_chain_s(problem, problem.movables)
    assert seconds_per_link(problem, problem.movables) == pytest.approx(expected_s, rel=1e-6)
