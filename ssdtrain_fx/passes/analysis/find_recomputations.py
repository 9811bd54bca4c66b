"""Which saved storages backward could make again itself, from what, and for every other one the reason why not.

    forward    h = mm(x, w)              # saved for backward
               a = h * h                 # saved too: backward could multiply again

A node may run again only where it gives the same bits in another place of another graph.

``inner="aot_eager"``: every functional op that draws no random numbers does. The same kernel gets the same arguments.

``inner="inductor"``: the op is compiled again, fused with other neighbours, as a vector or as a scalar. Then only what
IEEE 754 rounds exactly, or does not round at all, is the same everywhere: moves and selections, comparisons,
``+ - * /`` and square roots. That leaves out ``exp``, ``tanh``, ``erf`` (other code for vectors than for scalars),
``maximum`` and ``clamp`` (the sign of a zero), reductions (other order of additions) and matrix products (a sum that
follows may become a part of them, other layouts of arguments, other kernels). Two traps remain:

- float16 and bfloat16 values are only rounded when they are stored, and what is stored depends on fusion. So only ops
  that commute with rounding are safe there: moves, ``relu``, ``neg``, ``abs``.
- On a GPU, ``a * b + c`` in one kernel is rounded once. So no product and no sum of one is safe there; nor are division
  and square root, which Triton approximates.
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
"""Longest chain, views not counted. A guess: longer ones cost more than they save, and hold their intermediates."""
SMALL_PARAMETER = 8
"""An input is small when it has at most one byte for so many of the storage that is made with it."""

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
"""Moves and selections: to round a value first or last is the same."""

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
"""No rounding, but a tiny value may have become zero where it was stored, and a constant is rounded when stored."""

_SUMS = frozenset({"aten.add", "aten.sub", "aten.rsub"})
_CASTS = frozenset({"aten._to_copy", "prims.convert_element_type"})
_ROUNDED_ONCE = _SUMS | _CASTS | {"aten.mul", "aten.div", "aten.reciprocal", "aten.sqrt"}
"""IEEE 754 says what the result is, to the bit."""

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
"""Never fused: their results are stored, hence rounded, before anything reads them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """How backward makes one saved storage again."""

    storage_idx: int
    nodes: tuple[fx.Node, ...]
    """What runs again, in graph order: the op that makes the storage, what leads to it, and the saved views of it."""
    sources: tuple[int, ...]
    """Saved storages that ``nodes`` read, in order. All of them are made before this storage, so chains of
    recomputations have no cycles. Graph inputs do not count."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoRecomputation:
    """A saved storage that backward cannot make again."""

    storage_idx: int
    reason: str


class _CannotRunAgainError(Exception):
    """Its message is the reason."""


def find_recomputations(
    joint: ScheduledJointGraph,
    alias_sets: AliasSets,
    candidates: Sequence[Candidate],
    *,
    fused: bool,
    max_ops: int = MAX_OPS,
) -> Mapping[int, Recomputation]:
    """What backward could make again, by index of the storage. See :func:`judge_recomputations` for the reasons."""
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
    """A verdict for every candidate that may leave memory. Those that must stay are in memory anyway.

    Args:
        candidates: of the same graph. Each recomputation on its own supposes that all others are kept or come back.
        fused: Inductor compiles the graph, and what runs again is fused with other neighbours.
        max_ops: the longest chain, views not counted.
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
    """Walks from what is saved back to what is saved."""

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
        self.may_change_layouts = compiled and any(_name(node) in _CONVOLUTIONS for node in joint.graph.nodes)
        self.max_ops = max_ops

    def find(self, candidate: Candidate) -> Recomputation:
        idx = candidate.storage.idx
        nodes: set[fx.Node] = set()
        sources: set[int] = set()
        # The first tensor as well: other recomputations may read it.
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
                raise _CannotRunAgainError(f"more than {self.max_ops} ops away from anything else that is saved")
        # Views of a source are taken again; only the storages that nobody makes here are sources.
        made = {at for node in nodes if not self._is_view(node) for at in self.alias_sets.by_node[node]}
        sources = {at for at in sources - made if not self.alias_sets.storages[at].is_input}
        return Recomputation(
            storage_idx=idx,
            nodes=tuple(sorted(nodes, key=self.positions.__getitem__)),
            sources=tuple(sorted(sources)),
        )

    def _is_at_hand(self, node: fx.Node, idx: int) -> bool:
        """Can backward read ``node`` while it makes storage ``idx`` again? Raises when it could, but must not."""
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
        # Where only other views of a storage are saved, its first tensor is read; views are taken again from there.
        return all(at in self.saved and self.alias_sets.storages[at].members[0] is node for at in held)

    def _is_small_parameter(self, node: fx.Node, idx: int) -> bool:
        """May backward hold this input for storage ``idx``, though it did not before?

        Data must not be held: the caller may write the next batch over it before backward. Nor must what another graph
        made, which would take as much memory. A bias or the weight of a norm has a gradient, and is small.
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
            reason = _reason_against_compiled_op(node)
            if not reason and self.may_change_layouts and node.meta["val"].dim() in (4, 5):
                reason = "Inductor may choose another layout for it in graphs with convolutions"
        if reason:
            raise _CannotRunAgainError(f"{node.name} ({_name(node)}): {reason}")

    def _is_view(self, node: fx.Node) -> bool:
        """Does the node make no storage of its own?"""
        if node.op != "call_function":
            return False
        held = {at for source in node.all_input_nodes for at in self.alias_sets.by_node[source]}
        return held.issuperset(self.alias_sets.by_node[node])


def _reason_against_op(node: fx.Node) -> str:
    """Why the node must not run twice under any compiler; empty when it may."""
    if node.target is operator.getitem:
        return ""
    if not isinstance(node.target, _torch_private.OpOverload):
        return "not an operator that is known"
    name, tags = _name(node), node.target.tags
    if torch.Tag.nondeterministic_seeded in tags or name.startswith(_RANDOM):
        return "draws random numbers"
    if node.target._schema.is_mutable:
        return "writes into an argument"
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return "its size depends on data"
    if name in _UNINITIALISED:
        return "uninitialised memory"
    if name in _UNORDERED:
        return "adds in an order that may change from run to run"
    if node.target.namespace not in ("aten", "prims"):
        return "an operator from outside torch, which may keep a state"
    return ""


def _reason_against_compiled_op(node: fx.Node) -> str:
    """Why Inductor may give the node other bits in another place; empty when it cannot."""
    name = _name(node)
    if not isinstance(node.meta["val"], torch.Tensor):
        return "makes several tensors at once"
    if name not in _COMMUTES_WITH_ROUNDING and name not in _EXACT and name not in _ROUNDED_ONCE:
        return "what it is fused with may change its last bits"
    tensors = [
        leaf
        for value in (node, *node.all_input_nodes)
        for leaf in _torch_private.tree_leaves(value.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
    ]
    if any(tensor.is_complex() for tensor in tensors):
        return "complex numbers are made of several operations"
    low = any(tensor.is_floating_point() and tensor.element_size() < 4 for tensor in tensors)
    if low and name not in _COMMUTES_WITH_ROUNDING:
        return "a value of low precision is rounded or not, depending on fusion"
    if name == "aten.div" and node.kwargs.get("rounding_mode") is not None:
        return "made of several operations"
    if name in _ROUNDED_ONCE and any(tensor.is_floating_point() for tensor in tensors):
        if _contracts_products(tensors) and name not in _SUMS and name not in _CASTS:
            return "rounded together with a sum that follows, or not exactly"
        if _contracts_products(tensors) and (node.kwargs or any(map(_may_be_product, node.all_input_nodes))):
            return "the sum of a product may be rounded once"
    return ""


def _contracts_products(tensors: Sequence[torch.Tensor]) -> bool:
    """Are ``a * b + c`` rounded once, if they happen to be in one kernel?"""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return True
    # Only here: importing Inductor takes a second, and whoever compiles with it has done so.
    from ssdtrain_fx._torch_private import inductor

    cpp = inductor.current_setting("cpp")
    return cpp.enable_floating_point_contract_flag != "off" or cpp.enable_unsafe_math_opt_flag


def _may_be_product(node: fx.Node) -> bool:
    """Could the value come out of a multiplication in the same kernel?"""
    if node.op != "call_function" or _name(node) in _KERNELS_OF_THEIR_OWN or _name(node) in _SUMS:
        return False
    if _name(node) in _COMMUTES_WITH_ROUNDING or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return any(_may_be_product(source) for source in node.all_input_nodes)
    return True


def _name(node: fx.Node) -> str:
    """``aten.add`` for all overloads of it."""
    if isinstance(node.target, _torch_private.OpOverload):
        return node.target._schema.name.replace("::", ".")
    return str(getattr(node.target, "__name__", node.target))
