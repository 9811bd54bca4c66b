"""Random numbers that backward draws again instead of reading them: a step that torch cuts like this is wrong."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.graph.source_lines import source_line

log = logging.getLogger(__name__)


def warn_of_redrawn_numbers(forward: fx.GraphModule, backward: fx.GraphModule) -> bool:
    """Whether ``backward`` draws numbers that ``forward`` has drawn. Warns if so.

    A partitioner copies a node that it recomputes under the same name. For checkpoints, torch then keeps the state of
    the generator in ops around it. For its memory budget it does not (torch 2.13), and dropout gets another mask.
    """
    names = {node.name for node in forward.graph.nodes}
    redrawn = [node for node in backward.graph.nodes if node.name in names and _draws(node)]
    if not redrawn:
        return False
    log.warning(
        "backward draws random numbers again that forward has drawn (%s), so gradients are wrong, with every backend. "
        "torch recomputes them, because torch._functorch.config.activation_memory_budget is %s, or a checkpoint has "
        "preserve_rng_state=False. Change this option.",
        _describe(redrawn[0]),
        _torch_private.activation_memory_budget(),
    )
    return True


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, _torch_private.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target.namespace == "rngprims":  # its seed and offset are arguments, so it draws the same numbers again
        return False
    for at, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":  # of attention, which has the tag anyway
            given: Any = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def _describe(node: fx.Node) -> str:
    """The line of user code, also if Inductor's node that draws a seed has none."""
    readers: list[fx.Node] = [node, *node.users]
    readers += [after for reader in node.users for after in reader.users]
    lines = [source_line(reader) for reader in readers]
    return next(filter(None, lines), node.name)
