"""Inductor's private APIs (see the table in ``_torch_private``)."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import fx
from torch._inductor import config, ir, list_mode_options
from torch._inductor import lowering as _lowering
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.output_code import OutputCode
from torch._inductor.virtualized import V
from torch._ops import OpOverload

from ssdtrain_fx._torch_private.direct_calls import DirectCall, are_direct, function_name
from ssdtrain_fx._torch_private.inductor_fusion import InStepMemory
from ssdtrain_fx._torch_private.inductor_loops import install_loops
from ssdtrain_fx._torch_private.inductor_order import (
    install_order,
    lower_at_the_end,
    order_of_graph,
    views_that_were_saved,
)

__all__ = [
    "SETTINGS_OF_MOVING_GRAPHS",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "OutputCode",
    "WrappedCode",
    "as_passes",
    "compile_fx",
    "compile_fx_inner",
    "current_setting",
    "install_lowerings",
    "keep_out_of_autograd_cache",
    "lower_at_the_end",
    "offload_strides_in",
    "options_of_mode",
    "require_layout_of_outputs",
    "settings",
    "views_that_were_saved",
]


SETTINGS_OF_MOVING_GRAPHS: dict[str, Any] = {
    # Inductor would keep a dead buffer for reuse by a later one of the same size. It decides by its own estimate of the
    # peak, which does not include offloads.
    "allow_buffer_reuse": False,
    # With CUDA graphs, it would collect our ops at one place, to cut a graph into fewer pieces.
    "triton.reorder_for_reducing_graph_partitions": False,
}
"""Settings for graphs with our ops."""

_LAYOUTS = "ssdtrain_layouts"
"""Keyword of the output of an FX graph; see ``require_layout_of_outputs``."""

STEP_MEMORY_MODULE = "ssdtrain_fx.runtime.memory.step_memory"

_EXCLUSIVE = "_ssdtrain_exclusive"
"""Attribute of the graph that Inductor lowers: the buffers that no kernel may overwrite once they are computed."""


def options_of_mode(mode: str) -> dict[str, Any]:
    """Inductor's settings for ``torch.compile(mode=...)``. Raises RuntimeError for an unknown mode."""
    return dict(list_mode_options(mode))


def current_setting(name: str) -> Any:
    """The value of one of Inductor's settings."""
    return getattr(config, name)


def settings(**changes: Any) -> AbstractContextManager[None]:
    """Change Inductor's settings for a ``with`` block."""
    return cast(Any, config).patch(changes)


def keep_out_of_autograd_cache(code: OutputCode) -> None:
    """Let AOTAutograd store no graph that contains ``code``. It stores graphs whose parts have a key of their own."""
    cast(Any, code)._fx_graph_cache_key = None


def as_passes(custom_pass: Any) -> tuple[CustomGraphPass, ...]:
    """The graph passes of a setting that is None, one pass or a list of passes."""
    if custom_pass is None:
        return ()
    passes = cast(Sequence[CustomGraphPass], custom_pass if isinstance(custom_pass, (list, tuple)) else [custom_pass])
    return tuple(passes)


