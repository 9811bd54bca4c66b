"""What backward may recompute, and the rewrite that inserts recomputations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
import torch._inductor.config as inductor_config
from expecttest import assert_expected_inline
from graphs import Program, capture_toy_or_program, live_at_marker, matrix, names, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_backend import rewriting_backend
from steps import Autocast, small_model
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ssdtrain_fx import _torch_private
from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.passes.analysis.find_recomputations import (
    _COMMUTES_WITH_ROUNDING,
    NoRecomputation,
    Recomputation,
    find_recomputations,
    judge_recomputations,
)
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, split
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, find
from ssdtrain_fx.passes.rewrites.insert_recomputations import insert_recomputations
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.testing import (
    TOYS,
    CapturedStep,
    GraphAnalysis,
    analyse,
    assert_same_bits,
    calls,
    capture_step,
    capture_toy,
    changes,
    listing,
    min_cut,
    named,
    save_all,
    train,
)

aten = torch.ops.aten
Inner = Literal["inductor", "aot_eager"]


def two_layers() -> CapturedStep:
    """The pre-activations h [4, 8] and the activations h * h are saved."""

    def function(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = x @ w1
        return ((h * h) @ w2).sum()

    return capture_step(function, matrix(4, 6), matrix(6, 8), matrix(8, 8))


def verdicts(analysis: GraphAnalysis, inner: Inner = "aot_eager", **options: Any) -> dict[str, Recomputation | str]:
    """The verdicts, by the name of the first node of each storage."""
    judged = judge_recomputations(
        analysis.joint, analysis.alias_sets, analysis.candidates, fused=inner == "inductor", **options
    )
    return {
        analysis.alias_sets.storages[idx].members[0].name: (
            verdict.reason if isinstance(verdict, NoRecomputation) else verdict
        )
        for idx, verdict in judged.items()
    }


def recomputation(analysis: GraphAnalysis, name: str, inner: Inner = "aot_eager") -> Recomputation:
    verdict = verdicts(analysis, inner)[name]
    assert isinstance(verdict, Recomputation), verdict
    return verdict


def reason(analysis: GraphAnalysis, name: str, inner: Inner = "aot_eager", **options: Any) -> str:
    verdict = verdicts(analysis, inner, **options)[name]
    assert isinstance(verdict, str), f"could be recomputed by {verdict}"
    return verdict


def sources(analysis: GraphAnalysis, found: Recomputation) -> list[str]:
    return [analysis.alias_sets.storages[idx].members[0].name for idx in found.sources]


def recompute(analysis: GraphAnalysis, *recomputations: Recomputation) -> ScheduledJointGraph:
    return insert_recomputations(analysis.joint, alias_sets=analysis.alias_sets, recomputations=recomputations)


def recompute_everything(analysis: GraphAnalysis, inner: Inner) -> ScheduledJointGraph:
    found = find_recomputations(analysis.joint, analysis.alias_sets, analysis.candidates, fused=inner == "inductor")
    return recompute(analysis, *found.values())


# What may be recomputed


def test_a_chain_ends_at_what_is_saved() -> None:
    analysis = analyse(two_layers())
    found = recomputation(analysis, "mul")
    assert names(found.nodes) == ["mul"]
    assert sources(analysis, found) == ["mm"]


def test_graph_inputs_that_backward_holds_are_no_sources() -> None:
    analysis = analyse(two_layers())
    found = recomputation(analysis, "mm")
    assert names(found.nodes) == ["mm"]
    assert found.sources == (), "x and w1 are inputs"


def test_what_lies_between_runs_as_well() -> None:
    """h + 1 is not saved, so it is recomputed together with the op that follows it."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        return (h.sin().sum() + (-(h + 1)) @ w.t()).sum()

    analysis = analyse(capture_step(function, matrix(4, 6), matrix(6, 8)))
    found = recomputation(analysis, "neg", "inductor")
    assert (names(found.nodes), sources(analysis, found)) == (["add", "neg"], ["mm"])
    assert reason(analysis, "neg", max_ops=1) == "needs more than 1 ops from other saved values"


