"""Testing: tools to test passes and policies on toy models, in milliseconds and without a GPU.

A test captures a training step, rewrites its joint graph, and checks the graph's text, its results and its memory.

    from ssdtrain_fx.testing import assert_same_bits, capture_step, listing

    def test_my_pass() -> None:
        step = capture_step(model, x)                       # forward and backward, as AOTAutograd traces them
        joint = my_pass(step.join())
        assert_expected_inline(listing(joint.graph), ...)   # the graph, one line per node; `changes` shows less
        assert_same_bits(step.run(joint), step.run())       # outputs and gradients
        assert max(step.measure(joint).live_bytes) < max(step.measure().live_bytes)     # memory of real storages

Training does not use this package.
"""

from ssdtrain_fx.passes.graph.op_targets import find as calls
from ssdtrain_fx.testing.analyse import GraphAnalysis, analyse, toy_hardware
from ssdtrain_fx.testing.capture import CapturedStep, Partition, capture_step, min_cut, save_all
from ssdtrain_fx.testing.compare import assert_same_bits
from ssdtrain_fx.testing.interpret import MeasuredMemory, measure_memory, run
from ssdtrain_fx.testing.listing import changes, listing, named
from ssdtrain_fx.testing.toys import TOYS, capture_toy
from ssdtrain_fx.testing.train import Step, gradients_of, train

__all__ = [
    "TOYS",
    "CapturedStep",
    "GraphAnalysis",
    "MeasuredMemory",
    "Partition",
    "Step",
    "analyse",
    "assert_same_bits",
    "calls",
    "capture_step",
    "capture_toy",
    "changes",
    "gradients_of",
    "listing",
    "measure_memory",
    "min_cut",
    "named",
    "run",
    "save_all",
    "toy_hardware",
    "train",
]
