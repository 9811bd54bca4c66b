"""Reloads that begin before backward requests them: those of the graph whose backward is expected next.

:mod:`ssdtrain_fx.runtime.policy.graph_runs` guesses which tensors these are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Ahead, Entry, Fill
from ssdtrain_fx.runtime.lanes.lane import Lane
from ssdtrain_fx.runtime.lanes.open_lanes import Lanes
from ssdtrain_fx.runtime.memory.layout import same_layout
from ssdtrain_fx.runtime.policy.graph_runs import GraphRuns

log = logging.getLogger(__name__)


class ReadAhead:
    """The reloads that one engine has begun ahead. Methods are called without the ledger's lock."""

    def __init__(self, ledger: Ledger, lanes: Lanes, runs: GraphRuns) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._runs = runs

    def begin(self, entries: Iterable[Entry]) -> None:
        """Begin to reload ``entries``. What is not possible now is left to ``reload``."""
        for entry in entries:
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        if not entry.byte_count or not same_layout(entry.size, entry.stride, entry.stored_stride):
            return
        ledger, lane = self._ledger, self._lanes.of_entry(entry)
        try:
            y = lane.allocate(entry, entry.stride, entry.device)
        except (RuntimeError, MemoryError, OSError) as error:  # no memory now
            log.debug("%s is not read ahead: %s", entry.name, error)
            return
        fill = Fill(entry, y, None, lane.mover.mark(y.device))
        with ledger.lock, ledger.change:
            if not entry.dead and not entry.stays and not entry.reloaded and entry.ahead is None and not ledger.closed:
                entry.ahead = Ahead(y, fill, lane.mover.stream(y.device))
                lane.enlist_reads(fill)
        ledger.tidy()

    def take(self, entry: Entry, stride: tuple[int, ...], device: torch.device, lane: Lane) -> Tensor | None:
        """The tensor of a reload that was begun, if it is what backward requests."""
        ledger = self._ledger
        with ledger.lock, ledger.change:
            ahead = entry.ahead
            if ahead is None:
                return None
            ledger.check_usable(entry.name)
            entry.ahead = None
            # The allocator may reuse memory of another stream while this stream still uses it. A failed read may
            # succeed on the next try.
            fits = stride == entry.stride and ahead.stream == lane.mover.stream(device) and ahead.fill.error is None
            if fits:
                ledger.counters.reloads += 1
                ledger.counters.ahead_bytes += entry.byte_count
                self._runs.reloaded(entry)
                entry.reloaded = True
                entry.fills[ahead.tensor.data_ptr()] = ahead.fill
            else:
                ledger.trash.append(ahead)
        tensor = ahead.tensor if fits else None
        del ahead
        ledger.tidy()
        return tensor
