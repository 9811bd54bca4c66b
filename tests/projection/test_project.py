"""Projections: the formulas by hand, limits that must hold, and the command."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from ssdtrain_fx.cli import app
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.projection.catalog import find_drive, find_gpu
from ssdtrain_fx.projection.machine import Efficiency, machine
from ssdtrain_fx.projection.models import MODELS, find_model
from ssdtrain_fx.projection.parallelism import Parallelism
from ssdtrain_fx.projection.project import CONTEXT_BYTES, Cluster, Projection, Workload
from ssdtrain_fx.projection.sweep import sweep
from ssdtrain_fx.projection.trace import trace
from ssdtrain_fx.projection.transformer import Shape, Transformer, check_shares, flops_per_token

SHAPE = Shape(
    family="llama", layers=8, hidden=512, heads=8, kv_heads=2, ffn=1536, vocab=2048, sequence=2048, tied=False
)
CLUSTER = Cluster(gpu=find_gpu("a100 sxm"), drive=find_drive("980 pro 1tb"), drives_per_gpu=4)


@functools.cache
def workload(**parallelism: Any) -> Workload:
    return Workload(SHAPE, micro_batch=4, parallelism=Parallelism(**parallelism), cluster=CLUSTER)


def projected(cluster: Cluster = CLUSTER, *, max_slowdown: float = 0.05, **parallelism: Any) -> Projection:
    return workload(**parallelism).project(cluster, max_slowdown=max_slowdown)


def test_one_gpu() -> None:
    found = projected()
    keep, offload = found.keep, found.offload
    assert offload.activation_bytes < keep.activation_bytes
    assert 0 <= offload.exposed_s <= 0.05 * keep.step_s
    assert offload.step_s == pytest.approx(keep.step_s + offload.exposed_s)
    assert keep.exposed_s == keep.written_bytes == 0
    assert found.communication_s == 0
    assert found.state_bytes == SHAPE.parameters * 16
    assert keep.memory_bytes == keep.activation_bytes + found.state_bytes + CONTEXT_BYTES
    assert keep.tokens_per_s == pytest.approx(4 * 2048 / keep.step_s)
    rated = 4 * CLUSTER.drive.endurance_bytes
    assert found.lifetime_s == pytest.approx(rated / (offload.written_bytes_per_day / 86400))
    assert found.drive_cost_usd == pytest.approx(4 * 229.99)


def test_drives_that_write_nothing_last_for_ever_and_need_no_price() -> None:
    unpriced = dataclasses.replace(CLUSTER, drive=dataclasses.replace(CLUSTER.drive, price_usd=None))
    found = dataclasses.replace(projected(), cluster=unpriced, offload=projected().keep)
    assert found.lifetime_s == math.inf
    assert found.drive_cost_usd is None


def test_more_drives_and_more_time_need_less_memory() -> None:
    """Within the few percent by which the planner misses the best plan."""

    def peak(count: float, slowdown: float) -> int:
        cluster = dataclasses.replace(CLUSTER, drives_per_gpu=count)
        return projected(cluster, max_slowdown=slowdown).offload.activation_bytes

    peaks = [[peak(count, slowdown) for count in (0.5, 1, 2, 4, 8)] for slowdown in (0.0, 0.05, 0.2)]
    for row in (*peaks, *zip(*peaks, strict=True)):
        assert all(after <= 1.03 * before for before, after in itertools.pairwise(row))
    assert peaks[2][4] < 0.9 * peaks[0][0]


def test_pinned_memory_takes_what_drives_cannot() -> None:
    one = projected(dataclasses.replace(CLUSTER, drives_per_gpu=0.5))
    both = projected(dataclasses.replace(CLUSTER, drives_per_gpu=0.5, host_bytes_per_gpu=8 << 30))
    assert both.offload.activation_bytes < one.offload.activation_bytes
    assert 0 < both.offload.host_bytes <= 8 << 30


def test_pipelines() -> None:
    parallelism = Parallelism(pipeline=4, micro_batches=8)
    assert parallelism.bubble == pytest.approx(3 / 11)
    assert Parallelism(pipeline=4, micro_batches=8, chunks=2).bubble == pytest.approx(3 / (2 * 8 + 3))
    assert (parallelism.in_flight, Parallelism(pipeline=4, micro_batches=2).in_flight) == (4, 2)
    assert Parallelism(pipeline=4, micro_batches=99, chunks=2).in_flight == 5.5
    found = projected(pipeline=4, micro_batches=8)
    problem = workload(pipeline=4, micro_batches=8)._problem
    saved = int(problem.kept_live_bytes[problem.marker])
    assert found.keep.activation_bytes == int(problem.kept_live_bytes.max()) + 3 * saved
    last = dataclasses.replace(SHAPE, layers=2)  # of the stages, with the head
    last_s = trace(last, micro_batch=4, hardware=machine(CLUSTER.gpu, CLUSTER.drive)).step_s
    assert last_s > 1.1 * problem.step_s
    assert found.keep.step_s - found.update_s == pytest.approx(11 * last_s, rel=0.01)
    moved = found.offload.written_bytes // 8
    assert found.offload.activation_bytes <= int(problem.kept_live_bytes.max()) + 3 * (saved - moved)
    assert found.offload.exposed_s == 0  # the first stage has time while the others wait for the last one


def test_sharing_of_states() -> None:
    one, shared = projected(), workload().with_parallelism(data=4).project(CLUSTER)
    whole = workload().with_parallelism(data=4, fsdp=False).project(CLUSTER)
    head = SHAPE.vocab * SHAPE.hidden
    unshared = 2 * SHAPE.layer_parameters + 2 * head + max(SHAPE.layer_parameters, head)
    assert shared.state_bytes == 12 * SHAPE.parameters // 4 + 2 * (2 * SHAPE.parameters // 4 + unshared)
    assert whole.state_bytes == one.state_bytes
    assert shared.keep.activation_bytes == one.keep.activation_bytes
    staged = workload(pipeline=4).with_parallelism(data=2).project(CLUSTER)
    stage = (SHAPE.parameters - SHAPE.embedding_parameters) // 4 + SHAPE.embedding_parameters
    assert staged.state_bytes == 12 * stage // 2 + 4 * stage


def test_tensor_parallel_gpus_share_layers_and_talk() -> None:
    one, two = projected(), projected(tensor=2)
    assert two.keep.activation_bytes < one.keep.activation_bytes
    assert two.state_bytes == one.state_bytes // 2
    activation = 4 * 2048 * 512 * 2
    rate = CLUSTER.efficiency.network * CLUSTER.gpu.link_bytes_per_s
    assert two.communication_s == pytest.approx(8 * 4 * activation / rate)  # 2 (t - 1) / t is 1
    sixteen = projected(tensor=8).communication_s
    assert sixteen > two.communication_s


SHALLOW = dataclasses.replace(SHAPE, layers=2)


@functools.cache
def shallow(shape: Shape = SHALLOW, **parallelism: Any) -> Workload:
    return Workload(shape, micro_batch=4, parallelism=Parallelism(**parallelism), cluster=CLUSTER)


def test_sequence_parallel_gpus_share_what_lies_between_products() -> None:
    """Of the estimate for a layer, s b h (10 + 24 / t), they share the 10 as well: masks, and inputs of norms, of
    attention and of the feed-forward network (Korthikanti et al., 2022)."""
    shape = dataclasses.replace(SHAPE, family="gpt", kv_heads=8, ffn=2048, dropout=0.1)
    unit = 4 * 2048 * 512
    for shared, estimate in ((False, 10 + 24 / 8), (True, (10 + 24) / 8)):
        three, one = (saved_bytes(shape, layers, tensor=8, sequence_parallel=shared) for layers in (3, 1))
        assert (three - one) / 2 / unit == pytest.approx(estimate, rel=0.2)


def saved_bytes(shape: Shape, layers: int, **parallelism: Any) -> int:
    """Between forward and backward."""
    shape, hardware = dataclasses.replace(shape, layers=layers), machine(CLUSTER.gpu, CLUSTER.drive)
    problem = trace(shape, micro_batch=4, hardware=hardware, parallelism=Parallelism(**parallelism))
    return int(problem.kept_live_bytes[problem.marker])


def test_context_parallel_gpus_share_tokens() -> None:
    one, two = shallow().project(CLUSTER), shallow(context=2).project(CLUSTER)
    assert two.parallelism.gpus == 2
    assert two.keep.activation_bytes == pytest.approx(one.keep.activation_bytes / 2, rel=0.15)
    assert two.keep.tokens_per_s > one.keep.tokens_per_s
    assert two.state_bytes < one.state_bytes  # they share states, as data-parallel GPUs do
    key_values = 2 * (4 * 1024) * SHAPE.kv_heads * SHAPE.head_size * 2
    rate = CLUSTER.efficiency.network * CLUSTER.gpu.link_bytes_per_s
    alone = shallow(context=2).with_parallelism(fsdp=False)
    reduction_s = max(0.0, 2 * SHALLOW.parameters * 2 / 2 / rate - alone._problem.step_s)
    assert alone.project(CLUSTER).communication_s == pytest.approx(2 * 3 * key_values / rate + reduction_s)


MIXED = dataclasses.replace(SHALLOW, ffn=512, experts=8, experts_per_token=2, shared_experts=1)


def test_experts() -> None:
    """A token visits 2 of 8 experts, and a shared one: three times the width of one."""
    assert MIXED.layer_parameters - SHALLOW.layer_parameters == (9 - 3) * MIXED.ffn_parameters + 8 * 512
    assert MIXED.active_parameters == pytest.approx(SHALLOW.parameters, rel=0.01)
    assert flops_per_token(MIXED) == pytest.approx(flops_per_token(SHALLOW), rel=0.01)
    real = sum(parameter.numel() for parameter in Transformer(MIXED).parameters())
    assert real == pytest.approx(MIXED.parameters, rel=0.01)
    dense, mixed = (shallow(shape, data=8, fsdp=False)._problem for shape in (SHALLOW, MIXED))
    assert dense.step_s < mixed.step_s < 1.5 * dense.step_s
    assert mixed.kept_live_bytes.max() > dense.kept_live_bytes.max()


def test_spread_experts() -> None:
    """8 GPUs hold one expert each, and as many tokens come as leave."""
    spread = shallow(MIXED, data=8, expert=8, fsdp=False)
    alone, shared = (workload.project(CLUSTER) for workload in (shallow(MIXED, data=8, fsdp=False), spread))
    assert alone.state_bytes - shared.state_bytes == 16 * MIXED.expert_parameters * 7 // 8
    assert shared.keep.activation_bytes == pytest.approx(alone.keep.activation_bytes, rel=0.05)
    sent = 4 * 2048 * 512 * 2 * 2 * 7 / 8  # samples, tokens, hidden, bytes, visits, and the share that leaves
    rate = CLUSTER.efficiency.network * CLUSTER.gpu.link_bytes_per_s
    held = MIXED.parameters - MIXED.expert_parameters * 7 // 8
    reduction_s = max(0.0, 2 * held * 2 * 7 / 8 / rate - spread._problem.step_s)
    assert shared.communication_s == pytest.approx(2 * 4 * sent / rate + reduction_s)
    grid = sweep(spread, CLUSTER, drives_per_gpu=[1], max_slowdowns=[0.02])
    assert all(data % 8 == 0 for data in grid.data)  # with fewer GPUs, nobody would hold some of the experts


def test_what_shares_states_updates_its_share() -> None:
    whole, spread = (
        shallow(MIXED, data=8, fsdp=False, expert=expert).with_parallelism(fsdp=True).project(CLUSTER)
        for expert in (1, 8)
    )
    assert whole.update_s == spread.update_s
    assert whole.state_bytes > spread.state_bytes  # of the two layers that are gathered, all experts


def test_a_workload_is_not_traced_again_for_other_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload()
    monkeypatch.setattr("ssdtrain_fx.projection.project.trace", None)
    assert one.with_parallelism(data=8).project(CLUSTER).parallelism.gpus == 8
    assert one.parallelism.gpus == 1
    with pytest.raises(ConfigError, match="With another context, tensor, a micro-batch has to be traced again"):
        one.with_parallelism(tensor=2, context=2)


def test_parameters_are_those_of_the_traced_model() -> None:
    """All but norms, biases and positions, which hardly count."""
    for family in ("gpt", "llama", "bert", "t5"):
        shape = dataclasses.replace(SHAPE, family=family, kv_heads=8)
        real = sum(parameter.numel() for parameter in Transformer(shape).parameters())
        assert shape.parameters <= real < 1.05 * shape.parameters + shape.sequence * shape.hidden


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-xl", 1.56),
        ("gpt3-175b", 175),
        ("llama-3-8b", 8.0),
        ("llama-3-70b", 70.6),
        ("llama-3-405b", 405),
        ("mixtral-8x7b", 46.7),
        ("deepseek-moe-16b", 16.4),
    ],
)
def test_published_models_have_the_published_size(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_gradients_of_parameters_are_states_not_activations() -> None:
    """A layer has 3 MiB of parameters and no activation to speak of."""
    shape = dataclasses.replace(SHAPE, family="gpt", kv_heads=8, hidden=1024, ffn=4096, vocab=64, sequence=1, layers=6)
    problem = trace(shape, micro_batch=1, hardware=machine(CLUSTER.gpu, CLUSTER.drive))
    largest = 2 * 4 * 1024 * 1024  # bytes of the gradient of one matrix
    assert largest <= problem.kept_live_bytes.max() < 2.5 * largest < 2 * shape.parameters


def test_recomputing_layers_takes_less_memory_and_more_time() -> None:
    parallelism = Parallelism(tensor=2)
    both = Workload(SHAPE, micro_batch=4, parallelism=parallelism, cluster=CLUSTER, compare_recomputation=True)
    found = both.project(CLUSTER)
    assert found.recompute is not None
    assert found.recompute.activation_bytes < 0.5 * found.keep.activation_bytes
    assert found.recompute.written_bytes == 0
    computing_s = found.keep.step_s - found.communication_s - found.update_s
    again_s = found.recompute.step_s - 1.5 * found.communication_s - found.update_s
    assert 1.1 * computing_s < again_s < 4 / 3 * computing_s  # forward is a third of a step, and the head runs once
    assert projected().recompute is None


def test_flops_of_a_token() -> None:
    shape = find_model("llama-3-8b")
    weights = shape.parameters - shape.vocab * shape.hidden  # looking up an embedding is no product
    assert flops_per_token(shape) == pytest.approx(6 * weights + 6 * 32 * 8192 * 4096)


def test_a_profile_of_data_sheets() -> None:
    gpu, drive = find_gpu("h100 sxm"), find_drive("990 pro 4tb")
    one, many = machine(gpu, drive), machine(gpu, drive, 64)
    assert one.write.bytes_per_s == pytest.approx(0.9 * 6.9e9)
    assert many.write.bytes_per_s == many.copy_out.bytes_per_s == pytest.approx(0.86 * 64e9)  # PCIe is the limit
    assert one.flops_per_s["bfloat16"] == pytest.approx(Efficiency().products * 989e12, rel=0.01)
    assert one.has_host_tier


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="3 stages cannot share 8 layers equally"):
        workload(pipeline=3)
    with pytest.raises(ConfigError, match="A stage with 2 layers cannot have 3 equal chunks"):
        workload(pipeline=4, chunks=3)
    with pytest.raises(ConfigError, match="4 GPUs cannot share a layer with 20 heads, 10 of keys and values"):
        check_shares(dataclasses.replace(SHAPE, hidden=640, heads=20, kv_heads=10), Parallelism(tensor=4))
    with pytest.raises(ConfigError, match="7 GPUs cannot share a layer with 8 heads"):
        workload(tensor=7)
    with pytest.raises(ConfigError, match="Parallelism has micro_batches=0; expected at least 1"):
        Parallelism(micro_batches=0)
    with pytest.raises(ConfigError, match=r"The efficiency of drives is 1.5; expected a share above 0, at most 1"):
        Efficiency(drives=1.5)
    with pytest.raises(ConfigError, match="There are 0 drives per GPU; expected more than 0"):
        machine(CLUSTER.gpu, CLUSTER.drive, 0)
    with pytest.raises(ConfigError, match="The micro-batch is 0; expected at least 1"):
        trace(SHAPE, micro_batch=0, hardware=machine(CLUSTER.gpu, CLUSTER.drive))
    with pytest.raises(ConfigError, match="hidden is 512, which 7 does not divide"):
        dataclasses.replace(SHAPE, heads=7)
    with pytest.raises(ConfigError, match=r"Experts cannot be spread over 3 GPUs: 4 \(data \* context\) hold the same"):
        Parallelism(data=2, context=2, expert=3)
    with pytest.raises(ConfigError, match="16 GPUs cannot share 8 experts"):
        check_shares(MIXED, Parallelism(data=16, expert=16))
    with pytest.raises(ConfigError, match="6 GPUs cannot share 2048 tokens"):
        check_shares(SHAPE, Parallelism(context=3, tensor=2, sequence_parallel=True))
    with pytest.raises(ConfigError, match="only layers of llama have experts"):
        dataclasses.replace(SHAPE, family="gpt", kv_heads=8, experts=4, experts_per_token=1)
    with pytest.raises(ConfigError, match="A micro-batch visits 2 of 8 experts: too few"):
        trace(dataclasses.replace(MIXED, sequence=1), micro_batch=1, hardware=machine(CLUSTER.gpu, CLUSTER.drive))
    with pytest.raises(ConfigError, match=r"There is no model 'llama'. Known are gpt2-xl"):
        find_model("llama")


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = [
        "project",
        "llama-3-8b",
        "--layers",
        "6",
        "--sequence",
        "1024",
        "--data",
        "2",
        "--drive",
        "980-pro-1tb",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "llama-3-8b on 2 x H100 SXM: a projection, not a measurement" in done.output
    assert "4 x Samsung 980 PRO 1TB per GPU, rated for 600 TB each, last" in done.output
    assert "cost 1,840 USD for all GPUs" in done.output
    plain = CliRunner().invoke(app, [*arguments, "--gpu", "rtx 4090", "--json", "-"])
    assert plain.exit_code == 0, plain.output
    found = json.loads(plain.stdout)
    assert found["cluster"]["gpu"]["name"] == "RTX 4090"
    assert found["keep"]["fits"] is False
    assert "more than 24.00 GiB" in plain.stderr


def test_the_command_refuses_what_cannot_be() -> None:
    done = CliRunner().invoke(app, ["project", "llama-3-8b", "--pipeline", "5"])
    assert done.exit_code == 3
    assert "5 stages cannot share 32 layers equally" in " ".join(done.output.split())
    assert "There is no model" in CliRunner().invoke(app, ["project", "x"]).output


def test_a_page_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["project", "gpt2-xl", "--layers", "2", "--sequence", "64", "--page", "/dev/full"])
    assert done.exit_code == 3
    assert "/dev/full cannot be written: No space left on device" in done.output


def test_the_catalogue_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["project", "llama-3-8b", "--list"])
    assert done.exit_code == 0
    assert "H200 SXM" in done.output and "Samsung 990 PRO 4TB" in done.output
