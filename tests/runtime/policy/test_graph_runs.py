"""What spans two graphs: deferred releases, reloads begun ahead, tensors that two graphs offload."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import MemoryFile, each_file, engine_on
from torch import Tensor

from ssdtrain_fx import expect_backward, micro_batch
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.policy.schedule_hints import ScheduleHints, schedule_hints

CPU = torch.device("cpu")
NAMES = ["a", "b", "c"]
SIZE = 8
SIZE_BYTES = 4 * SIZE


file = each_file("threads", "cuda")


@pytest.fixture
def engine(file: MemoryFile, tmp_path: Path) -> Iterator[Engine]:
    with engine_on(file, str(tmp_path)) as engine:
        yield engine


class Graph:
    """A graph whose forward offloads three tensors and whose backward requests them in the order ``backward``."""

    def __init__(
        self,
        engine: Engine,
        graph_name: str = "graph",
        backward: str = "cba",
        plan: dict[str, dict[str, float]] | None = None,
    ) -> None:
        self.engine, self.graph_name, self.order = engine, graph_name, backward
        self.plan = plan or {}

    def forward(self, value: float) -> dict[str, Tensor]:
        tokens: dict[str, Tensor] = {}
        for number, name in enumerate(NAMES):
            x = torch.full((SIZE,), float(value + number))
            token = self.engine.offload(x, name, graph_name=self.graph_name, **self.plan.get(name, {}))
            tokens[name] = self.engine.release(token, x)
        self.engine.wait_until_idle()
        return tokens

    def backward(self, tokens: dict[str, Tensor], value: float) -> list[list[str]]:
        """Returns what is being read ahead after each wait."""
        ahead: list[list[str]] = []
        for name in self.order:
            y = self.engine.reload(tokens[name], (SIZE,), (1,), torch.float32, CPU)
            self.engine.wait(y, tokens[name])
            assert torch.equal(y, torch.full((SIZE,), float(value + NAMES.index(name))))
            ahead.append(ahead_of(self.engine))
        return ahead


def ahead_of(engine: Engine) -> list[str]:
    """Names of the tensors that are being read ahead, in the order of offloading."""
    return [entry.name for entry in engine._ledger.entries.values() if entry.ahead is not None]  # pyright: ignore[reportPrivateUsage]


def ahead_runs(engine: Engine) -> set[tuple[str, object]]:
    """Graph and micro-batch of the tensors that are being read ahead."""
    entries = engine._ledger.entries.values()  # pyright: ignore[reportPrivateUsage]
    runs = [entry.run for entry in entries if entry.ahead is not None]
    return {(run.graph_name, run.micro_batch) for run in runs if run is not None}


@pytest.fixture(autouse=True)
def nothing_expected() -> Iterator[None]:
    yield
    schedule_hints.expected = None


def test_backward_reads_ahead_for_the_run_before_no_more_than_it_has_used(engine: Engine) -> None:
    """``    run 2   reload c, wait c, reload b, wait b, reload a, wait a
    run 1                             ^ c             ^ b            (the tensor waited for last may be in use)``"""
    graph = Graph(engine)
    first, second = graph.forward(10), graph.forward(20)
    assert graph.backward(second, 20) == [[], ["c"], ["b", "c"]]
    graph.backward(first, 10)
    assert engine.statistics().ahead_bytes == 2 * SIZE_BYTES
    assert engine.statistics().reloads == 6


@pytest.mark.parametrize(
    ("lead_s", "seen"),
    [
        ({"c": 0.0}, [[], [], []]),  # its reload is early enough
        ({"c": 0.5}, [[], [], ["c"]]),  # more than 0 s are left after the last wait, but at the wait before, 1 s is
        ({"c": 1.0}, [[], [], ["c"]]),
        ({"c": 1.5}, [[], ["c"], ["c"]]),
        ({"c": 2.5, "b": 0.5}, [[], ["c"], ["b", "c"]]),  # at the first wait, nothing has been used yet
        ({"c": 2.5, "b": 1.5}, [[], ["c"], ["b", "c"]]),
    ],
)
def test_with_a_plan_reads_begin_as_late_as_the_next_backward_permits(
    engine: Engine, lead_s: dict[str, float], seen: list[list[str]]
) -> None:
    """What is read earlier is only in the way of the backward that still runs."""
    left_s = {"c": 2.0, "b": 1.0, "a": 0.0}
    plan = {name: {"lead_s": lead_s.get(name, 0.0), "left_s": left_s[name]} for name in NAMES}
    graph = Graph(engine, plan=plan)
    first, second = graph.forward(10), graph.forward(20)
    assert graph.backward(second, 20) == seen
    graph.backward(first, 10)
    assert engine.statistics().ahead_bytes == len(seen[-1]) * SIZE_BYTES


def test_micro_batches_that_come_back_in_the_order_of_forward_are_read_ahead(engine: Engine) -> None:
    """As in a stage of a pipeline: the run before is over, so the run after comes next."""
    graph = Graph(engine)
    runs = [graph.forward(10.0 * number) for number in range(4)]
    for number in range(4):
        graph.backward(runs[0], 10.0 * number)
        assert ahead_of(engine) == (["b", "c"] if number in (1, 2) else [])  # the first one follows a forward
        del runs[0]
    assert engine.statistics().ahead_bytes == 2 * 2 * SIZE_BYTES
    assert engine.statistics().reloads == 12


def test_where_forwards_and_backwards_alternate_no_forward_finds_memory_taken(engine: Engine) -> None:
    """One forward, one backward: what is read ahead would be in memory during the forward."""
    graph = Graph(engine)
    runs = [graph.forward(0.0), graph.forward(10.0)]
    for number in range(4):
        graph.backward(runs.pop(0), 10.0 * number)
        assert ahead_of(engine) == []
        runs.append(graph.forward(10.0 * (number + 2)))
    graph.backward(runs.pop(0), 40.0)
    assert ahead_of(engine) == []
    graph.backward(runs.pop(0), 50.0)
    assert engine.statistics().ahead_bytes == 0


def test_where_forwards_and_backwards_alternate_what_is_told_is_read_ahead(engine: Engine) -> None:
    """As 1F1B does: backward 0, forward 2, backward 1, forward 3 ... Nothing is guessed there (see above)."""
    graph = Graph(engine)
    runs = []
    for number in range(2):
        with micro_batch(number):
            runs.append(graph.forward(10.0 * number))
    for number in range(4):
        expect_backward(number + 1)
        graph.backward(runs.pop(0), 10.0 * number)
        assert ahead_of(engine) == ["b", "c"]
        with micro_batch(number + 2):
            runs.append(graph.forward(10.0 * (number + 2)))
        assert ahead_of(engine) == ["b", "c"]
    graph.backward(runs.pop(0), 40.0)
    graph.backward(runs.pop(0), 50.0)
    assert engine.statistics().ahead_bytes == 4 * 2 * SIZE_BYTES
    assert schedule_hints.expected is None  # the backward of 4 has begun


def test_told_backwards_of_several_graphs_come_in_the_reverse_order_of_forward(engine: Engine) -> None:
    """Two graphs per micro-batch, and micro-batches in an order that nobody would guess."""
    one, other = Graph(engine, "one"), Graph(engine, "other")
    runs: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for number, key in enumerate("abc"):
        with micro_batch(key):
            runs[key] = one.forward(10.0 * number), other.forward(10.0 * number)
    for key, expected in (("b", "a"), ("a", "c"), ("c", "nothing")):
        first, second = runs.pop(key)
        value = 10.0 * "abc".index(key)
        expect_backward(expected)
        other.backward(second, value)
        assert ahead_of(engine) == ["b", "c"]
        assert ahead_runs(engine) == {("one", key)}
        one.backward(first, value)
        assert ahead_runs(engine) == ({("other", expected)} if expected in runs else set())
    assert engine.statistics().ahead_bytes == 5 * 2 * SIZE_BYTES


def test_what_is_told_comes_before_what_would_be_guessed(engine: Engine) -> None:
    """Unknown micro-batches are guessed, also later: an expectation that never comes true does no harm."""
    graph = Graph(engine)
    runs = []
    for number in range(4):
        with micro_batch((7, number)):
            runs.append(graph.forward(10.0 * number))
    for number, expected, ahead in ((3, 0, 0), (0, 9, 1), (1, 9, 2)):
        expect_backward((7, expected))
        graph.backward(runs[number], 10.0 * number)
        assert ahead_runs(engine) == {("graph", (7, ahead))}
    assert engine.statistics().ahead_bytes == 2 * 2 * SIZE_BYTES
    graph.backward(runs[2], 20.0)


def test_unnamed_runs_are_not_of_one_micro_batch(engine: Engine) -> None:
    graph = Graph(engine)
    with micro_batch("told"):
        told = graph.forward(0.0)
    first, second = graph.forward(10.0), graph.forward(20.0)
    expect_backward("told")
    graph.backward(second, 20.0)
    assert ahead_runs(engine) == {("graph", "told")}
    graph.backward(told, 0.0)
    graph.backward(first, 10.0)


def test_another_expectation_gives_back_what_was_read_for_the_first(engine: Engine) -> None:
    """What is read ahead never takes more memory than the present backward has finished with."""
    graph = Graph(engine)
    runs = []
    for number in range(4):
        with micro_batch(number):
            runs.append(graph.forward(10.0 * number))
    for expected, name in zip((1, 2, 3), "cba", strict=True):
        expect_backward(expected)
        y = engine.reload(runs[0][name], (SIZE,), (1,), torch.float32, CPU)
        engine.wait(y, runs[0][name])
        assert ahead_runs(engine) == (set() if name == "c" else {("graph", expected)})
    assert len(ahead_of(engine)) == 2
    graph.backward(runs[3], 30.0)


def test_a_forward_that_backward_computes_again_leaves_what_was_told(engine: Engine) -> None:
    """As checkpoints do: the layer has a run of its own, and its backward comes at once."""
    graph, layer = Graph(engine), Graph(engine, "layer")
    runs = []
    for number in range(2):
        with micro_batch(number):
            runs.append(graph.forward(10.0 * number))
    expect_backward(1)
    graph.backward(runs[0], 0.0)
    for _ in range(3):
        layer.backward(layer.forward(50.0), 50.0)
        assert ("graph", 1) in ahead_runs(engine)
    graph.backward(runs[1], 10.0)
    engine.wait_until_idle()
    assert engine.statistics().bytes_read == (6 + 9) * SIZE_BYTES  # nothing was read twice


def test_what_is_told_and_does_not_come_costs_reads_and_nothing_else(engine: Engine) -> None:
    graph = Graph(engine)
    runs = []
    for number in range(3):
        with micro_batch(number):
            runs.append(graph.forward(10.0 * number))
    expect_backward(2)
    graph.backward(runs[0], 0.0)
    assert ahead_runs(engine) == {("graph", 2)}
    graph.backward(runs[1], 10.0)
    assert engine.statistics().ahead_bytes == 0
    graph.backward(runs[2], 20.0)
    assert engine.statistics().ahead_bytes == 2 * SIZE_BYTES


def test_the_micro_batch_of_a_forward_ends_with_its_block() -> None:
    hints = ScheduleHints()
    with hints.forward_of("outer"):
        with contextlib.suppress(RuntimeError), hints.forward_of("inner"):
            assert hints.micro_batch == "inner"
            raise RuntimeError
        assert hints.micro_batch == "outer"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: hints.micro_batch).result() is None
            pool.submit(hints.expect, 3).result()
    assert hints.micro_batch is None
    assert hints.expected == 3  # for all threads: backward may run in another one
    hints.expect((1, "a"))
    hints.begun((1, "b"))
    assert hints.expected == (1, "a")
    hints.begun((*[1], "a"))  # equal, and another object
    assert hints.expected is None


def test_a_key_that_cannot_be_one_is_refused() -> None:
    """What is compared while the engine holds its lock must not run code of the user, or raise."""
    keys: list[Any] = [[1], 1.5, None, True, torch.tensor(1), (0, torch.zeros(2)), ("a", (1, 2.0))]
    for key in keys:
        with pytest.raises(ConfigError, match="expected the number of a micro-batch"), micro_batch(key):
            pass
        with pytest.raises(ConfigError, match="expected the number of a micro-batch"):
            expect_backward(key)
    with micro_batch((0, ("a", 1))):
        expect_backward("b")


def test_runs_that_are_over_leave_no_name_behind(engine: Engine) -> None:
    graph = Graph(engine)
    for number in range(3):
        with micro_batch(number):
            tokens = graph.forward(0.0)
        graph.backward(tokens, 0.0)
    del tokens
    engine.wait_until_idle()
    with micro_batch("last"):
        last = graph.forward(0.0)
    gc.collect()
    assert list(engine._runs._last_run) == ["last"]  # pyright: ignore[reportPrivateUsage]
    graph.backward(last, 0.0)


def test_graphs_that_share_an_activation_are_read_ahead(engine: Engine) -> None:
    """The backward of the second graph requests the shared one, which is no request of the first graph's backward."""
    x = torch.full((SIZE,), 7.0)
    one, other = Graph(engine, "one"), Graph(engine, "other")
    shared = [engine.release(engine.offload(x, "x", graph_name="one", external=True), x)]
    first = one.forward(10)
    shared.append(engine.release(engine.offload(x, "x", graph_name="other", external=True), x))
    second = other.forward(20)
    engine.wait(engine.reload(shared[1], (SIZE,), (1,), torch.float32, CPU), shared[1])
    other.backward(second, 20)
    assert ahead_of(engine) == ["b", "c"]
    one.backward(first, 10)


