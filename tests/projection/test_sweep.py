"""Sweeps: the grid, what must rise or fall along its axes, and its JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time

import pytest

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.projection.catalog import find_drive, find_gpu
from ssdtrain_fx.projection.models import MODELS, find_model
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.project import Cluster, Projection, Workload
from ssdtrain_fx.projection.sweep import MODEL_SOURCES, Sweep, sweep

DRIVES, SLOWDOWNS, DATA = range(3)


@pytest.fixture(params=["pipeline", "alone"])
def both(request: pytest.FixtureRequest) -> tuple[Workload, Sweep]:
    """A workload and its sweep."""
    return request.getfixturevalue(request.param), request.getfixturevalue(f"{request.param}_sweep")


def neighbours(found: Sweep, axis: int) -> list[tuple[Projection, Projection]]:
    """All pairs of which the second one is a step further along an axis."""
    sizes = len(found.drives_per_gpu), len(found.max_slowdowns), len(found.data)
    step = [int(number == axis) for number in range(3)]
    return [
        (found.at(*point), found.at(*(one + more for one, more in zip(point, step, strict=True))))
        for point in itertools.product(*(range(size - more) for size, more in zip(sizes, step, strict=True)))
    ]


def test_the_grid_is_complete_and_its_axes_rise(both: tuple[Workload, Sweep]) -> None:
    _, found = both
    assert found.drives_per_gpu == (0.5, 1, 4, 8) and found.max_slowdowns == (0.0, 0.02, 0.1)
    wanted = list(itertools.product(found.drives_per_gpu, found.max_slowdowns, found.data))
    assert wanted == [(one.cluster.drives_per_gpu, one.max_slowdown, one.parallelism.data) for one in found.projections]
    assert found.at(2, 1, 1) is found.projections[(2 * 3 + 1) * len(found.data) + 1]


def test_clusters_have_up_to_16384_gpus_and_their_own_number(pipeline_sweep: Sweep, alone_sweep: Sweep) -> None:
    assert pipeline_sweep.data == (1, 2, 3, *(2**power for power in range(2, 14)))
    assert pipeline_sweep.projections[-1].parallelism.gpus == 16_384
    assert alone_sweep.data == (1, 2, 8), "what is asked for, and that of the workload"


def test_a_larger_cluster_keeps_its_size(pipeline: Workload, pipeline_sweep: Sweep) -> None:
    huge = pipeline.with_parallelism(data=20_000)
    found = sweep(huge, pipeline_sweep.cluster, drives_per_gpu=[1], max_slowdowns=[0.0])
    assert found.data[-2:] == (8192, 20_000)


def test_every_point_equals_a_single_projection(both: tuple[Workload, Sweep]) -> None:
    workload, found = both
    for drives, slowdown, data in [(0, 0, 0), (1, 2, 1), (3, 1, 2)]:
        cluster = dataclasses.replace(found.cluster, drives_per_gpu=found.drives_per_gpu[drives])
        single = workload.with_parallelism(data=found.data[data])
        single._choices = {}  # planned again
        assert single.project(cluster, max_slowdown=found.max_slowdowns[slowdown]) == found.at(drives, slowdown, data)


@pytest.mark.parametrize("axis", [DRIVES, SLOWDOWNS])
def test_drives_and_time_never_raise_the_activations_of_a_pipeline(pipeline_sweep: Sweep, axis: int) -> None:
    """Its plans move as many bytes as possible. Those of one micro-batch alone are searched for, and no such order is
    guaranteed: with slow drives, more is copied back from staging before it is written."""
    for less, more in neighbours(pipeline_sweep, axis):
        assert more.offload.activation_bytes <= less.offload.activation_bytes
        assert more.offload.written_bytes >= less.offload.written_bytes


def test_offloading_lowers_the_activations_within_the_allowed_time(both: tuple[Workload, Sweep]) -> None:
    workload, found = both
    for one in found.projections:
        assert one.offload.activation_bytes <= one.keep.activation_bytes
        allowed_s = one.max_slowdown * workload.parallelism.slots * workload._problem.step_s
        assert one.keep.exposed_s == 0 and one.offload.exposed_s <= allowed_s + 1e-9


def test_drives_write_no_faster_than_they_can(both: tuple[Workload, Sweep]) -> None:
    """Also where they are so slow that most storages are needed again before their write begins."""
    _, found = both
    for one in found.projections:
        rate = one.cluster.drive.write_bytes_per_s * one.cluster.drives_per_gpu
        assert one.offload.written_bytes / one.offload.step_s <= rate


def test_what_the_number_of_gpus_changes(both: tuple[Workload, Sweep]) -> None:
    _, found = both
    for fewer, more in neighbours(found, DATA):
        for one, other in ((fewer.keep, more.keep), (fewer.offload, more.offload)):
            assert one.activation_bytes == other.activation_bytes and one.written_bytes == other.written_bytes
            assert one.tokens_per_s < other.tokens_per_s
        if fewer.parallelism.data > 1:
            assert more.state_bytes < fewer.state_bytes


def test_the_json_has_every_number_of_every_point(both: tuple[Workload, Sweep]) -> None:
    _, found = both
    plain = json.loads(found.to_json())
    assert plain["schema"] == "ssdtrain_fx.sweep/1"
    axes = plain["axes"]
    assert axes["drives_per_gpu"] == [0.5, 1, 4, 8] and axes["max_slowdown_shares"] == [0.0, 0.02, 0.1]
    assert axes["data_parallel_gpus"] == list(found.data)
    assert len(plain["points"]) == len(found.projections)
    for point, projection in zip(plain["points"], found.projections, strict=True):
        assert point["data_parallel_gpus"] == projection.parallelism.data
        assert point["gpus"] == projection.parallelism.gpus
        assert point["bubble_share"] == projection.parallelism.bubble
        assert point["lifetime_s"] == projection.lifetime_s
        assert point["drive_cost_usd"] == projection.drive_cost_usd
        for way, outcome in (("keep", projection.keep), ("offload", projection.offload)):
            assert point[way]["activation_bytes"] == outcome.activation_bytes
            assert point[way]["memory_bytes"] == outcome.memory_bytes
            assert point[way]["step_s"] == outcome.step_s
            assert point[way]["written_bytes_per_gpu_and_day"] == outcome.written_bytes_per_day


def test_equal_sweeps_give_equal_json(alone: Workload, alone_sweep: Sweep) -> None:
    again = sweep(alone, alone_sweep.cluster, drives_per_gpu=(8, 4, 1, 0.5), max_slowdowns=(0.1, 0, 0.02), data=(8, 2))
    assert again.to_json() == alone_sweep.to_json()


def test_an_endless_lifetime_and_an_unknown_price_are_null(alone_sweep: Sweep) -> None:
    first, *others = alone_sweep.projections
    without_price = dataclasses.replace(first.cluster, drive=find_drive("Samsung 980 PRO 2TB"))
    idle = dataclasses.replace(
        first, cluster=without_price, offload=dataclasses.replace(first.offload, written_bytes=0)
    )
    changed = dataclasses.replace(alone_sweep, projections=(idle, *others))
    points = json.loads(changed.to_json())["points"]
    assert points[0]["lifetime_s"] is points[0]["drive_cost_usd"] is None
    assert points[1]["lifetime_s"] > 0 and points[1]["drive_cost_usd"] == 229.99


def test_a_published_model_is_named_with_its_source(pipeline: Workload, alone_sweep: Sweep) -> None:
    assert MODEL_SOURCES.keys() == MODELS.keys()
    assert alone_sweep.model == "llama, 4 layers of 4096"
    assert json.loads(alone_sweep.to_json())["model"]["source"] is None
    named = dataclasses.replace(alone_sweep, model="llama-3-8b")
    assert json.loads(named.to_json())["model"]["source"] is None, "another shape"
    found = sweep(pipeline, alone_sweep.cluster, model="mine", drives_per_gpu=[1], max_slowdowns=[0.0])
    assert found.model == "mine"


def test_an_axis_without_values_is_refused(alone: Workload, alone_sweep: Sweep) -> None:
    with pytest.raises(ConfigError, match="no value of drives_per_gpu; expected at least one"):
        sweep(alone, alone_sweep.cluster, drives_per_gpu=[])
    with pytest.raises(ConfigError, match="no value of max_slowdowns; expected at least one"):
        sweep(alone, alone_sweep.cluster, max_slowdowns=[])


@pytest.mark.slow
def test_a_whole_sweep_takes_seconds() -> None:
    cluster = Cluster(gpu=find_gpu("H100 SXM"), drive=find_drive("Samsung 990 PRO 4TB"))
    parallelism = Parallelism(data=32, tensor=8, pipeline=4, micro_batches=16)
    workload = Workload(find_model("llama-3-70b"), micro_batch=1, parallelism=parallelism, cluster=cluster)
    before_s = time.perf_counter()
    found = sweep(workload, cluster)
    assert time.perf_counter() - before_s < 15
    assert len(found.projections) == 5 * 5 * 10
    assert found.model == "llama-3-70b"
    assert "2407.21783" in json.loads(found.to_json())["model"]["source"]
