"""What torch's own tests train, under one name each: operators, higher-order operators, custom functions, modules."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

INTERNAL = "torch.testing._internal"
OPERATORS = {
    "": "common_methods_invocations.op_db",
    "higher_order.": "hop_db.hop_db",
    "custom_op.": "custom_op_db.custom_op_db",
    "autograd_function.": "autograd_function_db.autograd_function_db",
}
"""By prefix of the names here: lists of torch's tests."""
MODULES, MODULE_LIST = "module.", "common_modules.module_db"
PREFIXES = (*OPERATORS, MODULES)


def _source(prefix: str) -> str:
    return prefix.removesuffix(".").replace("_", " ") or "operator"


SOURCES = tuple(map(_source, PREFIXES))


class ModuleOperator:
    """A module as an operator that takes its parameters and buffers, too, so that all of them may differ by step."""

    supports_autograd = True

    def __init__(self, info: Any) -> None:
        self._info = info
        self.name: str = info.name
        self.variant_test_name = ""

    def supports_dtype(self, dtype: torch.dtype, device: str) -> bool:
        return dtype in self._info.supported_dtypes(device)

    def supported_backward_dtypes(self, device: str) -> Any:
        return self._info.supported_dtypes(device)

    def sample_inputs(self, device: str, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Any]:
        """For each of torch's inputs a module, in evaluation mode, too, if that differs."""
        make_sample = importlib.import_module(f"{INTERNAL}.opinfo.core").SampleInput
        for training in (True, False) if self._info.train_and_eval_differ else (True,):
            for made in self._info.module_inputs_func(
                self._info, device=device, dtype=dtype, requires_grad=requires_grad, training=training
            ):
                arguments = made.constructor_input
                module: nn.Module = self._info.module_cls(*arguments.args, **arguments.kwargs)
                module.to(device=device, dtype=dtype).train(training)
                given = made.forward_input
                if self._info.is_lazy:  # its parameters get their shapes
                    module(*given.args, **given.kwargs)
                state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                yield make_sample(module, args=(state, given.args, given.kwargs))

    @staticmethod
    def op(module: nn.Module, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.func.functional_call(module, state, args, kwargs)


@functools.cache
def operators() -> dict[str, Any]:
    """All that is differentiable, by name."""
    found: dict[str, Any] = {}
    for prefix, where in OPERATORS.items():
        for op in _list_of(where):
            if op.supports_autograd:
                variant = f".{op.variant_test_name}" if op.variant_test_name else ""
                found[f"{prefix}{op.name}{variant}"] = op
    return found | {f"{MODULES}{info.name}": ModuleOperator(info) for info in _list_of(MODULE_LIST)}


def source_of(name: str) -> str:
    """Which of ``SOURCES`` the thing of this name is from."""
    prefix = name.partition(".")[0] + "."
    return _source(prefix if prefix in PREFIXES else "")


def has_gradient(op: Any, dtype: torch.dtype) -> bool:
    return op.supports_dtype(dtype, "cpu") and dtype in op.supported_backward_dtypes("cpu")


def _list_of(where: str) -> list[Any]:
    module, name = where.split(".")
    return getattr(importlib.import_module(f"{INTERNAL}.{module}"), name)
