"""A user's policy and pass: what they see, what they may do, and that no policy gives a wrong gradient."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssdtrain_fx import BudgetError, ConfigError, OffloadConfig, PassError, PolicyError, backend, statistics
from ssdtrain_fx.function_names import stable_name
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD
from ssdtrain_fx.passes.pipeline import OffloadedStep, offload_saved_tensors
from ssdtrain_fx.passes.planning.plan import Recompute
from ssdtrain_fx.passes.planning.policy import Budget, Costs, Decision, Keep, Placement, StepAnalysis
from ssdtrain_fx.testing import TOYS, CapturedStep, analyse, assert_same_bits, calls, capture_step, capture_toy
from ssdtrain_fx.testing import toy_hardware as toy

aten = torch.ops.aten


def move_all(analysis: StepAnalysis, costs: Costs, budget: Budget) -> dict[str, Decision]:
    return {**costs.place(analysis.movables)}


def move_none(analysis: StepAnalysis, costs: Costs, budget: Budget) -> dict[str, Decision]:
    return {}


def three_layers() -> CapturedStep:
    """Saves exp, tanh and exp_1, 256 bytes each. The logits are saved too, and returned."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x.exp().tanh().exp().sin()
        return logits.square().sum(), logits

    return capture_step(function, torch.randn(8, 8, requires_grad=True))


def rewrite(step: CapturedStep, **options: Any) -> OffloadedStep:
    config = OffloadConfig(**{"inner": "aot_eager", "min_tensor_bytes": 0, **options})
    return offload_saved_tensors(
        step.forward,
        step.backward,
        num_forward_outputs=step.num_forward_outputs,
        config=config,
        hardware=toy(1e12),
        budget=config.find_budget(),  # all of it for the plan
        describe=True,
    )


# What a policy sees


def test_a_policy_sees_names_positions_and_costs() -> None:
    seen: list[tuple[StepAnalysis, Costs, Budget]] = []

    def look(analysis: StepAnalysis, costs: Costs, budget: Budget) -> Mapping[str, Decision]:
        seen.append((analysis, costs, budget))
        return {}

    analysis = analyse(three_layers())
    plan = analysis.plan(policy=look, disk=128, max_slowdown=0.25, budget_bytes=1 << 20)
    ((step, costs, budget),) = seen
    assert step.nodes == tuple(node.name for node in analysis.joint.graph.nodes)
    assert step.nodes[step.marker] == analysis.joint.marker.name
    assert set(step.movables) == {"exp", "tanh", "exp_1"}
    (logits,) = [storage for storage in step.storages if storage.name == "sin"] or [None]
    assert logits is None or "graph output" in logits.decision.reason
    assert step.peak_bytes == max(step.live_bytes) == plan.peak_before_bytes
    assert (costs.step_s, costs.disk_s("exp"), costs.compute_s("exp")) == (len(step.nodes), 4.0, 0.0)
    assert budget == Budget(max_slowdown=0.25, memory_budget_bytes=1 << 20)
    assert not plan.offloaded


@pytest.mark.parametrize("name", TOYS)
def test_decisions_of_place_are_legal_and_change_no_bit(name: str) -> None:
    step = capture_toy(name)
    analysis = analyse(step)
    plan = analysis.plan(policy=move_all)
    assert plan.offloaded
    assert_same_bits(step.run(analysis.rewrite(plan)), step.run())


def test_the_simulation_of_a_policy_is_what_the_plan_predicts() -> None:
    simulated: list[float] = []

    def move_one(analysis: StepAnalysis, costs: Costs, budget: Budget) -> Mapping[str, Decision]:
        decisions = costs.place(["exp"], ssd_speedup=float("inf"))
        simulated.extend([costs.simulate(decisions).exposed_s, costs.simulate(decisions).peak_bytes])
        return decisions

    plan = analyse(three_layers()).plan(policy=move_one, disk=64)
    assert simulated == [plan.exposed_s, plan.peak_after_bytes]
    assert plan.exposed_s > 0
    assert [storage.name for storage in plan.offloaded] == ["exp"]
    kept = {storage.name: storage.decision.reason for storage in plan.storages if storage.name == "tanh"}
    assert kept == {"tanh": "the policy does not offload it"}


# What a policy may not do


