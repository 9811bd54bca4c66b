"""``memory_budget_bytes="auto"``: in a process whose memory the kernel limits, and in keys of compile caches."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import EMPTY_GRAPH, FAST_DISK
from test_training_loops import Tower

from ssdtrain_fx import OffloadConfig, backend, config, explain
from ssdtrain_fx.compiler.inductor import OffloadPartitioner
from ssdtrain_fx.memory_limit import MemoryLimit
from ssdtrain_fx.passes.policy import Budget, Costs, Decision, StepAnalysis
from ssdtrain_fx.studies.limited_process import (
    KINDS,
    TOUCH,
    EnforcedLimit,
    LimitedRun,
    NotEnforced,
    find_kind,
    limit,
    run_limited,
    why_not,
)

MIB = 1 << 20


def limited(program: str, *arguments: str, limit_bytes: int) -> LimitedRun:
    done = run_limited(program, *arguments, limit_bytes=limit_bytes)
    if isinstance(done, NotEnforced):
        pytest.skip(done.reason)
    return done


def test_the_limit_is_enforced() -> None:
    assert limited(TOUCH, str(300 * MIB), limit_bytes=200 * MIB).ran_out_of_memory
    assert limited(TOUCH, str(100 * MIB), limit_bytes=200 * MIB).returncode == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("cgroup")])
def test_a_cgroup_is_removed_with_what_runs_in_it(kind: str) -> None:
    reason = why_not(kind)
    if reason is not None:
        pytest.skip(f"{kind} does not limit memory here: {reason}")
    with limit(kind, 100 * MIB) as enforced:
        assert enforced.cgroup is not None and enforced.cgroup.is_dir()
        process = start(enforced, "echo; exec sleep 100")
    assert process.wait() == -9
    assert not enforced.cgroup.exists()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("cgroup")])
def test_a_cgroup_counts_what_its_processes_hold_and_kills_them(kind: str) -> None:
    reason = why_not(kind)
    if reason is not None:
        pytest.skip(f"{kind} does not limit memory here: {reason}")
    touch = f"'{sys.executable}' -c 'touched = b\"x\" * (40 << 20)'; echo; exec sleep 100"
    with limit(kind, 100 * MIB, swap_bytes=50 * MIB) as enforced:
        process = start(enforced, touch)
        peak_bytes = enforced.peak_bytes()
        if peak_bytes is not None:  # a v2 kernel before 5.19 does not say
            assert 40 * MIB < peak_bytes <= 100 * MIB
        assert enforced.cgroup is not None
        swap = [enforced.cgroup / name for name in ("memory.memsw.limit_in_bytes", "memory.swap.max")]
        assert {int(file.read_text()) for file in swap if file.exists()} <= {150 * MIB, 50 * MIB}
        enforced.kill()
        assert process.wait(timeout=10) == -9


def start(enforced: EnforcedLimit, script: str) -> subprocess.Popen[bytes]:
    """A shell under the limit that has written a line. Its output is closed."""
    process = subprocess.Popen([*enforced.prefix, "sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    process.stdout.close()
    return process


def test_a_limit_of_one_process_counts_nothing_and_allows_no_swap() -> None:
    with limit("RLIMIT_DATA", 100 * MIB) as enforced:
        assert enforced.peak_bytes() is None
        enforced.kill()  # there is no cgroup: nothing is killed
    with pytest.raises(OSError, match="a cgroup is needed"), limit("RLIMIT_DATA", 100 * MIB, swap_bytes=1):
        pass


AUTO = """
import json, logging, sys
import torch
from ssdtrain_fx import OffloadConfig, backend, explain, statistics
from ssdtrain_fx.memory_limit import read_memory_limit
from ssdtrain_fx.testing import toy_hardware

MIB = 1 << 20
config = OffloadConfig(
    inner="aot_eager",
    ssd_dir=sys.argv[1],
    memory_budget_bytes="auto",
    recompute=False,
    hardware=toy_hardware(1e9, kernel_s=1e-3),
)

def step(x, *weights):
    # Saves two tensors of 16 MiB in each of 6 layers.
    for weight in weights:
        h = x @ weight
        x = h * h
    return x.sum()

weights = [torch.nn.Parameter(torch.eye(16)) for _ in range(6)]

def inputs(rows):
    return torch.ones(rows, 16), *weights

