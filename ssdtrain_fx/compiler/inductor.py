"""Offloading under Inductor: how the pipeline hooks into one call of ``compile_fx``.

    compile_fx
      partition          OffloadPartitioner: the partitioner that Inductor would use, then the pipeline
      compile forward    KeepLayouts; then the layouts that the offloaded tensors really got are read from the code
      compile backward   its reloads get these layouts, as AOTAutograd does for tensors that are saved in memory;
                         KeepLayouts

Any of these steps may be served by a compile cache. Then no code here runs and only the cached code counts, so the
uuids below cover everything that the code depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx._torch_private import inductor as private
from ssdtrain_fx._torch_private.inductor_fusion import fusing_as_planned, running_in_step_memory
from ssdtrain_fx._torch_private.inductor_mutations import keeping_writers_in_front
from ssdtrain_fx.compiler.calibration import Calibration
from ssdtrain_fx.compiler.chunk_loss import LossChunking
from ssdtrain_fx.compiler.dry_run import compile_to_zeros
from ssdtrain_fx.compiler.inlined_hooks import hooks_need_saved_tensors
from ssdtrain_fx.compiler.plain_step import PlainStep
from ssdtrain_fx.compiler.redrawn_numbers import warn_of_redrawn_numbers
from ssdtrain_fx.config import OffloadConfig, device_of
from ssdtrain_fx.function_names import display_name, stable_name
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.analysis.chains import find_activation_inputs
from ssdtrain_fx.passes.analysis.fused_kernels import STORED
from ssdtrain_fx.passes.graph.copy_nodes import COPY_OF
from ssdtrain_fx.passes.graph.joint_graph import SAVED, VIEWED_AT, join, split
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, OPS, RELEASE, RELOAD, WAIT, find
from ssdtrain_fx.passes.graph.stride_nodes import strides_like
from ssdtrain_fx.passes.graph.tensor_sizes import hint
from ssdtrain_fx.passes.pipeline import OffloadedStep, offload_saved_tensors
from ssdtrain_fx.passes.planning.step_budget import StepBudget
from ssdtrain_fx.runtime.memory.step_memory import keep_memory_for

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
"""Where the source of all passes and of the runtime is."""

STEP_MEMORY = "ssdtrain_step_memory"
"""Key in the metadata of the output of both halves of a step: the arguments of ``in_step_memory`` besides the code."""

STEP_MEMORY_OF_COMPILED_AUTOGRAD = {"planned_peak_bytes": 0}
"""The backwards of all graphs become one graph, which no plan is about."""

Observer = Callable[[OffloadedStep], None]


@functools.cache
def _source_hash() -> str:
    """Hash of this package's source: graphs cached by one version of a pass must not be used by another version."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class OffloadPartitioner(private.CustomPartitionerFn):
    """Partitions as Inductor would, then rewrites both graphs.

    Inductor deep-copies its settings, and pickles them for the keys of its caches.
    """

    def __init__(
        self,
        config: OffloadConfig,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        observe: Observer | None = None,
        *,
        budget: StepBudget | None = None,
        on_warning: Callable[[], None] | None = None,
        on_rewrite: Callable[[fx.GraphModule, fx.GraphModule], None] | None = None,
    ) -> None:
        """
        Args:
            observe: called with every rewritten step.
            budget: what ``config.find_budget`` has found earlier. None: it is called now.
            on_warning: called if a warning about this step has been logged that every process should log.
            on_rewrite: called with both halves of a step that is rewritten, as plain Inductor would compile them.
        """
        # This object must not hold tensors, because it is pickled.
        self.config = config
        self.calibration = Calibration(config, gm, example_inputs)
        self.device = self.calibration.device
        self.activation_inputs = find_activation_inputs(example_inputs)
        # Found once: the key of the compile caches and the plan must have the same budget.
        self.budget = config.find_budget(example_inputs) if budget is None else budget
        self.observe = observe
        self.on_warning = on_warning
        self.on_rewrite = on_rewrite
        is_link = bool(self.activation_inputs) or config.forwards_in_flight > 1
        self.chunking = LossChunking(config, example_inputs, is_link=is_link)
        self.inner: private.CustomPartitionerFn | None = private.current_setting("custom_partitioner_fn")

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadPartitioner:
        """The same object: it does not change, and a copy must not find another budget."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What a key may depend on. The description of a limit tells how much memory is in use, to the byte."""
        budget = self.budget
        if budget is not None and budget.limit is not None:
            budget = dataclasses.replace(budget, limit="")
        return {
            **self.__dict__,
            "budget": budget,
            "observe": None,
            "on_warning": None,
            "on_rewrite": None,
            "chunking": None,
        }

    @property
    def hardware(self) -> Hardware:
        return self.calibration.hardware

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self.inner or min_cut_rematerialization_partition
        if hooks_need_saved_tensors():
            if self.on_warning is not None:
                self.on_warning()
            return partition(gm, joint_inputs, **kwargs)
        budget = self.config.budget_of_plan(self.budget, self.hardware)
        plain: dict[fx.GraphModule, tuple[fx.GraphModule, fx.GraphModule]] = {}

        def make_plan(halves: tuple[fx.GraphModule, fx.GraphModule], config: OffloadConfig) -> OffloadedStep:
            PlainStep.mark(*halves)
            step = offload_saved_tensors(
                *halves,
                num_forward_outputs=kwargs["num_fwd_outputs"],
                config=config,
                hardware=self.hardware,
                budget=budget,
                times=self.config.load_call_times(self.device),
                describe=self.observe is not None,
                activation_inputs=self.activation_inputs,
                is_final=False,
            )
            plain[step.forward] = halves
            return step

        step = self.chunking.plan(gm, joint_inputs, partition=partition, make_plan=make_plan, budget=budget, **kwargs)
        is_wrong = warn_of_redrawn_numbers(*plain[step.forward])
        if step.warning:
            log.warning("%s", step.warning)
        if self.observe is not None:
            self.observe(self.calibration.describe(step))
        timed = self.calibration.halves(step.plan)
        for half, timed_half in zip((step.forward, step.backward), timed, strict=True):
            half.graph.output_node().meta[STEP_MEMORY] = {
                "planned_peak_bytes": step.plan.peak_after_bytes,
                "timed": None if timed_half is None else tuple(timed_half),
            }
        if self.on_rewrite is not None and any(_is_rewritten(half.graph) for half in (step.forward, step.backward)):
            self.on_rewrite(*plain[step.forward])
        if (is_wrong or step.warning or self.chunking.has_warned) and self.on_warning is not None:
            self.on_warning()
        return step.forward, step.backward

    def uuid(self) -> str:
        inner = self.inner.uuid() if self.inner is not None else None
        planned_for = f"{self.config.cache_key()} {self.hardware.digest()} {sorted(self.activation_inputs)}"
        times = self.config.load_call_times(self.device)
        if times is not None:
            planned_for += f" {times.generation}"
        # The number differs from the option for "auto".
        planned_for += f" {None if self.budget is None else self.budget.size_bytes}"
        planned_for += f" {_torch_private.overwrites_saved_tensors()} {torch.get_num_threads()}"
        return f"ssdtrain_fx {_source_hash()} {planned_for} {inner!r}"


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionedStep:
    """A training step as cut by Inductor's partitioner, before anything is offloaded."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_forward_outputs: int
    device: str
    """Device that the step is planned for: ``cpu`` or ``cuda``."""


class _CapturePartition(private.CustomPartitionerFn):
    """Partitions as Inductor would. The compiler gets copies, because it rewrites its graphs."""

    def __init__(self, device: str, observe: Callable[[PartitionedStep], None]) -> None:
        self.device = device
        self.observe = observe
        self.inner: private.CustomPartitionerFn | None = private.current_setting("custom_partitioner_fn")

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        partition = self.inner or min_cut_rematerialization_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        step = PartitionedStep(forward, backward, kwargs["num_fwd_outputs"], self.device)
        self.observe(step)
        return split(join(forward, backward, num_forward_outputs=step.num_forward_outputs))

    def uuid(self) -> None:
        """None: the graphs that this partitions are never compiled to code."""


class KeepLayouts(private.CustomGraphPass):
    """Gives an offloaded tensor the layout that Inductor would give it if forward still returned it for backward.

    Runs last on every graph. Does not change graphs without offloads.
    """

    def __init__(self) -> None:
        self.inner: Any = private.current_setting("post_grad_custom_post_pass")
        self.plain_digest = ""
        """Of what the rewritten graph is computed like; see ``PlainStep``. Inductor's cache has no other key for it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepLayouts:
        """The same object: Inductor copies its settings before the digest is known."""
        return self

    def __call__(self, graph: fx.Graph) -> None:
        for inner in private.as_passes(self.inner):
            inner(graph)
        sources = [node.args[0] for node in find(graph, OFFLOAD)]
        for offload in find(graph, OFFLOAD):
            if SAVED in offload.meta and isinstance(offload.args[0], fx.Node):
                offload.args[0].meta[SAVED] = True
        private.lower_at_the_end(graph, frozenset((OFFLOAD, RELEASE)))
        if sources:
            made = [node for node in sources if isinstance(node, fx.Node) and node.op != "placeholder"]
            returned = [node for node in made if SAVED in node.meta]
            views_of_others = private.views_that_were_saved(graph, VIEWED_AT)
            private.require_layout_of_outputs(graph, returned + views_of_others)

    def uuid(self) -> str:
        inner = [inner.uuid() for inner in private.as_passes(self.inner)]
        return f"ssdtrain_fx {_source_hash()} {self.plain_digest} {inner!r}"


