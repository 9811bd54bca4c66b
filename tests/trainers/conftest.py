"""Settings for the tests of trainers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._inductor.config as inductor_config

import ssdtrain_fx


@pytest.fixture(autouse=True)
def _disabled() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """No test leaves the switch on."""
    yield
    ssdtrain_fx.disable()


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Kernels without vector instructions, which compile in half the time."""
    with inductor_config.patch({"cpp.simdlen": 1}):
        yield
