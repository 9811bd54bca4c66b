"""The verifier: checks every invariant of a rewritten joint graph, on the graph itself and not on the plan.

- An offload takes a storage that the graph allocates, that is not held outside the graph and that no op writes to. A
  storage is offloaded once. An input is offloaded only if it is marked as held outside the graph. It is never left to
  the engine: its release is not ``deferred``, and it is not marked as ``exclusive``.
- The token of an offload goes to exactly one release, in forward, together with the same tensor.
- The storage is not read after the release, and not at all in backward.
- At no position does the host tier hold more than its budget, by the chunks that the storages take.
- If one offload gives the order of its reload, all do, and the order is correct.
- A reload is in backward and takes a released token. Exactly one wait takes its ticket, and both ask for the shape,
  strides, dtype and device that were offloaded.

Reads need no check: they read the value that the wait returns, so they come after it.

A violation raises InternalError with the nodes around the offending one.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import fx
from torch.fx.node import map_arg

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.graph.alias_sets import AliasSets, Storage, find_alias_sets, find_written_storages, storages_of
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELEASE, RELOAD, WAIT, find, site_of
from ssdtrain_fx.passes.planning.transfer_problem import HostTier


def verify_offloads(
    joint: ScheduledJointGraph, *, host: HostTier | None = None, hardware: Hardware | None = None
) -> ScheduledJointGraph:
    """Check ``joint`` and return it unchanged.

    Args:
        host: the host tier. None if there is none.
        hardware: says how much of the tier a storage takes. None: as much as its size.

    Raises:
        InternalError: the rewritten graph breaks an invariant (see the head of this file).
    """
    graph = joint.graph
    graph.lint()
    positions = joint.positions()
    marker = positions[joint.marker]
    alias_sets = find_alias_sets(graph)
    held = storages_of((*joint.forward_outputs, *joint.gradients), alias_sets)
    written = find_written_storages(graph, alias_sets)
    seen: set[int] = set()
    for offload in find(graph, OFFLOAD):
        source = offload.args[0]
        storage = _storage_of(source, alias_sets, offload)
        if positions[offload] > marker:
            _fail(offload, "the offload is in backward; expected it in forward")
        if storage.is_input != site_of(offload).external or storage.idx in held:
            _fail(offload, "the offloaded storage is held outside the graph")
        if storage.idx in written:
            _fail(offload, "the offloaded storage is written in place")
        if storage.idx in seen:
            _fail(offload, "the storage is offloaded twice")
        seen.add(storage.idx)
        release = _only_user(offload, RELEASE)
        if release.args[:2] != (offload, source) or positions[release] > marker:
            _fail(release, "a release must be in forward and take the offloaded tensor itself")
        if storage.is_input and (release.args[2:] == (True,) or release.kwargs.get("exclusive")):
            _fail(release, "leaves an input to the engine, although the caller may write to it")
        for member in storage.members:
            for user in member.users:
                if positions[user] > positions[release]:
                    _fail(user, f"reads {member} after {release}")
        for user in release.users:
            if user.target is not RELOAD:
                _fail(user, "uses the token of a release; expected only reloads to use it")
        if not release.users:
            _fail(release, "the storage is never reloaded")
    for release in find(graph, RELEASE):
        if not (isinstance(release.args[0], fx.Node) and release.args[0].target is OFFLOAD):
            _fail(release, "a release must take the token that an offload returned")
    for reload in find(graph, RELOAD):
        _verify_reload(reload, positions, marker)
    _verify_host_tier(joint, alias_sets, host, hardware)
    _verify_reload_orders(graph)
    return joint


def _verify_reload(reload: fx.Node, positions: dict[fx.Node, int], marker: int) -> None:
    token = reload.args[0]
    if not (isinstance(token, fx.Node) and token.target is RELEASE):
        _fail(reload, "a reload must take the token that a release returned")
    if positions[reload] < marker:
        _fail(reload, "the reload is in forward; expected it in backward")
    wait = _only_user(reload, WAIT)
    if wait.args[1:] != reload.args[1:]:
        _fail(wait, f"waits for {wait.args[1:]}, but its reload asks for {reload.args[1:]}")
    asked = map_arg(reload.args[1:], lambda argument: argument.meta["val"])
    source = token.args[1]
    assert isinstance(source, fx.Node)
    was, now = source.meta["val"], wait.meta["val"]
    if (was.shape, was.stride(), was.dtype, was.device) != (now.shape, now.stride(), now.dtype, now.device):
        _fail(wait, f"reloads {_describe(now)}, but {_describe(was)} was offloaded")
    if asked != (list(was.shape), list(was.stride()), was.dtype, was.device):
        _fail(reload, f"asks for {asked}, but {_describe(was)} was offloaded")


def _verify_host_tier(
    joint: ScheduledJointGraph, alias_sets: AliasSets, host: HostTier | None, hardware: Hardware | None
) -> None:
    """Replay the graph: an offload takes room in the tier, and its wait returns it."""
    held: dict[fx.Node, int] = {}
    for node in joint.graph.nodes:
        if node.target is OFFLOAD and site_of(node).host:
            if host is None:
                _fail(node, "offloads to the host tier, but there is none")
            size_bytes = _storage_of(node.args[0], alias_sets, node).hint_bytes
            held[node] = size_bytes if hardware is None else hardware.staged_bytes(size_bytes)
            if sum(held.values()) > host.budget_bytes:
                _fail(node, f"the host tier would hold {sum(held.values())} bytes; its budget is {host.budget_bytes}")
        elif node.target is WAIT:
            held.pop(_offload_of(node.all_input_nodes[0]), None)


def _verify_reload_orders(graph: fx.Graph) -> None:
    """Check the order of reloads. If a storage is reloaded twice, its first reload counts."""
    offloads = list(dict.fromkeys(map(_offload_of, find(graph, RELOAD))))
    said = [site_of(offload).reload_order for offload in offloads]
    if any(order is not None for order in said) and said != list(range(len(offloads))):
        wrong = next(offload for order, offload in enumerate(offloads) if said[order] != order)
        _fail(wrong, f"has a wrong reload_order: it is reloaded as number {offloads.index(wrong)}, counted from 0")


def _offload_of(reload: fx.Node) -> fx.Node:
    release = reload.all_input_nodes[0]
    return release.all_input_nodes[0]


def _storage_of(node: object, alias_sets: AliasSets, offender: fx.Node) -> Storage:
    storage = alias_sets.of(node) if isinstance(node, fx.Node) else None
    if storage is None:
        _fail(offender, f"{node} is not a tensor with a storage")
    return storage


def _only_user(node: fx.Node, target: object) -> fx.Node:
    users = list(node.users)
    if len(users) != 1 or users[0].target is not target:
        _fail(node, f"expected one user, a {target}; found {users}")
    return users[0]


def _describe(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} with strides {tuple(value.stride())} on {value.device}"


def _fail(offender: fx.Node, message: str) -> NoReturn:
    nodes = list(offender.graph.nodes)
    at = nodes.index(offender)
    around = [
        f"{'->' if idx == at else '  '} {idx:5d}  {nodes[idx].format_node()}"
        for idx in range(max(0, at - 5), min(len(nodes), at + 6))
    ]
    raise InternalError(f"{offender.name}: {message}.\n" + "\n".join(around))
