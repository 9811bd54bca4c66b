"""Predicted against allocated: the activation peak of a plan, and what the compiled step really takes from torch.

    python benchmarks/peaks.py --model gpt2 --model bert --model t5 --model llama --disk-gb-per-s 2

The peak is the sum of all allocations and frees that torch.profiler records over one step, not resident memory: so it
is exact, and what the C library holds back does not count. With ``--inner aot_eager`` every op runs by itself; what an
op allocates for itself is known to nobody and counts as the difference.

What is moved, and with it both peaks, depends on the hardware profile. ``--disk-gb-per-s`` has the plan made for a disk
of that rate. When this machine is too slow for the plan, the engine keeps tensors in memory to save time: then the
allocated peak says nothing about the plan, and ``kept`` is not 0.
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
from ssdtrain_fx.runtime import engine
from ssdtrain_fx.studies.zoo import build
from ssdtrain_fx.units import format_bytes


def allocated_peak_bytes(model: torch.nn.Module, batch: tuple[Any, ...], config: OffloadConfig) -> tuple[int, int]:
    """Highest sum of what torch allocates over one step, above what it had before; tensors kept to save time in it."""
    torch._dynamo.reset()
    engine.prepare_heap = lambda: sys.maxsize  # all reloads are torch's: else those from 32 MiB on are not recorded
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
    """The profile of this machine, with a disk of this rate in both directions if one is given."""
    profile = OffloadConfig().load_hardware("cpu")
    if disk_gb_per_s is None:
        return profile
    disk = Channel(bytes_per_s=disk_gb_per_s * 1e9)
    return dataclasses.replace(profile, write=disk, read=disk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="again for more models (default: gpt2)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--max-slowdown", type=float, action="append", help="again for more (default: 0.3)")
    parser.add_argument("--disk-gb-per-s", type=float, help="plan for such a disk (default: the one that is there)")
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
