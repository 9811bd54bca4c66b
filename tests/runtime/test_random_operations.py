"""Four threads offload, reload and drop at random on a disk with random faults; a dictionary holds the expected values.

Rules only start work, so that everything runs at the same time. ``settle`` waits for it and compares the results.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from faulty_disk import Effect, Fail, Fault, FaultyDisk, Flip, LaneKind, Late, Operation, Short
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)
from runtime_fakes import fetch, offload
from torch import Tensor

from ssdtrain_fx.errors import ActivationLostError
from ssdtrain_fx.runtime.book.admission import BALANCE_LIMIT_S, MIN_STALL_SHARE
from ssdtrain_fx.runtime.engine import Engine

THREADS = 4

effects = st.one_of(
    st.sampled_from([errno.EIO, errno.ENOSPC, errno.ESTALE]).map(Fail),
    st.sampled_from([0, 4096]).map(Short),
    st.just(Late(0.001)),
)
damage = st.builds(Flip, st.integers(0, 4095), st.integers(1, 255))
threads = st.integers(0, THREADS - 1)
releases = st.sampled_from([{}, {}, {"exclusive": True}, {"exclusive": True, "deferred": True}])
waits = st.sampled_from([{}, {"out_s": 0.0, "back_s": 0.0}, {"out_s": 0.0, "back_s": 0.0, "stall_s": 1.0}])
"""What the plan says about the time that a tensor has, and about the stalls that it causes."""


class Operations(RuleBasedStateMachine):
    """One engine and the tensors that were offloaded."""

    lane: ClassVar[LaneKind]
    checksum: ClassVar[bool] = True
    tensors: Bundle[int] = Bundle("tensors")

    @initialize(buffers=st.sampled_from([2, 3, 8, 32]), is_limited=st.booleans())
    def open(self, buffers: int, is_limited: bool) -> None:
        """If the engine ``is_limited``, tensors without enough time to leave stay in memory."""
        self.resources = contextlib.ExitStack()
        self.disk = FaultyDisk()
        self.disk.chunk_bytes = 8192
        directory = tempfile.gettempdir()
        self.engine: Engine = self.resources.enter_context(
            self.disk.engine(
                self.lane,
                directory,
                checksum=self.checksum,
                host_budget_bytes=8192 * buffers,
                max_stall_share=MIN_STALL_SHARE if is_limited else None,
            )
        )
        if is_limited:
            self.engine._ledger.admission.charge(BALANCE_LIMIT_S)
            for meter in self.engine._ledger.traffic.meters:
                meter.note(4096, 1.0, busy=True)  # holds until a faster rate is measured
        self.workers = [self.resources.enter_context(ThreadPoolExecutor(1)) for _ in range(THREADS)]
        self.tokens: dict[int, Future[Tensor]] = {}
        self.values: dict[int, Tensor] = {}
        self.pending: list[Future[Any]] = []
        self.reload_count = self.offloaded_bytes = self.reloaded_bytes = self.lost_count = 0
        self.all_were_waited_for = True
        self.are_linked = False

    @rule(
        target=tensors,
        thread=threads,
        elements=st.sampled_from([0, 1, 512, 1024, 1100, 3000]),
        host=st.booleans(),
        order=st.none() | st.integers(0, 5),
        graph_name=st.sampled_from(["", "", "", "first", "second"]),
        release=releases,
        wait=waits,
    )
    def offload(
        self,
        thread: int,
        elements: int,
        host: bool,
        order: int | None,
        graph_name: str,
        release: dict[str, Any],
        wait: dict[str, Any],
    ) -> int:
        self.are_linked |= bool(graph_name)
        hints = {"host": host, "reload_order": order, "graph_name": graph_name, **release, **wait}
        return self._offload(thread, elements, hints)

    @rule(target=tensors, thread=threads, orders=st.permutations(range(4)), host=st.sampled_from([[], [0], [1, 2]]))
    def forward(self, thread: int, orders: list[int], host: list[int]) -> Any:
        """A run of a graph; its tensors can be read ahead once they are on disk."""
        return multiple(
            *(self._offload(thread, 1100, {"host": order in host, "reload_order": order}) for order in orders)
        )

    @rule(thread=threads, key=tensors)
    def reload(self, thread: int, key: int) -> None:
        value = self.values[key]
        self.reload_count += 1
        self.reloaded_bytes += value.nbytes
        self.pending.append(self.workers[thread].submit(self._reload, self.tokens[key], value))

    @rule(thread=threads, key=tensors)
    def reload_in_vain(self, thread: int, key: int) -> None:
        """Reload without a wait, as after an exception."""
        value = self.values[key]
        self.reload_count += 1
        self.reloaded_bytes += value.nbytes
        self.all_were_waited_for = False
        self.pending.append(self.workers[thread].submit(self._reload_in_vain, self.tokens[key], value))

    @rule(key=consumes(tensors))
    def drop(self, key: int) -> None:
        del self.tokens[key]

    @rule()
    def slow_device_down(self) -> None:
        """None of the device's work completes before the next ``settle``."""
        self.disk.cuda.device_is_fast = False

    @rule(operation=st.sampled_from(["write", "read"]), ahead=st.integers(0, 3), effect=effects | damage)
    def break_transfer(self, operation: Operation, ahead: int, effect: Effect) -> None:
        if self.checksum or not isinstance(effect, Flip):  # otherwise the damage is not detectable
            self.disk.faults.append(Fault(operation, self.disk.counts[operation] + ahead, effect))

    @rule(ahead=st.integers(0, 3))
    def break_growth(self, ahead: int) -> None:
        self.disk.faults.append(Fault("grow", self.disk.counts["grow"] + ahead, Fail(errno.ENOSPC)))

    @rule()
    def settle(self) -> None:
        self.disk.cuda.finish_all()
        for future in (*self.tokens.values(), *self.pending):
            future.result()
        self.lost_count += sum(future.result() is False for future in self.pending)
        self.pending.clear()
        for worker in self.workers:
            worker.submit(int).result()  # until then it holds its last task
        self.engine.wait_until_idle()
        self._check_statistics()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        with self.resources:
            self.settle()
            damaged_writes = any(f.operation == "write" and isinstance(f.effect, Flip) for f in self.disk.faults)
            self.disk.faults.clear()
            if not damaged_writes:  # the data survives all other faults
                self._check_data()
            self.tokens.clear()
            self.engine.wait_until_idle()
            statistics = self.engine.statistics()
            assert (statistics.slots_in_use, statistics.slot_bytes_in_use) == (0, 0)
            for lane in self.engine._lanes.by_type.values():
                assert lane.pool.available == lane.pool.buffer_limit

    def _offload(self, thread: int, elements: int, hints: dict[str, Any]) -> int:
        key = len(self.values)
        value = self.values[key] = torch.arange(elements) + 10_000 * key
        self.offloaded_bytes += value.nbytes
        self.tokens[key] = self.workers[thread].submit(offload, self.engine, value.clone(), f"tensor_{key}", **hints)
        return key

    def _check_data(self) -> None:
        for key, token in self.tokens.items():
            assert torch.equal(fetch(self.engine, token.result(), self.values[key]), self.values[key])

    def _reload(self, token: Future[Tensor], value: Tensor) -> bool:
        """Whether the data was reloaded."""
        try:
            found = fetch(self.engine, token.result(), value)
        except ActivationLostError:
            return False
        assert torch.equal(found, value)
        return True

    def _reload_in_vain(self, token: Future[Tensor], value: Tensor) -> None:
        self.engine.reload(token.result(), value.size(), value.stride(), value.dtype, value.device)

    def _check_statistics(self) -> None:
        statistics = self.engine.statistics()
        struck = [operation for operation, _ in self.disk.struck]
        assert (statistics.offloads, statistics.reloads) == (len(self.values), self.reload_count)
        assert statistics.in_flight_bytes == 0
        slots = sum(self.values[key].nbytes > 0 for key in self.tokens)
        assert slots - statistics.kept_for_time <= statistics.slots_in_use <= slots
        out_bytes = statistics.bytes_written + statistics.kept_bytes + statistics.cancelled_bytes
        host_bytes = statistics.host_bytes - statistics.demoted_bytes
        assert host_bytes >= 0
        # A tensor that stays may have left in part, or never had a slot.
        assert self.offloaded_bytes - statistics.kept_for_time_bytes <= out_bytes + host_bytes <= self.offloaded_bytes
        back_bytes = statistics.bytes_read - statistics.read_ahead_bytes + statistics.forwarded_bytes
        if not self.are_linked:  # otherwise later tensors of the chain are read along, requested or not
            assert back_bytes <= self.reloaded_bytes
        if not self.lost_count and self.all_were_waited_for and not statistics.kept_for_time:
            assert back_bytes >= self.reloaded_bytes
        if not struck:
            assert self.lost_count == statistics.kept_bytes == 0


class OperationsByAio(Operations):
    lane = "aio"


class OperationsFromSource(Operations):
    lane = "source"


class OperationsByThreads(Operations):
    lane = "threads"


class OperationsByCuda(Operations):
    """A lane with a host tier, on a stand-in for the device."""

    lane = "cuda"


class OperationsByKvikio(Operations):
    """Direct transfers between a stand-in for the device and the disk; without checksums, damage is not detectable."""

    lane = "kvikio"
    checksum = False


def run_examples(operations: type[Operations], count: int) -> None:
    run_state_machine_as_test(operations, settings=settings(max_examples=count, stateful_step_count=20, deadline=None))  # pyright: ignore[reportUnknownMemberType]


LANES = [OperationsByAio, OperationsFromSource, OperationsByThreads, OperationsByCuda, OperationsByKvikio]


@pytest.mark.parametrize("operations", LANES, ids=lambda operations: operations.__name__)
def test_random_operations(operations: type[Operations]) -> None:
    run_examples(operations, 120)


@pytest.mark.slow
@pytest.mark.parametrize("operations", LANES, ids=lambda operations: operations.__name__)
def test_many_random_operations(operations: type[Operations]) -> None:
    run_examples(operations, 500)
