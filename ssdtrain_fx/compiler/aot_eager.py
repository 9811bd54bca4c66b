"""Offloading without a compiler: AOTAutograd's two graphs are rewritten and run node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.compiler.calibration import Calibration
from ssdtrain_fx.compiler.inlined_hooks import hooks_need_saved_tensors
from ssdtrain_fx.compiler.redrawn_numbers import warn_of_redrawn_numbers
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.passes.analysis.chains import find_activation_inputs
from ssdtrain_fx.passes.graph.op_targets import RELEASE, RELOAD, WAIT, find
from ssdtrain_fx.passes.pipeline import OffloadedStep, offload_saved_tensors
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, keep_memory_for


def compile_with_aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: OffloadConfig,
    *,
    observe: Callable[[OffloadedStep], None] | None = None,
    compiler: _torch_private.AOTCompiler | None = None,
    budget: StepBudget | None = None,
) -> Callable[..., Any]:
    """Compile as ``torch.compile(backend="aot_eager")`` does, with offloading.

    Args:
        observe: called with every rewritten step.
        compiler: compiles the two graphs; None runs them node by node.
        budget: what ``config.find_budget`` has found earlier. None: it is called now.
    """

    plan: Plan | None = None
    calibration = Calibration(config, gm, example_inputs)
    device, activation_inputs = calibration.device, find_activation_inputs(example_inputs)
    # Imported here: it imports Dynamo, which takes as long as torch itself. Who compiles has imported it already.
    from functorch.compile import min_cut_rematerialization_partition

    found_budget = config.find_budget(example_inputs) if budget is None else budget

    def partition(gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if hooks_need_saved_tensors():
            return forward, backward
        warn_of_redrawn_numbers(forward, backward)
        hardware = calibration.hardware
        step = offload_saved_tensors(
            forward,
            backward,
            num_forward_outputs=kwargs["num_fwd_outputs"],
            config=config,
            hardware=hardware,
            budget=config.budget_of_plan(found_budget, hardware),
            times=config.load_call_times(device),
            describe=observe is not None,
            activation_inputs=activation_inputs,
        )
        if observe is not None:
            observe(calibration.describe(step))
        nonlocal plan
        plan = step.plan
        for node in (*find(step.backward.graph, RELOAD), *find(step.backward.graph, WAIT)):
            # No code is compiled for a layout here, so reload what forward really made. Metadata can be wrong: under
            # autocast on CPU, native_layer_norm claims float32 for the statistics that it returns as bfloat16.
            node.update_arg(2, None)
            node.update_arg(3, None)
        return step.forward, step.backward

    def compile_half(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        run = run_node_by_node(gm, example_inputs)
        is_forward = bool(find(gm.graph, RELEASE))
        if plan is None:
            return run
        moves = is_forward or bool(find(gm.graph, RELOAD))
        forward, backward = calibration.halves(plan) if moves else (None, None)
        timed = forward if is_forward else backward
        run = in_step_memory(run, planned_peak_bytes=plan.peak_after_bytes, timed=timed, moves=moves)
        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    compiled = _torch_private.aot_autograd(
        gm, example_inputs, compiler=compiler or compile_half, partition_fn=partition
    )
    return keep_memory_for(compiled)


def run_node_by_node(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A compiler that compiles nothing. Every value is freed after its last use, arguments included."""

    def run(args: list[Any]) -> Any:
        # A new interpreter for each run: it keeps the results of its last run, which would be tokens and gradients.
        return fx.Interpreter(gm).boxed_run(args)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run
