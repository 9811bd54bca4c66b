"""A hardware profile with a different number in every field."""

from __future__ import annotations

from ssdtrain_fx.hardware import Channel, Hardware, convolution_key

HARDWARE = Hardware(
    device="cpu",
    flops_per_s={"float32": 2e11, convolution_key("float32"): 4e11},
    memory_bytes_per_s=5e10,
    elements_per_s={"float32": 5e9},
    kernel_s=4e-6,
    write=Channel(bytes_per_s=3e9, latency_s=1e-4),
    read=Channel(bytes_per_s=2e9, latency_s=2e-4),
    share_when_both=0.6,
    copy_out=Channel(bytes_per_s=1e10),
    copy_in=Channel(bytes_per_s=2e10),
    copies_block_compute=True,
    offload_s=5e-5,
    reload_s=6e-5,
    next_offload_s=1e-5,
    next_reload_s=2e-5,
    staging_bytes=12 << 20,
    staging_chunk_bytes=3 << 20,
)
