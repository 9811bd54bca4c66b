"""How long does each node take? Counted from shapes and a hardware profile: no clock, so the same graph costs the same.

A kernel takes ``max(arithmetic, bytes moved / memory rate) + kernel_s``, the roofline. Matrix products, convolutions
and attention are kernels of their own, with FLOPs from ``torch.utils.flop_counter``. Pointwise ops and reductions are
not: Inductor fuses them, so that a chain of ten reads and writes memory once. They are grouped roughly as it does:

    0  a = mm(x, w)         own kernel
    1  b = mul(a, 2)        \\
    2  c = tanh(b)           | one group: reads a and d, writes c and e; b never reaches memory. Costs are on node 3.
    3  e = add(c, d)        /
    4  f = mm(e, v)         own kernel
    5  return c, f

Two nodes may share a group when

* both are forward, or both are backward;
* the longest chain of own kernels in front of them is the same: then no kernel can stand between them. A pointwise op
  is made where it is first needed (Inductor inlines it there), so it counts the chain in front of its first reader;
* they iterate over the same elements, or one over leading dimensions of the other, as the statistics of a row do;
* one reads the other, or both read the same storage.

A reduction over leading dimensions (the gradient of a bias) walks memory in another order and is a pass of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils import flop_counter as _flop_counter

from ssdtrain_fx import _torch_private
from ssdtrain_fx.hardware import Hardware, convolution_key
from ssdtrain_fx.passes.alias_sets import AliasSets
from ssdtrain_fx.passes.joint_graph import ScheduledJointGraph, backward_starts
from ssdtrain_fx.passes.op_targets import OPS

flop_counter = cast(Any, _flop_counter)  # untyped

Shape = tuple[int, ...]


class _Kind(enum.Enum):
    FREE = "takes no time: inputs, views, symbols, the marker, our ops"
    POINTWISE = "an element of the result depends on few elements of the arguments"
    ROWS = "reduces trailing dimensions"
    COLUMNS = "reduces others, or all"
    KERNEL = "is never fused"


class NodeFacts:
    """What the costs of all nodes of one graph depend on: found once, for its kernels and for its seconds."""

    def __init__(self, joint: ScheduledJointGraph, alias_sets: AliasSets) -> None:
        self._alias_sets = alias_sets
        self._facts = [_Fact.of(node, alias_sets) for node in joint.graph.nodes]

    @property
    def facts(self) -> Sequence[_Fact]:
        return self._facts

    @functools.cached_property
    def groups(self) -> Sequence[int]:
        """The fused group of every position, named by one of its members."""
        position_of = {fact.node: position for position, fact in enumerate(self._facts)}
        return _fuse(self._facts, position_of, self._alias_sets)


def estimate_node_seconds(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    hardware: Hardware,
    *,
    fused: bool = True,
    facts: NodeFacts | None = None,
) -> tuple[float, ...]:
    """Seconds of every position of ``joint``.

    The time of a fused group stands at its last member, which is about where Inductor runs the kernel; the other
    members cost 0, and so do inputs, views, ``getitem`` and the marker. Sizes that depend on data count as 0.

    Args:
        fused: False for ``inner="aot_eager"``, which runs node by node: then every node is a group of its own.
        facts: of this graph, where somebody has found them already.
    """
    facts = NodeFacts(joint, alias_sets) if facts is None else facts
    groups = facts.groups if fused else range(len(facts.facts))
    return _price(facts.facts, groups, alias_sets, hardware, fused=fused)


def takes_time(node: fx.Node, alias_sets: AliasSets) -> bool:
    """False for inputs, views, ``getitem``, symbols, the marker and our own ops."""
    op = _op(node.target) if node.op == "call_function" else _FREE_OP
    if op.kind is _Kind.FREE:
        return False
    makes_a_storage = any(alias_sets.storages[idx].allocator is node for idx in alias_sets.by_node[node])
    return makes_a_storage or bool(op.written_arguments)


def find_own_kernels(joint: ScheduledJointGraph, alias_sets: AliasSets, *, fused: bool) -> tuple[fx.Node, ...]:
    """The nodes that run as the op that stands in the graph, fused with nothing, in order.

    Args:
        fused: False for ``inner="aot_eager"``: then every node that takes time is one. Otherwise also left out is what
            adds at indices: Inductor fuses it with nothing, but generates the kernel itself.
    """

    def is_own(op: _Op) -> bool:
        return op.kind is _Kind.KERNEL and not op.adds_at_indices

    nodes = [node for node in joint.graph.nodes if takes_time(node, alias_sets)]
    return tuple(node for node in nodes if not fused or is_own(_op(node.target)))


@dataclasses.dataclass(frozen=True, slots=True)
class FusedKernel:
    """A group of pointwise ops and reductions, as one kernel. Storages by index."""

    last: int
    """Position of the last member."""
    reads: tuple[int, ...]
    """Made by others."""
    writes: tuple[int, ...]
    """Made here, and needed by others."""
    inlined: tuple[int, ...]
    """Made here for members alone: they never reach memory."""


def find_fused_kernels(
    joint: ScheduledJointGraph, alias_sets: AliasSets, *, found: NodeFacts | None = None
) -> tuple[FusedKernel, ...]:
    """The groups behind :func:`estimate_node_seconds`, in the order of their last members.

    Args:
        found: facts of this graph, where somebody has found them already.
    """
    found = NodeFacts(joint, alias_sets) if found is None else found
    facts, groups = found.facts, found.groups
    maker: dict[int, int] = {}
    for fact, group in zip(facts, groups, strict=True):
        if fact.kind is not _Kind.FREE:
            maker.update((idx, group) for idx in fact.made)
    needed = {idx for fact in facts if fact.node.op == "output" for idx, _ in fact.read}
    members: dict[int, list[int]] = {}
    for position, (fact, group) in enumerate(zip(facts, groups, strict=True)):
        if fact.kind is _Kind.FREE:
            continue
        needed.update(idx for idx, _ in fact.read if maker.get(idx, group) != group)
        if fact.kind in _FUSIBLE:
            members.setdefault(group, []).append(position)
    kernels: list[FusedKernel] = []
    for group, positions in members.items():
        made = [idx for position in positions for idx in facts[position].made]
        read = dict.fromkeys(
            idx for position in positions for idx, _ in facts[position].read if maker.get(idx) != group
        )
        kernels.append(
            FusedKernel(
                last=positions[-1],
                reads=tuple(read),
                writes=tuple(idx for idx in made if idx in needed),
                inlined=tuple(idx for idx in made if idx not in needed),
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: kernel.last))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Fact:
    """What the cost of a node depends on, apart from its neighbours."""

    node: fx.Node
    kind: _Kind
    made: tuple[int, ...]
    """Storages that it allocates."""
    written: tuple[tuple[int, int], ...]
    """Storages of arguments that it writes, and the bytes."""
    read: tuple[tuple[int, int], ...]
    """Storages that it reads, and the bytes of each argument: a slice reads less than its storage has."""
    shape: Shape
    """What it iterates over: the shape of its result, or for a reduction of its argument."""
    flops: int
    convolves: bool
    dtype: torch.dtype | None
    expensive_elements: int
    """Elements that take a transcendental function or a random number."""
    traffic_bytes: int
    """Bytes moved beyond ``read``, ``written`` and what it makes."""

    @classmethod
    def of(cls, node: fx.Node, alias_sets: AliasSets) -> _Fact:
        made = tuple(idx for idx in alias_sets.by_node[node] if alias_sets.storages[idx].allocator is node)
        op = _op(node.target) if node.op == "call_function" else _FREE_OP
        if not takes_time(node, alias_sets):
            held = tuple((idx, 0) for source in node.all_input_nodes for idx in alias_sets.by_node[source])
            return cls(node, _Kind.FREE, made, (), held, (), 0, False, None, 0, 0)
        inputs = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
        first = inputs[0].meta["val"] if inputs else None
        results = [leaf for leaf in _torch_private.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        result = results[0] if results else first
        kind, shape = op.kind, _shape(result)
        if kind is _Kind.ROWS:
            shape = _shape(first)
            kind = _reduction_kind(node, shape)
        table = node.args[0] if op.looks_up else None
        read: list[tuple[int, int]] = []
        for value in inputs:
            size_bytes = _touched_bytes(value.meta["val"])
            if value is table:
                size_bytes = min(size_bytes, _touched_bytes(result))
            read += [(idx, size_bytes) for idx in alias_sets.by_node[value]]
        written = [
            (idx, _touched_bytes(value.meta.get("val")))
            for value in op.written_values(node)
            for idx in alias_sets.by_node[value]
        ]
        traffic_bytes, expensive_elements = 0, 0
        if op.is_expensive(node):
            expensive_elements = max(math.prod(shape), math.prod(_shape(result)))
        if op.adds_at_indices:
            values = max((value.meta["val"] for value in inputs[1:] or inputs), key=_touched_bytes)
            traffic_bytes = 2 * _touched_bytes(values)
            expensive_elements = math.prod(_shape(values))
        attention_elements = _attention_elements(node, op)
        return cls(
            node=node,
            kind=kind,
            made=made,
            written=tuple(written),
            read=tuple(read),
            shape=shape,
            flops=op.count_flops(node),
            convolves="conv" in op.name,
            dtype=None if result is None else result.dtype,
            expensive_elements=expensive_elements + attention_elements,
            traffic_bytes=traffic_bytes,
        )


# -- groups ------------------------------------------------------------------------------------------------------------


def _fuse(facts: Sequence[_Fact], position_of: Mapping[fx.Node, int], alias_sets: AliasSets) -> list[int]:
    """The group of every position, named by one of its members."""
    users = _users(facts, position_of)
    levels = _levels(facts, position_of, users)
    by_columns = _feeds_only_columns(facts, users)
    parent = list(range(len(facts)))
    shapes = [fact.shape for fact in facts]

    def find(member: int) -> int:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    # A storage is written by its allocator and by ops that mutate it; the last one before a reader made what is read.
    maker: dict[int, int] = {}
    readers: dict[tuple[int, int, bool], int] = {}
    for position, fact in enumerate(facts):
        if fact.kind in _FUSIBLE:
            level, columns = levels[position], by_columns[position]
            partners: list[int] = []
            for idx, _ in fact.read:
                made_at = maker.get(idx)
                if made_at is not None and levels[made_at] == level and by_columns[made_at] == columns:
                    partners.append(made_at)
                partners.append(readers.setdefault((idx, level, columns), position))
            for partner in partners:
                mine, other = find(position), find(partner)
                if mine != other and facts[partner].kind in _FUSIBLE and _same_space(shapes[mine], shapes[other]):
                    parent[mine] = other
                    shapes[other] = max(shapes[mine], shapes[other], key=math.prod)
        if fact.kind is not _Kind.FREE:
            maker.update((idx, position) for idx in fact.made)
            maker.update((idx, position) for idx, _ in fact.written)
    return [find(position) for position in range(len(facts))]


def _users(facts: Sequence[_Fact], position_of: Mapping[fx.Node, int]) -> list[list[int]]:
    """Who reads the value of a position, views and ``getitem`` looked through; ``len(facts) - 1`` is the output."""
    users: list[list[int]] = [[] for _ in facts]
    for position in range(len(facts) - 1, -1, -1):
        for user in facts[position].node.users:
            at = position_of[user]
            if facts[at].kind is _Kind.FREE and user.op != "output":
                users[position] += users[at]
            else:
                users[position].append(at)
    return users


def _levels(facts: Sequence[_Fact], position_of: Mapping[fx.Node, int], users: Sequence[Sequence[int]]) -> list[int]:
    """For every position the number of own kernels in a row in front of it; backward starts above all of forward."""
    levels = [0] * len(facts)
    floor, highest, marker = 0, 0, len(facts)
    for position, fact in enumerate(facts):
        if fact.node.target is backward_starts:
            floor, marker = highest + 2, position
        level = floor if fact.kind is not _Kind.FREE else 0
        for source in fact.node.all_input_nodes:
            at = position_of[source]
            level = max(level, levels[at] + (facts[at].kind is _Kind.KERNEL))
        levels[position] = level
        highest = max(highest, level)
    for position in range(len(facts) - 1, -1, -1):
        readers = users[position]
        if facts[position].kind is not _Kind.POINTWISE or not readers:
            continue
        last = max(readers)
        if (position > marker or last < marker) and last < len(facts) - 1:
            levels[position] = min(levels[at] for at in readers)
    return levels


def _feeds_only_columns(facts: Sequence[_Fact], users: Sequence[Sequence[int]]) -> list[bool]:
    """Is this a reduction over columns, or a pointwise op that is inlined into such reductions only?"""
    found = [fact.kind is _Kind.COLUMNS for fact in facts]
    for position in range(len(facts) - 1, -1, -1):
        if facts[position].kind is _Kind.POINTWISE and users[position]:
            shape = facts[position].shape
            found[position] = all(found[at] and _same_space(facts[at].shape, shape) for at in users[position])
    return found


def _same_space(one: Shape, other: Shape) -> bool:
    """Does one iteration run over all elements, or over leading dimensions, of the other?"""
    small, large = sorted((one, other), key=math.prod)
    count, product = math.prod(small), 1
    for size in large:
        if product >= count:
            break
        product *= size
    return product == count


# -- prices ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Bill:
    """What one group costs, added up over its members."""

    arithmetic_s: float = 0.0
    moved_bytes: int = 0
    last: int = 0
    read: dict[int, int] = dataclasses.field(default_factory=dict[int, int])


def _price(
    facts: Sequence[_Fact], groups: Sequence[int], alias_sets: AliasSets, hardware: Hardware, *, fused: bool
) -> tuple[float, ...]:
    sizes = [_storage_bytes(alias_sets, idx) for idx in range(len(alias_sets.storages))]
    maker: dict[int, int] = {}
    needed_outside: set[tuple[int, int]] = set()  # storage, group that made it
    bills: dict[int, _Bill] = {}
    for position, fact in enumerate(facts):
        group = groups[position]
        if fact.node.op == "output":
            needed_outside.update((idx, maker[idx]) for idx, _ in fact.read if idx in maker)
        if fact.kind is _Kind.FREE:
            continue
        bill = bills.setdefault(group, _Bill())
        bill.last = position
        bill.moved_bytes += fact.traffic_bytes
        bill.arithmetic_s += fact.flops / _flop_rate(hardware, fact)
        bill.arithmetic_s += fact.expensive_elements / _rate(hardware.elements_per_s, fact.dtype)
        for idx, size_bytes in fact.read:
            if idx in maker and maker[idx] == group:
                continue
            if idx in maker:
                needed_outside.add((idx, maker[idx]))
            bill.read[idx] = min(bill.read.get(idx, 0) + size_bytes, sizes[idx])
        for idx, size_bytes in fact.written:
            bill.moved_bytes += size_bytes
            maker[idx] = group
        for idx in fact.made:
            maker[idx] = group
    for fact, group in zip(facts, groups, strict=True):
        if fact.kind is not _Kind.FREE:
            bills[group].moved_bytes += sum(
                sizes[idx]
                for idx in fact.made
                if not fused or fact.kind is _Kind.KERNEL or (idx, group) in needed_outside
            )
    seconds = [0.0] * len(facts)
    for bill in bills.values():
        moved_bytes = bill.moved_bytes + sum(bill.read.values())
        seconds[bill.last] = max(bill.arithmetic_s, moved_bytes / hardware.memory_bytes_per_s) + hardware.kernel_s
    return tuple(seconds)


def _flop_rate(hardware: Hardware, fact: _Fact) -> float:
    if fact.convolves:
        rate = hardware.flops_per_s.get(convolution_key(str(fact.dtype).removeprefix("torch.")))
        if rate is not None:
            return rate
    return _rate(hardware.flops_per_s, fact.dtype)


def _rate(rates: Mapping[str, float], dtype: torch.dtype | None) -> float:
    """The rate for ``dtype``, else that of float32, half of it for eight bytes; infinite in an empty profile."""
    if dtype is None:
        return math.inf
    name = str(dtype).removeprefix("torch.")
    if name in rates:
        return rates[name]
    known = rates.get("float32", min(rates.values(), default=math.inf))
    return known * 4 / dtype.itemsize if dtype.itemsize > 4 else known


# -- sizes -------------------------------------------------------------------------------------------------------------


def _hint(size: Any) -> int:
    if type(size) is int:
        return size
    try:
        return _torch_private.size_hint(size)
    except ValueError:
        return 0


def _shape(tensor: Any) -> Shape:
    return tuple(map(_hint, tensor.shape)) if isinstance(tensor, torch.Tensor) else ()


def _touched_bytes(tensor: Any) -> int:
    """Bytes of the distinct elements: an expanded dimension repeats what is there."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return 0
    count = tensor.dtype.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if type(stride) is not int or stride != 0:
            count *= _hint(size)
    return count


