"""The four ops of ssdtrain_fx as call targets. Passes identify their nodes by target, never by name."""

from __future__ import annotations

import torch
from torch import fx

import ssdtrain_fx.runtime.op_contract as _registered  # registers the ops, so that the names below exist
from ssdtrain_fx.runtime.sites import Site

OFFLOAD = torch.ops.ssdtrain.offload.default
RELEASE = torch.ops.ssdtrain.release.default
RELOAD = torch.ops.ssdtrain.reload.default
WAIT = torch.ops.ssdtrain.wait.default
OPS = (OFFLOAD, RELEASE, RELOAD, WAIT)
assert _registered


def site_of(offload: fx.Node) -> Site:
    """What the plan says to this ``offload``."""
    argument = offload.args[2]
    assert isinstance(argument, str)
    return Site.from_argument(argument)


def find(graph: fx.Graph, target: object) -> list[fx.Node]:
    """All calls of ``target`` in graph order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]
