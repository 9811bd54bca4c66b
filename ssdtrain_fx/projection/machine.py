"""A hardware profile of a machine that one does not have, from the figures of data sheets.

No program reaches the peaks of a data sheet. What it reaches of them is a :class:`Efficiency`, whose defaults come from
one machine that was measured, where they could be. Where they could not, they are guesses, and say so.
"""

from __future__ import annotations

import dataclasses

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.projection.catalog import Drive, Gpu
from ssdtrain_fx.runtime.memory.staging import pinned_chunk_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of nominal rates that training reaches.

    Raises:
        ConfigError: a share is not above 0 and at most 1.
    """

    products: float = 0.6
    """Matrix products. With this, a Llama-3 405B on 8,192 H100 takes 1.01 of the time that was published. One large
    product alone reached 0.9 on an H200, and those of small models reach less."""
    memory: float = 0.8
    """Kernels that only move memory. A guess."""
    host: float = 0.86
    """Copies to pinned host memory beside computation, as measured on an H200."""
    drives: float = 0.9
    """Large sequential transfers of files. A guess; drives for clients are slower once their cache is full."""
    network: float = 0.8
    """Collectives, of the rate of the link. A guess."""

    def __post_init__(self) -> None:
        for name, share in dataclasses.asdict(self).items():
            if not 0 < share <= 1:
                raise ConfigError(f"The efficiency of {name} is {share}; expected a share above 0, at most 1.")


KERNEL_S = 5e-6
"""The launch of a kernel. A guess."""
OFFLOAD_S = 150e-6
RELOAD_S = 63e-6
"""Host time of the ops of one tensor, as measured on an H200."""
SFU_SHARE = 0.25
"""Expensive functions (``exp``, ``tanh``) per float32 operation: GPUs have one special function unit for four lanes."""
STAGING_BYTES = 1 << 30
"""Pinned memory between a GPU and its drives: the default of ``host_budget_bytes``."""
SHARE_WHEN_BOTH = 0.6
"""Of the rate of a drive while it reads and writes. A guess."""


def machine(
    gpu: Gpu, drive: Drive | None, drives_per_gpu: float = 1, *, efficiency: Efficiency | None = None
) -> Hardware:
    """The profile of one GPU with its share of the drives, which are striped.

    Args:
        drive: None: there is none, and nothing can be offloaded to one.
        drives_per_gpu: may be a fraction: several GPUs share a drive.

    Raises:
        ConfigError: ``drives_per_gpu`` is not above 0.
    """
    if not drives_per_gpu > 0:
        raise ConfigError(f"There are {drives_per_gpu} drives per GPU; expected more than 0.")
    efficiency = efficiency or Efficiency()
    to_host = efficiency.host * gpu.host_bytes_per_s
    write = read = 1.0
    if drive is not None:
        share = efficiency.drives * drives_per_gpu
        write, read = (min(share * rate, to_host) for rate in (drive.write_bytes_per_s, drive.read_bytes_per_s))
    float32 = gpu.flops_per_s["float32"]
    return Hardware(
        device=gpu.name,
        flops_per_s={name: efficiency.products * rate for name, rate in gpu.flops_per_s.items() if name != "fp8"},
        memory_bytes_per_s=efficiency.memory * gpu.memory_bytes_per_s,
        elements_per_s=dict.fromkeys(("float32", "bfloat16", "float16"), SFU_SHARE * float32 / 2),
        kernel_s=KERNEL_S,
        write=Channel(bytes_per_s=write, latency_s=1e-4),
        read=Channel(bytes_per_s=read, latency_s=1e-4),
        share_when_both=SHARE_WHEN_BOTH,
        copy_out=Channel(bytes_per_s=to_host),
        copy_in=Channel(bytes_per_s=to_host),
        copies_block_compute=False,
        offload_s=OFFLOAD_S,
        reload_s=RELOAD_S,
        staging_bytes=STAGING_BYTES,
        staging_chunk_bytes=pinned_chunk_bytes(STAGING_BYTES),
    )
