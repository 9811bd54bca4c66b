"""FLOPs of matrix products, convolutions and attention, from the shapes of arguments and results.

Most formulas are those of ``torch.utils.flop_counter``. Users add those of their own ops there, by
``register_flop_formula``. Here are the ones that it lacks, and one that it has wrong: it counts the gradient of the
weight of a grouped convolution as if there were one group (torch 2.13). For a depthwise convolution, this is too much
by a factor of the number of channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.utils import flop_counter as _flop_counter

flop_counter = cast(Any, _flop_counter)  # untyped

FlopFormula = Callable[..., int]
"""Called with the arguments of the op, with shapes in place of tensors, and with the shape of the result as
``out_val``."""
_Shape = Sequence[int]


def find_flop_formula(op: Any) -> FlopFormula | None:
    """The formula for calls of ``op``, an ``OpOverload``. None: it computes little, or what it computes is unknown."""
    name = str(op._schema.name)
    registered = flop_counter.flop_registry.get(op.overloadpacket)
    if name in _CORRECTED or registered is None:
        return _CORRECTED.get(name) or _MISSING.get(name)
    return registered if hasattr(registered, "__wrapped__") else None  # the others need tensors


def _convolution_backward(
    grad_output: _Shape,
    x: _Shape,
    weight: _Shape,
    bias_sizes: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: object,
    output_mask: Sequence[bool],
    **_: object,
) -> int:
    """Each gradient pairs the same elements as forward: every weight, with every place and sample."""
    places = x if transposed else grad_output
    forward = 2 * math.prod(weight) * math.prod(places[2:]) * places[0]
    return forward * sum(output_mask[:2])


def _grouped_product(one: _Shape, other: _Shape, *_: object, **__: object) -> int:
    """A product of [m, k] and [k, n] for each group. Both arguments are stacks of matrices, or groups divide m, n or k
    of the one that is not."""
    stacked = one[0] if len(one) == len(other) == 3 else 1
    return 2 * stacked * one[-2] * one[-1] * other[-1]


def _grouped_product_backward(*shapes: _Shape, **_: object) -> int:
    """The gradients of both factors."""
    return 2 * _grouped_product(*shapes)


_CORRECTED: Mapping[str, FlopFormula] = {"aten::convolution_backward": _convolution_backward}
_MISSING: Mapping[str, FlopFormula] = {
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    "transformers::grouped_mm_fallback": _grouped_product,  # experts on a CPU, and in float32
    "transformers::grouped_mm_fallback_backward": _grouped_product_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": flop_counter.sdpa_flop,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": flop_counter.sdpa_backward_flop,
    "aten::_scaled_dot_product_fused_attention_overrideable": flop_counter.sdpa_flop,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": flop_counter.sdpa_backward_flop,
}