def test_a_backward_that_is_repeated_reads_nothing_ahead_for_a_run_that_has_been(engine: Engine) -> None:
    graph = Graph(engine)
    runs = [graph.forward(10), graph.forward(20), graph.forward(30)]
    graph.backward(runs[0], 10)
    graph.backward(runs[1], 20)
    assert ahead_of(engine) == ["b", "c"]
    graph.backward(runs[2], 30)
    graph.backward(runs[1], 20)
    assert ahead_of(engine) == []


def test_the_order_of_the_last_backward_is_the_order_of_reading_ahead(engine: Engine) -> None:
    graph = Graph(engine, backward="abc")
    first, second = graph.forward(10), graph.forward(20)
    graph.backward(second, 20)
    assert ahead_of(engine) == ["a", "b"]
    graph.backward(first, 10)


def test_another_order_than_expected_costs_reads_and_nothing_else(engine: Engine) -> None:
    """Backward of run 3 reads ahead for run 2, but run 1 comes next: the tensors read ahead are freed. While run 1
    computes, they are read again, because only run 2 is to come."""
    graph = Graph(engine)
    first, second, third = graph.forward(10), graph.forward(20), graph.forward(30)
    graph.backward(third, 30)
    assert ahead_of(engine) == ["b", "c"]
    y = engine.reload(first["a"], (SIZE,), (1,), torch.float32, CPU)
    assert ahead_of(engine) == []
    engine.wait(y, first["a"])
    del y
    graph.backward(first, 10)
    assert ahead_of(engine) == ["a", "b", "c"]
    graph.backward(second, 20)
    engine.wait_until_idle()
    statistics = engine.statistics()
    assert statistics.ahead_bytes == 3 * SIZE_BYTES
    assert statistics.bytes_read == (10 + 2) * SIZE_BYTES


