"""How long a drive lasts that is written to at the rate of a plan.

    lifetime = rated bytes / bytes per step * time per step

The model of SSDTrain (Wu et al., 2024). It counts what the plan writes, and no other writes, write amplification or
over-provisioning: large sequential writes, as here, are what ratings allow the most of. Time between steps (optimizer,
data) is not counted either; with it the drive lasts longer.
"""

from __future__ import annotations

import dataclasses

from ssdtrain_fx.errors import ConfigError

TB = 10**12
ASSUMED_ENDURANCE_BYTES = 600 * TB
"""What makers commonly promise for a client drive of 1 TB. Data-centre drives: one to three drive writes per day for
five years, 1800 to 5500 TB for each TB."""

DAY_S = 24 * 3600.0
YEAR_S = 365.25 * DAY_S


@dataclasses.dataclass(frozen=True, slots=True)
class Endurance:
    """A drive at work.

    Raises:
        ConfigError: the rating is not above 0.
    """

    rated_bytes: int
    """All that may be written to it, as its data sheet has it (TBW times 10**12)."""
    written_bytes: int
    """Per step."""
    step_s: float

    def __post_init__(self) -> None:
        if self.rated_bytes <= 0:
            raise ConfigError(
                f"The rated endurance of the drive is {self.rated_bytes} bytes; expected more than 0: "
                "the TBW of its data sheet times 10**12."
            )

    @property
    def lifetime_s(self) -> float:
        """Infinite when nothing is written."""
        return self.rated_bytes / self.written_bytes * self.step_s if self.written_bytes else float("inf")

    def __str__(self) -> str:
        drive = f"a drive rated for {self.rated_bytes / TB:,.4g} TB"
        if not self.written_bytes:
            return f"{drive} is not worn"
        return f"at this rate {drive} lasts {format_lifetime(self.lifetime_s)}"


def format_lifetime(seconds: float) -> str:
    """Days up to two years, then years."""
    if seconds == float("inf"):
        return "for ever"
    if seconds < 2 * YEAR_S:
        days = seconds / DAY_S
        return f"{days:.1f} days" if days < 10 else f"{days:,.0f} days"
    return f"{seconds / YEAR_S:,.1f} years"
