"""Option ``modules``: keep, offload or recompute what single modules make."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import transfer_problems
from steps import machine, settled_statistics
from torch import Tensor, nn

from ssdtrain_fx import OffloadConfig, backend, explain
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.planning.chains import choose_most
from ssdtrain_fx.passes.planning.place_transfers import choose_cheapest, choose_lowest_peak
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem
from ssdtrain_fx.testing import assert_same_bits, gradients_of

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.head(x)).sum()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


def config_with(modules: Any, **options: Any) -> OffloadConfig:
    """Without ``modules`` nothing moves: offloading is not allowed any time."""
    defaults: dict[str, Any] = {
        "min_tensor_bytes": 0,
        "inner": "aot_eager",
        "hardware": machine(1e6),
        "max_slowdown": 0.0,
    }
    return OffloadConfig(**{**defaults, "modules": modules, **options})


def plan_of(model: nn.Module, x: Tensor, config: OffloadConfig) -> Plan:
    (graph,) = explain(model, x, config=config).graphs
    return graph.plan


def gradients_after(model: nn.Module, x: Tensor, compiler: Any = None) -> dict[str, Tensor]:
    """The gradients of one step of the model, compiled if a compiler is given."""
    model.zero_grad()
    (model if compiler is None else torch.compile(model, backend=compiler))(x).backward()
    return gradients_of(model)


def decisions(plan: Plan) -> dict[str, str]:
    """What happens to each storage that is not an input, by its name."""
    return {storage.name: type(storage.decision).__name__ for storage in plan.storages if not storage.is_input}


LAYER_0 = ("getitem", "getitem_1", "getitem_2", "addmm", "gelu", "add")
"""What the first block makes: its norm, its first product, the activation, and the sum at its end."""


def test_without_wishes_nothing_moves(model: Model, x: Tensor) -> None:
    assert set(decisions(plan_of(model, x, config_with({}))).values()) == {"Keep"}


@pytest.mark.parametrize(
    ("modules", "moved"),
    [
        ({"layers.0": "offload"}, set(LAYER_0)),
        ({"layers.0.mlp": "offload"}, {"addmm", "gelu"}),
        ({"*.norm": "offload", "layers.[12]*": "keep"}, {"getitem", "getitem_1", "getitem_2"}),
        ({"layers.*": "keep", "layers.0.mlp.1": "offload"}, {"gelu"}),
        ({"layers.0": "offload", "*": "keep"}, set[str]()),
    ],
)
def test_a_pattern_takes_its_module_and_what_is_inside_and_the_last_one_counts(
    model: Model, x: Tensor, modules: dict[str, str], moved: set[str]
) -> None:
    found = decisions(plan_of(model, x, config_with(modules)))
    assert {name for name, decision in found.items() if decision == "Offload"} == moved


def test_what_is_to_be_recomputed_is_even_if_nothing_else_may_be(model: Model, x: Tensor) -> None:
    found = decisions(plan_of(model, x, config_with({"layers.0.mlp": "recompute"}, recompute=False)))
    assert {name for name, decision in found.items() if decision == "Recompute"} == {"addmm", "gelu"}


def test_the_rest_is_planned_as_before(model: Model, x: Tensor) -> None:
    """With time for everything, the planner offloads beside what is kept and what is recomputed."""
    wishes = {"layers.0": "keep", "layers.1": "recompute"}
    found = decisions(plan_of(model, x, config_with(wishes, policy="all")))
    assert [found[name] for name in LAYER_0[:5]] == ["Keep"] * 5
    layer_1 = ("getitem_3", "getitem_4", "getitem_5", "addmm_2", "gelu_1", "add_1")
    assert [found[name] for name in layer_1] == ["Recompute"] * 6
    assert found["addmm_4"] == found["gelu_2"] == "Offload"


@pytest.mark.parametrize(
    "modules",
    [
        {"layers.*": "offload"},
        {"layers.*": "recompute"},
        {"layers.0": "recompute", "layers.1": "offload", "layers.2": "keep", "head": "offload"},
    ],
)
@pytest.mark.parametrize("options", [{}, {"policy": "all"}, {"max_slowdown": 10.0}])
def test_gradients_are_the_same(model: Model, x: Tensor, modules: dict[str, str], options: dict[str, Any]) -> None:
    expected = gradients_after(model, x, "aot_eager")
    before = settled_statistics().offloads
    assert_same_bits(gradients_after(model, x, backend(config_with(modules, **options))), expected)
    if "offload" in modules.values():
        assert settled_statistics().offloads > before


def test_a_graph_of_a_chain_moves_what_it_is_told_to(model: Model, x: Tensor) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    expected = gradients_after(model, x)
    before = settled_statistics().offloads
    for layer in model.layers:
        layer.compile(backend=backend(config_with({"mlp": "offload"})))
    assert_same_bits(gradients_after(model, x), expected)
    assert settled_statistics().offloads - before == 3 * 2  # the first product and the activation of each block


def test_what_cannot_be_recomputed_is_named(model: Model, x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    """Under Inductor, another place of a sum over products may give other bits."""
    with caplog.at_level(logging.WARNING, "ssdtrain_fx"):
        found = decisions(plan_of(model, x, config_with({"head": "recompute"}, inner="inductor")))
    assert "modules asks to recompute 1 storages that backward cannot recompute bit for bit" in caplog.text
    assert "fusion may change its last bits" in caplog.text
    assert "Recompute" not in found.values()


def test_a_pattern_that_matches_nothing_is_named_with_the_modules_that_there_are(
    model: Model, x: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ssdtrain_fx"):
        plan_of(model, x, config_with({"layer.0": "keep", "*.mlp": "keep"}))
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "no module of this graph matches 'layer.0'" in record.getMessage()
    assert "layers.0.mlp" in record.getMessage()


@pytest.mark.parametrize(
    "modules", [{"layers": "ssd"}, {1: "keep"}, "layers", 3, None, [("layers", "keep", 1)], ["layers"], [["a", "keep"]]]
)
def test_a_wrong_value_says_what_was_expected(modules: Any) -> None:
    with pytest.raises(ConfigError, match=r"Option 'modules' .*expected a dictionary from patterns to one of 'keep'"):
        OffloadConfig(modules=modules)


def test_a_policy_of_ones_own_decides_alone() -> None:
    with pytest.raises(ConfigError, match="modules and policy of backend 'ssdtrain' contradict each other"):
        OffloadConfig(modules={"layers": "keep"}, policy=lambda *_: {})


def test_the_order_is_part_of_the_key_of_compile_caches() -> None:
    one = OffloadConfig(modules={"a": "keep", "*": "offload"})
    other = OffloadConfig(modules={"*": "offload", "a": "keep"})
    assert one.cache_key() != other.cache_key() != OffloadConfig().cache_key()
    assert one == OffloadConfig(modules=(("a", "keep"), ("*", "offload")))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=transfer_problems(), wanted=st.integers(0, 63), slowdown=st.sampled_from([0.0, 0.02, 0.5]))
def test_every_planner_offloads_what_must_move(problem: TransferProblem, wanted: int, slowdown: float) -> None:
    movables = [dataclasses.replace(one, must_move=bool(wanted >> at & 1)) for at, one in enumerate(problem.movables)]
    must_move = {movable.idx for movable in movables if movable.must_move}
    wished = dataclasses.replace(problem, movables=tuple(movables))
    choices = [
        choose_lowest_peak(wished, max_slowdown=slowdown),
        choose_cheapest(wished, budget_bytes=1 << 60),
        choose_most(wished, max_slowdown=slowdown),
    ]
    for choice in choices:
        assert choice is not None
        assert must_move <= choice.placements.keys()
    fastest = choose_cheapest(wished, budget_bytes=1 << 60)
    assert fastest is not None
    assert fastest.placements.keys() == must_move  # the budget asks for nothing else
