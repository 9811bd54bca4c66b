"""What the tests of the runtime share: the stand-ins of :mod:`runtime_fakes`."""

import pytest
from runtime_fakes import FakeCuda, MemoryFile


@pytest.fixture
def file() -> MemoryFile:
    return MemoryFile()


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()
