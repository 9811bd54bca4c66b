"""What a call target says about the cost of its calls: how it is fused, what it computes, what it writes.

The lists of names below follow torch's ops and how Inductor lowers them. An unknown op is a separate kernel.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.graph.flop_formulas import FlopFormula, find_flop_formula
from ssdtrain_fx.passes.graph.joint_graph import backward_starts
from ssdtrain_fx.passes.graph.op_targets import OPS
from ssdtrain_fx.passes.graph.tensor_sizes import shape_of


class Kind(enum.Enum):
    FREE = "takes no time: inputs, views, symbols, the marker, the ops of ssdtrain_fx"
    POINTWISE = "an element of the result depends on few elements of the arguments"
    ROWS = "reduces trailing dimensions"
    COLUMNS = "reduces other dimensions, or all"
    KERNEL = "is never fused"


FUSIBLE = (Kind.POINTWISE, Kind.ROWS, Kind.COLUMNS)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops that Inductor lowers to pointwise code, although they do not have the tag `pointwise`.
_POINTWISE_NAMES = _names(
    """
    _low_memory_max_pool_offsets_to_indices _low_memory_max_pool_with_offsets _to_copy _unsafe_index
    _unsafe_masked_index arange avg_pool2d avg_pool2d_backward cat constant_pad_nd convert_element_type copy copy_
    embedding eye fill fill_ flip fma full full_like gather index index_select inductor_lookup_seed inductor_randint
    inductor_random inductor_seed inductor_seeds iota lift_fresh_copy native_dropout ones ones_like rand rand_like randn
    randn_like reflection_pad2d repeat rev roll scalar_tensor select_scatter slice_scatter stack tril triu
    upsample_nearest2d view_dtype where zeros zeros_like
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
class Op:
    """What a call target says about its calls."""

    name: str
    kind: Kind
    flop_formula: FlopFormula | None = None
    attention_arguments: tuple[int, int] | None = None
    """For attention: the positions of query and key among the arguments."""
    causal_argument: int = 0
    """For attention: the position of ``is_causal``."""
    written_arguments: tuple[tuple[int, str], ...] = ()

    @property
    def looks_up(self) -> bool:
        """True if it reads only some rows of its first argument."""
        return self.name in _LOOK_UP_NAMES

    @property
    def adds_at_indices(self) -> bool:
        """True if it adds values to elements of its result that indices select."""
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
        """FLOPs of a call of this op. ``node`` may run it inside another op, see :func:`op_inside`."""
        if self.flop_formula is None:
            return 0
        args = fx.map_arg(arguments_inside(node), lambda source: _shape_or_value(source.meta.get("val")))
        kwargs = fx.map_arg(dict(node.kwargs), lambda source: _shape_or_value(source.meta.get("val")))
        results = _shape_or_value(node.meta.get("val"))
        flops = self.flop_formula(*cast(Any, args), **cast(Any, kwargs), out_val=results)
        return int(self._looked_at(node) * flops)

    def attention_elements(self, node: fx.Node) -> int:
        """Number of exponentials in the softmax of attention: one per pair of query and key that is looked at."""
        if self.attention_arguments is None:
            return 0
        arguments = arguments_inside(node)
        query, key = (shape_of(cast(fx.Node, arguments[at]).meta.get("val")) for at in self.attention_arguments)
        return int(self._looked_at(node) * math.prod(query[:-1]) * key[-2])

    def _looked_at(self, node: fx.Node) -> float:
        """The share of all pairs of query and key that attention looks at. Causal kernels skip blocks of keys that come
        after all queries of a block: about half of many keys, and nothing of a few."""
        if self.attention_arguments is None:
            return 1.0
        arguments, at = arguments_inside(node), self.causal_argument
        if not (arguments[at] if at < len(arguments) else node.kwargs.get("is_causal", False)):
            return 1.0
        keys = shape_of(cast(fx.Node, arguments[self.attention_arguments[1]]).meta.get("val"))[-2]
        return min(1.0, (keys + KEY_BLOCK) / (2 * max(1, keys)))


FREE_OP = Op("", Kind.FREE)
KEY_BLOCK = 512
"""Keys that attention on a CPU takes together (``kvBlockSize`` of its flash kernel). GPUs take fewer."""
_ATTENTION_NAMES = _names(
    """
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    """
)


_AROUND_RANDOM_OPS = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
"""Ops around one that draws random numbers, in checkpoints: they keep or set the state of the generator. By the
position of the op inside among their arguments, which is followed by its own arguments."""


def is_around_random_op(node: fx.Node) -> bool:
    """Whether ``node`` runs another op, and keeps or sets the state of the random number generator for it."""
    return str(node.target) in _AROUND_RANDOM_OPS


def op_inside(node: fx.Node) -> Op:
    """The op that takes the time of ``node``: attention may draw a dropout mask, so checkpoints wrap it."""
    at = _AROUND_RANDOM_OPS.get(str(node.target))
    target: Any = node.target if at is None else node.args[at]
    return op_of(target)


def arguments_inside(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of :func:`op_inside`."""
    at = _AROUND_RANDOM_OPS.get(str(node.target))
    return node.args if at is None else node.args[at + 1 :]


@functools.cache
def op_of(target: Any) -> Op:
    """What a call target says about its calls. Unknown targets are accepted too."""
    if target is backward_starts or target in OPS:
        return FREE_OP
    if not isinstance(target, _torch_private.OpOverload):
        return Op(str(getattr(target, "__name__", target)), Kind.KERNEL)
    packet = target.overloadpacket
    name = str(packet.__name__)
    forward_name = name.removesuffix("_backward")
    attention: tuple[int, int] | None = None
    causal = 0
    formula = find_flop_formula(target)
    if forward_name in _ATTENTION_NAMES:
        attention = (0, 1) if forward_name == name else (1, 2)
        causal = next(at for at, argument in enumerate(target._schema.arguments) if argument.name == "is_causal")
    tags = target.tags
    if formula is not None:
        kind = Kind.KERNEL
    elif torch.Tag.reduction in tags:
        kind = Kind.ROWS
    elif torch.Tag.pointwise in tags or torch.Tag.view_copy in tags or name in _POINTWISE_NAMES:
        kind = Kind.POINTWISE
    elif name.startswith(("empty", "new_empty")):
        kind = Kind.FREE
    else:
        kind = Kind.KERNEL
    written = tuple(
        (at, argument.name)
        for at, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Op(name, kind, formula, attention, causal, written)


def _shape_or_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.Size(shape_of(value))
    if isinstance(value, (tuple, list)):
        return [_shape_or_value(item) for item in cast(Sequence[Any], value)]
    return value