def test_what_is_read_ahead_goes_with_its_token(engine: Engine) -> None:
    graph = Graph(engine)
    first, second = graph.forward(10), graph.forward(20)
    graph.backward(second, 20)
    assert ahead_of(engine) == ["b", "c"]
    del first, second
    engine.wait_until_idle()
    assert ahead_of(engine) == []
    assert engine.statistics().slots_in_use == 0


def test_a_second_backward_of_the_same_graph(engine: Engine) -> None:
    graph = Graph(engine)
    first, second = graph.forward(10), graph.forward(20)
    for _ in range(2):
        graph.backward(second, 20)
        graph.backward(first, 10)


def test_a_failed_read_ahead_is_tried_again(engine: Engine, file: MemoryFile) -> None:
    graph = Graph(engine)
    first, second = graph.forward(10), graph.forward(20)
    file.read_error = lambda index: OSError(5, "no luck") if index == 2 else None
    for name in "cb":
        y = engine.reload(second[name], (SIZE,), (1,), torch.float32, CPU)
        engine.wait(y, second[name])
    assert ahead_of(engine) == ["c"]
    engine.wait_until_idle()
    graph.backward(first, 10)
    assert engine.statistics().ahead_bytes == 0


def test_another_layout_than_expected_is_read_again(engine: Engine) -> None:
    x = torch.arange(6.0).view(2, 3)
    tokens: list[Tensor] = []
    for _ in range(2):
        for name in NAMES:
            tokens.append(engine.release(token := engine.offload(y := x.clone(), name, graph_name="graph"), y))
            del token
    engine.wait_until_idle()
    for token in reversed(tokens):
        y = engine.reload(token, (2, 3), (1, 2), torch.float32, CPU)
        engine.wait(y, token)
        assert y.stride() == (1, 2)
        assert torch.equal(y, x)
    assert engine.statistics().ahead_bytes == 0


