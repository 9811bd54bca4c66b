"""Insert the four nodes of every offloaded storage at the positions given by the plan.

    before   a = gelu(h)                                 # f32[8, 512, 1536]  24 MiB  saved for backward
             y = mm(a, w)
             backward_starts()
             gw = mm(gy, a)

    after    a = gelu(h)
             t = offload(a)                              # starts the copy and the write
             y = mm(a, w)
             t1 = release(t, a)                          # a is live until here; its memory can be reused afterwards
             backward_starts()
             r = reload(t1, [8, 512, 1536], ...)         # allocates the tensor and starts the read
             a1 = wait(r, [8, 512, 1536], ...)           # the data is complete
             gw = mm(gy, a1)

Saved views of a storage are rebuilt after the wait: their view ops run again on the reloaded tensor.

Every read of ``a1`` reads the result of ``wait``, so data flow alone determines the order. If ``wait`` only wrote into
its argument, the order would depend on the compiler's tracking of mutations. Inductor 2.13 loses it when it aligns the
loops of fused CPU kernels: the fused kernel then runs before the wait, and gradients are wrong without an error.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.fx.node import Argument, map_arg

from ssdtrain_fx._torch_private import FakeTensor, FakeTensorMode, OpOverload, size_expression
from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.passes.analysis.candidates import Candidate, view_path
from ssdtrain_fx.passes.graph.alias_sets import AliasSets
from ssdtrain_fx.passes.graph.joint_graph import SAVED, VIEWED_AT, ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELEASE, RELOAD, WAIT
from ssdtrain_fx.passes.planning.plan import Offload, Plan
from ssdtrain_fx.passes.planning.transfer_problem import Step
from ssdtrain_fx.runtime.sites import Site

NUM_NAMES = 16
"""How many nodes before a view are noted: Inductor may remove some of them."""


@dataclasses.dataclass(slots=True, eq=False)
class _Chain:
    """The nodes of one storage that have been inserted so far."""

    candidate: Candidate
    source: fx.Node
    decision: Offload
    reload_order: int | None = None
    size: Sequence[int | fx.Node] = ()
    stride: Sequence[int | fx.Node] = ()
    token: fx.Node | None = None
    ticket: fx.Node | None = None


def insert_offloads(
    joint: ScheduledJointGraph,
    *,
    alias_sets: AliasSets,
    plan: Plan,
    candidates: Sequence[Candidate],
    engine: str,
    graph_name: str = "",
    order_reloads: bool = False,
) -> ScheduledJointGraph:
    """Rewrite ``joint`` in place so that it executes ``plan``. A plan without offloads changes nothing.

    Args:
        candidates: the candidates that the plan was made from.
        engine: the engine's configuration, as the ops take it (``EngineConfig.to_argument()``).
        graph_name: the name of the graph within a chain of graphs; empty outside a chain. Inside a chain, a release
            at the end of forward does not wait.
        order_reloads: pass the position of its reload in backward, from 0 on, to each offload. This is for devices
            whose engine reads ahead into staging.

    Raises:
        InternalError: the plan was made for another graph.
    """
    sources = {
        candidate.representative.name: candidate for candidate in candidates if candidate.representative is not None
    }
    decisions: dict[str, Offload] = {}
    for storage in plan.storages:
        if isinstance(storage.decision, Offload):
            if storage.name not in sources or storage.decision.representative != storage.name:
                moved = storage.decision.representative
                raise InternalError(f"the plan is for another graph: it offloads {moved!r} for {storage.name!r}.")
            decisions[storage.name] = storage.decision
    _note_saved_views(joint, [sources[name] for name in decisions])
    positions = joint.positions()
    nodes = list(joint.graph.nodes)
    steps: list[tuple[int, Step, _Chain]] = []
    for name, candidate in sources.items():
        decision = decisions.get(name)
        if decision is None:
            continue
        assert candidate.representative is not None
        chain = _Chain(candidate, candidate.representative, decision)
        release = Step.RELEASE_AT_ONCE if decision.release == decision.offload else Step.RELEASE
        reload = Step.RELOAD_AT_ONCE if decision.reload == decision.wait else Step.RELOAD
        steps += [
            (decision.offload, Step.OFFLOAD, chain),
            (decision.release, release, chain),
            (decision.reload, reload, chain),
            (decision.wait, Step.WAIT, chain),
        ]
    symbols = {
        size_expression(node.meta["val"]): node
        for node in joint.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.SymInt)
    }
    steps.sort(key=lambda item: item[:2])
    if order_reloads:
        reloaded = [chain for _, step, chain in steps if step in (Step.RELOAD_AT_ONCE, Step.RELOAD)]
        for order, chain in enumerate(reloaded):
            chain.reload_order = order
    for position, step, chain in steps:
        with joint.graph.inserting_before(nodes[position]):
            if step is Step.OFFLOAD:
                _insert_offload(joint.graph, chain, symbols, engine, graph_name)
            elif step in (Step.RELEASE, Step.RELEASE_AT_ONCE):
                # An input may be written to outside the graph once forward has returned, so it has to leave before.
                exclusive = not chain.candidate.storage.is_input
                deferred = exclusive and bool(graph_name) and nodes[position] is joint.marker
                _insert_release(joint.graph, chain, deferred=deferred, exclusive=exclusive)
            elif step is Step.WAIT:
                replicas = _insert_wait(joint.graph, chain, alias_sets)
                _redirect_backward_reads(replicas, positions, positions[joint.marker])
            else:
                _insert_reload(joint.graph, chain)
    joint.gm.recompile()
    return joint


def _note_saved_views(joint: ScheduledJointGraph, candidates: Sequence[Candidate]) -> None:
    """Note where forward would return the first view of a storage that is itself not saved. The views may be erased.

    A view that is returned tells Inductor when to store what it views, and with which layout.
    """
    base_of: dict[fx.Node, fx.Node] = {}
    for candidate in candidates:
        base = candidate.representative
        if base is not None and base.op != "placeholder" and SAVED not in base.meta:
            base_of.update(dict.fromkeys(candidate.saved_nodes, base))
    names: list[str] = []
    for node in itertools.takewhile(lambda node: node is not joint.marker, joint.graph.nodes):
        if node in base_of:
            base_of[node].meta.setdefault(VIEWED_AT, (node.name, *reversed(names[-NUM_NAMES:])))
        names.append(node.name)


def _insert_offload(
    graph: fx.Graph, chain: _Chain, symbols: Mapping[object, fx.Node], engine: str, graph_name: str
) -> None:
    source = chain.source
    value = _value(source)

    def as_arguments(numbers: Sequence[int | torch.SymInt], read: OpOverload) -> list[int | fx.Node]:
        """Backward gets symbols from forward: the symbol itself, or the number that forward reads from the tensor."""
        arguments: list[int | fx.Node] = []
        for dim, number in enumerate(numbers):
            if isinstance(number, int):
                arguments.append(number)
                continue
            symbol = symbols.get(size_expression(number))
            if symbol is None:
                symbol = graph.call_function(read, (source, dim))
                symbol.meta["val"] = number
            arguments.append(symbol)
        return arguments

    chain.size = as_arguments(value.shape, torch.ops.aten.sym_size.int)
    chain.stride = as_arguments(value.stride(), torch.ops.aten.sym_stride.int)
    # The strides are empty here. The compiler fills them in when it chooses the layout of the source.
    site = Site(
        name=source.name,
        out_s=chain.decision.out_s,
        back_s=chain.decision.back_s,
        stall_s=chain.decision.stall_s,
        graph_name=graph_name,
        lead_s=chain.decision.lead_s if graph_name else None,
        left_s=chain.decision.left_s if graph_name else None,
        external=bool(graph_name) and chain.candidate.storage.is_input,
        host=chain.decision.tier == "host",
        reload_order=chain.reload_order,
        engine=engine,
    )
    chain.token = graph.call_function(OFFLOAD, (source, [], site.to_argument()))
    _annotate(chain.token, source, _fake_token(value))
    if SAVED in source.meta:  # Inductor may replace the source by a node without its metadata
        chain.token.meta[SAVED] = True


def _insert_release(graph: fx.Graph, chain: _Chain, *, deferred: bool, exclusive: bool) -> None:
    arguments: tuple[Argument, ...] = (chain.token, chain.source)
    keywords: dict[str, Argument] = {"exclusive": True} if exclusive else {}
    token = graph.call_function(RELEASE, (*arguments, True) if deferred else arguments, keywords)
    _annotate(token, chain.source, _fake_token(_value(chain.source)))
    chain.token = token


def _insert_reload(graph: fx.Graph, chain: _Chain) -> None:
    chain.ticket = graph.call_function(RELOAD, (chain.token, *_layout_arguments(chain)))
    _annotate(chain.ticket, chain.source, _fake_token(_value(chain.source)))


def _insert_wait(graph: fx.Graph, chain: _Chain, alias_sets: AliasSets) -> dict[fx.Node, fx.Node]:
    """Insert the wait and rebuild the saved views. Return the replacement of every saved tensor."""
    value = _value(chain.source)
    reloaded = graph.call_function(WAIT, (chain.ticket, *_layout_arguments(chain)))
    with _fake_mode(value):
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    _annotate(reloaded, chain.source, fake)
    replicas = {chain.source: reloaded}
    for saved in chain.candidate.saved_nodes:
        path = view_path(saved, replicas, chain.candidate.storage, alias_sets)
        assert path is not None
        for view in path:
            replica = graph.node_copy(view, lambda node: replicas.get(node, node))
            replica.meta = dict(view.meta)
            replica.meta["val"] = _run_fake(replica, _fake_mode(value))
            replicas[view] = replica
    return replicas


def _layout_arguments(chain: _Chain) -> tuple[Argument, ...]:
    value = _value(chain.source)
    return (list(chain.size), list(chain.stride), value.dtype, value.device)


def _redirect_backward_reads(replicas: dict[fx.Node, fx.Node], positions: Mapping[fx.Node, int], marker: int) -> None:
    """Make backward read the replicas, and erase views in forward without other users, which would count as reads."""
    for original, replica in reversed(replicas.items()):
        for user in list(original.users):
            if positions.get(user, -1) > marker:
                user.replace_input_with(original, replica)
        if not original.users:
            original.graph.erase_node(original)


def _run_fake(node: fx.Node, fake_mode: FakeTensorMode) -> object:
    """The value of a view of a reloaded tensor. It shares the storage of the reloaded tensor, not of the original."""

    def value_of(source: fx.Node) -> Argument:
        return source.meta["val"]

    assert callable(node.target)
    with fake_mode:
        return node.target(*map_arg(node.args, value_of), **map_arg(node.kwargs, value_of))


def _annotate(node: fx.Node, source: fx.Node, value: object) -> None:
    """Set the value of a new node, and copy the stack trace of the offloaded tensor to keep dumps readable."""
    for name in ("stack_trace", "nn_module_stack"):
        if name in source.meta:
            node.meta[name] = source.meta[name]
    node.meta["val"] = value


def _value(node: fx.Node) -> FakeTensor:
    return node.meta["val"]


def _fake_mode(value: FakeTensor) -> FakeTensorMode:
    return value.fake_mode


def _fake_token(value: FakeTensor) -> torch.Tensor:
    with _fake_mode(value):
        return torch.empty((1,), dtype=torch.int64)
