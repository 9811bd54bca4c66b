"""Training in several ranks on CPUs with gloo: the bits of plain Inductor, and nothing is left of a killed rank."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ssdtrain_fx.testing import toy_hardware

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "ranks.py"
MANY = [pytest.mark.slow, pytest.mark.timeout(1800)]
PIPELINES = ("gpipe", "1f1b", "1f1b-told", "interleaved", "zero-bubble")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, which knows how to start ranks."""
    specification = importlib.util.spec_from_file_location("benchmark_ranks", PROGRAM)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)  # dataclasses look up their module
    specification.loader.exec_module(module)
    for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SSDTRAIN_OPTIONS"):
        monkeypatch.delenv(variable, raising=False)
    return module


@pytest.fixture
def slow_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a machine with a slow disk."""
    path = tmp_path_factory.mktemp("profile") / "slow_disk.json"
    path.write_text(toy_hardware(disk_bytes_per_s=1e6, kernel_s=1e-3).to_json())
    return path


def small(ranks: ModuleType, ssd_dir: Path, parallelism: str, **changes: Any) -> Any:
    options = {"policy": "all", "min_tensor_bytes": 0, "ssd_dir": str(ssd_dir), **changes.pop("options", {})}
    sizes = {"steps": 4, "layers": 4, "hidden": 64, "batch": 8, "sequence": 16, **changes}
    return ranks.Job(parallelism=parallelism, variant="ssdtrain", options=options, **sizes)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "parallelism", "steps"),
    [
        (2, "ddp", 4),
        *(
            pytest.param(count, parallelism, 50, marks=MANY)
            for count in (2, 4)
            for parallelism in ("ddp", "fsdp", "tensor", *PIPELINES)
        ),
    ],
)
def test_every_bit_of_every_rank_is_equal(
    ranks: ModuleType, tmp_path: Path, slow_disk: Path, count: int, parallelism: str, steps: int
) -> None:
    """Losses, gradients and parameters, after every step. By the plan, all reads have to begin early."""
    job = small(ranks, tmp_path, parallelism, steps=steps, layers=2 * count, options={"hardware": str(slow_disk)})
    found = ranks.compare(job, count)
    assert found["difference"] == ""
    assert len(found["offloads_of_each_rank"]) == count
    assert min(found["offloads_of_each_rank"]) >= steps
    assert list(tmp_path.iterdir()) == []
    if parallelism.startswith("1f1b"):
        assert (found["ahead_bytes"] > 0) is (parallelism == "1f1b-told")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp", "tensor", "gpipe", "1f1b", "interleaved"])
def test_the_peak_of_the_fullest_rank_is_as_planned(
    ranks: ModuleType, tmp_path: Path, count: int, parallelism: str
) -> None:
    """The plans of all graphs of a rank, added up in the order in which their halves run."""
    sizes = {"layers": 8, "hidden": 128, "batch": 16, "sequence": 256}
    found = ranks.compare(small(ranks, tmp_path, parallelism, options={"min_tensor_bytes": 1 << 16}, **sizes), count)
    assert 0.95 < found["activation_peak_bytes"] / found["planned_peak_bytes"] < 1.05


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "parallelism", "kills"),
    [
        (2, "ddp", 1),
        pytest.param(2, "ddp", 20, marks=MANY),
        pytest.param(4, "fsdp", 3, marks=MANY),
        pytest.param(4, "1f1b", 3, marks=MANY),
    ],
)
def test_a_killed_rank_leaves_nothing(
    ranks: ModuleType, tmp_path: Path, count: int, parallelism: str, kills: int
) -> None:
    """The others end with the usual error of the launcher, which names the rank."""
    generator = random.Random(0)
    for _ in range(kills):
        kill = ranks.kill_one(small(ranks, tmp_path, parallelism), count, generator)
        assert kill.exit_code != 0
        assert kill.names_the_rank
        assert (kill.processes_left, kill.files_left) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_that_knows_how_many_micro_batches_it_holds_adds_less_memory(
    ranks: ModuleType, tmp_path: Path, schedule: str
) -> None:
    """By itself, one micro-batch has its peak where nothing can be offloaded."""
    options = {"policy": "auto", "max_slowdown": 0.2, "min_tensor_bytes": 1 << 16}
    sizes = {"steps": 6, "layers": 8, "hidden": 256, "batch": 16, "sequence": 256}
    found = ranks.compare(small(ranks, tmp_path, schedule, options=options, **sizes), 2)
    assert found["difference"] == ""
    plain_bytes, ours_bytes = found["inductor_growth_bytes_of_each_rank"], found["growth_bytes_of_each_rank"]
    assert all(ours < 0.8 * plain for ours, plain in zip(ours_bytes, plain_bytes, strict=True))
    if schedule == "1f1b":  # the last stage holds one micro-batch at a time
        first, last = found["offloads_of_each_rank"]
        assert first > last
