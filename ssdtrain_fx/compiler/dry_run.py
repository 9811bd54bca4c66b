"""Stand-ins for compiled code: outputs of the same shapes, without computation and with almost no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ssdtrain_fx import _torch_private
from ssdtrain_fx.errors import ConfigError


def compile_to_zeros(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
    """Compile to a function that returns zeros of the right shapes. What is only saved for backward takes no memory."""
    output = gm.graph.output_node()
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in _as_list(output)]
    saved = [_torch_private.is_saved_descriptor(desc) for desc in output.meta.get("desc", [None] * len(values))]

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return [_zero_like(value, is_saved) for value, is_saved in zip(values, saved, strict=True)]

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def run_dry(model: Callable[..., Any], trace: Callable[..., Any], *inputs: Any, **kwargs: Any) -> None:
    """Call ``torch.compile(model, backend=trace)`` once, as in training. ``trace`` should end in a dry run.

    Buffers and the state of random number generators are unchanged afterwards, and no recompilation of the model is
    used up. A compiled module is treated as the module inside it.

    Raises:
        ConfigError: ``model`` cannot be called.
    """
    if not callable(model):
        raise ConfigError(f"The model is {model!r}; expected a module or a function, followed by its inputs.")
    model = getattr(model, "_orig_mod", model)
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    values = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            _torch_private.compile_apart(model, trace)(*inputs, **kwargs)
    finally:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(values[name])


def _as_list(output: fx.Node) -> list[Any]:
    values: Any = output.args[0]
    return list(values) if isinstance(values, (tuple, list)) else [values]  # pyright: ignore[reportUnknownArgumentType]


def _zero_like(value: Any, is_saved: bool) -> Any:
    if isinstance(value, torch.SymInt):
        return _torch_private.size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_torch_private.size_hint(size) for size in value.shape]
    if is_saved:
        return torch.zeros((), dtype=value.dtype, device=value.device).expand(shape)
    return torch.zeros(shape, dtype=value.dtype, device=value.device)
