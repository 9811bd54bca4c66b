"""On a GPU, ops take time of the host, which it has while the GPU computes."""

from __future__ import annotations

import dataclasses

import pytest
from problems import make_hardware

from ssdtrain_fx.passes.planning.transfer_problem import HOST_IDLE_SHARE, Movable, TransferProblem

MIB = 1 << 20
GPU = make_hardware(device="a GPU", offload_s=3e-3, reload_s=2e-3, kernel_s=1e-3)


def pose(sizes: list[int], *, node_s: float = 0.1, device: str = "a GPU") -> TransferProblem:
    """Ten nodes, five of them in forward."""
    return TransferProblem(
        node_s=(node_s,) * 10,
        marker=5,
        fixed_live_bytes=(0,) * 10,
        movables=tuple(
            Movable(idx=idx, size_bytes=size, live_start=0, offload=1, earliest_release=2, wait=8, live_end=9)
            for idx, size in enumerate(sizes)
        ),
        hardware=dataclasses.replace(GPU, device=device, copies_block_compute=device == "cpu"),
    )


def test_ops_that_fit_into_the_time_of_the_host_delay_no_gpu() -> None:
    problem = pose([MIB] * 100)  # 0.5 s of ops; the host has 0.99 s
    assert problem.blocks_out_s(MIB) == problem.blocks_in_s(MIB) == 0


def test_the_largest_storages_get_the_time_of_the_host() -> None:
    problem = pose([MIB] * 100 + [2 * MIB] * 60 + [4 * MIB] * 100)
    idle_s = HOST_IDLE_SHARE * (1 - 10e-3)
    left = 1 - (idle_s - 0.5) / 0.3
    assert 0 < left < 1
    assert problem.blocks_out_s(4 * MIB) == 0
    assert problem.blocks_out_s(2 * MIB) == pytest.approx(left * 3e-3)
    assert problem.blocks_in_s(2 * MIB) == pytest.approx(left * 2e-3)
    assert problem.blocks_out_s(MIB) == pytest.approx(3e-3)


def test_a_host_that_can_hardly_launch_the_kernels_has_no_time() -> None:
    problem = pose([MIB], node_s=1e-3)
    assert problem.blocks_out_s(MIB) == pytest.approx(3e-3)


def test_on_a_cpu_the_ops_run_where_the_kernels_run() -> None:
    assert pose([MIB] * 100, device="cpu").blocks_out_s(MIB) >= 3e-3
