"""How each kind of decision is shown. One line for each, and for each tier; the rest of the report asks here."""

from __future__ import annotations

import dataclasses

from ssdtrain_fx.passes.planning.plan import Offload, PlannedDecision


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """For people."""

    name: str
    color: str
    """Readable on white and on black."""
    meaning: str


STYLES = {
    "Offload": Style("offload", "#0c7f74", "leaves memory in forward and comes back in backward"),
    "Keep": Style("keep", "#6f757e", "stays in memory"),
    "Recompute": Style("recompute", "#8f55c8", "is forgotten in forward and made again in backward"),
}
"""By the class of the decision."""

ON_HOST = Style("host", "#4d7fa8", "leaves the GPU in forward for pinned host memory and comes back in backward")
"""An offload that gets no further."""


def style_of(decision: PlannedDecision) -> Style:
    """A decision that nobody has styled yet shows under the name of its class."""
    if isinstance(decision, Offload) and decision.tier == "host":
        return ON_HOST
    kind = type(decision).__name__
    return STYLES.get(kind, Style(kind.lower(), "#c2571a", ""))