def test_saved_views_are_taken_again() -> None:
    """The transpose of w is saved, so it can be read. The transpose of the result is taken from the recomputed one."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (v @ (x @ w.t()).t()).sum()

    analysis = analyse(capture_step(function, matrix(4, 6), matrix(8, 6), matrix(5, 8)))
    found = recomputation(analysis, "mm")
    assert (names(found.nodes), found.sources) == (["mm", "t_1"], ())


def test_random_numbers_are_drawn_once() -> None:
    analysis = analyse(capture_toy("mlp"))
    mask = next(node for node in analysis.joint.saved if node.meta["val"].dtype is torch.bool)
    storage = analysis.alias_sets.of(mask)
    assert storage is not None
    assert reason(analysis, storage.members[0].name).endswith("draws random numbers")


def test_data_that_backward_did_not_hold_is_not_held() -> None:
    """The caller may overwrite x with the next batch before backward."""
    analysis = analyse(capture_step(lambda x, w: ((x + 1) @ w).sum(), torch.randn(64, 4), matrix(4, 4)))
    assert reason(analysis, "add") == "reads the graph input primals_1, which backward does not hold"


def test_a_small_parameter_may_be_read() -> None:
    def function(h: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return ((h.exp() + b) @ w).sum()

    analysis = analyse(capture_step(function, matrix(64, 4), matrix(4), matrix(4, 4)))
    found = recomputation(analysis, "add", "inductor")
    assert sources(analysis, found) == ["exp"]
    assert named(analysis.joint.graph, "primals_2") not in analysis.joint.saved
    joint = recompute(analysis, found)
    assert named(joint.graph, "primals_2") in joint.saved


def test_a_parameter_as_large_as_the_result_is_not_held_for_it() -> None:
    def function(h: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return ((h.exp() + b) @ w).sum()

    analysis = analyse(capture_step(function, matrix(64, 4), matrix(64, 4), matrix(4, 4)))
    assert reason(analysis, "add") == "reads the graph input primals_2, which backward does not hold"


def test_an_input_that_is_written_is_not_read_again() -> None:
    def function(x: Tensor, count: Tensor) -> Tensor:
        y = ((x.sin() + count) @ x).sum()
        count.add_(1)
        return y

    analysis = analyse(capture_step(function, matrix(4, 4), torch.randn(4, 4)))
    assert "written in place" in reason(analysis, "add")


@pytest.mark.parametrize(
    "op",
    [torch.exp, torch.tanh, torch.erf, F.gelu, torch.rsqrt, torch.sigmoid, lambda x: x.softmax(-1), lambda x: x @ x],
    ids=["exp", "tanh", "erf", "gelu", "rsqrt", "sigmoid", "softmax", "mm"],
)
def test_inductor_may_give_other_bits(op: Callable[[Tensor], Tensor]) -> None:
    analysis = analyse(capture_step(lambda x, w: ((op(x.sin())) @ w).sum(), matrix(16, 16), matrix(16, 16)))
    found = {name: verdict for name, verdict in verdicts(analysis, "inductor").items() if name != "sin"}
    assert found
    for verdict in found.values():
        assert isinstance(verdict, str)
        assert verdict.endswith("fusion may change its last bits")
    assert all(isinstance(verdict, Recomputation) for verdict in verdicts(analysis, "aot_eager").values())


def of_low_precision(op: Callable[[Tensor], Tensor]) -> GraphAnalysis:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        return (h.sin() + op(h) @ w).float().sum()

    arguments = [torch.randn(16, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    return analyse(capture_step(function, *arguments))


def test_inductor_rounds_low_precision_where_it_stores() -> None:
    assert reason(of_low_precision(lambda h: h + 1), "add", "inductor").endswith("a low-precision value is rounded")
    analysis = of_low_precision(lambda h: -h)
    assert names(recomputation(analysis, "neg", "inductor").nodes) == ["neg"]


LOW, HIGH = torch.bfloat16, torch.float32
INDICES = torch.arange(16).flip(0)
SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "abs": lambda a, b: torch.where(b > 0, a.abs(), a.abs()),
    "cat": lambda a, b: torch.cat([a, b], dim=1)[:, :16],
    "clone": lambda a, b: a.clone() * b.sign().abs(),
    "embedding": lambda a, b: F.embedding(INDICES, a),
    "flip": lambda a, b: a.flip(1),
    "gather": lambda a, b: a.gather(1, INDICES.expand(16, 16)),
    "index": lambda a, b: a[INDICES],
    "index_select": lambda a, b: a.index_select(1, INDICES),
    "neg": lambda a, b: -a,
    "relu": lambda a, b: a.relu(),
    "repeat": lambda a, b: a.repeat(2, 1)[:16],
    "roll": lambda a, b: a.roll(3, 1),
    "select_scatter": lambda a, b: torch.select_scatter(a, b[0].to(a.dtype), 0, 3),
    "slice_scatter": lambda a, b: torch.slice_scatter(a, b[:4].to(a.dtype), 0, 2, 6),
    "where": lambda a, b: torch.where(a.detach() > 0.1, a, b),
    "where_with_a_number": lambda a, b: torch.where(a.detach() > 0.1, a, 0.1),
    "where_with_a_scalar": lambda a, b: torch.where(a.detach() > 0.1, a, b[0, 0]),
}
"""Every op that is said to commute with rounding; the second operand may have another dtype."""


class Selections(nn.Module):
    """Each op reads products that are computed in the same kernel. Backward reads its operands and its result."""

    def __init__(self, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.ops = {name: op for name, op in SELECTIONS.items() if _accepts(op, dtypes)}
        self.operands = nn.ParameterDict({name: torch.randn(3, 16, 16) for name in self.ops})

    def forward(self, scale: Tensor) -> Tensor:
        total = torch.zeros(())
        for name, op in self.ops.items():
            x, y, w = self.operands[name].unbind()
            a, b = (x * scale).to(self.dtypes[0]), (y * scale).to(self.dtypes[1])
            p, q = a * a, b * b
            for value in (p, q, op(p, q)):
                total = total + (value @ w.to(value.dtype)).float().sum()
        return total


def _accepts(op: Callable[[Tensor, Tensor], Tensor], dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
    """Two dtypes are for ops that select from both operands."""
    first = torch.ones(16, 16, dtype=dtypes[0])
    second = torch.ones(16, 16, dtype=dtypes[1], requires_grad=True)
    try:
        result = op(first, second)
    except RuntimeError:  # the op takes operands of one dtype only
        return False
    return dtypes[0] == dtypes[1] or result.requires_grad


def test_every_op_that_commutes_with_rounding_is_tried() -> None:
    named_by_tests = {name.partition("_with_")[0] for name in SELECTIONS}
    assert {name.removeprefix("aten.") for name in _COMMUTES_WITH_ROUNDING} == named_by_tests


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "dtypes",
    [(HIGH, LOW), *(pytest.param(dtypes, marks=pytest.mark.slow) for dtypes in ((LOW, LOW), (LOW, HIGH)))],
    ids=["high-low", "low", "low-high"],
)
def test_hazard_13_operands_of_another_precision_are_rounded_where_they_are_stored(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """Whatever may run again under Inductor gives the bits of what was stored."""
    done: list[int] = []

    def rewrite(joint: ScheduledJointGraph) -> ScheduledJointGraph:
        analysis = analyse(joint)
        found = find_recomputations(joint, analysis.alias_sets, analysis.candidates, fused=True)
        done.append(len(found))
        return recompute(analysis, *found.values())

    model, batches = Selections(dtypes), [(torch.tensor(1.01),), (torch.tensor(0.99),)]
    expected = train(model, batches, "inductor")
    assert_same_bits(train(model, batches, rewriting_backend(rewrite, "inductor")), expected)
    # Nothing may run again beside operands of another precision: it could join a loop over 16-bit values.
    assert (sum(done) > 0) == (HIGH not in dtypes)


class Int16(nn.Module):
    """The mask is saved, and could be made again from ``h`` by way of int16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(32, 100), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        mask = ((h * 100).to(torch.int16) > 5).float()
        return (h @ h.t()).sum() + (h.sin() * mask * self.scale).sum()


