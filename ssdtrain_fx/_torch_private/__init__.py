"""Private: all private torch APIs that the package uses. No other module imports a private torch name.

Inductor's APIs are in the separate module ``_torch_private.inductor``, because importing it takes a second.

Each was checked by running the test suite on 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0, on a CPU. The exceptions are
``generate_end``, ``innermost_fn``, ``_empty_strided_cpu`` and the C++ headers, which the arena uses: they were checked
on 2.13.0 and 2.15.0. What concerns GPUs alone was checked on 2.11.0, on an H200, and on 2.13.0. The loops of CPU
kernels (``inductor_loops``) were checked on 2.11.0, 2.13.0 and 2.15.0. Comments in the code say what differs between
these versions.

| name | without it |
|---|---|
| ``_inductor.compile_fx``: ``compile_fx``, ``compile_fx_inner`` | no Inductor backend |
| ``_inductor.custom_graph_pass.CustomPartitionerFn`` | the pipeline is never called |
| ``_inductor.custom_graph_pass.CustomGraphPass`` | other layouts: last bits differ |
| ``_inductor.lowering``, ``ir``, ``V.graph.additional_buffer_deps`` | the scheduler moves our ops |
| ``_inductor.memory.reorder_for_peak_memory`` | on GPUs, other kernels: last bits differ |
| ``_inductor.lowering._has_saved_lowp_output_use`` | on GPUs, the same for 16-bit values |
| ``_inductor.config.assume_unaligned_fallback_output`` | the same |
| ``_inductor.graph.GraphLowering.run_node``, ``fx.Node.users`` | saved tensors get other layouts: last bits differ |
| ``codegen.cpp.TilingSelect``, ``SchedulerNode._compute_attrs``, ``GraphLowering`` | on CPUs, other last bits |
| ``SchedulerNode.recompute_size_and_body``, ``mutation_renames`` | torch 2.13 and earlier: wrong gradients |
| ``compile_fx.fx_codegen_and_compile`` | plain graphs are lowered although the code is cached |
| ``ShapeEnv``: attributes, ``evaluate_expr`` | dynamic shapes: backward cannot be lowered, or lacks guards |
| ``V.set_choices_handler``, ``scheduler.name_to_node``, ``name_to_buf`` | peaks above the planned ones |
| ``codegen.wrapper.PythonWrapperCodegen.can_reuse`` | kernels overwrite what the engine holds, and reuse little else |
| ``ir.FallbackKernel``, ``add_import_once``, ``V.graph.never_reuse_buffers`` | no Inductor backend |
| ``_inductor.fx_passes.auto_chunker``, ``compile_fx.partition_fn(partitioner_fn_override=)`` | no ``chunk_loss`` |
| ``_inductor.output_code.OutputCode.source_code`` | convolution nets: last bits differ |
| ``_inductor.list_mode_options`` | ``mode=`` cannot be honoured |
| ``meta["inductor_realize_to_strides"]`` | a recomputed tensor may get another layout |
| ``_functorch._aot_autograd.utils``: ``top_saved_tensors_hooks``, ``..._are_inlineable`` | such hooks get tokens |
| ``_functorch.config.activation_memory_budget`` | a warning lacks a number |
| ``_functorch._aot_autograd.descriptors`` | graph logs lose labels; inputs of a graph stay in memory |
| ``_dynamo.backends.common.aot_autograd`` | no ``inner="aot_eager"`` |
| ``fx._lazy_graph_module._LazyGraphModule`` | planning takes a fifth longer |
| ``multiprocessing.reductions.StorageWeakRef`` | ``explain`` and ``ssdtrain_fx.testing`` count no live storages |
| ``UntypedStorage._cdata`` | no alias sets |
| ``_dynamo.eval_frame.innermost_fn`` | memory stays mapped after the last compiled step has died |
| ``_dynamo.callback.callback_handler`` | ``benchmarks/gpu.py`` cannot let processes compile at the same time |
| ``_dynamo.config``, ``_dynamo.exc.BackendCompilerFailed`` | ``explain`` hits the recompile limit |
| ``_C._dynamo.guards._reinterpret_tensor``, ``_empty_strided_cpu`` | no memory for reloads |
| ``c10/core/Allocator.h``, ``c10/core/CPUAllocator.h`` (C++) | steps use the heap: little of the saving shows |
| ``PythonWrapperCodegen.generate_end`` | the same |
| ``_subclasses.fake_tensor``, ``_ops.OpOverload``, ``utils._pytree`` | no graph analysis |
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "NO_AUTO_CHUNKER",
    "REALIZE_TO_STRIDES",
    "AOTCompiler",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "StorageWeakRef",
    "activation_memory_budget",
    "aot_autograd",
    "called_subgraph",
    "compile_apart",
    "copy_graph",
    "empty_cpu",
    "empty_strided_cpu",
    "fake_on",
    "functorch_config_patch",
    "graph_module",
    "has_auto_chunker",
    "innermost",
    "input_number",
    "is_saved_descriptor",
    "is_tangent",
    "leaves_by_path",
    "on_compiled",
    "overwrites_saved_tensors",
    "reinterpret",
    "result_number",
    "saved_descriptors",
    "saved_tensor_hooks_are_inlined",
    "size_expression",
    "size_hint",
    "storage_key",
    "tree_leaves",
]

REALIZE_TO_STRIDES = "inductor_realize_to_strides"
"""Key of ``node.meta``: Inductor stores the value with the strides in the metadata."""

AOTCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def tree_leaves(value: object) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if value is None or isinstance(value, torch.Tensor):  # most values; pytree is slow for them
        return [value]
    from torch.utils import _pytree

    return _pytree.tree_leaves(value)


def leaves_by_path(value: object) -> dict[str, Any]:
    """The leaves of nested tuples, lists and dicts, each by its path, such as ``[0]['bias']``."""
    from torch.utils import _pytree

    return {_pytree.keystr(path): leaf for path, leaf in _pytree.tree_flatten_with_path(value)[0]}


def storage_key(tensor: torch.Tensor) -> int:
    """An identity shared by all (fake) tensors that view one storage. Valid while one of them is alive."""
    return cast(int, tensor.untyped_storage()._cdata)


def fake_on(device: torch.device, value: torch.Tensor, fake_mode: FakeTensorMode) -> FakeTensor:
    """A fake tensor on ``device``, which need not exist, with the storage of ``value``, a tensor on ``meta``."""
    return FakeTensor(fake_mode, value, device)


def size_hint(size: int | torch.SymInt) -> int:
    """``size`` as a number, for estimates only: adds no guard.

    Raises:
        ValueError: the size depends on data, so there is no hint.
    """
    if isinstance(size, int):
        return size
    hint = cast(Any, size).node.hint
    if hint is None:
        raise ValueError(f"size {size} depends on data and has no hint")
    return int(hint)


def size_expression(size: int | torch.SymInt) -> object:
    """``size`` as a number or as an expression of symbols, which is equal for equal sizes. Comparing adds no guard."""
    return size if isinstance(size, int) else cast(Any, size).node.expr


def saved_descriptors(nodes: Sequence[fx.Node]) -> list[object]:
    """AOTAutograd's descriptors for the saved values ``nodes`` of a forward graph, in order."""
    from torch._functorch._aot_autograd import descriptors

    plain = descriptors.SavedForBackwardsAOTOutput
    unchecked = getattr(descriptors, "SavedForBackwardsNoVcCheckAOTOutput", plain)
    return [
        (unchecked if node.meta.get("saved_tensor_with_no_vc_check") else plain)(idx) for idx, node in enumerate(nodes)
    ]


