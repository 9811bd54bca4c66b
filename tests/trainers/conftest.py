"""Settings for the tests of trainers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch._inductor.config as inductor_config

import ssdtrain_fx


@pytest.fixture(autouse=True)
def _disabled() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """No test leaves the switch on."""
    yield
    ssdtrain_fx.disable()


@pytest.fixture
def accelerate() -> Any:
    """Accelerate, for a test that needs it and transformers."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Kernels without vector instructions, which compile in half the time."""
    with inductor_config.patch({"cpp.simdlen": 1}):
        yield