def test_a_deferred_release_waits_only_for_the_run_before(file: MemoryFile, tmp_path: Path) -> None:
    """Staging has room for two tensors and writes are held: run 1 ends at once, run 2 once the tensors of run 1 have
    left."""
    xs = [torch.full((SIZE,), float(number)) for number in range(6)]
    with engine_on(file, str(tmp_path), host_budget_bytes=3 * 4096) as engine:

        def run(numbers: range) -> list[Tensor]:
            tokens = [engine.offload(xs[number], f"x{number % 3}", graph_name="graph") for number in numbers]
            pairs = zip(numbers, tokens, strict=True)
            return [engine.release(token, xs[number], deferred=True) for number, token in pairs]

        file.writes_may_go_on.clear()
        tokens = run(range(3))
        assert engine.statistics().late_bytes >= SIZE_BYTES
        assert engine.statistics().release_stall_s == 0
        for number in range(3):
            xs[number] = torch.empty(0)  # the engine holds tensors that have not left
        file.writes_may_go_on.set()
        tokens += run(range(3, 6))
        entries = list(engine._ledger.entries.values())  # pyright: ignore[reportPrivateUsage]
        assert all(entry.uncopied == 0 for entry in entries[:3])
        for number, token in enumerate(tokens):
            y = engine.reload(token, (SIZE,), (1,), torch.float32, CPU)
            engine.wait(y, token)
            assert torch.equal(y, torch.full((SIZE,), float(number)))