def is_saved_descriptor(descriptor: object) -> bool:
    """Whether this descriptor of a forward output says that it is only saved for backward."""
    return type(descriptor).__name__.startswith("SavedForBackwards")


def input_number(descriptor: object) -> int | None:
    """Which argument of the compiled function this placeholder is; None if AOTAutograd has added it."""
    from torch._functorch._aot_autograd import descriptors

    return descriptor.idx if isinstance(descriptor, descriptors.PlainAOTInput) else None


def result_number(descriptor: object) -> int | None:
    """Which result of the traced function this result of forward is; None if AOTAutograd has added it."""
    from torch._functorch._aot_autograd import descriptors

    return descriptor.idx if isinstance(descriptor, descriptors.PlainAOTOutput) else None


def differentiated_input_number(descriptor: object) -> int | None:
    """Which argument of the compiled function this result of backward is the gradient of; None for other results."""
    from torch._functorch._aot_autograd import descriptors

    return input_number(descriptor.grad_of) if isinstance(descriptor, descriptors.GradAOTOutput) else None


def is_tangent(descriptor: object) -> bool:
    """Whether this placeholder is the gradient of a result, with which backward begins."""
    from torch._functorch._aot_autograd import descriptors

    return isinstance(descriptor, descriptors.TangentAOTInput)


NO_AUTO_CHUNKER = f"torch {torch.__version__} has no usable auto-chunker; torch 2.13 is the oldest with one"


