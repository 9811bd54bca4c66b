"""Predict how long a drive lasts at the write rate of a plan.

    lifetime = rated bytes / bytes per step * time per step

This is the model of SSDTrain (Wu et al., 2024). It counts the bytes that the plan writes. It ignores other writes,
write amplification and over-provisioning: ratings are most generous for large sequential writes, as here. It also
ignores the time between steps (optimizer, data loading), with which the drive lasts longer.
"""

from __future__ import annotations

import dataclasses

from ssdtrain_fx.errors import ConfigError

TB = 10**12
ASSUMED_ENDURANCE_BYTES = 600 * TB
"""A common rating for a client drive of 1 TB. Data-centre drives are rated for one to three drive writes per day for
five years, which is 1800 to 5500 TB per TB of capacity."""

DAY_S = 24 * 3600.0
YEAR_S = 365.25 * DAY_S


@dataclasses.dataclass(frozen=True, slots=True)
class Endurance:
    """The wear of a drive under a constant write rate.

    Raises:
        ConfigError: the rating is not above 0.
    """

    rated_bytes: int
    """Total bytes that may be written to it according to its data sheet (TBW times 10**12)."""
    written_bytes: int
    """Bytes written per step."""
    step_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.rated_bytes, (int, float)) or not self.rated_bytes > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"The rated endurance of the drive is {self.rated_bytes!r} bytes; expected a number above 0. "
                "Use the TBW of its data sheet times 10**12."
            )

    @property
    def lifetime_s(self) -> float:
        """Seconds until the rating is used up; infinite when nothing is written."""
        return self.rated_bytes / self.written_bytes * self.step_s if self.written_bytes else float("inf")

    def __str__(self) -> str:
        drive = f"a drive rated for {self.rated_bytes / TB:,.4g} TB"
        if not self.written_bytes:
            return f"{drive} is not written to"
        return f"at this rate {drive} lasts {format_lifetime(self.lifetime_s)}"


def format_lifetime(seconds: float) -> str:
    """Format a lifetime in days up to two years, and in years beyond that."""
    if seconds == float("inf"):
        return "forever"
    if seconds < 2 * YEAR_S:
        days = seconds / DAY_S
        return f"{days:.1f} days" if days < 10 else f"{days:,.0f} days"
    return f"{seconds / YEAR_S:,.1f} years"
