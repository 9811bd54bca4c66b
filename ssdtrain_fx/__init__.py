"""Offload saved activations to SSD from inside ``torch.compile``."""

from ssdtrain_fx.compiler.dynamo_backend import backend
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.errors import (
    ActivationLostError,
    BudgetError,
    ConfigError,
    InternalError,
    PassError,
    PolicyError,
    SSDTrainError,
    StalledDiskError,
)
from ssdtrain_fx.report import Report, explain
from ssdtrain_fx.runtime.memory.step_memory import MemoryStats, memory_stats, reset_peak_memory_stats
from ssdtrain_fx.runtime.ops import empty_cache, statistics, trace
from ssdtrain_fx.runtime.policy.schedule_hints import expect_backward, micro_batch
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies.rok_curve import RokCurve, RokOutcome, RokPoint, rok
from ssdtrain_fx.switch import disable, enable

__all__ = [
    "ActivationLostError",
    "BudgetError",
    "ConfigError",
    "InternalError",
    "MemoryStats",
    "OffloadConfig",
    "PassError",
    "PolicyError",
    "Report",
    "RokCurve",
    "RokOutcome",
    "RokPoint",
    "SSDTrainError",
    "StalledDiskError",
    "Statistics",
    "backend",
    "disable",
    "empty_cache",
    "enable",
    "expect_backward",
    "explain",
    "memory_stats",
    "micro_batch",
    "reset_peak_memory_stats",
    "rok",
    "statistics",
    "trace",
]

__version__ = "0.1.0"
