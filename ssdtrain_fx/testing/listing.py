"""A graph as text that a test can expect: the same graph gives the same lines, in every process."""

from __future__ import annotations

import difflib
import re
from typing import cast

from torch import Tensor, fx


def listing(graph: fx.Graph) -> str:
    """One line per node: name, type and call. Short enough to check by eye.

        primals_1: f32[4, 6]
        exp: f32[4, 6] = exp(primals_1)
        return ((sum_1), (mul))

    Overloads are left out where they say nothing (``default``, ``Tensor``). Made for ``expecttest``.
    """
    return "\n".join(map(_line, graph.nodes))


def changes(before: str, after: str) -> str:
    """What a pass did, in lines: ``-`` left out, ``+`` put in, each group with the line in front of it and behind it.

    Args:
        before: what ``listing`` says of the graph, or any text.
        after: the same behind the pass.
    """
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "\n".join("..." if line.startswith("@@") else line for line in list(lines)[2:])


def named(graph: fx.Graph, name: str) -> fx.Node:
    """The node of this name.

    Raises:
        KeyError: no node has it; the message lists those that there are.
    """
    for node in graph.nodes:
        if node.name == name:
            return node
    raise KeyError(f"no node is named {name!r}; there are {', '.join(node.name for node in graph.nodes)}")


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