class Mask(nn.Module):
    """The mask is saved, and could be made again from ``h``. Two loops of backward read bfloat16 values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(32, 100), nn.Parameter(torch.ones(()))
        self.square = nn.Parameter(torch.randn(100, 100) / 10)

    def forward(self, x: Tensor) -> Tensor:
        h, low = self.linear(x) @ self.square, x.bfloat16() @ self.linear.weight.t().bfloat16()
        product = low * self.scale.view(1)
        masked = torch.where(h > 0.1, low, 0.0).float()
        return (masked.sin() * self.scale).sum() + (h @ h.t()).sum() + product.sin().sum()


VECTORS = pytest.mark.parametrize(("module", "why"), [(Int16, "no vector code"), (Mask, "other vectors")])


@VECTORS
def test_inductor_may_change_the_vectors_of_a_loop(module: type[nn.Module], why: str) -> None:
    found = verdicts(analyse(capture_step(module(), torch.randn(16, 32))), "inductor")
    assert [verdict for verdict in found.values() if isinstance(verdict, str) and why in verdict], found


@pytest.mark.usefixtures("one_thread")
@VECTORS
def test_loops_of_backward_keep_their_vectors(
    module: type[nn.Module], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that may run again does, and joins them."""

    def partition(*args: Any, compiler: str = "", **kwargs: Any) -> Any:
        return save_all(*args, **kwargs)

    monkeypatch.setattr("rewriting_backend.min_cut_rematerialization_partition", partition)
    torch.manual_seed(0)
    model, batches = module(), [(torch.randn(64, 32),)]
    expected = train(model, batches, rewriting_backend(lambda joint: joint, "inductor"))
    found = train(
        model, batches, rewriting_backend(lambda joint: recompute_everything(analyse(joint), "inductor"), "inductor")
    )
    assert_same_bits(found, expected)