class _CompileBothHalves:
    """Inductor's ``inner_compile`` for one graph. Passes the layouts of offloaded tensors from forward to backward."""

    def __init__(self) -> None:
        self.stride_by_token: dict[str, tuple[int, ...]] = {}
        self.has_warned = False
        self.plain: PlainStep | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> private.OutputCode:
        # What is read here is read before compiling, because Inductor rewrites the graph.
        site_by_token = {release.name: _site_argument(release) for release in find(gm.graph, RELEASE)}
        for reload in find(gm.graph, RELOAD):
            token = reload.args[0]
            assert isinstance(token, fx.Node)
            if token.name in self.stride_by_token:
                size, stride = cast(Any, reload.args[1:3])
                with gm.graph.inserting_before(reload):
                    stride = strides_like(gm.graph, size, stride, self.stride_by_token[token.name])
                for node in (reload, *reload.users):
                    node.update_arg(2, stride)
        hints = _hints_of_symbols(gm.graph)
        with contextlib.ExitStack() as stack:
            stack.enter_context(keeping_writers_in_front())
            if self.plain is not None:
                stack.enter_context(self.plain.computing_alike(gm, example_inputs, **kwargs))
            step_memory = gm.graph.output_node().meta.get(STEP_MEMORY)
            if _is_rewritten(gm.graph):
                step_memory = step_memory or STEP_MEMORY_OF_COMPILED_AUTOGRAD
                stack.enter_context(private.settings(**private.SETTINGS_OF_MOVING_GRAPHS))
                stack.enter_context(fusing_as_planned(frozenset(OPS), STORED, step_memory))
            elif step_memory is not None:  # a training graph
                unmoved = {**step_memory, "timed": None, "moves": False}
                stack.enter_context(running_in_step_memory(unmoved))
            code = private.compile_fx_inner(gm, example_inputs, **kwargs)
        if site_by_token:
            strides = private.offload_strides_in(code, OFFLOAD, hints)
            for token_name, site in site_by_token.items():
                if site in strides:
                    self.stride_by_token[token_name] = strides[site]
        if self.has_warned:
            # Planned again in every process, so that every process logs the warning.
            private.keep_out_of_autograd_cache(code)
        return code


