"""Errors a user can meet. Each message says what was found, what was expected, and what to do."""

from __future__ import annotations


class SSDTrainError(Exception):
    """Base class of every error that ``ssdtrain_fx`` raises on purpose."""


class ConfigError(SSDTrainError, ValueError):
    """An option is unknown, has the wrong type or value, or cannot work on this machine."""


class BudgetError(SSDTrainError):
    """``memory_budget_bytes`` is below the lowest peak that can be reached, which is ``floor_bytes``."""

    def __init__(self, floor_bytes: int, message: str) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes


class PolicyError(SSDTrainError, ValueError):
    """A policy decided what would give wrong gradients, or what the graph has no place for. Nothing was rewritten."""


class PassError(SSDTrainError, ValueError):
    """A custom pass returned a graph that cannot be compiled as this training step."""


class ActivationLostError(SSDTrainError, RuntimeError):
    """A saved tensor cannot be read back. Raised before any gradient is produced from it."""


class StalledDiskError(SSDTrainError, TimeoutError):
    """No transfer has come to an end for ``io_timeout_s``. The message shows what is queued and under way."""


class InternalError(SSDTrainError, AssertionError):
    """An invariant of ``ssdtrain_fx`` itself is broken. This is a bug: please report it."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}\nThis is a bug in ssdtrain_fx, not in your model. Please report it with the text above."
        )
