"""Which saved storages backward could recompute, from what, and why it cannot recompute the others.

    forward    h = mm(x, w)              # saved for backward
               a = h * h                 # also saved: backward could recompute it from h

A node may be recomputed only if it gives the same bits at another position in another graph.

``inner="aot_eager"``: every functional op that draws no random numbers does, because the same kernel gets the same
arguments.

``inner="inductor"``: the op is compiled again, fused with other neighbours, as vector or as scalar code. Then only
results that IEEE 754 rounds exactly, or does not round at all, are the same everywhere: moves and selections,
comparisons, ``+ - * /`` and square roots. This rules out:

- ``exp``, ``tanh``, ``erf``: vector and scalar code differ.
- ``maximum`` and ``clamp``: the sign of a zero may differ.
- Reductions: the order of additions may differ.
- Matrix products: a sum that follows may be merged into them, arguments may have other layouts, and other kernels may
  be chosen.

Three more cases are unsafe:

- float16 and bfloat16 values are rounded only when they are stored, and fusion decides what is stored. So only ops
  that commute with rounding are safe there: moves, ``relu``, ``neg``, ``abs``. And every operand must have the dtype
  of the result: ``where(m, bf16, f32)`` is a float32 value, so fused code selects the bfloat16 operand before it is
  rounded, and code that reads the stored operand selects it afterwards.
- On a CPU, what runs again joins a loop of backward, and may change the vectors of that loop: its ``sin`` and its sums
  would get other bits. Inductor has no vector code for some dtypes, such as int16, so their loops are scalar code. And
  a loop whose parts all use 16-bit values has vectors of twice as many elements; a mask made from float32 values would
  end that. So in a graph with 16-bit values, only ops on such values are safe.
- On a GPU, ``a * b + c`` in one kernel is rounded once. So neither products nor sums of products are safe there.
  Division and square root are not safe either, because Triton approximates them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.analysis.candidates import Candidate
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, find_written_storages
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, is_symbol

MAX_OPS = 8
"""Longest chain of ops, not counting views. A guess: longer ones cost more than they save, and hold intermediates."""
SMALL_PARAMETER = 8
"""An input is small if the storage that is recomputed from it is at least this many times as large."""

_COMMUTES_WITH_ROUNDING = frozenset(
    f"aten.{name}"
    for name in (
        "abs",
        "cat",
        "clone",
        "embedding",
        "flip",
        "gather",
        "index",
        "index_select",
        "neg",
        "relu",
        "repeat",
        "roll",
        "select_scatter",
        "slice_scatter",
        "where",
    )
)
"""Moves and selections: rounding before or after gives the same result."""

_EXACT = frozenset(
    f"aten.{name}"
    for name in (
        "arange",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "ceil",
        "constant_pad_nd",
        "eq",
        "floor",
        "full",
        "full_like",
        "ge",
        "gt",
        "isinf",
        "isnan",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "masked_fill",
        "ne",
        "ones_like",
        "scalar_tensor",
        "sign",
        "trunc",
        "zeros_like",
    )
) | {"prims.iota"}
"""No rounding, but a tiny value may become zero when it is stored, and a constant is rounded when it is stored."""

_SUMS = frozenset({"aten.add", "aten.sub", "aten.rsub"})
_CASTS = frozenset({"aten._to_copy", "prims.convert_element_type"})
_ROUNDED_ONCE = _SUMS | _CASTS | {"aten.mul", "aten.div", "aten.reciprocal", "aten.sqrt"}
"""IEEE 754 defines every bit of the result."""

_UNORDERED = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_index_put",
        "bincount",
        "cumsum",
        "embedding_dense_backward",
        "histc",
        "index_add",
        "index_put",
        "index_reduce",
        "put",
        "scatter_add",
        "scatter_reduce",
    )
)
_UNINITIALISED = frozenset(
    f"aten.{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
_RANDOM = ("prims.inductor_seed", "prims.inductor_lookup_seed", "prims.inductor_rand", "rngprims.")
_CONVOLUTIONS = frozenset({"aten.convolution", "aten.convolution_backward"})
_KERNELS_OF_THEIR_OWN = _CONVOLUTIONS | {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
"""Never fused: their results are stored, and so rounded, before they are read."""


_HAS_VECTOR_CODE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)
"""The dtypes that do not turn a whole loop into scalar code (``VECTORIZABLE_DTYPES`` of torch 2.13; no float8 here)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """How backward recomputes one saved storage."""

    storage_idx: int
    nodes: tuple[fx.Node, ...]
    """The nodes to run again, in graph order: the op that makes the storage, the ops before it, and its saved views."""
    sources: tuple[int, ...]
    """Saved storages that ``nodes`` read, in order. All of them are made before this storage, so chains of
    recomputations have no cycles. Graph inputs do not count."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoRecomputation:
    """A saved storage that backward cannot recompute."""

    storage_idx: int
    reason: str


class _CannotRunAgainError(Exception):
    """Raised when a node must not run again. The message is the reason."""


def find_recomputations(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    candidates: Sequence[Candidate],
    *,
    fused: bool,
    max_ops: int = MAX_OPS,
) -> Mapping[int, Recomputation]:
    """Every storage that backward could recompute, by index. :func:`judge_recomputations` also gives the reasons."""
    judged = judge_recomputations(joint, alias_sets, candidates, fused=fused, max_ops=max_ops)
    return {idx: verdict for idx, verdict in judged.items() if isinstance(verdict, Recomputation)}


def judge_recomputations(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    candidates: Sequence[Candidate],
    *,
    fused: bool,
    max_ops: int = MAX_OPS,
) -> Mapping[int, Recomputation | NoRecomputation]:
    """A verdict for every candidate that may leave memory. Candidates that must stay need no recomputation.

    Args:
        candidates: of the same graph. Each recomputation assumes that all other candidates are kept or reloaded.
        fused: Inductor compiles the graph, and what runs again is fused with other neighbours.
        max_ops: the longest chain of ops, not counting views.
    """
    finder = _Finder(joint, alias_sets, candidates, compiled=fused, max_ops=max_ops)
    verdicts: dict[int, Recomputation | NoRecomputation] = {}
    for candidate in candidates:
        if candidate.representative is None:
            continue
        idx = candidate.storage.idx
        try:
            verdicts[idx] = finder.find(candidate)
        except _CannotRunAgainError as error:
            verdicts[idx] = NoRecomputation(idx, str(error))
    return verdicts


class _Finder:
    """Walks back from a saved storage to the saved values that it can be recomputed from."""

    def __init__(
        self,
        joint: ScheduledJointGraph,
        alias_sets: AliasSets,
        candidates: Sequence[Candidate],
        *,
        compiled: bool,
        max_ops: int,
    ) -> None:
        self.alias_sets = alias_sets
        self.positions = joint.positions()
        inputs = [node for node in joint.graph.find_nodes(op="placeholder") if node not in joint.backward_inputs]
        self.differentiated = {
            node for node, gradient in zip(inputs, joint.gradients, strict=False) if gradient is not None
        }
        self.saved_nodes = {node for candidate in candidates for node in candidate.saved_nodes}
        self.saved = {candidate.storage.idx for candidate in candidates}
        self.written = find_written_storages(joint.graph, alias_sets)
        self.compiled = compiled
        self.has_low_precision = compiled and any(map(_has_low_precision, joint.graph.nodes))
        self.may_change_layouts = compiled and any(_name(node) in _CONVOLUTIONS for node in joint.graph.nodes)
        self.max_ops = max_ops

    def find(self, candidate: Candidate) -> Recomputation:
        idx = candidate.storage.idx
        nodes: set[fx.Node] = set()
        sources: set[int] = set()
        # Include the first tensor: other recomputations may read it.
        pending = [candidate.storage.members[0], *candidate.saved_nodes]
        while pending:
            node = pending.pop()
            if node in nodes:
                continue
            self._check(node)
            nodes.add(node)
            for source in node.all_input_nodes:
                if self._is_at_hand(source, idx):
                    sources |= {at for at in self.alias_sets.by_node[source] if at in self.saved}
                else:
                    pending.append(source)
            if sum(not self._is_view(node) for node in nodes) > self.max_ops:
                raise _CannotRunAgainError(f"needs more than {self.max_ops} ops from other saved values")
        # Views of a source are replayed. Only storages that these nodes do not make are sources.
        made = {at for node in nodes if not self._is_view(node) for at in self.alias_sets.by_node[node]}
        sources = {at for at in sources - made if not self.alias_sets.storages[at].is_input}
        return Recomputation(
            storage_idx=idx,
            nodes=tuple(sorted(nodes, key=self.positions.__getitem__)),
            sources=tuple(sorted(sources)),
        )

    def _is_at_hand(self, node: fx.Node, idx: int) -> bool:
        """Can backward read ``node`` while it recomputes storage ``idx``? Raises if it could, but must not."""
        if node.op == "get_attr" or is_symbol(node):
            return True
        held = self.alias_sets.by_node[node]
        if any(at in self.written for at in held):
            raise _CannotRunAgainError(f"reads {node.name}, which is written in place")
        if idx in held:
            return False
        if node.op == "placeholder":
            if not self.saved.issuperset(held) and not self._is_small_parameter(node, idx):
                raise _CannotRunAgainError(f"reads the graph input {node.name}, which backward does not hold")
            return True
        if node in self.saved_nodes:
            return True
        # If only other views of a storage are saved, the first tensor is read, and views are replayed from it.
        return all(at in self.saved and self.alias_sets.storages[at].members[0] is node for at in held)

    def _is_small_parameter(self, node: fx.Node, idx: int) -> bool:
        """May backward hold this input to recompute storage ``idx``, although it did not hold it before?

        It must not hold data: the caller may overwrite it with the next batch before backward. Nor may it hold the
        result of another graph, which would take as much memory. A bias or a norm's weight has a gradient and is small.
        """
        if node not in self.differentiated:
            return False
        (held,) = self.alias_sets.by_node[node]
        storages = self.alias_sets.storages
        return SMALL_PARAMETER * storages[held].hint_bytes <= storages[idx].hint_bytes

    def _check(self, node: fx.Node) -> None:
        for leaf in _torch_private.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor) and type(leaf) is not _torch_private.FakeTensor:
                raise _CannotRunAgainError(f"{node.name} is a tensor subclass")
        if any(at in self.written for at in self.alias_sets.by_node[node]):
            raise _CannotRunAgainError(f"{node.name} is written in place")
        reason = _reason_against_op(node)
        if not reason and not self._is_view(node) and self.compiled:
            reason = _reason_against_compiled_op(node) or self._reason_against_vectors(node)
            if not reason and self.may_change_layouts and node.meta["val"].dim() in (4, 5):
                reason = "Inductor may choose another layout for it, because the graph has convolutions"
        if reason:
            raise _CannotRunAgainError(f"{node.name} ({_name(node)}): {reason}")

    def _reason_against_vectors(self, node: fx.Node) -> str:
        """Why the node may change the vectors of a loop that it joins; empty if it cannot."""
        tensors = _tensors_of(node)
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return ""
        if any(tensor.dtype not in _HAS_VECTOR_CODE for tensor in tensors):
            return "Inductor has no vector code for its dtype, and loops of backward would become scalar code"
        if self.has_low_precision and not any(map(_is_low, tensors)):
            return "loops over 16-bit values have other vectors than its own, and it may join one"
        return ""

    def _is_view(self, node: fx.Node) -> bool:
        """Does the node allocate no storage?"""
        if node.op != "call_function":
            return False
        held = {at for source in node.all_input_nodes for at in self.alias_sets.by_node[source]}
        return held.issuperset(self.alias_sets.by_node[node])


def _reason_against_op(node: fx.Node) -> str:
    """Why the node must not run twice with any compiler; empty if it may."""
    if node.target is operator.getitem:
        return ""
    if not isinstance(node.target, _torch_private.OpOverload):
        return "not a torch operator"
    name, tags = _name(node), node.target.tags
    if torch.Tag.nondeterministic_seeded in tags or name.startswith(_RANDOM):
        return "draws random numbers"
    if node.target._schema.is_mutable:
        return "writes into an argument"
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return "its size depends on data"
    if name in _UNINITIALISED:
        return "returns uninitialised memory"
    if name in _UNORDERED:
        return "the order of its additions may change from run to run"
    if node.target.namespace not in ("aten", "prims"):
        return "an operator outside aten and prims, which may have state"
    return ""


def _reason_against_compiled_op(node: fx.Node) -> str:
    """Why Inductor may compute other bits for the node at another position; empty if it cannot."""
    name = _name(node)
    if not isinstance(node.meta["val"], torch.Tensor):
        return "returns several tensors"
    if name not in _COMMUTES_WITH_ROUNDING and name not in _EXACT and name not in _ROUNDED_ONCE:
        return "fusion may change its last bits"
    tensors = _tensors_of(node)
    if any(tensor.is_complex() for tensor in tensors):
        return "complex arithmetic takes several operations"
    if any(map(_is_low, tensors)) and (name not in _COMMUTES_WITH_ROUNDING or not _has_one_precision(node, tensors)):
        return "fusion decides whether a low-precision value is rounded"
    if name == "aten.div" and node.kwargs.get("rounding_mode") is not None:
        return "division with a rounding mode takes several operations"
    if name in _ROUNDED_ONCE and any(tensor.is_floating_point() for tensor in tensors):
        if _contracts_products(tensors) and name not in _SUMS and name not in _CASTS:
            return "it may be rounded together with a following sum, or be inexact"
        if _contracts_products(tensors) and (node.kwargs or any(map(_may_be_product, node.all_input_nodes))):
            return "the sum of a product may be rounded once"
    return ""


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The result and the operands."""
    values = (node, *node.all_input_nodes)
    leaves = (leaf for value in values for leaf in _torch_private.tree_leaves(value.meta.get("val")))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_low(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


def _has_low_precision(node: fx.Node) -> bool:
    leaves = _torch_private.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) and _is_low(leaf) for leaf in leaves)