def on_cuda(analysis: GraphAnalysis) -> GraphAnalysis:
    """Make the analysis look as if the step had been traced on a GPU."""
    for node in analysis.joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, _torch_private.FakeTensor):
            value.fake_device = torch.device("cuda", 0)
    return analysis


def test_a_gpu_rounds_a_product_and_its_sum_once() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        h = x @ w
        return ((h * h.sin() + h) @ w + (h + b) @ w + (h.abs() * 3) @ w).sum()

    step = capture_step(function, matrix(16, 16), matrix(16, 16), matrix(16))
    on_cpu = {name for name, verdict in verdicts(analyse(step), "inductor").items() if not isinstance(verdict, str)}
    assert on_cpu == {"add", "add_1", "mul_1"}
    analysis = on_cuda(analyse(step))
    assert reason(analysis, "add", "inductor") == "add (aten.add): the sum of a product may be rounded once"
    assert reason(analysis, "mul_1", "inductor").startswith("mul_1 (aten.mul): it may be rounded together")
    assert sources(analysis, recomputation(analysis, "add_1", "inductor")) == ["mm"]


def test_inductor_changes_layouts_around_convolutions() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = F.conv2d(x, w)
        return (F.conv2d(h * h, w)).sum()

    analysis = analyse(capture_step(function, matrix(1, 2, 8, 8), matrix(2, 2, 3, 3)))
    assert reason(analysis, "mul", "inductor").endswith("another layout for it, because the graph has convolutions")
    assert sources(analysis, recomputation(analysis, "mul")) == ["convolution"]


def test_what_must_stay_gets_no_verdict() -> None:
    analysis = analyse(two_layers(), min_tensor_bytes=1 << 30)
    assert analysis.candidates
    assert verdicts(analysis) == {}


# The rewrite


