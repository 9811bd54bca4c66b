"""Everything here needs a GPU."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS gives equal bits only with a fixed workspace

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(absent)
            item.add_marker(pytest.mark.gpu)