def has_auto_chunker() -> bool:
    """Whether Inductor can compute a loss in chunks. Older versions of the auto-chunker lack ops of ordinary losses."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def called_subgraph(node: fx.Node) -> str | None:
    """The attribute with the graph that this node calls, as torch's auto-chunker makes such nodes; otherwise None."""
    if node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    subgraph = node.args[0]
    return str(subgraph.target) if isinstance(subgraph, fx.Node) else None


def graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A GraphModule that generates its Python code when it is run or printed, not after every change of its graph."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name)


def copy_graph(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of the graph that can be rewritten, and a map from each node to its copy."""
    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
        copy_of[node].meta = dict(node.meta)
    copied = graph_module(gm, graph, type(gm).__name__)
    copied.meta = dict(gm.meta)
    return copied, copy_of


def functorch_config_patch(**changes: Any) -> AbstractContextManager[None]:
    """Change AOTAutograd's settings for a ``with`` block."""
    from torch._functorch import config

    return cast(AbstractContextManager[None], config.patch(**changes))


def activation_memory_budget() -> float:
    """Torch's own option for recomputation; 1 is its default, and recomputes nothing that costs time."""
    from torch._functorch import config

    return float(cast(Any, config).activation_memory_budget)


def overwrites_saved_tensors() -> bool:
    """Whether backward may overwrite saved tensors, so that it can run only once. Inductor's cache does not distinguish
    the two cases."""
    from torch._functorch import config

    return bool(cast(Any, config).donated_buffer)


def saved_tensor_hooks_are_inlined() -> bool:
    """Whether AOTAutograd inlines saved-tensor hooks into the graphs that a partitioner has returned: both hooks are
    graph modules, and the step is compiled within them."""
    from torch._functorch._aot_autograd import utils

    hooks = cast(Any, utils)
    return hooks.saved_tensors_hooks_are_inlineable(hooks.top_saved_tensors_hooks())


_empty_strided_cpu = cast(Any, torch._C)._dynamo.guards._empty_strided_cpu
_reinterpret_tensor = cast(Any, torch._C)._dynamo.guards._reinterpret_tensor


def reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A new tensor on the memory of ``tensor``, from its start. To autograd it is not a view."""
    # torch 2.15 accepts only tuples.
    return _reinterpret_tensor(tensor, tuple(size), tuple(stride), 0)


def empty_cpu(byte_count: int) -> torch.Tensor:
    """Uninitialised bytes from torch's CPU allocator, as compiled code allocates them. ``torch.empty`` would fill them
    under deterministic algorithms."""
    return _empty_strided_cpu((byte_count,), (1,), torch.uint8)


def empty_strided_cpu(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The same as a tensor with a layout."""
    return _empty_strided_cpu(tuple(size), tuple(stride), dtype)


def aot_autograd(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, compiler: AOTCompiler, partition_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """AOTAutograd as the ``aot_eager`` backend uses it. Its compile cache is off because ``compiler`` is a plain
    function."""
    from torch._dynamo.backends.common import aot_autograd

    compiled = aot_autograd(fw_compiler=compiler, partition_fn=partition_fn, keep_inference_input_mutations=True)
    return compiled(gm, example_inputs)


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that Dynamo calls for ``function``: without the wrappers that say that it is not traced."""
    from torch._dynamo.eval_frame import innermost_fn

    return innermost_fn(function)


@contextmanager
def on_compiled(act: Callable[[], object]) -> Generator[None]:
    """Within the block, ``act`` is called whenever Dynamo has compiled something, before it runs."""
    from torch._dynamo.callback import callback_handler

    def ended(_: object) -> None:
        act()

    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        callback_handler.remove_end_callback(ended)


def compile_apart(model: Callable[..., Any], backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile`` that uses up none of the recompilations of ``model``, and raises the backend's own errors.

    torch 2.11 and 2.12 have no ``isolate_recompiles``. There, ``model`` is compiled as a part of a function that is new
    with every call. If ``model`` has graph breaks, some of its recompilations are used up, but none is refused here.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import BackendCompilerFailed

    limits: dict[str, Any] = {}
    if _can_isolate_recompiles():
        options["isolate_recompiles"] = True
    else:
        model = _part_of_a_new_function(model)
        limits = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with cast(Any, config).patch(limits):
                return torch.compile(model, backend=backend, **options)(*args, **kwargs)
        except BackendCompilerFailed as error:
            raise error.inner_exception from None

    return run


def _can_isolate_recompiles() -> bool:
    return "isolate_recompiles" in inspect.signature(cast(Any, torch.compile)).parameters


def _part_of_a_new_function(model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``model`` in a function with a new code object. Dynamo keeps compiled code per code object."""
    self = model  # in the metadata of nodes, names of modules begin with the name of this variable

    def run(*args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
