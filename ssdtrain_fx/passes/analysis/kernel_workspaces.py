"""Memory that the kernels of attention on a CPU need besides their arguments and results.

Flash attention goes through the scores in blocks of ``rows x columns``. Every thread has its own block:

    q [B, H, S, D], k and v [B, H, K, D]
    rows           at most S: 256 where S is at least 768, 64 where it is at least 192, otherwise 32
    columns        at most K: 512
    forward        the scores, two columns, and a block of the result, all in float32
    backward       the scores and their gradient, in float32
    both           in bf16 and fp16, what the block holds of scores is there in that type too

Backward reads the gradient of the result in the order [B, S, H, D], and copies it if it lies in another order.

Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of PyTorch. The tests compare with what the kernels allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from ssdtrain_fx.passes.graph.tensor_sizes import shape_of, touched_bytes

_aten: Any = torch.ops.aten


def find_kernel_workspaces(graph: fx.Graph) -> Mapping[fx.Node, int]:
    """The bytes that nodes of ``graph`` allocate and free while they run, for nodes that do so."""
    return {node: _KERNELS[node.target](node) for node in graph.nodes if node.target in _KERNELS}


def _of_forward(node: fx.Node) -> int:
    query, key = (_value(node, index) for index in range(2))
    rows, columns = _block(query, key)
    scores, head_size = rows * columns, shape_of(query)[3]
    per_thread = 4 * (scores + 2 * rows + rows * head_size) + _in_low_precision(query, scores)
    return torch.get_num_threads() * per_thread


def _of_backward(node: fx.Node) -> int:
    grad_out, query, key = (_value(node, index) for index in range(3))
    rows, columns = _block(query, key)
    scores = 2 * rows * columns
    copied = 0 if grad_out.transpose(1, 2).is_contiguous() else touched_bytes(grad_out)
    return torch.get_num_threads() * (4 * scores + _in_low_precision(query, scores)) + copied


def _value(node: fx.Node, index: int) -> Tensor:
    argument = node.args[index]
    assert isinstance(argument, fx.Node)
    return cast(Tensor, argument.meta["val"])


def _block(query: Tensor, key: Tensor) -> tuple[int, int]:
    queries, keys = shape_of(query)[2], shape_of(key)[2]
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _in_low_precision(query: Tensor, elements: int) -> int:
    return query.element_size() * elements if query.dtype in (torch.bfloat16, torch.float16) else 0


_KERNELS: Mapping[Any, Callable[[fx.Node], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _of_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _of_backward,
}