def _has_one_precision(node: fx.Node, tensors: Sequence[torch.Tensor]) -> bool:
    """Do all floating-point operands and the result have the same dtype? A Python number has none, so it does not."""
    if any(isinstance(leaf, float) for leaf in _torch_private.tree_leaves((node.args, node.kwargs))):
        return False
    return len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) == 1


def _contracts_products(tensors: Sequence[torch.Tensor]) -> bool:
    """Is ``a * b + c`` rounded only once if one kernel computes it?"""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return True
    # A local import: importing Inductor takes a second, and a process that compiles with it has already imported it.
    from ssdtrain_fx._torch_private import inductor

    cpp = inductor.current_setting("cpp")
    return cpp.enable_floating_point_contract_flag != "off" or cpp.enable_unsafe_math_opt_flag


def _may_be_product(node: fx.Node) -> bool:
    """Could the value be the result of a multiplication in the same kernel?"""
    if node.op != "call_function" or _name(node) in _KERNELS_OF_THEIR_OWN or _name(node) in _SUMS:
        return False
    if _name(node) in _COMMUTES_WITH_ROUNDING or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return any(_may_be_product(source) for source in node.all_input_nodes)
    return True


def _name(node: fx.Node) -> str:
    """The name without the overload: ``aten.add`` for all overloads of it."""
    if isinstance(node.target, _torch_private.OpOverload):
        return node.target._schema.name.replace("::", ".")
    return str(getattr(node.target, "__name__", node.target))
