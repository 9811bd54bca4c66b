"""Print a graph as text for expected-output tests: the same graph gives the same lines in every process."""

from __future__ import annotations

import difflib
import re
from typing import cast

from torch import Tensor, fx


def listing(graph: fx.Graph) -> str:
    """Print a graph, one line per node: name, type and call.

        primals_1: f32[4, 6]
        exp: f32[4, 6] = exp(primals_1)
        return ((sum_1), (mul))

    Leaves out overload names that carry no information (``default``, ``Tensor``). Works well with ``expecttest``.
    """
    return "\n".join(map(_line, graph.nodes))


def changes(before: str, after: str) -> str:
    """Diff of two listings: ``-`` marks removed lines, ``+`` added ones. Each group has one line of context.

    Args:
        before: the listing of the graph before the pass, or any text.
        after: the same after the pass.
    """
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "\n".join("..." if line.startswith("@@") else line for line in list(lines)[2:])


def named(graph: fx.Graph, name: str) -> fx.Node:
    """Return the node of this name.

    Raises:
        KeyError: no node has this name; the message lists the names of all nodes.
    """
    for node in graph.nodes:
        if node.name == name:
            return node
    raise KeyError(f"no node is named {name!r}; nodes: {', '.join(node.name for node in graph.nodes)}")


def _line(node: fx.Node) -> str:
    keywords = [f"{key}={_show(value)}" for key, value in node.kwargs.items()]
    arguments = ", ".join([*map(_show, node.args), *keywords])
    if node.op == "output":
        return f"return {arguments}"
    if node.op == "placeholder":
        return f"{node.name}: {_type(node)}"
    target = re.sub(r"\.(default|Tensor|dim_IntList)$", "", str(getattr(node.target, "__name__", node.target)))
    call = f"self.{node.target}" if node.op == "get_attr" else f"{target}({arguments})"
    return f"{node.name}: {_type(node)} = {call}" if "val" in node.meta else call


def _show(argument: object) -> str:
    if isinstance(argument, (list, tuple)):
        inside = ", ".join(map(_show, cast("list[object]", argument)))
        return f"[{inside}]" if isinstance(argument, list) else f"({inside})"
    return str(argument) if not isinstance(argument, str) else repr(argument)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        short = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{short}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__
