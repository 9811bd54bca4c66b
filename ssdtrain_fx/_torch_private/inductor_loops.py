"""Loops of CPU kernels as plain Inductor chooses them (see the table in ``_torch_private``).

How Inductor computes a node decides the last bits of its result: ``exp`` rounds differently in vectorized and in scalar
code, and a sum depends on the order of its additions, which depends on the loops and on the width of vectors. Inductor
chooses these for a nest of loops, not for each node in it. So the choice depends on what is fused with a node, and on
what is stored. Both are different if tensors are moved between the kernels.

So the graphs that plain Inductor would compile are lowered too, without the C++ compiler, and what Inductor chooses for
their nodes is recorded. The same nodes of the rewritten graphs then get the same loops and vectors, and are not fused
with nodes for which Inductor has chosen others. Nodes whose results are the same for every choice are left alone.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from torch import fx
from torch._inductor import compile_fx as inductor_compile
from torch._inductor import config, cpu_vec_isa, ir
from torch._inductor.codegen import cpp
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
from torch._inductor.utils import convert_shape_to_symint, shape_env_from_inputs
from torch._inductor.virtualized import V

from ssdtrain_fx._torch_private import functorch_config_patch
from ssdtrain_fx._torch_private.guards import forgetting_guards

__all__ = ["LAYOUT_OF_RESULTS", "PLAIN_NODE", "LoopChoices", "choosing_loops", "install_loops"]

log = logging.getLogger(__name__)

PLAIN_NODE = "ssdtrain_plain_node"
"""Key in the metadata of nodes: the name of the node in the graphs of plain Inductor, with the half that it is in."""

LAYOUT_OF_RESULTS = "user_visible_output_idxs"
"""Key in the metadata of a graph's output: results whose layout Inductor may not choose. ``compile_fx`` sets it."""

_LOOP_KERNELS = (SchedulerNode, FusedSchedulerNode, cpp.OuterLoopFusedSchedulerNode)

