"""explain() reports what would happen, without changing the model, the random state or the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain_fx
from ssdtrain_fx import BudgetError, ConfigError, OffloadConfig, Report, _torch_private, explain
from ssdtrain_fx.passes.planning.plan import Keep
from ssdtrain_fx.testing import toy_hardware


class Toy(nn.Module):
    """Batch norm has buffers that forward writes, and dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.dropout(self.norm(x)).square().sum()


def config(**changes: Any) -> OffloadConfig:
    settings: dict[str, Any] = {"inner": "aot_eager", "min_tensor_bytes": 512, "policy": "all", **changes}
    return OffloadConfig(**settings)


def batch() -> Tensor:
    return torch.randn(64, 8)


def explain_toy(**changes: Any) -> Report:
    return explain(Toy(), batch(), config=config(**changes))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_report_holds_the_plan_and_both_graphs(inner: str) -> None:
    (graph,) = explain_toy(inner=inner).graphs
    plan = graph.plan
    assert len([saved for saved in plan.offloaded if saved.shape == ("64", "8")]) >= 4
    assert plan.peak_after_bytes <= plan.peak_before_bytes
    assert all(saved.size_bytes >= 512 for saved in plan.offloaded)
    for op in ("offload", "release", "reload", "wait"):
        assert f"ssdtrain.{op}" not in graph.joint_before
        assert graph.joint_after.count(f"torch.ops.ssdtrain.{op}.default(") == len(plan.offloaded)
    assert '"f32[64, 8][8, 1]"' in graph.joint_before, "shapes and strides are shown"


def test_the_table_shows_the_line_of_user_code() -> None:
    (graph,) = explain_toy().graphs
    assert "test_explain.py:" in graph.table()
    assert "x = torch.tanh(layer(x))" in graph.table()


def test_a_report_of_a_plan_that_keeps_everything() -> None:
    (graph,) = (report := explain_toy(min_tensor_bytes=1 << 30)).graphs
    assert not graph.plan.offloaded
    assert {type(saved.decision) for saved in graph.plan.storages} == {Keep}
    assert graph.joint_before == graph.joint_after
    assert "; 0 B out and back per step; 0 µs exposed in a step of " in str(report).splitlines()[0]
    assert str(report).splitlines()[0].endswith("; a drive rated for 600 TB is not written to")


def test_graph_breaks_give_one_report_each() -> None:
    class Broken(Toy):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layers[0](x))
            torch._dynamo.graph_break()
            return torch.tanh(self.layers[1](x)).sum()

    report = explain(Broken(), batch(), config=config())
    assert len(report.graphs) == 2
    lines = str(report).splitlines()
    assert lines[0] == report.step_summary()
    assert f"graph 0 of 2: {report.graphs[0].summary(report.rated_endurance_bytes)}" in lines
    assert f"graph 1 of 2: {report.graphs[1].summary(report.rated_endurance_bytes)}" in lines


def test_code_without_gradients_says_so() -> None:
    report = explain(lambda x: x.exp().sum(), batch(), config=config())
    assert report.graphs == ()
    assert str(report).startswith("No graph of this call saves anything for backward")
    assert "Let parameters or inputs require gradients" in str(report)


def test_the_name_of_a_model_is_no_model() -> None:
    with pytest.raises(ConfigError, match="The model is 'gpt2'; expected a module or a function"):
        explain("gpt2", config=config())  # pyright: ignore[reportArgumentType]


def test_functions_and_keywords() -> None:
    report = explain(
        lambda x, *, scale: (x.exp() * scale).sum(), batch().requires_grad_(), scale=torch.ones(8), config=config()
    )
    ((exp,),) = (graph.plan.offloaded for graph in report.graphs)
    assert exp.name == "exp"


def test_gradients_are_assumed_as_in_training() -> None:
    with torch.no_grad():
        assert explain_toy().graphs


def test_a_compiled_module_is_explained_by_the_module_in_it() -> None:
    model, x = Toy(), batch()
    assert explain(torch.compile(model), x, config=config()) == explain(model, x, config=config())


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_parameters_buffers_and_random_numbers_stay(inner: str) -> None:
    """A real forward would update the running mean, count the batch and draw a mask."""
    model, x = Toy(), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    explain(model, x, config=config(inner=inner))
    assert torch.equal(torch.get_rng_state(), random_state)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x)
    assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])


