"""Testing tools: what they must reject, what they must not change, and that other packages can use them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from ssdtrain_fx.testing import (
    analyse,
    assert_same_bits,
    capture_step,
    capture_toy,
    changes,
    listing,
    measure_memory,
    named,
    run,
    toy_hardware,
    train,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        ([0.0], [-0.0], "1 of 1 elements differ, the first is 0.0 instead of -0.0"),
        ([1.0, 2.0], [1.0, 2.0000002], "1 of 2 elements differ, the first is 2.0 instead of 2.0000002"),
        ([1.0, NAN], [1.0, 2.0], "the first is nan instead of 2.0"),
        ([1.0], [1.0, 1.0], r"\[1\] instead of torch.float32 \[2\]"),
    ],
)
def test_a_bit_that_differs_is_found(found: list[float], expected: list[float], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(torch.tensor(found), torch.tensor(expected))


def test_the_message_says_where() -> None:
    one = ({"weight": torch.ones(2), "bias": torch.zeros(2)}, 3)
    with pytest.raises(AssertionError, match=r"^\[0\]\['bias'\]: 2 of 2 elements differ"):
        assert_same_bits(({"weight": torch.ones(2), "bias": torch.ones(2)}, 3), one)
    with pytest.raises(AssertionError, match=r"^\[1\]: 4 instead of 3"):
        assert_same_bits((one[0], 4), one)
    with pytest.raises(AssertionError, match="expected"):
        assert_same_bits(({"weight": torch.ones(2)}, 3), one)


def test_other_dtypes_and_strides_differ() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    with pytest.raises(AssertionError, match=r"torch\.float64"):
        assert_same_bits(matrix.double(), matrix)
    turned = matrix.t().contiguous().t()
    assert_same_bits(turned, matrix)
    with pytest.raises(AssertionError, match="strides"):
        assert_same_bits(turned, matrix, strides=True)


def test_the_same_not_a_number_is_the_same() -> None:
    values = (torch.tensor([NAN, 1.0]), torch.tensor(True), torch.tensor(1 + 2j), torch.empty(0), None)
    assert_same_bits(values, tuple(value.clone() if isinstance(value, Tensor) else value for value in values))


def test_the_strides_of_a_single_element_do_not_matter() -> None:
    column = torch.arange(12.0).view(2, 6)[:, :1]
    assert column[0].stride() == (1,) and column.mT[0].stride() == (6,)
    assert_same_bits(column.mT[0, :1], torch.tensor([0.0]))
    with pytest.raises(AssertionError, match=r"the first is 0\.0 instead of 1\.0"):
        assert_same_bits(column.mT[0, :1], torch.tensor([1.0]))


def test_nothing_to_compare_is_no_success() -> None:
    with pytest.raises(AssertionError, match="expected contains no tensor to compare"):
        assert_same_bits([], [])


class Noisy(nn.Module):
    """Batch norm writes its buffers, dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(self.norm(x))).square().sum()


def test_a_capture_leaves_no_trace() -> None:
    module = Noisy()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    random_state = torch.get_rng_state()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    capture_step(module, x)
    assert_same_bits(dict(module.named_buffers()), buffers)
    assert x.grad is None and all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_captured_step_computes_what_eager_autograd_does() -> None:
    """Compares loss and gradients with those of the function itself."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh().square().sum()

    x, w = torch.randn(4, 6), torch.randn(6, 8, requires_grad=True)
    loss = function(x, w)
    (gradient,) = torch.autograd.grad(loss, [w])
    step = capture_step(function, x, w)
    ((found,), gradients) = step.run()
    assert_same_bits(found, loss.detach())
    (tangent,) = [value for value in step.backward_args if isinstance(value, Tensor) and value.ndim == 0]
    assert gradients[0] is None
    torch.testing.assert_close(gradients[1], gradient * tangent)


def test_a_function_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="no output requires gradients for these inputs"):
        capture_step(lambda x: x.exp(), torch.randn(4))


def test_a_pass_that_breaks_a_value_is_caught() -> None:
    """The pass turns relu into neg: the results differ, and the diff shows the change."""
    step = capture_step(lambda x: x.relu().exp().sum(), torch.randn(4, requires_grad=True))
    joint = step.join()
    named(joint.graph, "relu").target = torch.ops.aten.neg.default
    joint.gm.recompile()
    with pytest.raises(AssertionError, match=r"^\[0\]\[0\]: 1 of 1 elements differ"):
        assert_same_bits(step.run(joint), step.run())
    assert_expected_inline(
        changes(listing(step.join().graph), listing(joint.graph)),
        """\
