"""Fixtures of the tests of memory."""

from __future__ import annotations

import gc

import pytest

from ssdtrain_fx._torch_private.arena import ArenaLibrary
from ssdtrain_fx.runtime.memory.step_memory import step_memory


@pytest.fixture
def library() -> ArenaLibrary:
    """The arena as users have it, empty."""
    gc.collect()
    assert step_memory.library is not None, "the machine of the tests has a compiler"
    step_memory.library.configure()
    step_memory.library.trim()
    step_memory.library.reset_peaks()
    return step_memory.library
