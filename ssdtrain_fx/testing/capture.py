"""Capture one training step: trace it as ``torch.compile`` does, partition it, and run it once on real tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import Tensor, fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.compiler.aot_eager import run_node_by_node
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, join
from ssdtrain_fx.testing.interpret import MeasuredMemory, copies, measure_memory, run

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
save_all: Partition = default_partition
"""Saves everything that backward needs, so backward recomputes nothing. The graphs are the easiest to read."""
min_cut: Partition = min_cut_rematerialization_partition
"""The partitioner that the backend uses."""


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedStep:
    """The forward and backward graphs of a training step, and the arguments that they were called with."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int
    """Number of outputs of ``forward`` that are not saved for backward."""
    forward_args: tuple[Any, ...]
    backward_args: tuple[Any, ...]

    def join(self) -> ScheduledJointGraph:
        """Return a new scheduled joint graph. Each call returns a separate graph, so tests can modify it."""
        return join(self.forward, self.backward, num_forward_outputs=self.num_forward_outputs)

    def joint_args(self, joint: ScheduledJointGraph) -> list[Any]:
        """Copies of the arguments for the placeholders of ``joint``, as captured when the step ran."""
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        by_name = dict(zip([node.name for node in placeholders], self.backward_args, strict=True))
        return copies([*self.forward_args, *(by_name[node.name] for node in joint.backward_inputs)])

    def run(self, joint: ScheduledJointGraph | None = None) -> Any:
        """Run ``joint`` on the captured arguments and return (outputs, gradients). None runs the captured step itself.

        Runs node by node, with the same random numbers every time. Offload nodes really move their tensors.
        """
        joint = self.join() if joint is None else joint
        return run(joint.gm, self.joint_args(joint))

    def measure(self, joint: ScheduledJointGraph | None = None) -> MeasuredMemory:
        """Run as ``run`` does, but return the memory at every node."""
        joint = self.join() if joint is None else joint
        return measure_memory(joint.gm, self.joint_args(joint))


def capture_step(
    function: Callable[..., Any], *inputs: Any, partition: Partition = save_all, dynamic: bool = False
) -> CapturedStep:
    """Trace ``function(*inputs)`` and its backward, and run both once to record the arguments of the two graphs.

    The gradients of parameters, the values of buffers and the state of the random number generators do not change.

    Args:
        function: a module or a function without graph breaks that returns tensors.
        inputs: the arguments of ``function``. One of them or a parameter must require gradients.
        dynamic: trace with symbolic sizes.

    Raises:
        ValueError: no output of ``function`` requires gradients.
    """
    graphs: list[tuple[fx.GraphModule, fx.GraphModule, int]] = []
    arguments: list[tuple[Any, ...]] = []

    def split(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(gm, joint_inputs, **kwargs)
        graphs.append((forward, backward, kwargs["num_fwd_outputs"]))
        return forward, backward

    def compile_half(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        compiled = run_node_by_node(gm, example_inputs)

        def call(args: list[Any]) -> Any:
            arguments.append(tuple(copies(args)))
            return compiled(args)

        call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def trace(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = _torch_private.aot_autograd(gm, example_inputs, compiler=compile_half, partition_fn=split)

        def call(*args: Any) -> Any:
            values = [(arg, arg._version, arg.detach().clone()) for arg in args if isinstance(arg, Tensor)]
            results = compiled(*args)
            _run_backward(results, [arg for arg, _, _ in values if arg.requires_grad])
            with torch.no_grad():
                for arg, version, value in values:
                    if arg._version != version:
                        arg.copy_(value)
            return results

        return call

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        _torch_private.compile_apart(function, trace, fullgraph=True, dynamic=dynamic)(*inputs)
    if not graphs:
        raise ValueError(f"{function} saves nothing for backward: no output requires gradients for these inputs.")
    ((forward, backward, num_forward_outputs),) = graphs
    forward_args, backward_args = arguments
    return CapturedStep(forward, backward, num_forward_outputs, forward_args, backward_args)


def _run_backward(results: Any, leaves: Sequence[Tensor]) -> None:
    """Run backward from fixed tangents, without changing ``.grad`` of the leaves."""
    roots = [leaf for leaf in _torch_private.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots:
        return
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(root.shape, dtype=root.dtype, generator=generator).to(root.device) for root in roots]
    torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
