"""The peak that a plan predicts is the peak of what the compiled step allocates.

The oracle adds up the allocations and frees that torch.profiler records. It does not see a graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.testing import toy_hardware

pytestmark = pytest.mark.usefixtures("one_thread")


def allocated_peak_bytes(step: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    peak_bytes = live_bytes = 0
    recorder: Any = recorded.profiler
    events = (event for event in recorder.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes


CASES = [(model, moves) for model in ("llama", "vit", "gpt2", "bert", "t5") for moves in (True, False)]


@pytest.mark.parametrize(
    ("model", "moves"),
    # Each is compiled in some seconds: one fused MLP and one convolution are enough for every day.
    [case if case in CASES[:3:2] else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_what_is_predicted_is_allocated(model: str, moves: bool, ssd_dir: str) -> None:
    torch.manual_seed(0)
    module, make_batch = zoo.build(model, layers=2, hidden=128, batch=8, sequence=128, vocab=512)
    batch = make_batch(torch.Generator().manual_seed(0))
    # With seconds per node and a disk of 1 TB/s, time is no limit.
    config = OffloadConfig(
        ssd_dir=ssd_dir, hardware=toy_hardware(1e12), max_slowdown=10.0, min_tensor_bytes=0 if moves else 1 << 40
    )
    compiled = torch.compile(module, backend=ssdtrain_fx.backend(config))

    def step() -> None:
        compiled(*batch).backward()
        module.zero_grad(set_to_none=True)

    (graph,) = ssdtrain_fx.explain(module, *batch, config=config).graphs
    torch._dynamo.reset()
    step()
    step()
    assert (ssdtrain_fx.statistics().offloads > 0) == moves
    assert allocated_peak_bytes(step) == pytest.approx(graph.plan.peak_after_bytes, rel=0.03)
