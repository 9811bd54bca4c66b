"""Run one pass with the real compilers, without the rest of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from functorch.compile import min_cut_rematerialization_partition
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private import inductor as private
from ssdtrain_fx.compiler.aot_eager import run_node_by_node
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, join, split

Rewrite = Callable[[ScheduledJointGraph], ScheduledJointGraph]


class RewritingPartitioner(private.CustomPartitionerFn):
    """The min-cut partitioner, followed by ``rewrite``."""

    def __init__(self, rewrite: Rewrite) -> None:
        self.rewrite = rewrite

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        return split(self.rewrite(join(forward, backward, num_forward_outputs=kwargs["num_fwd_outputs"])))

    def uuid(self) -> str:
        return f"never twice the same {time.time_ns()}"


def rewriting_backend(rewrite: Rewrite, inner: Literal["inductor", "aot_eager"]) -> Callable[..., Any]:
    """The backend ``inner``, with ``rewrite`` between the partitioner and the compiler."""
    partitioner = RewritingPartitioner(rewrite)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if inner == "aot_eager":
            return _torch_private.aot_autograd(gm, example_inputs, compiler=run_node_by_node, partition_fn=partitioner)
        with _torch_private.functorch_config_patch(enable_autograd_cache=False):
            return private.compile_fx(gm, example_inputs, config_patches={"custom_partitioner_fn": partitioner})

    return backend
