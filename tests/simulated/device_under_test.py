"""The device of this process, by the same names whether torch knows it or not."""

from __future__ import annotations

from typing import Any

import torch

_found = torch.accelerator.current_accelerator()
TYPE = "cuda" if _found is None else _found.type
DEVICE = torch.device(TYPE, 0)
gpu: Any = torch.get_device_module(TYPE)
"""``torch.cuda``, or the module of the device that torch does not know."""