def require_layout_of_outputs(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Let Inductor choose the layout of ``nodes`` as if forward still returned them.

    Lowering checks ``any(user.op == "output" for user in node.users)``, and then realizes the node with the strides in
    its metadata. ``fx.Interpreter.output`` returns only ``args[0]``, so nodes in ``kwargs`` have the output as a user
    but are not results.
    """
    output = graph.output_node()
    output.kwargs = {_LAYOUTS: tuple(nodes)}


def install_lowerings(*, offload: Any, release: Any, reload: Any, wait: Any, saved: str) -> None:
    """Lower our ops to extern calls in a fixed order; ``offload`` records the strides that ``x`` got.

    ``saved`` is a key in the metadata of nodes that forward would return without our ops.
    """
    lowering = cast(Any, _lowering)
    if offload in lowering.lowerings:
        return

    def record_layout(x: Any, stride: list[Any], *rest: Any) -> tuple[Any, ...]:
        source = ir.ExternKernel.realize_input(x)
        source.freeze_layout()
        return (x, list(source.get_stride()), *rest)

    def protect_memory(token: Any, x: Any, deferred: bool = False, exclusive: bool = False) -> tuple[Any, ...]:
        """Protect the memory of ``x`` if the engine may hold it after the last kernel has read it."""
        if config.allow_buffer_reuse or config.memory_planning or config.triton.cudagraphs:
            return (token, x)  # later kernels, or the same ones in the next step, would write to its memory
        if deferred or exclusive:
            V.graph.__dict__.setdefault(_EXCLUSIVE, set()).add(x.get_name())
        return (token, x, deferred, exclusive)

    def install(op: Any, *, before_kernel: bool = True) -> None:
        call_dispatcher = lowering.fallback_handler(op, add_to_fallback_set=False)

        def lower(*args: Any, **keywords: Any) -> Any:
            if op is offload:
                args = record_layout(*args)
            elif op is release:
                args, keywords = protect_memory(*args, **keywords), {}
            call = functools.partial(DirectCall.create, op) if are_direct() else call_dispatcher
            return order_of_graph().lower(
                lambda: call(*args, **keywords), before_kernel=before_kernel, after_readers=op is release
            )

        lowering.register_lowering(op, type_promotion_kind=None)(lower)

    own_ops = frozenset((offload, release, reload, wait))
    _write_in_place_as_planned(own_ops)
    _donate_nothing_to_subgraphs()
    _run_in_step_memory()
    _lower_as_if_unread(own_ops)
    _round_what_is_offloaded(saved)
    install_loops()
    install_order()
    install(offload)
    install(release)
    install(reload)
    install(wait, before_kernel=False)  # kernels that read its result follow it anyway


def _write_in_place_as_planned(own_ops: frozenset[Any]) -> None:
    """Let the last kernel that reads a tensor write its result to the same memory, unless the engine may hold it.

    Our ops after that kernel do not prevent it: they use the tensor only to fix the order, but Inductor counts them as
    readers here.
    """
    wrapper = cast(Any, PythonWrapperCodegen)
    can_reuse = wrapper.can_reuse

    def is_for_order(user: Any) -> bool:
        return user.is_weak and getattr(user.node.node, "op_overload", None) in own_ops

    def can_reuse_as_planned(self: Any, input_buffer: Any, output_buffer: Any = None) -> bool:
        if output_buffer is not None:  # otherwise Inductor asks whether to free a buffer
            if input_buffer.get_name() in V.graph.__dict__.get(_EXCLUSIVE, ()):
                return False
            users = getattr(input_buffer, "users", None)  # inputs have none
            if users:  # the caller counts them next
                input_buffer.users = [user for user in users if not is_for_order(user)]
        return can_reuse(self, input_buffer, output_buffer)

    wrapper.can_reuse = can_reuse_as_planned


def _lower_as_if_unread(own_ops: frozenset[Any]) -> None:
    """Let Inductor lower a node as if our ops did not read it: what it stores, and how, depends on the readers."""
    lowering = cast(Any, GraphLowering)
    run_node = lowering.run_node

    def run_node_without_own_readers(self: Any, node: fx.Node) -> Any:
        users = node.users
        if node.target in own_ops or not any(user.target in own_ops for user in users):
            return run_node(self, node)
        node.users = {user: None for user in users if user.target not in own_ops}
        try:
            return run_node(self, node)
        finally:
            node.users = users

    lowering.run_node = run_node_without_own_readers


def _round_what_is_offloaded(saved: str) -> None:
    """Let Inductor round a saved 16-bit result before others read it, as it does if forward returns it."""
    lowering = cast(Any, _lowering)
    is_saved = getattr(lowering, "_has_saved_lowp_output_use", None)
    if is_saved is None:  # before torch 2.13
        return

    def is_saved_or_offloaded(node: fx.Node | None) -> bool:
        if node is None or is_saved(node):
            return node is not None
        is_offloaded = any(node in cast(Any, user.kwargs.get(_LAYOUTS, ())) for user in node.users)
        return saved in node.meta and is_offloaded and any(user.op != "output" for user in node.users)

    lowering._has_saved_lowp_output_use = is_saved_or_offloaded


def _donate_nothing_to_subgraphs() -> None:
    """Let no subgraph, such as a branch of ``torch.cond``, overwrite its arguments in graphs with our ops.

    Inductor applies the numbers of the tensors that may be overwritten in backward to the arguments of its subgraphs
    too. The first arguments of backward are parameters, but with our ops, they are tokens, which may be overwritten.
    """
    lowering = cast(Any, SubgraphLowering)
    init = lowering.__init__

    def init_and_forget(self: Any, parent: Any, *args: Any, **keywords: Any) -> None:
        init(self, parent, *args, **keywords)
        if any(getattr(node.target, "namespace", "") == "ssdtrain" for node in parent.graph.nodes):
            self.bw_donated_idxs = None

    lowering.__init__ = init_and_forget


def _run_in_step_memory() -> None:
    """Let the code of training graphs take its memory from the arena.

    The generated module ends with ``call = ssdtrain_in_step_memory(call, ...)``, so that code from a cache does the
    same.
    """
    wrapper = cast(Any, PythonWrapperCodegen)
    generate_end = wrapper.generate_end

    def generate_end_and_wrap(self: Any, result: Any) -> None:
        generate_end(self, result)
        is_inlined = isinstance(self, SubgraphPythonWrapperCodegen)
        if isinstance(V.choices, InStepMemory) and not V.graph.cpp_wrapper and not is_inlined:
            arguments = ", ".join(f"{name}={value!r}" for name, value in V.choices.step_memory.items())
            result.splice(
                f"""
                from {STEP_MEMORY_MODULE} import in_step_memory as ssdtrain_in_step_memory
                call = ssdtrain_in_step_memory(call, {arguments})
                """
            )

    wrapper.generate_end = generate_end_and_wrap


def offload_strides_in(code: OutputCode, offload: OpOverload, hints: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The strides that each ``offload(x, stride, site)`` was compiled with, by site; read from generated Python.

    Code from a cache was not lowered in this process, so only the code itself holds the strides. ``hints`` are the
    values of symbols. Strides with other symbols, or without a value for these, are left out.
    """
    source = cast(str, getattr(code, "source_code", ""))
    strides: dict[str, tuple[int, ...]] = {}
    calls = (function_name(offload), f"torch.ops.{offload}")
    if not any(call in source for call in calls):
        return strides
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
            _, stride, site = node.args[:3]
            try:  # Inductor runs the same expressions
                strides[ast.literal_eval(site)] = tuple(eval(ast.unparse(stride), dict(hints)))
            except (NameError, ArithmeticError):
                continue
    return strides


class WrappedCode(OutputCode):
    """A Python function as the result of a compilation. It is never cached."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._boxed_call = True
        self._function = function

    def __call__(self, inputs: Any) -> Any:
        return self._function(inputs)

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        return
