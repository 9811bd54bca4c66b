"""Plans with a host tier: never worse than without, never above its budget, and compared with all other fillings."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import MIB, layered_problem, make_hardware, transfer_problems
from runtime_fakes import FakeCuda

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, site_of
from ssdtrain_fx.passes.planning.place_transfers import Choice, choose_all, choose_cheapest, choose_lowest_peak
from ssdtrain_fx.passes.planning.plan import Offload, Plan
from ssdtrain_fx.passes.planning.simulate import ROUNDING, host_bytes, simulate
from ssdtrain_fx.passes.planning.transfer_problem import HostTier, Movable, Placement, Placements, TransferProblem
from ssdtrain_fx.passes.planning.use_host_tier import use_host_tier
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.memory.staging import CHUNK_BYTES
from ssdtrain_fx.testing import analyse, assert_same_bits, calls, capture_toy, save_all, toy_hardware


def moved_bytes(problem: TransferProblem) -> int:
    return sum(movable.size_bytes for movable in problem.movables)


def on_gpu(problem: TransferProblem, *, staging_bytes: int, host: HostTier) -> TransferProblem:
    hardware = dataclasses.replace(
        problem.hardware, device="toy GPU", copies_block_compute=False, staging_bytes=staging_bytes
    )
    return dataclasses.replace(problem, hardware=hardware, host=host)


@st.composite
def gpu_problems(draw: st.DrawFn) -> TransferProblem:
    """Budgets from zero to all bytes, staging that is at least as large, and chunks of any size."""
    problem = draw(transfer_problems())
    budget_bytes = round(draw(st.floats(0, 1.2)) * moved_bytes(problem))
    hardware = dataclasses.replace(problem.hardware, staging_chunk_bytes=draw(st.sampled_from([1, 4096, 2 * MIB])))
    problem = dataclasses.replace(problem, hardware=hardware)
    host = HostTier(budget_bytes=budget_bytes)
    return on_gpu(problem, staging_bytes=round(budget_bytes * draw(st.sampled_from([1, 8 / 7, 2]))), host=host)


def without_host(problem: TransferProblem) -> TransferProblem:
    return dataclasses.replace(problem, host=None)


def written_bytes(problem: TransferProblem, placements: Placements) -> int:
    return sum(
        movable.size_bytes
        for movable in problem.movables
        if movable.idx in placements and placements[movable.idx].tier == "ssd"
    )


def assert_not_worse(problem: TransferProblem, tiered: Choice, plain: Choice) -> None:
    assert tiered.peak_bytes <= plain.peak_bytes
    assert tiered.simulation.exposed_s <= plain.simulation.exposed_s + ROUNDING * problem.step_s
    assert problem.host is not None
    assert max(host_bytes(problem, tiered.placements), default=0) <= problem.host.budget_bytes
    assert tiered.simulation == simulate(problem, tiered.placements)
    by_idx = {movable.idx: movable for movable in problem.movables}
    for idx, placement in tiered.placements.items():
        movable = by_idx[idx]
        assert max(movable.offload, movable.earliest_release) <= placement.release <= problem.marker
        assert problem.marker < placement.reload <= movable.wait


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=gpu_problems(), max_slowdown=st.sampled_from([0.0, 0.01, 0.1, 1.0]))
def test_never_worse_than_without(problem: TransferProblem, max_slowdown: float) -> None:
    plain = choose_lowest_peak(without_host(problem), max_slowdown=max_slowdown)
    assert_not_worse(problem, use_host_tier(problem, plain, may_move_others=True), plain)
    same = use_host_tier(problem, plain)
    assert_not_worse(problem, same, plain)
    assert same.placements.keys() == plain.placements.keys()
    assert_not_worse(problem, use_host_tier(problem, plain, time_first=True), plain)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problem=gpu_problems(), share=st.floats(0, 1))
def test_never_worse_under_a_budget(problem: TransferProblem, share: float) -> None:
    plain = choose_all(without_host(problem))
    assert use_host_tier(problem, plain).placements.keys() == plain.placements.keys()
    most_bytes = max(simulate(problem, {}).live_bytes)
    budget_bytes = round(plain.peak_bytes + share * (most_bytes - plain.peak_bytes))
    cheapest = choose_cheapest(without_host(problem), budget_bytes=budget_bytes)
    assert cheapest is not None
    tiered = use_host_tier(problem, cheapest, time_first=True)
    assert_not_worse(problem, tiered, cheapest)
    assert tiered.peak_bytes <= budget_bytes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    waits=st.lists(st.integers(8, 14), min_size=1, max_size=6),
    capacity=st.integers(0, 7),
    disk_bytes_per_s=st.sampled_from([2.0, 8.0, 100.0]),
)
def test_of_all_fillings_of_equal_sizes_none_writes_less(
    waits: list[int], capacity: int, disk_bytes_per_s: float
) -> None:
    """At most six storages of 8 bytes, one per node. A copy takes no time, and there is enough staging.

    Brute force over all fillings at the same positions: no filling that is no worse in the simulation writes less than
    the chosen one, unless the chosen one has a lower peak.
    """
    problem = TransferProblem(
        node_s=(1.0,) * 16,
        marker=7,
        fixed_live_bytes=(1,) * 16,
        movables=tuple(
            Movable(
                idx=at,
                size_bytes=8,
                live_start=at,
                offload=at + 1,
                earliest_release=at + 1,
                wait=wait,
                live_end=wait + 1,
            )
            for at, wait in enumerate(waits)
        ),
        hardware=make_hardware(
            device="toy GPU",
            write=Channel(bytes_per_s=disk_bytes_per_s),
            read=Channel(bytes_per_s=disk_bytes_per_s),
            staging_bytes=1000,
        ),
        host=HostTier(budget_bytes=8 * capacity),
    )
    plain = choose_all(without_host(problem))
    tiered = use_host_tier(problem, plain)
    assert_not_worse(problem, tiered, plain)
    least_bytes = written_bytes(problem, plain.placements)
    for held in itertools.product((False, True), repeat=len(waits)):
        if sum(held) <= capacity:
            filled: dict[int, Placement] = {
                idx: dataclasses.replace(placement, tier="host" if held[idx] else "ssd")
                for idx, placement in plain.placements.items()
            }
            allowed_s = plain.simulation.exposed_s + ROUNDING * problem.step_s
            if simulate(problem, filled).exposed_s <= allowed_s:
                least_bytes = min(least_bytes, written_bytes(problem, filled))
    assert tiered.peak_bytes < plain.peak_bytes or written_bytes(problem, tiered.placements) == least_bytes


@pytest.mark.parametrize("hidden", [0.2, 0.5, 1.0])
def test_a_layered_network_writes_less_and_fits_more(hidden: float) -> None:
    """48 layers, and host memory for half of the saved bytes."""
    layers = layered_problem(48, hidden=hidden)
    budget_bytes = moved_bytes(layers) // 2
    problem = on_gpu(layers, staging_bytes=budget_bytes * 8 // 7, host=HostTier(budget_bytes=budget_bytes))
    hardware = dataclasses.replace(problem.hardware, staging_chunk_bytes=2 * MIB)
    problem = dataclasses.replace(problem, hardware=hardware)
    plain = choose_lowest_peak(without_host(problem), max_slowdown=0.01)
    tiered = use_host_tier(problem, plain, may_move_others=True)
    assert_not_worse(problem, tiered, plain)
    assert written_bytes(problem, tiered.placements) < 0.8 * written_bytes(problem, plain.placements)
    if hidden < 1:  # SSD time was scarce without the tier
        assert tiered.peak_bytes < 0.7 * plain.peak_bytes


def test_what_is_needed_soonest_stays() -> None:
    plan = deep_plan(host_bytes=2048 * 2)
    assert [storage.name for storage in plan.on_host] == [storage.name for storage in plan.offloaded[-2:]]
    assert plan.host_peak_bytes == 2048 * 2
    assert plan.written_bytes == plan.offloaded_bytes - 2048 * 2


def deep_plan(host_bytes: int) -> Plan:
    """Seven saved storages of 2 KiB or less, all offloaded, and a fast disk."""
    return analyse(capture_toy("deep", partition=save_all), min_tensor_bytes=2048).plan(
        policy="all", disk=1e9, host_bytes=host_bytes
    )


def test_the_decision_says_its_tier_and_survives_json() -> None:
    plan = deep_plan(host_bytes=2048 * 2)
    assert Plan.from_json(plan.to_json()) == plan
    tiers = [storage.decision.tier for storage in plan.offloaded if isinstance(storage.decision, Offload)]
    assert tiers == ["ssd"] * (len(tiers) - 2) + ["host"] * 2
    assert all(storage.decision.reason.startswith("in host memory between") for storage in plan.on_host)
    assert deep_plan(host_bytes=0).on_host == ()


def test_the_ops_say_what_stays_and_when_it_comes_back() -> None:
    """The bits are the same as well: the engine may use or ignore these arguments."""
    step = capture_toy("deep", partition=save_all)
    analysis = analyse(step, min_tensor_bytes=2048)
    plan = analysis.plan(policy="all", disk=1e9, host_bytes=2048 * 2)
    joint = analysis.rewrite(plan)
    offloads = calls(joint.graph, OFFLOAD)
    count = len(offloads)
    assert [site_of(node).host for node in offloads] == [False] * (count - 2) + [True] * 2
    # Backward needs last what forward made first.
    assert [site_of(node).reload_order for node in offloads] == list(reversed(range(count)))
    assert_same_bits(step.run(joint), step.run())


def test_offloads_for_a_cpu_have_no_host_tier_and_no_order() -> None:
    analysis = analyse(capture_toy("deep", partition=save_all), min_tensor_bytes=2048)
    joint = analysis.rewrite(analysis.plan(policy="all", disk=1e9))
    offloads = calls(joint.graph, OFFLOAD)
    assert len(offloads) > 1
    assert {(site_of(node).host, site_of(node).reload_order) for node in offloads} == {(False, None)}


# Which devices have a host tier


@pytest.mark.parametrize(
    "hardware",
    [toy_hardware(), toy_hardware(copies_block_compute=True), toy_hardware(device="a CPU", copies_block_compute=True)],
)
def test_a_cpu_has_no_host_tier(hardware: Hardware) -> None:
    config = OffloadConfig(hardware=hardware, host_budget_bytes=1 << 30)
    assert config.host_tier(hardware) is None
    assert config.load_hardware("cpu") == dataclasses.replace(hardware, staging_chunk_bytes=CHUNK_BYTES)


def test_a_gpu_has_what_is_left_of_its_staging() -> None:
    """Of 64 MiB, 8 MiB are left for transfers in flight."""
    gpu = toy_hardware(device="toy GPU", staging_bytes=64 * MIB)
    assert OffloadConfig().host_tier(gpu) == HostTier(budget_bytes=56 * MIB)
    assert OffloadConfig(io="kvikio").host_tier(gpu) is None, "transfers bypass staging, so nothing can stay in it"


@pytest.mark.parametrize(
    ("measured_bytes", "uses_kvikio", "options", "planned_bytes"),
    [
        (64 * MIB, False, {}, 64 * MIB),
        (64 * MIB, True, {"io": "kvikio"}, 0),  # whatever the profile was measured with
        (0, True, {}, 0),
        (0, True, {"host_budget_bytes": 16 * MIB}, 0),
        (0, True, {"host_budget_bytes": 16 * MIB, "checksum": True}, 16 * MIB),  # not through KvikIO
        (0, False, {"host_budget_bytes": 16 * MIB}, 16 * MIB),
    ],
)
def test_the_planner_knows_the_staging_on_the_path_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    measured_bytes: int,
    uses_kvikio: bool,
    options: dict[str, Any],
    planned_bytes: int,
) -> None:
    """If a plan counts on staging that is not there, everything arrives late, and then nothing is moved at all."""
    monkeypatch.setattr("ssdtrain_fx.config.may_use_kvikio", lambda io: uses_kvikio)
    gpu = toy_hardware(device="toy GPU", staging_bytes=measured_bytes)
    assert OffloadConfig(hardware=gpu, **options).load_hardware("cuda").staging_bytes == planned_bytes


@pytest.mark.parametrize("budget_bytes", [None, 64 * MIB])
def test_the_planner_knows_how_large_the_chunks_of_staging_are(tmp_path: Path, budget_bytes: int | None) -> None:
    config = EngineConfig(ssd_dir=str(tmp_path), io="posix", host_budget_bytes=budget_bytes)
    with Engine(config, Parts(cuda=FakeCuda())) as engine:
        lane = engine._lanes.of("cuda")
        gpu = toy_hardware(device="toy GPU", staging_bytes=lane.staging_bytes)
        assert OffloadConfig(hardware=gpu).load_hardware("cuda").staging_chunk_bytes == lane.chunk_bytes


def test_the_planner_knows_the_host_budget_of_a_gpu() -> None:
    config = OffloadConfig(hardware=toy_hardware(device="toy GPU"), host_budget_bytes=16 * MIB)
    found = config.load_hardware("cuda")
    assert found == toy_hardware(device="toy GPU", staging_bytes=16 * MIB, staging_chunk_bytes=CHUNK_BYTES)
    assert config.host_tier(found) == HostTier(budget_bytes=14 * MIB)
