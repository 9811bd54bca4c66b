"""Toy training steps for the tests of the passes: traced by AOTAutograd, partitioned, and run once on real tensors."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ssdtrain_fx import _torch_private
from ssdtrain_fx.aot_eager import run_node_by_node
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.alias_sets import AliasSets, find_alias_sets
from ssdtrain_fx.passes.analysis import Analysis as PlannerAnalysis
from ssdtrain_fx.passes.candidates import Candidate, find_candidates
from ssdtrain_fx.passes.insert_offloads import insert_offloads
from ssdtrain_fx.passes.joint_graph import ScheduledJointGraph, join
from ssdtrain_fx.passes.liveness import find_live_intervals
from ssdtrain_fx.passes.plan import Plan
from ssdtrain_fx.passes.plan_offloads import plan_offloads, pose_problem

ENGINE = "{}"
"""The engine with all defaults: its file has no name and lies in the temp directory."""


def disk_only(bytes_per_s: float) -> Hardware:
    """A machine that is nothing but a disk: what is not on the disk has not left, and only the disk takes time."""
    free = Channel(bytes_per_s=1e30)
    disk = Channel(bytes_per_s=min(bytes_per_s, 1e30))
    return Hardware(
        device="cpu",
        flops_per_s={"float32": 1e12},
        memory_bytes_per_s=1e12,
        elements_per_s={"float32": 1e12},
        kernel_s=0.0,
        write=disk,
        read=disk,
        share_when_both=0.5,
        copy_out=free,
        copy_in=free,
        copies_block_compute=False,
        offload_s=0.0,
        reload_s=0.0,
        staging_bytes=0,
    )


Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
save_all: Partition = default_partition
"""Backward recomputes nothing: what it needs is saved. The easiest to read."""
min_cut: Partition = min_cut_rematerialization_partition
"""What the backend uses."""


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedStep:
    """The two graphs that a partitioner made of a training step, and the arguments that they were called with."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int
    forward_args: tuple[Any, ...]
    backward_args: tuple[Any, ...]

    def join(self) -> ScheduledJointGraph:
        return join(self.forward, self.backward, num_forward_outputs=self.num_forward_outputs)

    def joint_args(self, joint: ScheduledJointGraph) -> list[Any]:
        """Fresh copies of what the placeholders of ``joint`` stood for when the step ran."""
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        by_name = dict(zip([node.name for node in placeholders], self.backward_args, strict=True))
        return copies([*self.forward_args, *(by_name[node.name] for node in joint.backward_inputs)])


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """A joint graph and what the first passes say about it."""

    joint: ScheduledJointGraph
    alias_sets: AliasSets
    candidates: tuple[Candidate, ...]

    def plan(
        self,
        *,
        policy: str = "all",
        disk: float = 1024,
        max_slowdown: float = 0.0,
        budget_bytes: int | None = None,
    ) -> Plan:
        """Every node takes a second; ``disk`` bytes go either way meanwhile. No copies, no staging."""
        known = PlannerAnalysis(
            joint=self.joint,
            alias_sets=self.alias_sets,
            candidates=self.candidates,
            intervals=find_live_intervals(self.joint.graph, self.alias_sets),
            node_s=(1.0,) * len(self.joint.graph.nodes),
        )
        return plan_offloads(
            known,
            pose_problem(known, hardware=disk_only(disk)),
            move_all=policy == "all",
            max_slowdown=max_slowdown,
            memory_budget_bytes=budget_bytes,
        )

    def rewrite(self, plan: Plan) -> ScheduledJointGraph:
        """Execute the plan on ``joint`` itself, which is returned for convenience."""
        return insert_offloads(self.joint, self.alias_sets, plan, self.candidates, engine=ENGINE)

    def candidate(self, name: str) -> Candidate:
        """The candidate that has a saved node of this name."""
        found = [candidate for candidate in self.candidates if name in [node.name for node in candidate.saved_nodes]]
        assert len(found) == 1, f"{name} is not saved; saved are {[node.name for node in self.joint.saved]}"
        return found[0]


def capture_step(
    function: Callable[..., Any],
    *inputs: Any,
    partition: Partition = save_all,
    dynamic: bool = False,
) -> CapturedStep:
    """Compile ``function`` without a compiler, run one training step, and hand over what a partitioner made of it."""
    captured: list[CapturedStep] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _trace(gm, example_inputs, partition, captured)

    torch.compiler.reset()
    torch.manual_seed(0)
    _backward(torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs))
    (step,) = captured
    return step


def analyse(step: CapturedStep, *, min_tensor_bytes: int = 0) -> Analysis:
    joint = step.join()
    alias_sets = find_alias_sets(joint.graph)
    return Analysis(joint, alias_sets, find_candidates(joint, alias_sets, min_tensor_bytes=min_tensor_bytes))


class MLP(nn.Module):
    """Two linear layers with GELU and dropout: a 0-1 mask is saved, and a recomputable pointwise tail."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.second(F.gelu(self.first(x))), 0.5).square().mean()


class Attention(nn.Module):
    """One fused projection: q, k and v are strided views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(-2)).relu().sum()


class Norms(nn.Module):
    """Layer norms: ops with several results, of which backward reads three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(torch.tanh(self.linear(self.first(x))))).square().sum()


class Convolutions(nn.Module):
    """Convolution, batch norm (which writes its running statistics) and pooling (which saves int64 positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.linear = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2)
        return self.linear(y.flatten(1)).logsumexp(-1).sum()