def test_a_deferred_release_that_lasts_too_long_keeps_the_tensor_itself(file: MemoryFile, tmp_path: Path) -> None:
    """A tensor that is not written to any more is not copied, and a second backward finds it too."""
    with engine_on(file, str(tmp_path), host_budget_bytes=3 * 4096, max_stall_share=0.0) as engine:
        file.writes_may_go_on.clear()
        addresses: list[int] = []
        tokens: list[Tensor] = []
        for number in range(9):
            x = torch.full((SIZE,), float(number))
            addresses.append(x.data_ptr())
            tokens.append(engine.release(engine.offload(x, f"x{number % 3}", graph_name="graph"), x, deferred=True))
            del x
        assert engine.statistics().kept_for_time_bytes > 0
        entries = engine._ledger.entries.values()  # pyright: ignore[reportPrivateUsage]
        residents = {entry.resident.data_ptr() for entry in entries if entry.resident is not None}
        assert residents
        assert residents <= set(addresses)
        file.writes_may_go_on.set()
        for _ in range(2):
            for number, token in reversed([*enumerate(tokens)]):
                y = engine.reload(token, (SIZE,), (1,), torch.float32, CPU)
                engine.wait(y, token)
                assert torch.equal(engine.hand_over(y), torch.full((SIZE,), float(number)))