def _is_rewritten(graph: fx.Graph) -> bool:
    """Whether a half of a step moves tensors or computes some again."""
    return any(node.target in OPS or COPY_OF in node.meta for node in graph.nodes)


def _hints_of_symbols(graph: fx.Graph) -> dict[str, int]:
    """The hints of the symbols that a half of a step gets, by their names in generated code."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    hints = {str(_torch_private.size_expression(x)): hint(x) for x in values if isinstance(x, torch.SymInt)}
    return {name: number for name, number in hints.items() if number}


def _site_argument(release: fx.Node) -> str:
    offload = release.args[0]
    assert isinstance(offload, fx.Node) and isinstance(offload.args[2], str)
    return offload.args[2]


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: OffloadConfig,
    *,
    mode: str | None = None,
    observe: Observer | None = None,
    budget: StepBudget | None = None,
) -> Any:
    """Compile as ``torch.compile(backend="inductor", mode=mode)`` does, with offloading.

    Args:
        budget: what ``config.find_budget`` has found earlier. None: it is called now.
    """
    _warn_about_nameless(config)
    private.install_lowerings(offload=OFFLOAD, release=RELEASE, reload=RELOAD, wait=WAIT, saved=SAVED)
    halves = _CompileBothHalves()
    layouts = KeepLayouts()

    def note_warning() -> None:
        halves.has_warned = True

    def note_plain(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        if partitioner.device == "cpu":
            halves.plain = PlainStep(forward, backward)
            layouts.plain_digest = halves.plain.digest

    partitioner = OffloadPartitioner(
        config, gm, example_inputs, observe, budget=budget, on_warning=note_warning, on_rewrite=note_plain
    )
    patches: dict[str, Any] = {
        "custom_partitioner_fn": partitioner,
        "post_grad_custom_post_pass": layouts,
        **partitioner.chunking.settings(),
    }
    if mode is not None:
        patches |= private.options_of_mode(mode)

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> private.OutputCode:
        return halves(gm, example_inputs, **kwargs)

    with partitioner.chunking.active():
        compiled = private.compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches)
    return keep_memory_for(compiled)


def _warn_about_nameless(config: OffloadConfig) -> None:
    nameless = [display_name(function) for function in config.functions if stable_name(function) is None]
    if nameless:
        log.warning(
            "compile caches are not used: %s cannot be recognized in another process. Define each function at the top "
            "level of a module, without a closure, to use them.",
            ", ".join(nameless),
        )


def trace_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: OffloadConfig, *, observe: Observer
) -> Any:
    """Run Inductor up to the partitioner. The result computes nothing and returns zeros."""
    partitioner = OffloadPartitioner(config, gm, example_inputs, observe)
    with partitioner.chunking.active():
        return _trace(gm, example_inputs, partitioner, **partitioner.chunking.settings())


def capture_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, observe: Callable[[PartitionedStep], None]
) -> Any:
    """Like :func:`trace_with_inductor`, without offloading. ``observe`` gets a step for any number of plans."""
    return _trace(gm, example_inputs, _CapturePartition(device_of(example_inputs), observe))


def _trace(
    gm: fx.GraphModule, example_inputs: Sequence[Any], partitioner: private.CustomPartitionerFn, **settings: Any
) -> Any:
    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> private.OutputCode:
        return private.WrappedCode(compile_to_zeros(gm, example_inputs))

    with _torch_private.functorch_config_patch(enable_autograd_cache=False):
        patches = {"custom_partitioner_fn": partitioner, **settings}
        return private.compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches)