def test_before() -> None:
    assert_expected_inline(
        listing(two_layers().join().graph),
        """\
primals_1: f32[4, 6]
primals_2: f32[6, 8]
primals_3: f32[8, 8]
tangents_1: f32[]
mm: f32[4, 8] = mm(primals_1, primals_2)
mul: f32[4, 8] = mul(mm, mm)
mm_1: f32[4, 8] = mm(mul, primals_3)
sum_1: f32[] = sum(mm_1)
backward_starts()
expand: f32[4, 8] = expand(tangents_1, [4, 8])
t: f32[8, 4] = t(mul)
mm_2: f32[8, 8] = mm(t, expand)
t_1: f32[8, 8] = t(primals_3)
mm_3: f32[4, 8] = mm(expand, t_1)
mul_1: f32[4, 8] = mul(mm_3, mm)
mul_2: f32[4, 8] = mul(mm_3, mm)
add: f32[4, 8] = add(mul_2, mul_1)
t_2: f32[6, 4] = t(primals_1)
mm_4: f32[6, 8] = mm(t_2, add)
t_3: f32[8, 6] = t(primals_2)
mm_5: f32[4, 6] = mm(add, t_3)
return ((sum_1), (mm_5, mm_4, mm_2))""",
    )


def test_after() -> None:
    analysis = analyse(two_layers())
    joint = recompute(analysis, recomputation(analysis, "mul", "inductor"))
    assert_expected_inline(
        changes(listing(two_layers().join().graph), listing(joint.graph)),
        """\
...
 expand: f32[4, 8] = expand(tangents_1, [4, 8])
-t: f32[8, 4] = t(mul)
+mul_3: f32[4, 8] = mul(mm, mm)
+t: f32[8, 4] = t(mul_3)
 mm_2: f32[8, 8] = mm(t, expand)""",
    )


def test_what_is_made_again_can_be_read_by_what_is_made_again() -> None:
    """Backward reads mul first. The copy of mul reads the copy of mm, so the copy of mm is inserted before it."""
    analysis = analyse(two_layers())
    joint = recompute(analysis, *(recomputation(analysis, name) for name in ("mm", "mul")))
    assert_expected_inline(
        changes(listing(two_layers().join().graph), listing(joint.graph)),
        """\
...
 expand: f32[4, 8] = expand(tangents_1, [4, 8])
-t: f32[8, 4] = t(mul)
+mm_6: f32[4, 8] = mm(primals_1, primals_2)
+mul_3: f32[4, 8] = mul(mm_6, mm_6)
+t: f32[8, 4] = t(mul_3)
 mm_2: f32[8, 8] = mm(t, expand)
...
 mm_3: f32[4, 8] = mm(expand, t_1)
-mul_1: f32[4, 8] = mul(mm_3, mm)
-mul_2: f32[4, 8] = mul(mm_3, mm)
+mul_1: f32[4, 8] = mul(mm_3, mm_6)
+mul_2: f32[4, 8] = mul(mm_3, mm_6)
 add: f32[4, 8] = add(mul_2, mul_1)""",
    )


def test_nothing_to_do() -> None:
    analysis = analyse(two_layers())
    before = listing(analysis.joint.graph)
    assert recompute(analysis) is analysis.joint
    assert listing(analysis.joint.graph) == before


def test_a_storage_is_made_again_once() -> None:
    analysis = analyse(two_layers())
    found = recomputation(analysis, "mul")
    with pytest.raises(InternalError, match="two recomputations"):
        recompute(analysis, found, found)


def test_copies_have_separate_storages() -> None:
    """So for liveness, the copy ends in backward and the original in forward. Views of the copy are on its storage."""
    analysis = analyse(capture_step(lambda x, w: (w @ (x * x).t()).sum(), matrix(4, 6), matrix(3, 6)))
    joint = recompute(analysis, recomputation(analysis, "mul"))
    original, copy, *_ = calls(joint.graph, aten.mul.Tensor)
    marker = joint.positions()[joint.marker]
    alias_sets = find_alias_sets(joint.graph)
    assert joint.positions()[copy] > marker > max(joint.positions()[user] for user in original.users)
    (storage,) = (alias_sets.storages[idx] for idx in alias_sets.by_node[copy])
    assert storage.allocator is copy
    assert storage.members[1].target is aten.t.default


