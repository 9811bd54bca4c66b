"""Traces: the recorded events agree with the statistics, and viewers can read the file."""

from __future__ import annotations

import collections
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import MemoryFile, each_file, engine_on, fetch, offload

import ssdtrain_fx
from ssdtrain_fx.errors import ActivationLostError, ConfigError
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.trace import Trace, record

Event = dict[str, Any]


class OneEngine:
    """Passes a trace to one engine, as the registry does to all engines."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start_trace(self, trace: Trace) -> None:
        self._engine.trace = trace

    def stop_trace(self) -> None:
        self._engine.trace = None


file = each_file("aio", "threads")


@pytest.fixture
def engine(file: MemoryFile, tmp_path: Path) -> Iterator[Engine]:
    with engine_on(file, str(tmp_path)) as engine:
        yield engine


def read(path: Path) -> list[Event]:
    """The events of a trace, each checked against the requirements of the format."""
    content = json.loads(path.read_text())
    assert set(content) == {"displayTimeUnit", "baseTimeNanoseconds", "traceEvents"}
    events = content["traceEvents"]
    begun: dict[tuple[str, int], Event] = {}
    for event in events:
        assert isinstance(event["name"], str) and event["pid"] == os.getpid() and isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] == "thread_name" and isinstance(event["args"]["name"], str)
            case "X":
                assert event["ts"] > 0 and event["dur"] >= 0
            case "b":
                begun[event["name"], event["id"]] = event
            case "e":
                assert event["ts"] >= begun.pop((event["name"], event["id"]))["ts"]
            case "C":
                assert event["ts"] > 0 and all(isinstance(value, int) for value in event["args"].values())
            case unknown:
                pytest.fail(f"phase {unknown}")
    assert not begun, "events without an end"
    return events


def whole(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] in ("X", "b")]


def total_bytes(events: list[Event], name: str) -> int:
    return sum(event["args"]["bytes"] for event in whole(events) if event["name"] == name)


def test_bytes_and_stalls_add_up_to_the_statistics(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tensors = [torch.arange(3000 + number) for number in range(5)]
    before = engine.statistics()
    with record(path, OneEngine(engine)):
        tokens = [offload(engine, x.clone(), f"x{number}") for number, x in enumerate(tensors)]
        engine.wait_until_idle()
        assert all(torch.equal(fetch(engine, token, x), x) for token, x in zip(tokens, tensors, strict=True))
        late = offload(engine, tensors[0].clone(), "late")
        assert torch.equal(fetch(engine, late, tensors[0]), tensors[0])
        engine.wait_until_idle()
    moved = engine.statistics().since(before)
    events = read(path)
    assert moved.bytes_written == total_bytes(events, "write") == sum(x.nbytes for x in (*tensors, tensors[0]))
    assert moved.bytes_read == total_bytes(events, "read")
    assert moved.forwarded_bytes == total_bytes(events, "forward")
    assert moved.bytes_read + moved.forwarded_bytes == moved.bytes_written
    counts = collections.Counter(event["name"] for event in whole(events))
    assert counts["offload"] == counts["release"] == moved.offloads == 6
    assert counts["reload"] == counts["wait"] == moved.reloads == 6
    assert total_bytes(events, "offload") == total_bytes(events, "wait") == moved.bytes_written
    stalls_us = sum(event["dur"] for event in whole(events) if event["name"] == "stall")
    assert stalls_us == pytest.approx(1e6 * moved.stall_s, abs=0.01)


def test_a_stall_lies_within_its_op(
    file: MemoryFile, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk reads only once `wait` is blocked."""
    path = tmp_path / "trace.json"
    x = torch.arange(1500)
    token = offload(engine, x.clone())
    engine.wait_until_idle()
    file.reads_may_go_on.clear()
    block = engine._stalls.wait_for_progress

    def open_and_block(*arguments: Any) -> None:
        file.reads_may_go_on.set()
        block(*arguments)

    monkeypatch.setattr(engine._stalls, "wait_for_progress", open_and_block)
    with record(path, OneEngine(engine)):
        fetch(engine, token, x)
    events = whole(read(path))
    (wait,) = (event for event in events if event["name"] == "wait")
    (stall,) = (event for event in events if event["name"] == "stall")
    assert stall["tid"] == wait["tid"] == threading.get_native_id()
    assert stall["args"] == {"tensor": "x"}
    assert wait["ts"] <= stall["ts"] and stall["ts"] + stall["dur"] <= wait["ts"] + wait["dur"]