def with_change(name: str, **changes: Any) -> Callable[..., Mapping[str, Decision]]:
    def policy(analysis: StepAnalysis, costs: Costs, budget: Budget) -> Mapping[str, Decision]:
        return {name: dataclasses.replace(costs.place([name])[name], **changes)}

    return policy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"release": 0}, r"release is 0; expected \d+ to \d+ \(after the last read in forward, before backward"),
        ({"release": 99}, "release is 99"),
        ({"release": 5.0}, r"release is 5\.0"),
        ({"reload": 1}, r"reload is 1; expected \d+ to \d+ \(in backward, before the first read there\)"),
        ({"reload": 99}, "reload is 99"),
        ({"offload": 1}, r"offload is 1; expected \d+ to \d+ \(after the node that makes it, before the release\)"),
        ({"offload": 99}, "offload is 99"),
        ({"wait": 1}, r"wait is 1; expected \d+ to \d+ \(after the reload, before the first read in backward\)"),
        ({"wait": 99}, "wait is 99"),
    ],
)
def test_an_illegal_position_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=rf"with_change\S* decides Placement\(.*\) for storage 'exp': {message}"):
        analyse(three_layers()).plan(policy=with_change("exp", **changes))


@pytest.mark.parametrize(
    ("tier", "host_bytes", "message"),
    [
        ("host", 0, "there is no host tier here; only a GPU has one"),
        ("host", 255, "the host tier holds at most 255 bytes; this exceeds it by 1"),
        ("tape", 512, "expected tier 'ssd' or 'host'"),
    ],
)
def test_an_illegal_tier_is_refused(tier: str, host_bytes: int, message: str) -> None:
    with pytest.raises(PolicyError, match=rf"decides Placement\(.*\) for storage 'exp': {message}"):
        analyse(three_layers()).plan(policy=with_change("exp", tier=tier), host_bytes=host_bytes)


def test_a_policy_may_leave_a_storage_in_the_host_tier() -> None:
    plan = analyse(three_layers()).plan(policy=with_change("exp", tier="host"), host_bytes=256)
    assert [storage.name for storage in plan.on_host] == ["exp"]
    assert (plan.host_peak_bytes, plan.written_bytes) == (256, 0)


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({"nothing": Keep("")}, "for storage 'nothing': no such storage is saved; expected one of .*exp, tanh"),
        ({7: Keep("")}, "for storage 7: no such storage is saved"),
        ({"exp": "offload"}, r"decides offload for storage 'exp': expected Keep\(...\) or Placement\(...\)"),
        ({"exp": Recompute((), (), "")}, "for storage 'exp': expected Keep"),
        ({"primals_1": Placement(1, 9)}, "for storage 'primals_1': it must stay in memory: graph input"),
        (["exp"], r"returned \['exp'\]; expected a mapping"),
        (None, "returned None; expected a mapping"),
    ],
)
def test_a_decision_about_something_else_is_refused(decisions: Any, message: str) -> None:
    step = capture_step(lambda x: (x.sin() * x).exp().tanh().sum(), torch.randn(8, 8, requires_grad=True))
    with pytest.raises(PolicyError, match=message):
        analyse(step).plan(policy=lambda analysis, costs, budget: decisions)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(TOYS)), data=st.data())
def test_whatever_a_policy_returns_no_bit_changes(name: str, data: st.DataObject) -> None:
    """For positions anywhere in the graph, either the policy is refused, or outputs and gradients are the same."""

    def anything(analysis: StepAnalysis, costs: Costs, budget: Budget) -> Mapping[str, Decision]:
        names = data.draw(st.lists(st.sampled_from(sorted(analysis.movables)), unique=True, min_size=1))
        decisions: dict[str, Decision] = {}
        for name, decision in costs.place(names, ssd_speedup=data.draw(st.sampled_from([0.1, 1.0, 9.0]))).items():
            field = data.draw(st.sampled_from(["release", "reload", "offload", "wait"]))
            now = getattr(analysis.movables[name] if field in ("offload", "wait") else decision, field)
            decisions[name] = dataclasses.replace(decision, **{field: now + data.draw(st.integers(-4, 4))})
        return decisions

    step = capture_toy(name)
    analysis = analyse(step)
    try:
        plan = analysis.plan(policy=anything)
    except PolicyError:
        return
    assert_same_bits(step.run(analysis.rewrite(plan)), step.run())


def test_a_policy_above_the_memory_budget_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"memory_budget_bytes is 300, .* with policy .*move_none is"):
        rewrite(three_layers(), policy=move_none, memory_budget_bytes=300)


def test_an_error_of_the_policy_itself_comes_through() -> None:
    with pytest.raises(KeyError, match="no such storage"):
        rewrite(three_layers(), policy=lambda analysis, costs, budget: costs.place(["no such storage"]))


# A pass