def leave(left_bytes):
    # Everything that compiling needs is imported by now, and takes its memory.
    ballast.append(torch.ones((read_memory_limit().left_bytes - left_bytes) // 4))

def plan_then_make_room(gm, example_inputs):
    # How far a step stays within its budget is tested elsewhere.
    compiled = backend(config)(gm, example_inputs)
    ballast.clear()
    return compiled

ballast = []
explain(step, *inputs(64), config=config)
found = {"limit": read_memory_limit().limit_bytes, "source": read_memory_limit().source}
x = inputs(262144)
for name, left_bytes in ("fits", 480 * MIB), ("tight", 256 * MIB):
    torch._dynamo.reset()
    leave(left_bytes)
    before = statistics()
    torch.compile(step, backend=plan_then_make_room)(*x).backward()
    found[name] = statistics().since(before).offloads
leave(64 * MIB)
print("now", file=sys.stderr)
(graph,) = explain(step, *x, config=config).graphs
found["floor"] = [graph.plan.peak_after_bytes, graph.plan.floor_bytes]
print(json.dumps(found))
"""


def test_auto_reads_the_limit_of_the_process(tmp_path: Path) -> None:
    """One process, and less and less memory that is left: the step fits, it fits with offloads, and it does not fit."""
    limit_bytes = 1536 * MIB
    done = limited(AUTO, str(tmp_path), limit_bytes=limit_bytes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["limit"] == limit_bytes
    assert found["source"].startswith(str(find_kind()))
    assert found["fits"] == 0
    assert found["tight"] > 0
    assert found["floor"][0] == found["floor"][1]
    before, after = done.stderr.split("now\n")
    assert "does not fit" not in before
    assert after.count("the step does not fit into memory: it needs ") == 1
    assert f"of 1.50 GiB ({found['source']})" in after
    assert "Lower the batch size or min_tensor_bytes, or raise the limit." in after


# With a limit that the test sets


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that leaves this process so many bytes of 1 TiB."""

    def leave(left_bytes: int) -> None:
        limit = MemoryLimit(limit_bytes=1 << 40, used_bytes=(1 << 40) - left_bytes, source="the limit of the test")
        monkeypatch.setattr(config, "read_memory_limit", lambda **_: limit)

    return leave


def automatic(**options: Any) -> OffloadConfig:
    return OffloadConfig(
        **{"memory_budget_bytes": "auto", "hardware": FAST_DISK, "min_tensor_bytes": 0, "inner": "aot_eager", **options}
    )


def test_the_key_of_compile_caches_has_the_number(leave: Callable[[int], None]) -> None:
    def uuid(**options: Any) -> str:
        return OffloadPartitioner(automatic(**options), EMPTY_GRAPH, [torch.ones(1)]).uuid()

    def state() -> bytes:
        return pickle.dumps(OffloadPartitioner(automatic(), EMPTY_GRAPH, [torch.ones(1)], on_warning=lambda: None))

    leave(1000 * MIB)
    large, state_of_large = uuid(), state()
    leave(1001 * MIB)
    assert uuid() == large, "the difference is smaller than what budgets are rounded to"
    assert state() == state_of_large, "Inductor also pickles its settings for a key"
    assert uuid(memory_budget_bytes=896 * MIB) != large, "a number that is not met raises an error"
    leave(500 * MIB)
    assert uuid() != large


def test_key_and_plan_have_the_same_number(leave: Callable[[int], None]) -> None:
    """Inductor copies its settings. Less memory may be left when the copy makes its key or its plan."""
    leave(1000 * MIB)
    partitioner = OffloadPartitioner(automatic(), EMPTY_GRAPH, [torch.ones(1)])
    uuid = partitioner.uuid()
    leave(500 * MIB)
    copied = copy.deepcopy(partitioner)
    assert copied.uuid() == uuid
    assert copied.budget == partitioner.budget
    assert partitioner.budget is not None and partitioner.budget.size_bytes == 896 * MIB


def test_a_step_that_fits_offloads_nothing(leave: Callable[[int], None]) -> None:
    leave(500 * MIB)
    (graph,) = explain(Tower(), torch.randn(8, 32), config=automatic()).graphs
    assert not graph.plan.offloaded


@pytest.mark.parametrize("recompute", [True, False])
def test_a_step_that_does_not_fit_gets_the_lowest_peak_and_one_warning(
    recompute: bool, leave: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    leave(1)
    (graph,) = explain(Tower(), torch.randn(8, 32), config=automatic(recompute=recompute)).graphs
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.match(
        r"the step does not fit into memory: it needs [\d.]+ KiB at least, and memory_budget_bytes='auto' found room "
        r"for 0 B \(1 B are left of 1\.00 TiB \(the limit of the test\); ",
        warning.message,
    )
    assert "Lower the batch size or min_tensor_bytes, or raise the limit." in warning.message
    lowest = explain(Tower(), torch.randn(8, 32), config=automatic(memory_budget_bytes=None, max_slowdown=1e9)).plan
    assert graph.plan.peak_after_bytes <= lowest.peak_after_bytes


def move_none(analysis: StepAnalysis, costs: Costs, budget: Budget) -> Mapping[str, Decision]:
    return {}


def test_a_policy_above_the_limit_is_followed_with_a_warning(
    leave: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    leave(1)
    (graph,) = explain(Tower(), torch.randn(8, 32), config=automatic(policy=move_none)).graphs
    assert not graph.plan.offloaded
    assert caplog.text.count("the step does not fit into memory") == 1


@pytest.mark.slow
def test_a_warm_compile_cache_does_not_swallow_the_warning(
    leave: Callable[[int], None], caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing plans a graph that comes from the cache. So a step that does not fit is not stored there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def compile_once() -> tuple[int, int]:
        """Compile, and return how many graphs came from the cache and how many warnings there were."""
        torch._dynamo.reset()
        caplog.clear()
        hits = torch._dynamo.utils.counters["aot_autograd"]
        before = hits["autograd_cache_hit"]
        torch.compile(Tower(), backend=backend(automatic(inner="inductor")))(torch.randn(8, 32)).backward()
        warnings = sum("the step does not fit into memory" in record.message for record in caplog.records)
        return hits["autograd_cache_hit"] - before, warnings

    leave(500 * MIB)
    assert compile_once() == (0, 0)
    leave(500 * MIB + 1)
    assert compile_once() == (1, 0)
    leave(1)
    assert [compile_once(), compile_once()] == [(0, 1), (0, 1)]
    leave(500 * MIB)
    assert compile_once() == (1, 0)
