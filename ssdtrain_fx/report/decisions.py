"""How the report shows each kind of decision: one style per kind and per tier."""

from __future__ import annotations

import dataclasses

from ssdtrain_fx.passes.planning.plan import Offload, PlannedDecision


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """How a decision is displayed."""

    name: str
    color: str
    """Readable on white and on black."""
    meaning: str


STYLES = {
    "Offload": Style("offload", "#0c7f74", "is written to the SSD in forward and reloaded in backward"),
    "Keep": Style("keep", "#6f757e", "stays in memory"),
    "Recompute": Style("recompute", "#8f55c8", "is freed in forward and recomputed in backward"),
}
"""By class name of the decision."""

ON_HOST = Style("host", "#4d7fa8", "is copied to pinned host memory in forward and reloaded in backward")
"""For an offload to the host tier."""


def style_of(decision: PlannedDecision) -> Style:
    """The style of ``decision``. A kind without a style is shown under its class name."""
    if isinstance(decision, Offload) and decision.tier == "host":
        return ON_HOST
    kind = type(decision).__name__
    return STYLES.get(kind, Style(kind.lower(), "#c2571a", ""))