def test_a_base_is_saved_without_its_views() -> None:
    """Inductor may write over a saved tensor after its last read, even if another saved tensor shares its memory."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        p = x * x
        return (p.t() @ w + (-p) @ w).sum()

    analysis = analyse(capture_step(function, matrix(4, 4), matrix(4, 4)))
    assert names(node for node in analysis.joint.saved if not is_input(node)) == ["t", "neg"]
    joint = recompute(analysis, recomputation(analysis, "neg", "inductor"))
    assert names(node for node in joint.saved if not is_input(node)) == ["mul"]


def test_a_view_that_backward_takes_from_its_base_is_gone_from_forward() -> None:
    """Views that nothing reads count for no plan, so a release could come before them."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        p = x * x
        return (p @ w + (-p) @ w).sum()

    analysis = analyse(capture_step(function, matrix(4, 4), matrix(4, 4), partition=min_cut))
    joint = recompute(analysis, recomputation(analysis, "neg", "inductor"))
    assert [node for node in joint.graph.nodes if node.target is aten.t.default and not node.users] == []


def test_new_nodes_tell_where_they_come_from() -> None:
    analysis = analyse(two_layers())
    joint = recompute(analysis, recomputation(analysis, "mul"))
    first, second, *_ = calls(joint.graph, aten.mul.Tensor)
    assert first.meta["stack_trace"] == second.meta["stack_trace"]
    one, other = first.meta["val"], second.meta["val"]
    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_split_saves_what_is_said_to_be_saved() -> None:
    for name in TOYS:
        joint = recompute_everything(analyse(capture_toy(name)), "aot_eager")
        forward, _ = split(joint)
        results = forward.graph.output_node().args[0]
        assert isinstance(results, tuple)
        assert names(results[len(joint.forward_outputs) :]) == names(joint.saved)


def test_sizes_stay_symbols() -> None:
    step = capture_step(lambda x, w: ((x * x) @ w).sum(), matrix(8, 9), matrix(9, 4), dynamic=True)
    analysis = analyse(step)
    joint = recompute(analysis, recomputation(analysis, "mul"))
    _, copy, *_ = calls(joint.graph, aten.mul.Tensor)
    assert not any(isinstance(size, int) for size in copy.meta["val"].shape)
    split(joint)


# The same bits


def check_bits(step: CapturedStep, chosen: Callable[[Sequence[Recomputation]], Sequence[Recomputation]]) -> None:
    analysis = analyse(step)
    found = find_recomputations(analysis.joint, analysis.alias_sets, analysis.candidates, fused=False)
    selected = chosen(tuple(found.values()))
    gone = {recomputation.storage_idx for recomputation in selected}
    kept = {node.name for node in analysis.joint.saved if not gone.issuperset(analysis.alias_sets.by_node[node])}
    joint = recompute(analysis, *selected)
    joint.graph.lint()
    assert_same_bits(step.run(joint), step.run())
    for storage in analysis.alias_sets.storages:
        if storage.idx in gone:
            assert not any(node in storage.members for node in joint.saved), f"{storage.allocator} is still saved"
    assert {node.name for node in joint.saved if not is_input(node)} <= kept | {
        analysis.alias_sets.storages[idx].members[0].name for one in selected for idx in one.sources
    }


def is_input(node: fx.Node) -> bool:
    return node.op == "placeholder"


@pytest.mark.parametrize("name", TOYS)
def test_everything_made_again_gives_the_same_bits(name: str) -> None:
    check_bits(capture_toy_or_program(name), lambda found: found)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(program=random_programs(), chosen=st.sets(st.integers(0, 12)), turned=st.booleans())
def test_random_graphs_give_the_same_bits(program: Program, chosen: set[int], turned: bool) -> None:
    """Any subset works. Storages that are not recomputed are kept."""

    def choose(found: Sequence[Recomputation]) -> Sequence[Recomputation]:
        selected = [one for number, one in enumerate(found) if (number in chosen) != turned]
        return selected[::-1] if turned else selected

    check_bits(capture_toy_or_program(program), choose)


@pytest.mark.parametrize("name", TOYS)
def test_what_is_still_saved_can_be_offloaded(name: str) -> None:
    """The copies then read the reloaded tensors."""
    step = capture_toy_or_program(name)
    after = analyse(recompute_everything(analyse(step), "inductor"))
    joint = after.rewrite(after.plan(policy="all"))
    verify_offloads(joint)
    assert find(joint.graph, OFFLOAD)
    assert_same_bits(step.run(joint), step.run())