def _storage_bytes(alias_sets: AliasSets, idx: int) -> int:
    return _hint(alias_sets.storages[idx].size_bytes)


def _reduction_kind(node: fx.Node, shape: Shape) -> _Kind:
    """ROWS when what is reduced are the trailing dimensions and something is left."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if type(dims) is int:
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        return _Kind.COLUMNS
    reduced = {cast(int, dim) % len(shape) for dim in dims} if shape else set[int]()
    kept = [dim for dim, size in enumerate(shape) if dim not in reduced and size != 1]
    moving = [dim for dim in reduced if shape[dim] != 1]
    return _Kind.ROWS if kept and (not moving or max(kept) < min(moving)) else _Kind.COLUMNS


# -- ops ---------------------------------------------------------------------------------------------------------------


_FUSIBLE = (_Kind.POINTWISE, _Kind.ROWS, _Kind.COLUMNS)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops that Inductor lowers to pointwise code, though they do not carry the tag `pointwise`.
_POINTWISE_NAMES = _names(
    """
    _low_memory_max_pool_with_offsets _to_copy _unsafe_index _unsafe_masked_index arange avg_pool2d cat
    constant_pad_nd convert_element_type copy copy_ embedding eye fill fill_ flip fma full full_like gather index
    index_select inductor_lookup_seed inductor_randint inductor_random inductor_seed inductor_seeds iota
    lift_fresh_copy native_dropout ones ones_like rand rand_like randn randn_like reflection_pad2d repeat roll
    scalar_tensor select_scatter slice_scatter stack tril triu upsample_nearest2d view_dtype where zeros zeros_like
    """
)
_LOOK_UP_NAMES = _names(
    """
    _unsafe_index _unsafe_masked_index embedding gather index index_select
    """
)
_ADD_AT_INDICES_NAMES = _names(
    """
    _unsafe_masked_index_put_accumulate embedding_dense_backward index_add index_put index_put_ scatter_add
    scatter_add_ scatter_reduce
    """
)
_EXPENSIVE_NAMES = _names(
    """
    _log_softmax _log_softmax_backward_data _softmax acos acosh asin asinh atan atan2 atanh bernoulli celu cos cosh
    digamma elu erf erfc erfinv exp exp2 expm1 gelu gelu_backward inductor_randint inductor_random lgamma log log10
    log1p log2 log_sigmoid_forward logit logsumexp mish native_dropout normal rand rand_like randn randn_like rsqrt
    selu sigmoid silu silu_backward sin sinh softplus tan tanh
    """
)
_CHEAP_EXPONENTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class _Op:
    """What a call target says about its calls."""

    name: str
    kind: _Kind
    flop_formula: Callable[..., Any] | None = None
    attention_arguments: tuple[int, int] | None = None
    """Where query and key stand among the arguments, for attention."""
    written_arguments: tuple[tuple[int, str], ...] = ()

    @property
    def looks_up(self) -> bool:
        """Reads only some rows of its first argument."""
        return self.name in _LOOK_UP_NAMES

    @property
    def adds_at_indices(self) -> bool:
        """Adds values to elements all over its result."""
        return self.name in _ADD_AT_INDICES_NAMES

    def is_expensive(self, node: fx.Node) -> bool:
        if self.name == "pow":
            return len(node.args) < 2 or node.args[1] not in _CHEAP_EXPONENTS
        return self.name in _EXPENSIVE_NAMES

    def written_values(self, node: fx.Node) -> list[fx.Node]:
        values: list[fx.Node] = []
        for at, name in self.written_arguments:
            value = node.args[at] if at < len(node.args) else node.kwargs.get(name)
            values += [leaf for leaf in _torch_private.tree_leaves(value) if isinstance(leaf, fx.Node)]
        return values

    def count_flops(self, node: fx.Node) -> int:
        if self.flop_formula is None:
            return 0
        args = fx.map_arg(node.args, lambda source: _shape_or_value(source.meta.get("val")))
        kwargs = fx.map_arg(dict(node.kwargs), lambda source: _shape_or_value(source.meta.get("val")))
        results = _shape_or_value(node.meta.get("val"))
        return int(self.flop_formula(*cast(Any, args), **cast(Any, kwargs), out_val=results))


_FREE_OP = _Op("", _Kind.FREE)
_ATTENTION_NAMES = _names(
    """
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    """
)


@functools.cache
def _op(target: Any) -> _Op:
    if target is backward_starts or target in OPS:
        return _FREE_OP
    if not isinstance(target, _torch_private.OpOverload):
        return _Op(str(getattr(target, "__name__", target)), _Kind.KERNEL)
    packet = target.overloadpacket
    name = str(packet.__name__)
    forward_name = name.removesuffix("_backward")
    attention: tuple[int, int] | None = None
    formula: Any = flop_counter.flop_registry.get(packet)
    if forward_name in _ATTENTION_NAMES:
        attention = (0, 1) if forward_name == name else (1, 2)
        formula = flop_counter.sdpa_flop if forward_name == name else flop_counter.sdpa_backward_flop
    elif not hasattr(formula, "__wrapped__"):
        formula = None  # wants real tensors
    tags = target.tags
    if formula is not None:
        kind = _Kind.KERNEL
    elif torch.Tag.reduction in tags:
        kind = _Kind.ROWS
    elif torch.Tag.pointwise in tags or torch.Tag.view_copy in tags or name in _POINTWISE_NAMES:
        kind = _Kind.POINTWISE
    elif name.startswith(("empty", "new_empty")):
        kind = _Kind.FREE
    else:
        kind = _Kind.KERNEL
    written = tuple(
        (at, argument.name)
        for at, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _Op(name, kind, formula, attention, written)


def _attention_elements(node: fx.Node, op: _Op) -> int:
    """Exponentials of the softmax inside: one for every query and key."""
    if op.attention_arguments is None:
        return 0
    query, key = (_shape(cast(fx.Node, node.args[at]).meta.get("val")) for at in op.attention_arguments)
    return math.prod(query[:-1]) * key[-2]


def _shape_or_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.Size(_shape(value))
    if isinstance(value, (tuple, list)):
        return [_shape_or_value(item) for item in cast(Sequence[Any], value)]
    return value
