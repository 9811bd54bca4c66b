"""Compare the predicted activation peak of a plan with the memory that the compiled step allocates from torch.

    python benchmarks/peaks.py --model gpt2 --model bert --model t5 --model llama --disk-gb-per-s 2

The peak is computed from all allocations and frees that torch.profiler records over one step, not from resident memory.
So it is exact, and does not include free memory that the process holds back. With ``--inner aot_eager`` every op runs
separately. The temporary memory of an op is then unknown to the plan, and appears in the difference.

The storages that move, and so both peaks, depend on the hardware profile. With ``--disk-gb-per-s`` the plan is made for
a disk of that rate. If this machine is too slow for the plan, the engine keeps tensors in memory to save time. Then
``kept`` is not 0, and the allocated peak says nothing about the plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.hardware import Channel, Hardware
from ssdtrain_fx.studies.zoo import build
from ssdtrain_fx.units import format_bytes


def allocated_peak_bytes(model: torch.nn.Module, batch: tuple[Any, ...], config: OffloadConfig) -> tuple[int, int]:
    """Return the peak of torch's memory in one step above the memory before it, and the tensors kept to save time."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=ssdtrain_fx.backend(config))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(*batch).backward()
        model.zero_grad(set_to_none=True)

    step()
    step()
    kept_before = ssdtrain_fx.statistics().kept_for_time
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    results: Any = recorded.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    peak_bytes = live_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes, ssdtrain_fx.statistics().kept_for_time - kept_before


def hardware(disk_gb_per_s: float | None) -> Hardware:
    """Return the profile of this machine, with a disk of the given rate in both directions if there is one."""
    profile = OffloadConfig().load_hardware("cpu")
    if disk_gb_per_s is None:
        return profile
    disk = Channel(bytes_per_s=disk_gb_per_s * 1e9)
    return dataclasses.replace(profile, write=disk, read=disk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be repeated (default: gpt2)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--max-slowdown", type=float, action="append", help="may be repeated (default: 0.3)")
    parser.add_argument(
        "--disk-gb-per-s", type=float, help="plan for a disk of this rate (default: this machine's disk)"
    )
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="inductor")
    chosen = parser.parse_args()
    table = Table("model", "max_slowdown", "nothing moved", "predicted", "allocated", "allocated / predicted", "kept")
    for name in chosen.model or ["gpt2"]:
        torch.manual_seed(0)
        sizes = {key: getattr(chosen, key) for key in ("layers", "hidden", "batch", "sequence", "vocab")}
        model, make_batch = build(name, **sizes)
        batch = make_batch(torch.Generator().manual_seed(0))
        for max_slowdown in chosen.max_slowdown or [0.3]:
            config = OffloadConfig(
                max_slowdown=max_slowdown, inner=chosen.inner, hardware=hardware(chosen.disk_gb_per_s)
            )
            (graph,) = ssdtrain_fx.explain(model, *batch, config=config).graphs
            found_bytes, kept = allocated_peak_bytes(model, batch, config)
            predicted_bytes = graph.plan.peak_after_bytes
            table.add_row(
                name,
                f"{max_slowdown:g}",
                format_bytes(graph.plan.peak_before_bytes),
                format_bytes(predicted_bytes),
                format_bytes(found_bytes),
                f"{found_bytes / predicted_bytes:.3f}",
                str(kept),
            )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