def test_code_that_is_not_traced_leaves_no_trace() -> None:
    """Code that Dynamo does not capture really runs. Here it counts in a buffer and draws a random number."""

    class Counting(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        @torch._dynamo.disable
        def count_and_draw(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + torch.rand(())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.count_and_draw(x))

    model, x = Counting(), batch()
    random_state = torch.get_rng_state()
    assert explain(model, x, config=config()).graphs
    assert model.count == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    model(x)
    assert model.count == 1
    assert not torch.equal(torch.get_rng_state(), random_state)


def test_buffers_stay_after_an_error() -> None:
    class Failing(Toy):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            torch._dynamo.graph_break()
            raise ZeroDivisionError(loss.shape)

    model = Failing()
    with pytest.raises(ZeroDivisionError):
        explain(model, batch(), config=config())
    assert torch.equal(model.norm.running_mean, torch.zeros(8))
    assert model.norm.num_batches_tracked == 0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_nothing_is_opened_on_disk(inner: str, tmp_path: Path) -> None:
    before = ssdtrain_fx.statistics()
    assert explain_toy(inner=inner, ssd_dir=tmp_path).graphs[0].plan.offloaded
    assert list(tmp_path.iterdir()) == []
    assert ssdtrain_fx.statistics() == before


def test_the_directory_need_not_exist_when_the_hardware_is_given() -> None:
    """This makes it possible to plan for another machine."""
    assert explain_toy(ssd_dir="/this/is/nowhere", hardware=toy_hardware(1e9)).graphs[0].plan.offloaded


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_budget_out_of_reach_is_reported_as_such(inner: str) -> None:
    with pytest.raises(BudgetError, match="memory_budget_bytes is 1, but the predicted activation peak"):
        explain_toy(inner=inner, memory_budget_bytes=1, policy="auto")


def test_a_budget_in_reach_is_kept_to() -> None:
    """The hardware is given: an SSD measured under load may be so slow that everything is recomputed."""
    model, x, hardware = Toy(), batch(), toy_hardware(1e9, kernel_s=1e-3)
    best = explain(model, x, config=config(hardware=hardware)).graphs[0].plan
    assert best.peak_after_bytes < best.peak_before_bytes
    budget_bytes = (best.peak_after_bytes + best.peak_before_bytes) // 2
    within = config(memory_budget_bytes=budget_bytes, policy="auto", hardware=hardware)
    (graph,) = explain(model, x, config=within).graphs
    assert best.peak_after_bytes <= graph.plan.peak_after_bytes <= budget_bytes
    assert 0 < len(graph.plan.offloaded) < len(best.offloaded)


def test_it_can_be_called_again_and_again() -> None:
    """More often than Dynamo recompiles one function."""
    model, x = Toy(), batch()
    reports = [explain(model, x, config=config()) for _ in range(torch._dynamo.config.recompile_limit + 1)]
    assert len({str(report) for report in reports}) == 1


@pytest.mark.parametrize("isolates", [True, False])
def test_it_uses_up_none_of_the_compilations_of_the_model(isolates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isolates:  # like torch 2.11 and 2.12
        monkeypatch.setattr(_torch_private, "_can_isolate_recompiles", lambda: False)
    model, x = Toy(), batch()
    for _ in range(torch._dynamo.config.recompile_limit):
        explain(model, x, config=config())
    compiled: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        compiled.append(gm)
        return gm

    torch.compile(model, backend=backend)(x)
    assert len(compiled) == 1


def test_training_afterwards_computes_for_real() -> None:
    """The code that explain traced returns zeros. A later compile must not use it."""
    torch.manual_seed(1)
    model, x = Toy().eval(), batch()
    explain(model, x, config=config())
    assert torch.allclose(torch.compile(model, backend="aot_eager")(x), model(x))
    assert model(x) > 0


def test_the_rating_of_the_drive_can_be_given() -> None:
    report = explain(Toy(), batch(), config=config(), rated_endurance_bytes=5 * 10**12)
    assert "a drive rated for 5 TB lasts" in str(report).splitlines()[0]


@pytest.mark.parametrize("rating", [0, float("nan"), "600 TB", None])
def test_a_rating_that_is_no_number_above_0(rating: Any) -> None:
    with pytest.raises(ConfigError, match=r"rated endurance of the drive is .* bytes; expected a number above 0"):
        explain(Toy(), batch(), config=config(), rated_endurance_bytes=rating)


def test_what_a_warm_cache_holds_is_explained_and_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code may come from a cache, and then no pass runs. explain() still reports its plan, and the code
    follows that plan: it offloads the same number of storages. The cache is hit before and after explain.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    settings = config(inner="inductor", ssd_dir=tmp_path, hardware=toy_hardware(1e9))
    model, x = Toy(), batch()
    counters = torch._dynamo.utils.counters["aot_autograd"]

    def step_in_a_fresh_process() -> int:
        torch._dynamo.reset()
        before = ssdtrain_fx.statistics()
        torch.compile(model, backend=ssdtrain_fx.backend(settings))(x).backward()
        return ssdtrain_fx.statistics().since(before).offloads

    with torch._functorch.config.patch(enable_autograd_cache=True), torch._inductor.config.patch(fx_graph_cache=True):
        counters.clear()
        cold = explain(model, x, config=settings)
        assert not [name for name in counters if "cache" in name], "explain neither reads nor fills the cache"
        first = step_in_a_fresh_process()
        assert counters["autograd_cache_miss"] == 1
        assert step_in_a_fresh_process() == first
        assert counters["autograd_cache_hit"] == 1
        warm = explain(model, x, config=settings)
        assert counters["autograd_cache_hit"] == 1
        assert step_in_a_fresh_process() == first
        assert counters["autograd_cache_hit"] == 2
    assert warm.graphs == cold.graphs
    assert warm.measured is not None and warm.measured.allocated_bytes > 0
    assert str(warm).splitlines()[-1] == str(warm.measured)
    assert first == len(warm.plan.offloaded) > 0
