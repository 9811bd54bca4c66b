"""docs/architecture.md lists the states of a chunk and of an entry, and what leads from one to the next.

These tests record every transition while engines work on disks that fail, hang and are full. What happens must be
listed, and what is listed must happen.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import Fail, Fault, FaultyDisk, Hang, LaneKind
from runtime_fakes import fetch, offload
from torch import Tensor

from ssdtrain_fx.runtime.book.admission import BALANCE_LIMIT_S
from ssdtrain_fx.runtime.book.changes import Change
from ssdtrain_fx.runtime.book.ledger import Ledger
from ssdtrain_fx.runtime.book.records import Chunk, ChunkState, Entry
from ssdtrain_fx.runtime.engine import Engine

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
LANES: list[LaneKind] = ["aio", "source", "threads", "cuda", "kvikio"]

Transition = tuple[str, str]


def listed(heading: str) -> set[Transition]:
    """The first two columns of the table that follows ``heading``."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    section = text.split(f"\n### {heading}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 0
    return set(rows)


def state_of(entry: Entry) -> str:
    """What the fields of ``entry`` say together."""
    if entry.dead:
        return "DEAD" if entry.busy else "RETIRED"
    if entry.stays:
        return "STAYS"
    return "LEAVING" if entry.unsafe else "LEFT"


class Recorder:
    """The transitions of all chunks, and those of all entries between the ends of the ops' changes."""

    def __init__(self) -> None:
        self.of_chunks: set[Transition] = set()
        self.of_entries: set[Transition] = set()
        self._entries: list[tuple[Ledger, Entry]] = []
        self._states: dict[int, str] = {}

    def note_chunk(self, before: ChunkState, after: ChunkState) -> None:
        if before is not after:  # a write that is continued is still a write
            self.of_chunks.add((before.name, after.name))

    def add(self, ledger: Ledger, entry: Entry) -> None:
        self._entries.append((ledger, entry))

    def look(self, change: Change) -> None:
        """Called at the end of ``change``, with the lock of its ledger held."""
        for number, (ledger, entry) in enumerate(self._entries):
            if ledger.change is change:
                before, after = self._states.get(number, "NEW"), state_of(entry)
                assert (after == "RETIRED") == (entry.dead and entry.slot is None and not entry.chunks)
                if before != after:
                    self.of_entries.add((before, after))
                self._states[number] = after


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    def get(chunk: Chunk) -> ChunkState:
        return vars(chunk).get("_state", ChunkState.SOURCE)

    def put(chunk: Chunk, state: ChunkState) -> None:
        recorder.note_chunk(get(chunk), state)
        vars(chunk)["_state"] = state

    def also_add(enter: Callable[..., None]) -> Callable[..., None]:
        def enter_and_add(ledger: Ledger, handle: int, entry: Entry, *rest: Any) -> None:
            enter(ledger, handle, entry, *rest)
            recorder.add(ledger, entry)

        return enter_and_add

    end = Change.__exit__

    def look_and_end(change: Change, *raised: Any) -> Any:
        recorder.look(change)
        return end(change, *raised)

    monkeypatch.setattr(Chunk, "state", property(get, put))
    monkeypatch.setattr(Ledger, "enter", also_add(Ledger.enter))
    monkeypatch.setattr(Ledger, "enter_resident", also_add(Ledger.enter_resident))
    monkeypatch.setattr(Change, "__exit__", look_and_end)
    return recorder


def value(chunks: int = 3) -> Tensor:
    return torch.arange(chunks * 512)


def look(engine: Engine) -> None:
    """Drain dead tokens, and record what threads have changed between the ops."""
    with engine._ledger.lock, engine._ledger.change:
        engine._ledger.drain()


def settle(engine: Engine) -> None:
    engine.wait_until_idle()
    look(engine)


def round_trip(engine: Engine, disk: FaultyDisk) -> None:
    token = offload(engine, value())
    settle(engine)
    assert torch.equal(fetch(engine, token, value()), value())
    del token
    settle(engine)


def the_disk_is_full(engine: Engine, disk: FaultyDisk) -> None:
    disk.faults.append(Fault("grow", None, Fail(errno.ENOSPC)))
    round_trip(engine, disk)


def writes_fail(engine: Engine, disk: FaultyDisk) -> None:
    disk.faults.append(Fault("write", None, Fail(errno.EIO)))
    round_trip(engine, disk)


def tokens_die_while_the_disk_hangs(engine: Engine, disk: FaultyDisk) -> None:
    """Some chunks are being written, some wait in staging, and some have not left their tensors."""
    disk.faults.append(Fault("write", None, Hang()))
    tokens = [engine.offload(value(chunks), "x") for chunks in (1, 40, 1)]
    assert disk.hanging.wait(30)
    look(engine)
    tokens.clear()
    look(engine)
    disk.let_go()
    settle(engine)


def there_is_no_time_to_leave(engine: Engine, disk: FaultyDisk) -> None:
    """The disk hangs, and no op may wait for it."""
    disk.faults.append(Fault("write", None, Hang()))
    engine._ledger.admission.charge(BALANCE_LIMIT_S)
    tokens: list[Tensor] = []
    for _ in range(2):
        x = value(40)
        token = engine.offload(x, "x")
        assert disk.hanging.wait(30)
        look(engine)
        tokens.append(engine.release(token, x))
        look(engine)
    tokens.pop(0)
    look(engine)
    disk.let_go()
    settle(engine)
    tokens.clear()
    settle(engine)


def the_plan_refuses_a_tensor(engine: Engine, disk: FaultyDisk) -> None:
    """It never gets chunks."""
    engine._ledger.admission.charge(BALANCE_LIMIT_S)
    for meter in engine._ledger.traffic.meters:
        meter.note(4096, 1.0, busy=True)
    token = offload(engine, value(), exclusive=True, out_s=0.0, back_s=0.0)
    look(engine)
    del token
    settle(engine)


def the_host_tier_is_too_small(engine: Engine, disk: FaultyDisk) -> None:
    """A CPU has no host tier: there, all of it is written."""
    tokens = [offload(engine, value(2), host=True) for _ in range(8)]
    settle(engine)
    tokens.clear()
    settle(engine)


SCENARIOS: list[Callable[[Engine, FaultyDisk], None]] = [
    round_trip,
    the_disk_is_full,
    writes_fail,
    tokens_die_while_the_disk_hangs,
    there_is_no_time_to_leave,
    the_plan_refuses_a_tensor,
    the_host_tier_is_too_small,
]


def test_what_happens_is_what_is_listed(recorder: Recorder, tmp_path: Path) -> None:
    for lane in LANES:
        for scenario in SCENARIOS:
            disk = FaultyDisk()
            has_time = scenario not in (there_is_no_time_to_leave, the_plan_refuses_a_tensor)
            share = None if has_time else 0.0
            with disk.engine(lane, str(tmp_path), host_budget_bytes=8 * 4096, max_stall_share=share) as engine:
                scenario(engine, disk)
    assert recorder.of_chunks == listed("The states of a chunk")
    assert recorder.of_entries == listed("The states of an entry")