_EXACT_OPS = frozenset(
    (
        *(
            "constant",
            "index_expr",
            "load",
            "store",
            "store_reduction",
            "indirect_indexing",
            "check_bounds",
            "load_seed",
        ),
        *("identity", "to_dtype", "to_dtype_bitcast", "where", "masked", "rand", "randint64"),
        *("add", "sub", "mul", "truediv", "neg", "abs", "sqrt", "rsqrt", "reciprocal", "square", "relu", "sign"),
        *("maximum", "minimum", "floor", "ceil", "trunc", "isnan", "isinf", "eq", "ne", "lt", "gt", "le", "ge"),
        *("logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("bitwise_not", "bitwise_left_shift", "bitwise_right_shift"),
    )
)
"""Ops of loop bodies whose results are the same in vectorized and in scalar code: IEEE 754 defines them."""

_EXACT_REDUCTIONS = frozenset(("max", "min", "any", "argmax", "argmin", "xor_sum"))
"""Reductions whose results do not depend on the order of their elements, except for the sign of a zero."""


class _Choice(NamedTuple):
    """How a node is computed."""

    ranges: tuple[Any, ...]
    """The nest of loops, outermost first."""
    depth: int
    """How many of them are not loops of a reduction."""
    factors: tuple[int, ...]
    """Elements of a vector in each of the loops ``indices``; nothing if the code is scalar."""
    indices: tuple[int, ...]
    is_tail_scalar: bool
    """Whether the rest of a loop that is no whole vector may be computed one by one."""

    def has_tail(self) -> bool:
        """Whether a vectorized loop may have such a rest. A loop whose length is a symbol may."""
        sizes = [self.ranges[index] for index in self.indices]
        return any(size % factor != 0 for size, factor in zip(sizes, self.factors, strict=True))


class _Recorded(NamedTuple):
    choice: _Choice
    width: str | None
    """``scalar`` or ``vector`` if that alone decides the bits of the node."""
    tiling: tuple[Any, ...]
    """What ``select_tiling`` returned."""
    constraints: tuple[dict[Any, Any], list[Any]]
    """Ranges and index expressions from which Inductor has built the loops."""
    kernel: str
    """Nodes with the same value share a kernel."""


Key = tuple[str, str, str, int]
"""The (sub)graph, the node that an operation is lowered for, the kind of operation, and its number among these."""


class LoopChoices:
    """What Inductor chose for the nodes of one step, by the name of a node in the graphs of plain Inductor."""

    def __init__(self, when_needed: Callable[[], None] = lambda: None) -> None:
        """``when_needed`` records what is missing. It is called before Inductor lowers a graph to get these choices."""
        self.when_needed = when_needed
        self.plain_heuristics: Any = None
        """What Inductor compiles a graph with that is not rewritten. None: the current heuristics."""
        self._recorded: dict[Key, _Recorded] = {}
        self._guards: list[tuple[Any, Any]] = []
        """New guards of recorded graphs, each with the ``ShapeEnv`` that it belongs to."""
        self.missed: set[str] = set()
        """Nodes that could not be computed as recorded."""

    def record(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> list[tuple[Any, ...] | None]:
        """Record the choices for a graph of plain Inductor. Arguments as for ``compile_fx_inner``; it rewrites ``gm``.

        Returns:
            The strides of each output; None for what is not a tensor.
        """
        recorder = _Recorder(V.choices if self.plain_heuristics is None else self.plain_heuristics, self)
        shape_env, guards = shape_env_from_inputs(example_inputs), list[Any]()
        try:
            with (
                _without_caches(),
                forgetting_guards(shape_env, guards),
                V.set_choices_handler(cast(Any, recorder)),
            ):
                compile_fx_inner(gm, example_inputs, **kwargs)
        except _Scheduled as scheduled:
            self._guards += [(shape_env, guard) for guard in guards]
            return scheduled.strides
        return []  # Inductor does not lower a graph without kernels

    def add_guards(self) -> None:
        """Compile the step again for the sizes for which plain Inductor would compile it again.

        Backward gets some strides as numbers, and plain Inductor then needs these guards to notice other ones.
        """
        for shape_env, guard in self._guards:
            shape_env.evaluate_expr(guard)
        self._guards.clear()

    def note(self, graph: Any) -> None:
        """Record the choices for a graph of plain Inductor that has been scheduled."""
        for number, kernel in enumerate(graph.scheduler.nodes):
            for nest in _nests_of(kernel):
                tiling = _select_tiling(nest)
                group, reduction_group = max((node.group[1] for node in nest), key=lambda sizes: len(sizes[1]))
                choice = _choice((*group, *reduction_group), len(group), tiling)
                for node in filter(_depends_on_loops, nest):
                    key = _key_of(node)
                    if key is None:
                        continue
                    width = _width(node, choice)
                    self._recorded[key] = _Recorded(
                        choice=choice,
                        width=width,
                        tiling=tiling,
                        constraints=_constraints(node, nest if width is None else [node]),
                        kernel=f"{graph.name} {graph.is_backward} {number}",
                    )

    def tiling(self, nodes: Sequence[Any], ranges: tuple[Any, ...], depth: int, default: tuple[Any, ...]) -> Any:
        """What ``select_tiling`` is to return for a nest with these nodes, given what it chooses itself."""
        wanted = [(node, one) for node in nodes if (one := self._choice_of(node)) is not None]
        if not wanted:
            return default
        can_be_vectorized = _can_be_vectorized(nodes)
        candidates = [
            one.tiling
            for _, one in wanted
            if not one.choice.indices or (can_be_vectorized and one.choice[:2] == (ranges, depth))
        ]
        missed: list[Any] = []
        for tiling in (*candidates, default):
            choice = _choice(ranges, depth, tiling)
            missed = [node for node, one in wanted if not _is_met(one, node, choice)]
            if not missed:
                return tiling
        self.missed.update(key[1] for node in missed if (key := _key_of(node)) is not None)
        return default

    def constraints(self, node: Any) -> tuple[dict[Any, Any], list[Any]] | None:
        """What the loops of this node have to be built from, apart from its own index expressions."""
        key = _key_of(node)
        recorded = None if key is None else self._recorded.get(key)
        if recorded is None:
            return None
        return recorded.constraints if _default_body(node).var_ranges == recorded.constraints[0] else None

    def can_fuse(self, node1: Any, node2: Any) -> bool:
        """Whether one nest can compute both kernels as recorded."""
        nodes: list[Any] = [*node1.get_nodes(), *node2.get_nodes()]
        recorded = [one for node in nodes if (one := self._choice_of(node)) is not None]
        if len({one.kernel for one in recorded}) <= 1:
            return True
        if len({one.choice for one in recorded}) == 1:
            return True
        widths = {one.width for one in recorded}
        return len(widths) == 1 and None not in widths

    def _choice_of(self, node: Any) -> _Recorded | None:
        """What is recorded for a scheduled node; None if its bits do not depend on that."""
        key = _key_of(node) if _depends_on_loops(node) else None
        return None if key is None else self._recorded.get(key)


class _Scheduled(BaseException):
    """Ends a compilation before code is generated. Not an Exception, because Inductor would wrap it."""

    def __init__(self, strides: list[tuple[Any, ...] | None]) -> None:
        super().__init__()
        self.strides = strides


class _Heuristics:
    """Inductor's heuristics, as ``inner`` has them."""

    def __init__(self, inner: Any, choices: LoopChoices) -> None:
        self._inner = inner
        self.ssdtrain_loops = choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Recorder(_Heuristics):
    """While this is active, ``LoopChoices`` records what Inductor chooses."""


class _Chooser(_Heuristics):
    """While this is active, CPU kernels get the recorded choices."""

    def can_fuse_horizontal(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        can_fuse = self._inner.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)
        return can_fuse and self.ssdtrain_loops.can_fuse(node1, node2)

    def can_fuse_vertical(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        can_fuse = self._inner.can_fuse_vertical(scheduler, node1, node2, shared_data_score)
        return can_fuse and self.ssdtrain_loops.can_fuse(node1, node2)


@contextmanager
def choosing_loops(choices: LoopChoices) -> Generator[None]:
    """Compile graphs with these choices. Heuristics for rewritten graphs alone are set within this block."""
    choices.plain_heuristics = V.choices
    with V.set_choices_handler(cast(Any, _Chooser(V.choices, choices))):
        yield


def install_loops() -> None:
    """Let Inductor ask ``LoopChoices`` while it compiles within :func:`choosing_loops`."""
    _record_what_is_lowered()
    _choose_tiling()
    _build_loops()
    _end_after_scheduling()


def _record_what_is_lowered() -> None:
    """Record before a graph is lowered. Inductor has looked it up in its cache by then."""
    module = cast(Any, inductor_compile)
    generate = module.fx_codegen_and_compile

    def record_and_generate(*args: Any, **keywords: Any) -> Any:
        loops = _active()
        if loops is None:
            return generate(*args, **keywords)
        loops.when_needed()
        code = generate(*args, **keywords)
        loops.add_guards()  # before Inductor stores the code and its guards
        return code

    module.fx_codegen_and_compile = record_and_generate


def _choose_tiling() -> None:
    select = cast(Any, cpp.TilingSelect)
    select_tiling = select.select_tiling

    def select_tiling_as_plain(self: Any, fn_list: Any, var_sizes_list: Any) -> Any:
        tiling = select_tiling(self, fn_list, var_sizes_list)
        loops = _active()
        nodes = [getattr(getattr(fn, "original_fn", fn), "args", (None,))[0] for fn in fn_list]
        if loops is None or not all(isinstance(node, SchedulerNode) for node in nodes):
            return tiling
        group, reduction_group = max(var_sizes_list, key=lambda sizes: len(sizes[1]))
        return loops.tiling(nodes, (*group, *reduction_group), len(group), tiling)

    select.select_tiling = select_tiling_as_plain


def _build_loops() -> None:
    scheduler_node = cast(Any, SchedulerNode)
    compute_attrs = scheduler_node._compute_attrs

    def compute_attrs_as_plain(
        self: Any, extra_indexing_constraints: Any = None, recompute_sizes_body_func: Any = None
    ) -> None:
        loops = _active()
        if loops is not None and recompute_sizes_body_func is None:
            extra_indexing_constraints = _add_constraints(loops.constraints(self), extra_indexing_constraints)
        compute_attrs(self, extra_indexing_constraints, recompute_sizes_body_func)

    scheduler_node._compute_attrs = compute_attrs_as_plain


def _add_constraints(recorded: tuple[dict[Any, Any], list[Any]] | None, extra: Any) -> Any:
    if recorded is None:
        return extra
    ranges, expressions = recorded
    make: Any = getattr(ir, "ExtraIndexingConstraints", None)  # since torch 2.14
    if make is None:
        return (ranges, expressions if extra is None else [*expressions, *extra[1]])
    return make(ranges, expressions if extra is None else [*expressions, *extra.exprs])


def _end_after_scheduling() -> None:
    lowering = cast(Any, GraphLowering)
    compile_to_module = lowering.compile_to_module

    def compile_unless_recording(self: Any) -> Any:
        if not isinstance(V.choices, _Recorder):
            return compile_to_module(self)
        self.init_wrapper_code()
        _schedule(self, V.choices.ssdtrain_loops)
        outputs = self.graph_outputs or ()
        strides = [out.get_stride() if out.has_tensor_output() else None for out in outputs]
        raise _Scheduled([None if stride is None else tuple(convert_shape_to_symint(stride)) for stride in strides])

    lowering.compile_to_module = compile_unless_recording


def _schedule(graph: Any, choices: LoopChoices) -> None:
    """What ``GraphLowering.codegen`` does before it generates code, for a graph and its subgraphs."""
    graph._update_scheduler()
    choices.note(graph)
    for subgraph in _subgraphs_of(graph):
        for name in ("wrapper_code", "device_ops", "cpp_wrapper", "device_types", "device_idxs", "device_type"):
            setattr(subgraph, name, getattr(graph, name))
        with V.set_graph_handler(subgraph):
            _schedule(subgraph, choices)


def _subgraphs_of(graph: Any) -> list[Any]:
    found: list[Any] = []
    for operation in graph.operations:
        for part in cast("dict[str, Any]", vars(operation)).values():
            # torch 2.15 keeps the branches of a ``torch.cond`` in a list.
            several = cast("list[Any]", part) if isinstance(part, (list, tuple)) else [part]
            found += [one.graph for one in several if isinstance(one, ir.Subgraph)]
    return [subgraph for subgraph in found if subgraph is not None]


def _nests_of(kernel: Any) -> list[list[Any]]:
    """The nodes of each nest of loops in a kernel, with the loops that ``CppScheduling`` generates code for."""
    backend = kernel.scheduler.backends.get(kernel.get_device()) if type(kernel) in _LOOP_KERNELS else None
    if not isinstance(backend, cpp.CppScheduling) or kernel.is_template():
        return []
    if isinstance(kernel, cpp.OuterLoopFusedSchedulerNode):
        nests: list[Any] = cast(Any, kernel).get_outer_nodes()
        return [nest.get_nodes() for nest in nests]
    return [cast(Any, backend).try_loop_split(kernel.get_nodes())]


def _select_tiling(nest: list[Any]) -> tuple[Any, ...]:
    """What ``CppKernelProxy`` gets from ``select_tiling`` for a nest."""
    if not cpu_vec_isa.pick_vec_isa() or not any(size for node in nest for size in node.group[1]):
        return ([], [])
    proxy: Any = cpp.CppKernelProxy.__new__(cpp.CppKernelProxy)  # ``__init__`` would count another kernel
    proxy.legalize_lowp_fp_dtype(nest)
    proxy.data_type_propagation(nest)

    def run(node: Any, *variables: Any) -> Any:
        return node._body(*variables)

    with cast(Any, config).patch(inplace_buffers=False):
        bodies = [functools.partial(run, node) for node in nest]
        return cast(Any, cpp.TilingSelect()).select_tiling(bodies, [node.group[1] for node in nest])


def _active() -> LoopChoices | None:
    """The choices that are to be met. Other heuristics may stand around those of this module."""
    return None if isinstance(V.choices, _Recorder) else getattr(V.choices, "ssdtrain_loops", None)


@contextmanager
def _without_caches() -> Generator[None]:
    caches = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with cast(Any, config).patch(caches), functorch_config_patch(bundled_autograd_cache=False):
        yield


def _key_of(node: Any) -> Key | None:
    """Which part of the graphs of plain Inductor a scheduled operation computes; None if that is not known."""
    keys: dict[str, Key] | None = V.graph.__dict__.get("_ssdtrain_plain_nodes")
    if keys is None:
        keys = V.graph.__dict__["_ssdtrain_plain_nodes"] = _find_keys(V.graph)
    return keys.get(node.get_name())


def _find_keys(graph: Any) -> dict[str, Key]:
    half = "backward" if graph.is_backward else "forward"
    positions: dict[fx.Node, int] = {node: position for position, node in enumerate(graph.graph.nodes)}
    count_of: dict[tuple[str, str, str], int] = {}
    keys: dict[str, Key] = {}
    for operation in graph.operations:
        if operation.origins:
            lowered = max(operation.origins, key=lambda node: positions.get(node, -1))
            name = lowered.meta.get(PLAIN_NODE, f"{half} {lowered.name}")
            kind = (str(graph.name), name, type(getattr(operation, "data", None)).__name__)
            count_of[kind] = number = count_of.get(kind, -1) + 1
            keys[operation.get_operation_name()] = (*kind, number)
    return keys


def _default_body(node: Any) -> Any:
    """The body of a node before loops are merged."""
    return node.node.get_default_sizes_body()[1]


def _constraints(node: Any, nest: Sequence[Any]) -> tuple[dict[Any, Any], list[Any]]:
    ranges = _default_body(node).var_ranges
    bodies = [body for body in map(_default_body, nest) if body.var_ranges == ranges]
    return ranges, [expression for body in bodies for expression in body.indexing_exprs.values()]


def _depends_on_loops(node: Any) -> bool:
    """Whether the last bits of what a node computes depend on its loops."""
    body = getattr(node, "_body", None)
    if body is None:
        return False
    found = body.__dict__.get("_ssdtrain_depends_on_loops")
    if found is None:
        found = body.__dict__["_ssdtrain_depends_on_loops"] = _is_inexact(body) or _adds_up(body)
    return found


def _ops_of(body: Any) -> Generator[Any]:
    for block in itertools.chain([body.root_block], body.subblocks.values()):
        yield from (op for op in block.graph.nodes if op.op == "call_method")


def _is_inexact(body: Any) -> bool:
    return any(op.target not in _EXACT_OPS and op.target != "reduction" for op in _ops_of(body))


def _adds_up(body: Any) -> bool:
    """Whether a body adds up floating-point numbers."""
    for op in _ops_of(body):
        if op.target == "store" and "atomic_add" in (*op.args, *op.kwargs.values()):
            return True
        if op.target == "reduction":
            dtype, _, kind = op.args[1:4]
            if kind not in _EXACT_REDUCTIONS and (dtype.is_floating_point or dtype.is_complex):
                return True
    return False


def _choice(ranges: tuple[Any, ...], depth: int, tiling: tuple[Any, ...]) -> _Choice:
    factors, indices, *stats = tiling
    is_tail_scalar = not cast(Any, config).cpp.enable_loop_tail_vec or any(map(_is_tail_scalar, stats))
    return _Choice(ranges, depth, tuple(factors), tuple(indices), is_tail_scalar)


def _is_tail_scalar(stats: Any) -> bool:
    """Whether Inductor may compute the tail of a loop with these ops one by one; it depends on the length too."""
    slow = stats.mask_op_count + sum(stats.non_contig_indexing_op_counter.values())
    count = sum(stats.op_counter.values())
    return count > 0 and slow / count > stats.OVERHEAD_RATIO_THRESHOLD


def _width(node: Any, choice: _Choice) -> str | None:
    """``scalar`` or ``vector`` if all elements of a node are computed like this and it has no sums, otherwise None."""
    if _adds_up(node._body):
        return None
    if not choice.indices:
        return "scalar"
    is_whole = not (choice.is_tail_scalar and choice.has_tail())
    return "vector" if is_whole and _reads_in_every_loop(node, choice) else None


def _reads_in_every_loop(node: Any, choice: _Choice) -> bool:
    """Whether all that a node reads is different in every step of the vectorized loops. What is not is computed one by
    one."""
    variables = [variable for group in node._body.vars for variable in group]
    if len(variables) != len(choice.ranges):
        return False
    tiled = [variables[index] for index in choice.indices]
    reads = node._body.get_read_exprs()
    return all(any(variable in read.free_symbols for variable in tiled) for read in reads)


def _is_met(recorded: _Recorded, node: Any, choice: _Choice) -> bool:
    if choice == recorded.choice:
        return True
    return recorded.width is not None and _width(node, choice) == recorded.width


def _can_be_vectorized(nodes: Sequence[Any]) -> bool:
    bodies = [node._body for node in nodes]
    module = cast(Any, cpp)
    return all(dtype in module.VECTORIZABLE_DTYPES for dtype in module._get_dtype_from_loopbodies(bodies))