def test_less_is_alive_where_backward_begins() -> None:
    """Counts the storages of real tensors that an interpreter holds at the marker."""
    step = two_layers()
    analysis = analyse(step)
    before = live_at_marker(step, step.join())
    after = live_at_marker(step, recompute(analysis, recomputation(analysis, "mul")))
    assert before - after == 4 * 8 * 4


# Vectors and scalars. The remainder of a loop, and ops fused with one that has no vector form, compile to scalar code.

SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1e-38, 3.4e38, 0.1, -2.5)


def operands() -> tuple[Tensor, Tensor]:
    """Every pair of special values, and random values of many magnitudes."""
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor(SPECIAL)
    random = torch.randn(4096, generator=generator) * 10.0 ** torch.randint(-12, 12, (4096,), generator=generator)
    return (
        torch.cat([special.repeat_interleave(len(special)), random]),
        torch.cat([special.repeat(len(special)), random.flip(0)]),
    )


def bits(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dtype is not torch.bool else value


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_what_may_run_again_has_the_same_bits_as_vector_and_as_scalar() -> None:
    def safe(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        arithmetic = (
            a + b,
            a - b,
            1.5 - a,
            a * b,
            a * b + a,
            a / b,
            a.reciprocal(),
            a.sqrt(),
            torch.add(a, b, alpha=1.7),
        )
        selections = a.abs(), -a, a.relu(), torch.where(a > b, a, b), a.masked_fill(b > 0, 2.0)
        exact = a.sign(), a.floor(), a.ceil(), a.trunc(), a < b, a == b, a.isnan(), a.isinf(), a.logical_and(b)
        return (*arithmetic, *selections, *exact, a.double(), (a.double() * b.double()).float())

    def others(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch.maximum(a, b), a.clamp(min=0), a.sin().exp(), a.sin().tanh(), a.sin().erf(), a.sin()

    def compiled(function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], simdlen: int | None) -> tuple[Tensor, ...]:
        torch._dynamo.reset()
        with inductor_config.patch({"cpp.simdlen": simdlen}):
            return torch.compile(function)(*operands())

    for number, (vector, scalar) in enumerate(zip(compiled(safe, None), compiled(safe, 0), strict=True)):
        assert torch.equal(bits(vector), bits(scalar)), f"result {number}"
    if "avx" not in torch.backends.cpu.get_cpu_capability().lower():
        return  # which of the others differ depends on the machine's vector instructions
    for vector, scalar in zip(compiled(others, None), compiled(others, 0), strict=True):
        assert not torch.equal(bits(vector), bits(scalar)), "could be allowed"


# Real models with the real compilers. These tests decide what is in the lists of ops.


def check_model(name: str, inner: Inner, *, dropout: float = 0.1, autocast: bool = False) -> None:
    model, batches = small_model(name, dropout=dropout)
    if autocast:
        model = Autocast(model)
    done: list[int] = []

    def rewrite(joint: ScheduledJointGraph) -> ScheduledJointGraph:
        analysis = analyse(joint)
        found = find_recomputations(joint, analysis.alias_sets, analysis.candidates, fused=inner == "inductor")
        done.append(len(found))
        return recompute(analysis, *found.values())

    expected = train(model, batches, inner)
    assert_same_bits(train(model, batches, rewriting_backend(rewrite, inner)), expected)
    assert sum(done) > 0 or (inner == "inductor" and (autocast or name in ("vit", "conv"))), "nothing was recomputed"


MODELS = ["gpt2", "bert", "t5", "llama", "vit", "encoder", "conv"]


@pytest.mark.usefixtures("one_thread")
def test_a_model_trains_to_the_same_bits() -> None:
    check_model("encoder", "aot_eager")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_all_models_train_to_the_same_bits(name: str, inner: Inner, dropout: float, autocast: bool) -> None:
    check_model(name, inner, dropout=dropout, autocast=autocast)