def test_chunks_name_their_tensor_and_place_and_lie_in_named_threads(
    file: MemoryFile, engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    with record(path, OneEngine(engine)):
        token = offload(engine, torch.arange(1280), "gelu_3")
        engine.wait_until_idle()
    events = read(path)
    writes = [event for event in whole(events) if event["name"] == "write"]
    where = sorted((event["args"]["slot"], event["args"]["start"], event["args"]["bytes"]) for event in writes)
    assert where == [(0, 0, 4096), (0, 4096, 4096), (0, 8192, 2048)]
    assert {event["args"]["tensor"] for event in writes} == {"gelu_3"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(names) >= {event["tid"] for event in events}
    assert names[threading.get_native_id()] == threading.current_thread().name
    if not file.direct:
        assert all(names[event["tid"]].startswith("ssdtrain-io-") for event in writes)
    del token


def test_staging_rises_and_falls_back_to_nothing(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with record(path, OneEngine(engine)):
        token = offload(engine, torch.arange(5000))
        engine.wait_until_idle()
    levels = [event for event in read(path) if event["ph"] == "C"]
    for name in ("ssdtrain staging", "ssdtrain in flight"):
        course = [event["args"]["bytes"] for event in levels if event["name"] == name]
        assert max(course) >= 4096
        assert course[-1] == 0
    del token


def test_a_failed_transfer_says_why_and_counts_no_bytes(file: MemoryFile, engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    x = torch.arange(256)
    token = offload(engine, x.clone(), "mm_1")
    engine.wait_until_idle()
    file.read_error = lambda index: OSError(errno.EIO, "Input/output error")
    with pytest.raises(ActivationLostError), record(path, OneEngine(engine)):
        fetch(engine, token, x)
    events = whole(read(path))
    (failed,) = (event for event in events if event["name"] == "read failed")
    assert "Input/output error" in failed["args"]["error"]
    assert total_bytes(events, "read") == 0
    (wait,) = (event for event in events if event["name"] == "wait")
    assert "cannot be read back" in wait["args"]["error"]


def test_steps_go_from_the_first_offload_to_the_last_wait(engine: Engine, tmp_path: Path) -> None:
    """The trace begins in a backward pass. Two steps follow, the second with two backward passes (retain_graph)."""
    path = tmp_path / "trace.json"
    x = torch.arange(600)
    old = offload(engine, x.clone())
    with record(path, OneEngine(engine)):
        fetch(engine, old, x)
        for backwards in (1, 2):
            tokens = [offload(engine, x.clone()) for _ in range(3)]
            for _ in range(backwards):
                for token in tokens:
                    fetch(engine, token, x)
    events = whole(read(path))
    ops = sorted((event for event in events if event["name"] in ("offload", "wait")), key=lambda event: event["ts"])
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [step["name"] for step in steps] == ["step 0", "step 1"]
    for step, first, last in ((steps[0], ops[1], ops[6]), (steps[1], ops[7], ops[15])):
        assert (first["name"], last["name"]) == ("offload", "wait")
        assert step["ts"] == first["ts"]
        assert step["ts"] + step["dur"] == pytest.approx(last["ts"] + last["dur"], abs=0.01)


def test_nothing_is_recorded_while_off(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("add_op", "add_stall", "add_transfer", "add_levels"):
        monkeypatch.setattr(Trace, name, lambda *_, **__: pytest.fail("recorded although off"))
    x = torch.arange(3000)
    assert torch.equal(fetch(engine, offload(engine, x.clone()), x), x)
    engine.wait_until_idle()


def test_recording_ends_with_the_block(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    x = torch.arange(3000)
    with record(path, OneEngine(engine)):
        token = offload(engine, x.clone())
        engine.wait_until_idle()
    before = path.read_bytes()
    fetch(engine, token, x)
    assert engine.trace is None
    assert path.read_bytes() == before
    assert not [event for event in read(path) if event["name"] == "wait"]


# -- the function for users --------------------------------------------------------------------------------------------


def step_through_ops(ssd_dir: str) -> None:
    argument = EngineConfig(ssd_dir=ssd_dir).to_argument()
    x = torch.arange(4096.0)
    token = torch.ops.ssdtrain.release(torch.ops.ssdtrain.offload(x, x.stride(), f"name=tanh|{argument}"), x)
    layout = (x.size(), x.stride(), x.dtype, x.device)
    assert torch.equal(torch.ops.ssdtrain.wait(torch.ops.ssdtrain.reload(token, *layout), *layout), x)


def test_an_engine_that_opens_meanwhile_is_recorded_too(tmp_path: Path, ssd_dir: str) -> None:
    path = tmp_path / "trace.json"
    with ssdtrain_fx.trace(path):
        step_through_ops(ssd_dir)
    names = {event["name"] for event in whole(read(path))}
    assert names >= {"offload", "release", "reload", "wait", "step 0"}
    step_through_ops(ssd_dir)
    assert {event["name"] for event in whole(read(path))} == names


def test_the_clock_and_the_threads_are_those_of_torch_profiler(tmp_path: Path, ssd_dir: str) -> None:
    """profile( record_function( trace( ops ) ) ): in one file, the ops are inside the recorded function."""
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(1).add_(1)  # the first op starts the profiler
        with torch.profiler.record_function("around"), ssdtrain_fx.trace(ours):
            step_through_ops(ssd_dir)
    profile.export_chrome_trace(str(theirs))
    other = json.loads(theirs.read_text())
    assert json.loads(ours.read_text())["baseTimeNanoseconds"] == other["baseTimeNanoseconds"]
    (around,) = (event for event in other["traceEvents"] if event.get("name") == "around" and event["ph"] == "X")
    ops = [event for event in whole(read(ours)) if event["name"] in ("offload", "release", "reload", "wait")]
    assert len(ops) == 4
    tolerance_us = 2e3  # torch.profiler calibrates its clock to about a millisecond
    for op in ops:
        assert (op["pid"], op["tid"]) == (around["pid"], around["tid"])
        assert around["ts"] - tolerance_us <= op["ts"]
        assert op["ts"] + op["dur"] <= around["ts"] + around["dur"] + tolerance_us


def test_the_file_is_written_when_the_body_raises(tmp_path: Path, ssd_dir: str) -> None:
    path = tmp_path / "trace.json"

    def body() -> None:
        step_through_ops(ssd_dir)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ssdtrain_fx.trace(path):
        body()
    assert [event for event in read(path) if event["name"] == "wait"]
    with ssdtrain_fx.trace(path):  # the next trace may begin
        pass
    assert whole(read(path)) == []


def test_a_file_that_cannot_be_written_in_the_end_leaves_the_old_one_and_the_error_of_the_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def fail(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"), ssdtrain_fx.trace(path):
        pass
    with pytest.raises(ZeroDivisionError), ssdtrain_fx.trace(path):
        raise ZeroDivisionError
    assert "cannot be written" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "old"


def test_a_second_trace_at_the_same_time_is_refused_and_the_first_goes_on(tmp_path: Path, ssd_dir: str) -> None:
    path, other = tmp_path / "trace.json", tmp_path / "other.json"
    with ssdtrain_fx.trace(path):
        with (
            pytest.raises(ConfigError, match=r"recorded already\. Leave its `with` block first"),
            ssdtrain_fx.trace(other),
        ):
            pytest.fail("the body ran")
        step_through_ops(ssd_dir)
    assert not other.exists()
    assert [event for event in read(path) if event["name"] == "wait"]


def test_a_path_that_cannot_be_written_is_refused_before_the_body_runs(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a directory; expected the path of a file"),
        (tmp_path / "no" / "trace.json", "does not exist. Create it"),
        (Path("/proc/trace.json"), "no file can be created"),
    ):
        with pytest.raises(ConfigError, match=message), ssdtrain_fx.trace(path):
            pytest.fail("the body ran")


def test_a_working_directory_that_changes_meanwhile_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ssdtrain_fx.trace("trace.json"):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "trace.json").exists()
