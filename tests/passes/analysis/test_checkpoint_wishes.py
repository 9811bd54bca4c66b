"""Selective checkpoints may say which results belong on the host."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ssdtrain_fx import OffloadConfig, explain
from ssdtrain_fx.passes.planning.plan import Offload
from ssdtrain_fx.testing import toy_hardware

WIDTH, ROWS = 32, 64
SIZE_BYTES = 4 * WIDTH * ROWS
pytestmark = pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no such policy"
)


def tiers(first: str, others: str, inner: Any, **changes: Any) -> list[str | None]:
    """Where the result of each layer's product goes, None for memory. The first layer has a policy of its own."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def decide(policy: str, context: Any, op: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.addmm.default
        return CheckpointPolicy[policy] if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            decider = functools.partial(decide, others if number else first)
            contexts = functools.partial(create_selective_checkpoint_contexts, decider)
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    torch._dynamo.reset()
    options: dict[str, Any] = {"min_tensor_bytes": 0, **changes}
    report = explain(forward, torch.randn(ROWS, WIDTH), config=OffloadConfig(inner=inner, **options))
    storages = {storage.name: storage.decision for storage in report.plan.storages}
    made = [storages[f"addmm{suffix}"] for suffix in ("", "_1", "_2", "_3")]
    return [decision.tier if isinstance(decision, Offload) else None for decision in made]


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_what_must_be_offloaded_is(inner: Any) -> None:
    """Although the disk is so slow that nothing else moves."""
    slow = toy_hardware(disk_bytes_per_s=1)
    assert tiers("MUST_SAVE", "PREFER_CPU_OFFLOAD", inner, hardware=slow) == [None] * 4
    assert tiers("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD", inner, hardware=slow) == ["ssd", None, None, None]


def test_the_modules_of_the_user_count_more() -> None:
    found = tiers("MUST_CPU_OFFLOAD", "MUST_CPU_OFFLOAD", "aot_eager", modules={"*": "keep"})
    assert found == [None] * 4


@pytest.mark.parametrize(("policy", "expected"), [("MUST_SAVE", "ssd"), ("PREFER_CPU_OFFLOAD", "host")])
def test_the_host_tier_takes_it_before_the_others(policy: str, expected: str) -> None:
    """The tier has room for one of them. By itself, the plan holds a later layer there."""
    gpu = toy_hardware(disk_bytes_per_s=1e12, device="toy GPU", staging_bytes=8 << 20)
    found = tiers(policy, "MUST_SAVE", "aot_eager", hardware=gpu, policy="all")
    assert found[0] == expected
    assert "host" in found
