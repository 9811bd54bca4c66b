"""Same loss and same gradients, to the bit, as the same compiler without offloading."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch._inductor.config as inductor_config
from steps import FAST_DISK, Autocast, counted, small_model

from ssdtrain_fx import OffloadConfig, backend, explain
from ssdtrain_fx.hardware import Channel
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.passes.planning.step_budget import FRAGMENTATION
from ssdtrain_fx.testing import assert_same_bits, train

MODELS = ["gpt2", "bert", "t5", "llama", "mixtral", "encoder", "conv"]

Inner = Literal["inductor", "aot_eager"]


def check(
    name: str,
    *,
    inner: Inner = "inductor",
    dropout: float = 0.0,
    fallback_random: bool = False,
    autocast: bool = False,
    **options: Any,
) -> None:
    model, batches = small_model(name, dropout=dropout)
    if autocast:
        model = Autocast(model)
    # With the profile of the test machine, "auto" would decide that offloading these small tensors takes too much time.
    config = OffloadConfig(inner=inner, **{"policy": "all", "min_tensor_bytes": 0, "hardware": FAST_DISK, **options})
    with inductor_config.patch(fallback_random=fallback_random):
        expected = train(model, batches, inner)
        done = counted(lambda: assert_same_bits(train(model, batches, backend(config)), expected))
    # Gradients in float32 are the peak of these models in bfloat16, so "auto" may have nothing to move.
    assert done.offloads > 0 or (autocast and options.get("policy") == "auto")
    assert done.offloads == done.reloads


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_node_by_node_all_offloaded(name: str, dropout: float, autocast: bool) -> None:
    check(name, inner="aot_eager", dropout=dropout, autocast=autocast)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("gpt2", "encoder") else pytest.mark.slow) for name in MODELS]
)
def test_inductor_all_offloaded_with_dropout(name: str) -> None:
    check(name, dropout=0.1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "encoder"])
def test_inductor_with_eager_random_numbers_and_autocast(name: str) -> None:
    check(name, dropout=0.1, fallback_random=True, autocast=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", ["encoder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "conv"))]
)
def test_inductor_with_the_auto_policy(name: str) -> None:
    check(name, policy="auto", dropout=0.1)


ON_A_GPU = dataclasses.replace(FAST_DISK, device="toy GPU", staging_bytes=16 << 20)
"""As if the tensors were on a GPU, with a host tier of seven chunks. The CPU engine still writes them to the file."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_plans_with_a_host_tier(inner: Inner) -> None:
    model, batches = small_model("gpt2", dropout=0.1)
    config = OffloadConfig(inner=inner, policy="all", min_tensor_bytes=0, hardware=ON_A_GPU)
    (graph,) = explain(model, *batches[0], config=config).graphs
    assert 0 < len(graph.plan.on_host) < len(graph.plan.offloaded)
    assert "host=true;reload_order=0" in graph.diff()
    expected = train(model, batches, inner)
    done = counted(lambda: assert_same_bits(train(model, batches, backend(config)), expected))
    assert done.offloads == len(batches) * len(graph.plan.offloaded)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_measuring_while_compiling_leaves_random_numbers_alone(
    inner: Inner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops, dropout among them, are measured between seeding and the first dropout of the step."""
    monkeypatch.setenv("SSDTRAIN_PROFILE_DIR", str(tmp_path))
    check("encoder", inner=inner, dropout=0.1, fallback_random=True, costs="measured")


COPIES_ARE_SLOW = dataclasses.replace(FAST_DISK, copies_block_compute=True, copy_out=Channel(bytes_per_s=1e6))
"""Every kernel is faster than offloading its result."""


def check_mixed_plan(name: str, inner: Inner, *, dropout: float = 0.1, autocast: bool = False) -> None:
    """Storages that are cheaper to recompute than to offload are recomputed, also from reloaded storages."""
    model, batches = small_model(name, dropout=dropout)
    if autocast:
        model = Autocast(model)

    def plan_of(config: OffloadConfig) -> Plan:
        (graph,) = explain(model, *batches[0], config=config).graphs
        return graph.plan

    config = OffloadConfig(inner=inner, min_tensor_bytes=0, hardware=COPIES_ARE_SLOW, max_slowdown=1e9)
    # At the floor, there may be no room for recomputed storages. Far above it, nothing needs to be offloaded. The peak
    # without offloading is 1.6 % above the floor for one of these models, and 65 % for another.
    plan = plan_of(config)
    budget_bytes = plan.floor_bytes + 0.15 * (plan.peak_before_bytes - plan.floor_bytes)
    config = dataclasses.replace(config, memory_budget_bytes=math.ceil(FRAGMENTATION * budget_bytes))
    plan = plan_of(config)
    assert plan.recomputed and plan.offloaded
    expected = train(model, batches, inner)
    done = counted(lambda: assert_same_bits(train(model, batches, backend(config)), expected))
    assert done.offloads == len(batches) * len(plan.offloaded)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "inner"),
    [("encoder", "inductor"), *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("gpt2", "bert"))],
)
def test_mixed_plans(name: str, inner: Inner) -> None:
    check_mixed_plan(name, inner)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "encoder"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_mixed_plans_in_full(name: str, inner: Inner, dropout: float) -> None:
    check_mixed_plan(name, inner, dropout=dropout)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_mixed_plans_under_autocast(name: str) -> None:
    check_mixed_plan(name, "aot_eager", autocast=True)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["auto", "all"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fallback_random", [False, True], ids=["inductor_random", "eager_random"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_inductor_in_full(name: str, dropout: float, fallback_random: bool, autocast: bool, policy: str) -> None:
    check(name, dropout=dropout, fallback_random=fallback_random, autocast=autocast, policy=policy)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_inductor_with_default_options_on_tensors_that_are_large_enough(name: str) -> None:
    from ssdtrain_fx.studies import zoo

    torch.manual_seed(0)
    model, make_batch = zoo.build(name, layers=2, hidden=128, sequence=256, vocab=256, batch=8)
    generator = torch.Generator().manual_seed(1)
    batches = [make_batch(generator) for _ in range(3)]
    expected = train(model, batches, "inductor")
    done = counted(
        lambda: assert_same_bits(train(model, batches, backend(OffloadConfig(hardware=FAST_DISK))), expected)
    )
    assert done.offloads > 0


@pytest.mark.usefixtures("one_thread")
def test_channels_last_input_keeps_its_layout_through_the_disk() -> None:
    """Hazard 9, second half: a convolution net reloaded its channels_last activations as contiguous."""
    model, batches = small_model("conv")
    batches = [tuple(_channels_last(tensor) for tensor in batch) for batch in batches]
    expected = train(model, batches, "inductor")
    config = OffloadConfig(policy="all", min_tensor_bytes=0)
    assert_same_bits(train(model, batches, backend(config)), expected)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@pytest.mark.usefixtures("one_thread")
def test_dynamic_shapes() -> None:
    model, _ = small_model("encoder", layers=1)
    width = 64
    batches = [(torch.randn(2, length, width), torch.randn(2, length, width)) for length in (16, 32, 24)]
    expected = train(model, batches, "inductor", dynamic=True)
    config = OffloadConfig(policy="all", min_tensor_bytes=0)
    done = counted(lambda: assert_same_bits(train(model, batches, backend(config), dynamic=True), expected))
    assert done.offloads > 0


@pytest.mark.usefixtures("one_thread")
def test_two_configurations_in_one_process_do_not_share_compiled_code() -> None:
    """Hazard 5: a plan for one configuration must never be used for another one, whatever cache is warm."""
    model, batches = small_model("encoder", dropout=0.1)
    expected = train(model, batches, "inductor")
    everything = OffloadConfig(policy="all", min_tensor_bytes=0)
    nothing = OffloadConfig(policy="all", min_tensor_bytes=1 << 40)
    for config, expect_offloads in [(everything, True), (nothing, False), (everything, True)]:
        done = counted(lambda config=config: assert_same_bits(train(model, batches, backend(config)), expected))
        assert (done.offloads > 0) == expect_offloads


_ANOTHER_PROCESS = """
import sys
import torch
from steps import FAST_DISK, counted, small_model
from ssdtrain_fx import OffloadConfig, backend
from ssdtrain_fx.testing import assert_same_bits, train
torch.set_num_threads(1)
model, batches = small_model("encoder", dropout=0.1)
expected = train(model, batches, "inductor")
config = OffloadConfig(policy="all", min_tensor_bytes=int(sys.argv[1]))
done = counted(lambda: assert_same_bits(train(model, batches, backend(config)), expected))
hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
print("offloads", done.offloads, "hits", hits)
"""


def _in_another_process(cache: Path, min_tensor_bytes: int) -> list[str]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, "-c", _ANOTHER_PROCESS, str(min_tensor_bytes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_warm_compile_cache_in_other_processes(tmp_path: Path) -> None:
    """The second process compiles nothing, so no pass runs. The third has another plan and must miss the cache."""
    cold = _in_another_process(tmp_path, 0)
    warm = _in_another_process(tmp_path, 0)
    other = _in_another_process(tmp_path, 1 << 12)
    assert int(cold[1]) == int(warm[1]) > int(other[1]) > 0
    assert int(cold[3]) == 0
    assert int(warm[3]) > 0


class _Branches(torch.nn.Module):
    """The result of the first layer is saved, and is an argument of a branch, which has room for it in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        branches = (lambda x: torch.sin(x).sum(0)), (lambda x: torch.cos(x).sum(0))
        y = torch.cond(x.mean() > -9, *branches, (x,))
        return torch.exp(0.1 * self.second(x)).sum() + y.square().sum()


@pytest.mark.usefixtures("one_thread")
def test_a_branch_does_not_overwrite_its_arguments() -> None:
    torch.manual_seed(0)
    model, batches = _Branches(), [(torch.randn(64, 128),) for _ in range(2)]
    config = OffloadConfig(policy="all", min_tensor_bytes=0, hardware=FAST_DISK)
    expected = train(model, batches, "inductor")
    done = counted(lambda: assert_same_bits(train(model, batches, backend(config)), expected))
    assert done.offloads > 0
