"""A hardware profile as a value: storing it, comparing it, and refusing nonsense."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from profiles import HARDWARE
from torch import nn

from ssdtrain_fx import OffloadConfig, explain
from ssdtrain_fx.hardware import Channel, Hardware


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    assert Channel(bytes_per_s=1e9, latency_s=0.5).transfer_s(2_000_000_000) == 2.5


def test_json_round_trip_is_exact_and_stable() -> None:
    again = Hardware.from_json(HARDWARE.to_json())
    assert again == HARDWARE
    assert again.to_json() == HARDWARE.to_json()
    assert again.digest() == HARDWARE.digest()


def test_the_digest_tells_profiles_apart() -> None:
    assert dataclasses.replace(HARDWARE, kernel_s=5e-6).digest() != HARDWARE.digest()


def test_a_machine_that_computes_slower_takes_longer_for_every_node_and_no_transfer() -> None:
    """Nodes are products, a pointwise op, an expensive pointwise op and a reduction."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    slower = HARDWARE.computing_slower(3.0)

    def step_s(hardware: Hardware) -> float:
        config = OffloadConfig(hardware=hardware)
        (graph,) = explain(lambda x: model(x).square().mean(), torch.randn(32, 64), config=config).graphs
        return graph.plan.step_s

    assert step_s(slower) == pytest.approx(3 * step_s(HARDWARE))
    assert (slower.write, slower.read, slower.copy_out) == (HARDWARE.write, HARDWARE.read, HARDWARE.copy_out)
    assert (slower.offload_s, slower.reload_s) == (HARDWARE.offload_s, HARDWARE.reload_s)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes_per_s": 0.0}, "every rate .* must be finite and above 0"),
        ({"flops_per_s": {"float32": math.inf}}, "every rate .* must be finite and above 0"),
        ({"elements_per_s": {"float32": math.nan}}, "every rate .* must be finite and above 0"),
        ({"read": Channel(bytes_per_s=-1.0)}, "every rate .* must be finite and above 0"),
        ({"write": Channel(bytes_per_s=1.0, latency_s=-1e-6)}, "every time .* must be finite and at least 0"),
        ({"kernel_s": math.nan}, "every time .* must be finite and at least 0"),
        ({"staging_chunk_bytes": 0}, "staging_chunk_bytes is 0; expected a number above 0"),
        ({"share_when_both": 0.0}, r"share_when_both is 0.0; expected a number in \(0, 1\]"),
        ({"share_when_both": 1.1}, r"share_when_both is 1.1; expected a number in \(0, 1\]"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HARDWARE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"color": "red"}, {"read": {"rate": 1}}])
def test_text_with_other_fields_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Hardware.from_json(json.dumps({**json.loads(HARDWARE.to_json()), **change}))