class Deep(nn.Module):
    """Six layers on a large batch: activations are most of the memory, and the peak is where forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


TOYS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (MLP, (64, 16)),
    "attention": (Attention, (4, 16, 16)),
    "norms": (Norms, (48, 16)),
    "convolutions": (Convolutions, (8, 2, 8, 8)),
    "deep": (Deep, (64, 8)),
}
"""Module and shape of its input, by name."""


@functools.cache
def capture_toy(name: str, *, partition: Partition = min_cut, dynamic: bool = False) -> CapturedStep:
    """The same step every time: :meth:`CapturedStep.join` copies, so tests cannot disturb each other."""
    make, shape = TOYS[name]
    torch.manual_seed(0)
    module = make()
    return capture_step(module, torch.randn(shape, requires_grad=True), partition=partition, dynamic=dynamic)


RANDOM_OPS = ("add", "mul", "relu", "sin", "mm", "transpose", "view", "reshape", "split", "expand", "softmax", "norm")
Program = tuple[tuple[str, int, int], ...]
"""Instructions ``(op, a, b)``: apply the op to earlier values number a and b, counted modulo how many there are."""


def random_programs(*, max_size: int = 12) -> st.SearchStrategy[Program]:
    instruction = st.tuples(st.sampled_from(RANDOM_OPS), st.integers(0, 15), st.integers(0, 15))
    return st.lists(instruction, min_size=2, max_size=max_size).map(tuple)


def capture_program(program: Program, *, partition: Partition = save_all) -> CapturedStep:
    """Interpret ``program`` on two matrices; it returns a loss over its last three values, and the last itself."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values = [x.sin(), w.cos()]
        for op, first, second in program:
            a, b = values[first % len(values)], values[second % len(values)]
            values += _apply(op, a, b)
        return torch.stack([value.sum() for value in values[-3:]]).sum(), values[-1]

    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((4, 4), (4, 8)))
    return capture_step(function, x, w, partition=partition)


def _apply(op: str, a: Tensor, b: Tensor) -> list[Tensor]:
    """The results of one instruction; none where the shapes do not allow it."""
    match op:
        case "add" if a.shape == b.shape:
            return [a + b]
        case "mul" if a.shape == b.shape:
            return [a * b]
        case "relu":
            return [a.relu()]
        case "sin":
            return [a.sin()]
        case "softmax":
            return [a.softmax(-1)]
        case "norm":
            return [F.layer_norm(a, a.shape[-1:])]
        case "mm" if a.shape[1] == b.shape[0]:
            return [a @ b]
        case "transpose":
            return [a.t()]
        case "view" if a.is_contiguous():
            return [a.view(-1, 2)]
        case "reshape":
            return [a.reshape(2, -1)]
        case "split" if a.shape[0] > 1:
            return list(a.split(a.shape[0] // 2))
        case "expand":
            return [a.sum(0, keepdim=True).expand(a.shape)]
    return []


def run(gm: fx.GraphModule, args: Sequence[Any]) -> Any:
    """Node by node, on copies of the arguments, always with the same random numbers."""
    torch.manual_seed(0)
    return fx.Interpreter(gm).run(*copies(args))


def copies(values: Sequence[Any]) -> list[Any]:
    """Copies that keep strides; graphs write into some of their inputs."""
    return [value.detach().clone() if isinstance(value, Tensor) else value for value in values]


def named(graph: fx.Graph, name: str) -> fx.Node:
    (found,) = (node for node in graph.nodes if node.name == name)
    return found


def names(nodes: Iterable[object]) -> list[str]:
    return [str(node) for node in nodes]


def calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]


def listing(graph: fx.Graph) -> str:
    """One line per node: name, shape and call. Short enough to check by eye."""
    lines: list[str] = []
    for node in graph.nodes:
        keywords = [f"{key}={_show(value)}" for key, value in node.kwargs.items()]
        arguments = ", ".join([*map(_show, node.args), *keywords])
        if node.op == "output":
            lines.append(f"return {arguments}")
        elif node.op == "placeholder":
            lines.append(f"{node.name}: {_type(node)}")
        else:
            target = re.sub(r"\.(default|Tensor|dim_IntList)$", "", str(getattr(node.target, "__name__", node.target)))
            call = f"self.{node.target}" if node.op == "get_attr" else f"{target}({arguments})"
            lines.append(f"{node.name}: {_type(node)} = {call}" if "val" in node.meta else call)
    return "\n".join(lines)


def _show(argument: object) -> str:
    if isinstance(argument, (list, tuple)):
        inside = ", ".join(map(_show, argument))
        return f"[{inside}]" if isinstance(argument, list) else f"({inside})"
    return str(argument) if not isinstance(argument, str) else repr(argument)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        short = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{short}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def _trace(
    gm: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition, captured: list[CapturedStep]
) -> Callable[..., Any]:
    graphs: list[tuple[fx.GraphModule, fx.GraphModule, int]] = []
    forward_args: list[tuple[Any, ...]] = []

    def split(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(gm, joint_inputs, **kwargs)
        graphs.append((forward, backward, kwargs["num_fwd_outputs"]))
        return forward, backward

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        compiled = run_node_by_node(gm, example_inputs)

        def call(args: list[Any]) -> Any:
            if not forward_args:
                forward_args.append(tuple(copies(args)))
            elif not captured:
                captured.append(CapturedStep(*graphs[0], forward_args[0], tuple(copies(args))))
            return compiled(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return _torch_private.aot_autograd(gm, example_inputs, compiler=compiler, partition_fn=split)


def _backward(outputs: Any) -> None:
    leaves = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(root.shape, dtype=root.dtype, generator=generator) for root in roots]
    torch.autograd.backward(roots, tangents)