def square_then_multiply() -> CapturedStep:
    """Saves the square of x (for the gradient of w) and tanh."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x * x) @ w).tanh().sum()

    return capture_step(function, *(torch.randn(8, 8, requires_grad=True) for _ in range(2)))


def square_again(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    """A pass that recomputes the square of x in backward instead of reading the saved one."""
    positions, marker = joint.positions(), joint.marker
    square = calls(joint.graph, aten.mul.Tensor)[0]
    with joint.graph.inserting_after(marker):
        again = joint.graph.node_copy(square)
    again.meta = dict(square.meta)
    for user in list(square.users):
        if positions[user] > positions[marker]:
            user.replace_input_with(square, again)
    joint.gm.recompile()
    return joint


def test_a_pass_stands_in_front_of_the_planner() -> None:
    """The plan contains only storages that are still saved. The pass did not report which ones these are."""
    plain, rewritten = (rewrite(square_then_multiply(), policy="all", passes=passes) for passes in ((), [square_again]))
    moved = [[storage.name for storage in one.plan.offloaded] for one in (plain, rewritten)]
    assert moved == [["mul", "tanh"], ["tanh"]]
    assert rewritten.joint_before == plain.joint_before
    assert len(calls(rewritten.forward.graph, OFFLOAD)) == 1
    squares = [len(calls(one.backward.graph, aten.mul.Tensor)) for one in (plain, rewritten)]
    assert squares[1] == squares[0] + 1


def test_a_pass_of_which_nothing_is_offloaded_counts_all_the_same() -> None:
    plain, rewritten = (
        rewrite(square_then_multiply(), policy=move_none, passes=passes) for passes in ((), [square_again])
    )
    assert rewritten.joint_after != plain.joint_after
    assert not rewritten.plan.offloaded


def test_passes_run_in_order() -> None:
    order: list[int] = []

    def note(number: int) -> Callable[[ScheduledJointGraph], ScheduledJointGraph]:
        return lambda joint: order.append(number) or joint

    rewrite(three_layers(), passes=[note(1), note(2), note(3)])
    assert order == [1, 2, 3]


def break_marker(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    joint.graph.erase_node(joint.marker)
    return joint


def break_outputs(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    (_, gradients) = joint.graph.output_node().args[0]  # type: ignore[misc]
    joint.graph.output_node().args = ((joint.forward_outputs, (None,) * len(gradients)),)
    return joint


def break_inputs(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    with joint.graph.inserting_before(next(iter(joint.graph.nodes))):
        joint.graph.placeholder("one_more")
    return joint


def break_order(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    exp = calls(joint.graph, aten.exp.default)[0]
    joint.marker.append(exp)
    return joint


def break_value(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    exp = calls(joint.graph, aten.exp.default)[0]
    with joint.graph.inserting_after(exp):
        new = joint.graph.call_function(aten.neg.default, (exp,))
    exp.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return joint


def break_halves(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    exp = calls(joint.graph, aten.exp.default)[0]
    with joint.graph.inserting_after(exp):
        new = joint.graph.call_function(aten.mul.Tensor, (exp, joint.backward_inputs[0]))
    new.meta = dict(exp.meta)
    exp.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return joint


def return_nothing(joint: ScheduledJointGraph) -> Any:
    return None


@pytest.mark.parametrize(
    ("run_pass", "message"),
    [
        (return_nothing, "returned None; expected a ScheduledJointGraph"),
        (break_marker, r"returned a graph with 0 backward_starts\(\); expected one"),
        (break_outputs, r"changed the gradients to \['None'\]; expected \[\"torch.float32"),
        (break_inputs, "changed the inputs to .*one_more None"),
        (break_order, "returned a graph that is not well-formed: .*used before"),
        (break_value, r"left neg_default without meta\['val'\]"),
        (break_halves, "makes mul_tensor in forward read tangents_1, an input of backward"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(
    run_pass: Callable[[ScheduledJointGraph], ScheduledJointGraph], message: str
) -> None:
    with pytest.raises(PassError, match=rf"Custom pass \S*{run_pass.__name__} {message}"):
        rewrite(three_layers(), passes=[run_pass])


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "most"}, "'policy' .* is 'most'; expected one of 'auto', 'all', or a function"),
        ({"policy": None}, "'policy' .* is None"),
        ({"passes": square_again}, "'passes' .*; expected a sequence of functions"),
        ({"passes": ["recompute"]}, "'passes' .*; expected a sequence of functions"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig.from_options(options)


def test_functions_at_the_top_of_a_module_have_a_stable_name() -> None:
    name = stable_name(move_all)
    assert name is not None and name.startswith("test_extending.move_all ")
    assert stable_name(move_all) == name != stable_name(move_none)
    config = OffloadConfig(policy=move_all, passes=[square_again])
    assert config.cache_key() == dataclasses.replace(config).cache_key()
    keys = {OffloadConfig(policy=policy).cache_key() for policy in (move_all, move_none, "auto", "all")}
    keys |= {OffloadConfig(passes=passes).cache_key() for passes in ([square_again], [break_order])}
    assert len(keys) == 6
    assert "0x" not in "".join(keys), "an address is different in the next process"


def test_what_has_no_stable_name_never_has_the_same_key() -> None:
    class Policy:
        def __call__(self, *_: object) -> dict[str, Decision]:
            return {}

    for nameless in (lambda *_: {}, with_change("exp"), Policy(), Policy().__call__):
        config = OffloadConfig(policy=nameless)
        assert stable_name(nameless) is None
        assert config.cache_key() != config.cache_key()


# In separate modules

THEIR_POLICY = """
    from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
    from ssdtrain_fx.passes.planning.policy import Budget, Costs, Decision, StepAnalysis

    COUNT = {count}

    def move_the_largest(analysis: StepAnalysis, costs: Costs, budget: Budget) -> dict[str, Decision]:
        print("asked")
        largest = sorted(analysis.movables, key=lambda name: -analysis.movables[name].size_bytes)
        return {{**costs.place(largest[:COUNT])}}

    def change_nothing(joint: ScheduledJointGraph) -> ScheduledJointGraph:
        return joint