def offload_external(engine: Engine, x: Tensor) -> Tensor:
    return engine.release(engine.offload(x, "x", graph_name="graph", external=True), x)


def test_the_same_tensor_is_written_once(engine: Engine) -> None:
    x = torch.arange(SIZE)
    tokens = [offload_external(engine, x), offload_external(engine, x.view(SIZE))]
    engine.wait_until_idle()
    assert engine.statistics().bytes_written == x.nbytes
    assert engine.statistics().deduplicated_bytes == x.nbytes
    del tokens[0]
    (token,) = tokens
    y = engine.reload(token, x.size(), x.stride(), x.dtype, CPU)
    engine.wait(y, token)
    assert torch.equal(y, x)
    del tokens, token
    engine.wait_until_idle()
    assert engine.statistics().slots_in_use == 0


def test_equal_bytes_at_the_same_place_are_written_once_whoever_wrote_them(engine: Engine) -> None:
    x = torch.arange(SIZE)
    tokens = [offload_external(engine, x)]
    x.add_(1)
    x.sub_(1)
    tokens.append(offload_external(engine, x))
    assert engine.statistics().deduplicated_bytes == x.nbytes


@pytest.mark.parametrize("position", range(SIZE))
def test_a_write_past_the_version_counter_is_seen_wherever_it_is(engine: Engine, position: int) -> None:
    x = torch.arange(SIZE)
    before = x.clone()
    tokens = [offload_external(engine, x)]
    x.numpy()[position] = -1
    tokens.append(offload_external(engine, x))
    assert engine.statistics().deduplicated_bytes == 0
    for token, expected in zip(tokens, (before, x), strict=True):
        y = engine.reload(token, x.size(), x.stride(), x.dtype, CPU)
        engine.wait(y, token)
        assert torch.equal(y, expected)


def test_what_differs_in_place_layout_or_content_is_another_tensor(engine: Engine) -> None:
    x = torch.arange(2 * SIZE)
    tokens = [offload_external(engine, x)]
    tokens.append(offload_external(engine, x[:SIZE]))
    tokens.append(offload_external(engine, x[SIZE:]))
    tokens.append(offload_external(engine, x.view(torch.float64)))
    tokens.append(offload_external(engine, x.view(2, SIZE).t()))
    expected = x.clone()
    x.add_(1)
    tokens.append(offload_external(engine, x))
    address = x.data_ptr()
    del x
    others = [torch.full((2 * SIZE,), number) for number in range(64)]  # one of them may get the same memory
    tokens += [offload_external(engine, other) for other in others if other.data_ptr() == address]
    assert engine.statistics().deduplicated_bytes == 0
    y = engine.reload(tokens[0], (2 * SIZE,), (1,), torch.int64, CPU)
    engine.wait(y, tokens[0])
    assert torch.equal(y, expected)


def test_a_tensor_whose_tokens_have_died_is_written_again(engine: Engine) -> None:
    x = torch.arange(SIZE)
    offload_external(engine, x)
    engine.wait_until_idle()
    token = offload_external(engine, x)
    assert engine.statistics().deduplicated_bytes == 0
    y = engine.reload(token, x.size(), x.stride(), x.dtype, CPU)
    engine.wait(y, token)
    assert torch.equal(y, x)