...
 tangents_1: f32[]
-relu: f32[4] = relu(primals_1)
+relu: f32[4] = neg(primals_1)
 detach: f32[4] = detach(relu)""",
    )


def test_what_is_not_there_is_named() -> None:
    joint = capture_toy("mlp").join()
    with pytest.raises(KeyError, match="no node is named 'nothing'; nodes: primals_1, "):
        named(joint.graph, "nothing")
    with pytest.raises(KeyError, match="nothing is not saved for backward; saved nodes: "):
        analyse(joint).candidate("nothing")


def test_memory_is_counted_on_storages() -> None:
    """0 x (an input, not counted);  1 exp;  2 a view of it;  3 sin, the last reader of exp;  4 return sin"""
    graph = fx.Graph()
    x = graph.placeholder("x")
    exp = graph.call_function(torch.ops.aten.exp.default, (x,))
    view = graph.call_function(torch.ops.aten.view.default, (exp, [24]))
    graph.output((graph.call_function(torch.ops.aten.sin.default, (view,)),))
    measured = measure_memory(fx.GraphModule({}, graph), [torch.randn(4, 6)])
    assert measured.live_bytes == (0, 96, 96, 192, 96)
    assert measured.token_bytes == (0,) * 5


def test_a_run_writes_into_copies_and_draws_the_same_numbers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    added = graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    graph.output((added, graph.call_function(torch.ops.aten.rand_like.default, (added,))))
    gm, value = fx.GraphModule({}, graph), torch.zeros(3)
    assert_same_bits(run(gm, [value]), run(gm, [value]))
    assert value.tolist() == [0, 0, 0]


def test_training_leaves_the_model_as_it_was() -> None:
    module = Noisy()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    batches = [(torch.randn(8, 4),), (torch.randn(8, 4),)]
    first = train(module, batches, "eager")
    assert_same_bits(dict(module.state_dict()), state)
    assert_same_bits(train(module, batches, "eager"), first)
    assert set(first[0].gradients) == {name for name, _ in module.named_parameters()}


def test_toy_hardware_takes_changes() -> None:
    hardware = toy_hardware(2000, staging_bytes=7)
    assert hardware.write.transfer_s(1000) == 0.5
    assert hardware.staging_bytes == 7


SOMEBODY_ELSES_PACKAGE = {
    "their_passes/__init__.py": """
        import torch
        from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph

        def square_by_power(joint: ScheduledJointGraph) -> ScheduledJointGraph:
            for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
                first, second = node.args
                if first is second:
                    node.target, node.args = torch.ops.aten.pow.Tensor_Scalar, (first, 2)
            joint.gm.recompile()
            return joint
    """,
    "test_their_passes.py": """
        import torch
        from ssdtrain_fx.testing import analyse, assert_same_bits, calls, capture_step, changes, listing
        from their_passes import square_by_power

        def step():
            return capture_step(lambda x: (x * x).exp().sum(), torch.randn(4, 6, requires_grad=True))

        def test_text():
            captured = step()
            before = listing(captured.join().graph)
            joint = square_by_power(captured.join())
            assert "+mul: f32[4, 6] = pow.Tensor_Scalar(primals_1, 2)" in changes(before, listing(joint.graph))
            assert len(calls(joint.graph, torch.ops.aten.pow.Tensor_Scalar)) == 1

        def test_bits_and_bytes():
            captured = step()
            joint = square_by_power(captured.join())
            assert_same_bits(captured.run(joint), captured.run())
            assert max(captured.measure(joint).live_bytes) == max(captured.measure().live_bytes)

        def test_what_it_makes_can_be_offloaded():
            captured = step()
            analysis = analyse(square_by_power(captured.join()))
            plan = analysis.plan()
            assert plan.offloaded
            assert_same_bits(captured.run(analysis.rewrite(plan)), captured.run())
    """,
}


def write_package(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())


def test_another_package_can_test_a_pass(tmp_path: Path) -> None:
    """Runs from outside: in a separate package and process, without access to these tests."""
    write_package(tmp_path, SOMEBODY_ELSES_PACKAGE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