"""

THEIR_TRAINING = """
    import sys
    import torch
    import their_policies
    from ssdtrain_fx import OffloadConfig, backend, statistics
    from ssdtrain_fx.testing import assert_same_bits, toy_hardware, train

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)))
    model.append(torch.nn.Linear(32, 1)).append(torch.nn.Flatten(0))

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).square().sum()

    batches = [(torch.randn(64, 32),) for _ in range(2)]
    options = {"inner": sys.argv[1], "min_tensor_bytes": 0, "hardware": toy_hardware(1e12)}
    options |= {"policy": their_policies.move_the_largest, "passes": [their_policies.change_nothing]}
    found = train(Loss(), batches, "ssdtrain", options=options)
    print("offloads", statistics().offloads)
    assert_same_bits(found, train(Loss(), batches, sys.argv[1]))
"""


def write(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(textwrap.dedent(text).lstrip())


def run_their_training(directory: Path, inner: str) -> list[str]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache")}
    command = [sys.executable, "their_training.py", inner]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_another_package_can_define_a_policy_and_a_pass(tmp_path: Path) -> None:
    """In separate modules and a separate process, with `backend="ssdtrain"` and options."""
    write(tmp_path, "their_policies.py", THEIR_POLICY.format(count=3))
    write(tmp_path, "their_training.py", THEIR_TRAINING)
    assert run_their_training(tmp_path, "aot_eager") == ["asked", "offloads 6"]


@pytest.mark.slow
def test_inductors_cache_knows_the_source_of_a_policy(tmp_path: Path) -> None:
    """The second process takes the compiled graphs from the cache. After a change in the policy's module, none does."""
    write(tmp_path, "their_training.py", THEIR_TRAINING)
    write(tmp_path, "their_policies.py", THEIR_POLICY.format(count=3))
    assert run_their_training(tmp_path, "inductor") == ["asked", "offloads 6"]
    assert run_their_training(tmp_path, "inductor") == ["offloads 6"]
    write(tmp_path, "their_policies.py", THEIR_POLICY.format(count=2))
    assert run_their_training(tmp_path, "inductor") == ["asked", "offloads 4"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_closure_is_asked_every_time(caplog: pytest.LogCaptureFixture) -> None:
    """The code is the same but the value in the closure differs, so no compile cache may be used."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)), torch.nn.Tanh())
    offloads: list[int] = []
    for count in (1, 2, 1):

        def policy(analysis: StepAnalysis, costs: Costs, budget: Budget, count: int = count) -> dict[str, Decision]:
            return {**costs.place(sorted(analysis.movables)[:count])}

        torch._dynamo.reset()
        before = statistics()
        config = OffloadConfig(policy=policy, min_tensor_bytes=0, hardware=toy(1e12))
        torch.compile(model, backend=backend(config))(torch.randn(64, 32)).sum().backward()
        offloads.append(statistics().since(before).offloads)
    assert offloads == [1, 2, 1]
    assert "compile caches are not used" in caplog.text and "<locals>.policy cannot be recognized" in caplog.text
