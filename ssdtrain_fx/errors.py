"""Errors that users may see. Each message says what was found, what was expected, and what to do."""

from __future__ import annotations


class SSDTrainError(Exception):
    """Base class of every error that ``ssdtrain_fx`` raises on purpose."""


class ConfigError(SSDTrainError, ValueError):
    """An option is unknown, has the wrong type or value, or cannot work on this machine."""


class BudgetError(SSDTrainError):
    """No plan stays within ``memory_budget_bytes``."""

    def __init__(self, floor_bytes: int, message: str, *, reached_bytes: int) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        """The lowest peak that a plan can reach. The message says which budget allows it."""
        self.reached_bytes = reached_bytes
        """The peak of the plan that was refused. It is the floor, unless a policy made the plan."""


class PolicyError(SSDTrainError, ValueError):
    """A decision of a policy would give wrong gradients, or does not fit the graph. Nothing was rewritten."""


class PassError(SSDTrainError, ValueError):
    """A custom pass returned a graph that cannot be compiled as this training step."""


class ActivationLostError(SSDTrainError, RuntimeError):
    """A saved tensor cannot be reloaded. Raised before any gradient is computed from it."""


class StalledDiskError(SSDTrainError, TimeoutError):
    """No transfer has completed for ``io_timeout_s``. The message shows what is queued and in flight."""


class InternalError(SSDTrainError, AssertionError):
    """An invariant of ``ssdtrain_fx`` itself is broken. This is a bug: please report it."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}\nThis is a bug in ssdtrain_fx, not in your model. Please report it with the text above."
        )
