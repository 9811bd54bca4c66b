"""The configuration of an engine, as a value that fits into one string argument of an op."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ssdtrain_fx.runtime.sites import changed_fields, from_text, to_text

IOPath = Literal["auto", "posix", "aio", "kvikio"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The settings of an engine. Equal values share one engine within a process."""

    ssd_dir: str | tuple[str, ...] | None = None
    io: IOPath = "auto"
    host_budget_bytes: int | None = None
    disk_reserve_bytes: int | None = None
    checksum: bool = False
    io_timeout_s: float | None = 300.0
    max_stall_share: float | None = None
    """The share of the time for which transfers may stall the training thread. A tensor that would stall it for longer
    stays in memory. None: every tensor is moved, however long it takes."""

    def to_argument(self) -> str:
        """The string that the compiled graph contains; it lists only values that differ from the defaults."""
        return to_text(changed_fields(self))

    @classmethod
    def from_argument(cls, argument: str) -> EngineConfig:
        """Inverse of :meth:`to_argument`."""
        values = from_text(argument)
        if isinstance(values.get("ssd_dir"), list):
            values["ssd_dir"] = tuple(values["ssd_dir"])
        return cls(**values)
