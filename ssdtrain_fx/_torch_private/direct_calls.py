"""Direct calls of our ops in Inductor's generated code: as Python functions, without the dispatcher.

Why: between two matrix products all caches are cold. A call through the dispatcher then costs 50 to 90 us before the op
does anything, and the tensor that represents a Python object costs 15 to 35 us more. So the values that only our ops
read, the results of ``offload`` and ``reload``, are the objects themselves::

    buf1 = ssdtrain_offload(buf0, [64, 1], 'name=mm;...')   # an Owner
    buf2 = ssdtrain_release(buf1, buf0)                     # a token, which autograd saves
    buf3 = ssdtrain_reload(buf2, [8, 64], [64, 1])          # a Reloading
    buf4 = ssdtrain_wait(buf3)

The functions are in ``ssdtrain_fx.runtime.ops``. Generated code imports them itself, also when it comes from a cache.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.virtualized import V

MODULE = "ssdtrain_fx.runtime.ops"
PREFIX = "ssdtrain_"

_ARGUMENTS = {"offload": None, "release": None, "reload": 3, "wait": 1}
"""How many positional arguments of the op its function takes; None: all. The others are already known."""
_OBJECTS = {"offload": "release", "reload": "wait"}
"""Each op whose result is an object, with the only op that can read it."""
_DIRECT = "_ssdtrain_direct"
"""Attribute of the graph that Inductor lowers: whether its calls are direct."""


def function_name(op: torch._ops.OpOverload) -> str:
    """The name of the function of ``op`` in generated code."""
    return PREFIX + _name(op)


def are_direct() -> bool:
    """Whether the calls of our ops in the graph that is being lowered are direct.

    They are not if the code is C++, if CUDA graphs cut it into pieces, or if other ops read the objects.
    """
    state = V.graph.__dict__
    if _DIRECT not in state:
        graph = cast(fx.Graph, V.graph.graph)
        state[_DIRECT] = not (V.graph.cpp_wrapper or config.triton.cudagraphs) and _keeps_objects_apart(graph)
    return state[_DIRECT]


def _name(op: Any) -> str:
    return op._schema.name.split("::")[1]


def _keeps_objects_apart(graph: fx.Graph) -> bool:
    ours = {node: _name(node.target) for node in graph.nodes if _is_ours(node.target)}
    return all(
        ours.get(user) == _OBJECTS[name] for node, name in ours.items() if name in _OBJECTS for user in node.users
    )


def _is_ours(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "ssdtrain"


class DirectCall(ir.FallbackKernel):
    """One call. Generated code does not check the size and stride of its result: it may not be a tensor, and the engine
    checks it."""

    @classmethod
    def create(cls, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with V.graph.fake_mode:
            parts = cast(Any, cls).process_kernel(kernel, *args, **kwargs)
        if hasattr(parts, "example_output"):  # from torch 2.14 on
            parts = (parts.example_output, parts.tensor_args, parts.non_tensor_args, parts.unflatten_args, None)
        example, tensors, constants, unflatten, _ = parts
        call = cls(cls.tensor_to_layout(example), kernel, tensors, constants, unflatten, kwargs)
        call.python_kernel_name = function_name(kernel)
        if _name(kernel) in _OBJECTS:
            V.graph.never_reuse_buffers.add(call.get_name())
        if config.assume_unaligned_fallback_output:
            V.graph.unaligned_buffers.add(call.get_name())
        return ir.TensorBox.create(call)

    def codegen_args(self) -> list[str]:
        return super().codegen_args()[: _ARGUMENTS[_name(self.op_overload)]]

    def codegen(self, wrapper: Any) -> None:
        name = self.python_kernel_name
        wrapper.add_import_once(f"from {MODULE} import {_name(self.op_overload)} as {name}")
        wrapper.generate_fallback_kernel(self)
        self.codegen_unbacked_symbol_defs(wrapper)
