"""What the memory at a peak is for: the logits, gradients, what backward reads, or something else.

The logits are the result of a product that no other product of forward reads, and that is more than twice as large as
its arguments. Values with as many elements, such as the gradient of the logits, count as logits too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.graph.alias_sets import storages_of
from ssdtrain_fx.passes.graph.op_kinds import op_of
from ssdtrain_fx.passes.graph.tensor_sizes import shape_of, touched_bytes
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval
from ssdtrain_fx.passes.planning.plan import PeakPart, PeakRole

LARGE_RATIO = 2
"""As for torch's auto-chunker in ``chunk_loss``."""


def find_peak_parts(analysis: Analysis, live: Iterable[LiveInterval]) -> tuple[PeakPart, ...]:
    """The parts of a peak, largest first. Parts of 0 bytes are left out.

    Args:
        live: what is live at the peak. An index that is no storage's is one of ``Analysis.extras``.
    """
    storages = analysis.alias_sets.storages
    logits_elements = _count_logits(analysis)
    gradients = storages_of(analysis.joint.gradients, analysis.alias_sets)
    saved = storages_of(analysis.joint.saved, analysis.alias_sets)
    bytes_of: dict[PeakRole, int] = {}
    for span in live:
        idx = span.storage_idx
        role: PeakRole = "other"
        if idx < 0:
            role = "chunk"
        elif idx >= len(storages):
            role = "other"
        elif logits_elements and any(
            math.prod(shape_of(node.meta.get("val"))) == logits_elements for node in storages[idx].members
        ):
            role = "logits"
        elif idx in gradients:
            role = "gradients"
        elif idx in saved:
            role = "saved"
        bytes_of[role] = bytes_of.get(role, 0) + span.size_bytes
    parts = (PeakPart(role, size_bytes) for role, size_bytes in bytes_of.items() if size_bytes)
    return tuple(sorted(parts, key=lambda part: (-part.size_bytes, part.role)))


def _count_logits(analysis: Analysis) -> int:
    """The number of logits; 0 if the graph has none."""
    found = 0
    feeds_a_product: set[fx.Node] = set()
    forward = iter(reversed(list(analysis.joint.graph.nodes)))
    for node in forward:
        if node is analysis.joint.marker:
            break
    for node in forward:
        is_product = node.op == "call_function" and op_of(node.target).flop_formula is not None
        if is_product or node in feeds_a_product:
            feeds_a_product.update(node.all_input_nodes)
        if not is_product or node in feeds_a_product or not _is_product_of_matrices(node):
            continue
        taken_bytes = sum(touched_bytes(source.meta.get("val")) for source in node.all_input_nodes)
        if touched_bytes(node.meta.get("val")) > LARGE_RATIO * taken_bytes:
            found = max(found, math.prod(shape_of(node.meta["val"])))
    return found


def _is_product_of_matrices(node: fx.Node) -> bool:
    return str(node.target).startswith(("aten.mm.", "aten.addmm."))
