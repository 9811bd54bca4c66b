"""Sweeps that the tests share: a model of four wide layers, which are traced in seconds."""

from __future__ import annotations

import pytest

from ssdtrain_fx.projection.catalog import find_drive, find_gpu
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.project import Cluster, Workload
from ssdtrain_fx.projection.sweep import Sweep, sweep
from ssdtrain_fx.projection.transformer import Shape

SHAPE = Shape(
    family="llama", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, sequence=4096, tied=False
)
CLUSTER = Cluster(gpu=find_gpu("H100 SXM"), drive=find_drive("Samsung 980 PRO 1TB"))
AXES = {"drives_per_gpu": (1, 0.5, 4, 8), "max_slowdowns": (0.0, 0.02, 0.1)}


@pytest.fixture(scope="session")
def pipeline() -> Workload:
    """Two stages, of which the first one holds two micro-batches."""
    parallelism = Parallelism(data=3, pipeline=2, micro_batches=4)
    return Workload(SHAPE, micro_batch=2, parallelism=parallelism, cluster=CLUSTER)


@pytest.fixture(scope="session")
def pipeline_sweep(pipeline: Workload) -> Sweep:
    return sweep(pipeline, CLUSTER, **AXES)


@pytest.fixture(scope="session")
def alone() -> Workload:
    """One stage, which holds one micro-batch at a time."""
    return Workload(SHAPE, micro_batch=2, parallelism=Parallelism(), cluster=CLUSTER)


@pytest.fixture(scope="session")
def alone_sweep(alone: Workload) -> Sweep:
    return sweep(alone, CLUSTER, **AXES, data=(2, 8))
