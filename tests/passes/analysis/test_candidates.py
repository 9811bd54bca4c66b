"""Candidates: every storage that backward reads, with the node to offload or the reason to keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from graphs import matrix, names
from torch import Tensor, fx, nn

from ssdtrain_fx.passes.analysis.candidates import Candidate, find_candidates, view_path
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.testing import CapturedStep, GraphAnalysis, analyse, calls, capture_step, capture_toy, named

aten = torch.ops.aten
HELD = "graph input: a parameter, a buffer or data that the caller holds"
RETURNED = "graph output: the caller holds it, so offloading would free nothing"
PART_ONLY = "no node covers the storage: only a part of it is in this graph"


def candidates_of(function: Callable[..., Any], *inputs: Tensor, min_tensor_bytes: int = 0) -> GraphAnalysis:
    return analyse(capture_step(function, *inputs), min_tensor_bytes=min_tensor_bytes)


def made_by(analysis: GraphAnalysis, target: object) -> Candidate:
    """The candidate whose storage the only call of ``target`` allocates."""
    (found,) = [candidate for candidate in analysis.candidates if candidate.storage.allocator.target is target]
    return found


def again(joint: ScheduledJointGraph) -> GraphAnalysis:
    """The candidates of a graph that a test has edited."""
    alias_sets = find_alias_sets(joint.graph)
    return GraphAnalysis(joint, alias_sets, find_candidates(joint, alias_sets, min_tensor_bytes=0))


def capture_exp() -> CapturedStep:
    """exp [4, 6] has 96 bytes. Backward reads it (through a detach)."""
    return capture_step(lambda x: x.exp().sum(), matrix())


class TestStays:
    """One test for each reason to keep."""

    def test_parameters(self) -> None:
        analysis = analyse(capture_step(nn.Linear(6, 6), matrix(2, 6)))
        assert {candidate.reason_to_keep for candidate in analysis.candidates} == {HELD}
        assert len(analysis.candidates) == 2, "the input and the weight"

    def test_buffers(self) -> None:
        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.ones(4, 6))

            def forward(self, x: Tensor) -> Tensor:
                return (x * self.scale).sum()

        (candidate,) = analyse(capture_step(Scale(), matrix())).candidates
        assert (candidate.reason_to_keep, candidate.representative) == (HELD, None)

    def test_views_of_inputs(self) -> None:
        analysis = candidates_of(lambda x, w: (x.t() @ w).sum(), matrix(), matrix(4, 2))
        assert [candidate.reason_to_keep for candidate in analysis.candidates] == [HELD, HELD]
        assert names(analysis.candidates[0].saved_nodes) == ["t"]

    def test_what_is_returned(self) -> None:
        """The logits are saved and returned. While the caller holds them, offloading frees nothing."""
        analysis = candidates_of(lambda x: ((logits := x.exp()).sum(), logits), matrix())
        assert made_by(analysis, aten.exp.default).reason_to_keep == RETURNED

    def test_what_a_returned_view_shares(self) -> None:
        analysis = candidates_of(lambda x: ((y := x.exp()).sum(), y[:, :2].t()), matrix())
        assert made_by(analysis, aten.exp.default).reason_to_keep == RETURNED

    def test_what_is_returned_as_a_gradient(self) -> None:
        """Backward returns a saved tensor unchanged, so autograd holds it."""
        joint = capture_exp().join()
        (exp,) = calls(joint.graph, aten.exp.default)
        output = joint.graph.output_node()
        output.args = ((tuple(joint.forward_outputs), (exp,)),)
        assert made_by(again(joint), aten.exp.default).reason_to_keep == "returned as a gradient"

    @pytest.mark.parametrize("by_keyword", [False, True])
    def test_what_is_written_in_place(self, by_keyword: bool) -> None:
        """Functionalization removes in-place writes, but custom ops can add them again."""
        joint = capture_exp().join()
        (exp,) = calls(joint.graph, aten.exp.default)
        with joint.graph.inserting_before(joint.marker):
            written = (
                joint.graph.call_function(aten.mul_.Tensor, (), {"self": exp, "other": 2})
                if by_keyword
                else joint.graph.call_function(aten.mul_.Tensor, (exp, 2))
            )
        written.meta["val"] = exp.meta["val"]
        assert made_by(again(joint), aten.exp.default).reason_to_keep == "written in place"

    def test_what_is_written_through_a_view(self) -> None:
        joint = capture_exp().join()
        (exp,) = calls(joint.graph, aten.exp.default)
        with joint.graph.inserting_before(joint.marker):
            view = joint.graph.call_function(aten.detach.default, (exp,))
            view.meta["val"] = exp.meta["val"]
            joint.graph.call_function(aten._foreach_zero_.default, ([view],))
        assert made_by(again(joint), aten.exp.default).reason_to_keep == "written in place"

    def test_reading_an_argument_of_a_writing_op_is_no_write(self) -> None:
        joint = capture_exp().join()
        (exp,) = calls(joint.graph, aten.exp.default)
        with joint.graph.inserting_before(joint.marker):
            joint.graph.call_function(aten.mul_.Tensor, (calls(joint.graph, aten.sum.default)[0], exp))
        assert made_by(again(joint), aten.exp.default).reason_to_keep == ""

    def test_tensor_subclasses(self) -> None:
        class Tagged(Tensor):
            pass

        joint = capture_exp().join()
        for node in joint.saved:
            node.meta["val"] = torch.empty(4, 6).as_subclass(Tagged)
        (candidate,) = again(joint).candidates
        assert candidate.reason_to_keep == "tensor subclass Tagged"

    @pytest.mark.parametrize(
        ("device", "reason"),
        [
            ("xpu", "device xpu is not one of cpu, cuda"),
            ("mps", "device mps shares its memory with the CPU, so offloading from it would free nothing"),
        ],
    )
    def test_other_devices(self, device: str, reason: str) -> None:
        joint = capture_exp().join()
        (exp,) = calls(joint.graph, aten.exp.default)
        with exp.meta["val"].fake_mode:
            elsewhere = torch.empty(4, 6, device=device)
        for node in (exp, *joint.saved):
            node.meta["val"] = elsewhere
        assert made_by(again(joint), aten.exp.default).reason_to_keep == reason

    def test_sizes_that_depend_on_data(self) -> None:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            analysis = candidates_of(lambda x: x[x > 0].exp().sum(), matrix())
        exp = made_by(analysis, aten.exp.default)
        assert (exp.reason_to_keep, exp.representative) == ("its size depends on data", None)
        assert made_by(analysis, aten.gt.Scalar).reason_to_keep == "", "the mask has a known size"

    def test_empty_tensors(self) -> None:
        assert made_by(candidates_of(lambda x: x.exp().sum(), matrix(0, 6)), aten.exp.default).reason_to_keep == "empty"

    def test_scalars(self) -> None:
        scalar = made_by(candidates_of(lambda x: x.sum().exp() * 2, matrix()), aten.exp.default)
        assert scalar.reason_to_keep == "4 bytes: not larger than the token that would replace it"

    @pytest.mark.parametrize(("numbers", "moves"), [(2, False), (3, True)])
    def test_what_is_not_larger_than_a_token(self, numbers: int, moves: bool) -> None:
        candidate = made_by(candidates_of(lambda x: x.exp().sum(), matrix(numbers)), aten.exp.default)
        expected = "" if moves else "8 bytes: not larger than the token that would replace it"
        assert candidate.reason_to_keep == expected
        assert (candidate.representative is not None) == moves

    @pytest.mark.parametrize(("min_tensor_bytes", "moves"), [(96, True), (97, False)])
    def test_what_is_below_the_threshold(self, min_tensor_bytes: int, moves: bool) -> None:
        analysis = candidates_of(lambda x: x.exp().sum(), matrix(), min_tensor_bytes=min_tensor_bytes)
        expected = "" if moves else "96 bytes: below min_tensor_bytes=97"
        assert made_by(analysis, aten.exp.default).reason_to_keep == expected

    def test_storages_of_which_the_graph_has_only_a_part(self) -> None:
        """Rows are 12 elements apart and 6 are used, so no tensor in the graph covers the gaps."""
        analysis = candidates_of(lambda x: torch.empty_strided((4, 6), (12, 1)).copy_(x).sin().sum(), matrix())
        assert made_by(analysis, aten.copy.default).reason_to_keep == PART_ONLY

    def test_views_that_need_another_tensor_to_be_rebuilt(self) -> None:
        """A view op with a second tensor argument cannot be replayed from the reloaded base alone."""
        joint = capture_step(lambda x, w: (x.exp().t() @ w).sum(), matrix(), matrix(4, 2)).join()
        (exp,) = calls(joint.graph, aten.exp.default)
        transpose = next(node for node in joint.saved if node.target is aten.t.default)
        assert made_by(again(joint), aten.exp.default).representative is exp
        transpose.kwargs = {"other": named(joint.graph, "primals_2")}
        assert made_by(again(joint), aten.exp.default).reason_to_keep == PART_ONLY


class TestMoves:
    """Kinds of tensors that may be offloaded."""

    @pytest.mark.parametrize(
        ("function", "target", "dtype", "size_bytes"),
        [
            (lambda x: torch.where(x > 0.5, x, 0).sum(), aten.gt.Scalar, torch.bool, 24),
            (lambda x: x.bfloat16().exp().sum(), aten.exp.default, torch.bfloat16, 48),
            (lambda x: x.double().exp().sum(), aten.exp.default, torch.float64, 192),
            (lambda x: torch.view_as_real(torch.complex(x, x).exp()).sum(), aten.exp.default, torch.complex64, 192),
            (lambda x: x.sort().values.sum(), aten.sort.default, torch.int64, 192),
        ],
    )
    def test_dtypes(self, function: Callable[..., Any], target: object, dtype: torch.dtype, size_bytes: int) -> None:
        candidate = made_by(candidates_of(function, matrix()), target)
        assert candidate.reason_to_keep == ""
        assert candidate.representative is not None
        assert candidate.representative.meta["val"].dtype == dtype
        assert candidate.storage.hint_bytes == size_bytes

    def test_a_conjugate_moves_as_its_base(self) -> None:
        """conj() is a bit on a view, not data. The base is offloaded, and the view is replayed."""
        function = lambda x: torch.view_as_real((z := torch.complex(x, x).exp()) @ z.mH).sum()  # noqa: E731
        analysis = candidates_of(function, matrix())
        candidate = made_by(analysis, aten.exp.default)
        (conj,) = [node for node in candidate.saved_nodes if node.meta["val"].is_conj()]
        assert candidate.representative is candidate.storage.allocator
        path = view_path(conj, (candidate.storage.allocator,), candidate.storage, analysis.alias_sets)
        assert path is not None and path[-1] is conj

    def test_saved_transposes(self) -> None:
        analysis = candidates_of(lambda x, w: (x.exp().t() @ w).sum(), matrix(), matrix(4, 2))
        candidate = made_by(analysis, aten.exp.default)
        assert candidate.representative is candidate.storage.allocator
        assert "t" in names(candidate.saved_nodes)

    def test_saved_slices_move_as_the_whole(self) -> None:
        analysis = candidates_of(lambda x, w: (x.sin()[1:3] @ w).sum(), matrix(), matrix(6, 2))
        candidate = made_by(analysis, aten.sin.default)
        assert names(candidate.saved_nodes) == ["slice_1"]
        assert candidate.representative is candidate.storage.allocator
        assert candidate.storage.hint_bytes == 96

    def test_a_view_of_an_expanded_tensor(self) -> None:
        """exp [1, 6] -> expand [4, 6] -> t [6, 4]: 24 bytes are offloaded, not 96."""
        analysis = candidates_of(
            lambda x, w: (x.sum(0, keepdim=True).exp().expand(4, 6).t() @ w).sum(), matrix(), matrix(4, 2)
        )
        candidate = made_by(analysis, aten.exp.default)
        assert candidate.representative is candidate.storage.allocator
        assert candidate.storage.hint_bytes == 24
        (transpose,) = [node for node in candidate.saved_nodes if node.target is aten.t.default]
        path = view_path(transpose, (candidate.storage.allocator,), candidate.storage, analysis.alias_sets)
        assert path is not None
        assert [node.target for node in path] == [aten.expand.default, aten.t.default]

    def test_each_result_of_an_op_is_a_candidate(self) -> None:
        analysis = candidates_of(lambda x: nn.functional.layer_norm(x.sin(), (6,)).sum(), matrix())
        results = [c for c in analysis.candidates if c.storage.allocator.target is aten.native_layer_norm.default]
        assert [names(candidate.saved_nodes) for candidate in results] == [["getitem_1"], ["getitem_2"]]
        assert [str(candidate.representative) for candidate in results] == ["getitem_1", "getitem_2"]

    def test_symbolic_sizes(self) -> None:
        x = matrix(40, 6)
        torch._dynamo.mark_dynamic(x, 0)
        candidate = made_by(analyse(capture_step(lambda x: x.exp().sum(), x, dynamic=True)), aten.exp.default)
        assert candidate.reason_to_keep == ""
        assert candidate.representative is candidate.storage.allocator
        assert isinstance(candidate.storage.size_bytes, torch.SymInt)

    def test_symbolic_views(self) -> None:
        """A view whose sizes are symbols can be replayed, because backward receives symbols too."""
        candidate = made_by(analyse(capture_toy("attention", dynamic=True)), aten._softmax.default)
        assert candidate.reason_to_keep == ""


def qkv_analysis() -> GraphAnalysis:
    """addmm [8, 12] -> split -> q, k, v [8, 4] -> views of them are saved."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        q, k, v = torch.addmm(b, x, w).chunk(3, -1)
        return ((q @ k.t()) @ v).sum()

    return analyse(capture_step(function, matrix(8, 6), matrix(6, 12), matrix(12)))


def test_query_key_and_value_are_one_candidate() -> None:
    analysis = qkv_analysis()
    candidate = made_by(analysis, aten.addmm.default)
    assert names(candidate.saved_nodes) == ["getitem", "getitem_2", "t"]
    assert str(candidate.representative) == "addmm"
    assert candidate.storage.hint_bytes == 8 * 12 * 4


def test_view_paths_lead_through_split() -> None:
    analysis = qkv_analysis()
    candidate = made_by(analysis, aten.addmm.default)
    graph = analysis.joint.graph

    def path(name: str, start: fx.Node) -> list[str] | None:
        found = view_path(named(graph, name), (start,), candidate.storage, analysis.alias_sets)
        return None if found is None else names(found)

    addmm = candidate.storage.allocator
    assert path("t", addmm) == ["split", "getitem_1", "t"]
    assert path("getitem", addmm) == ["split", "getitem"]
    assert path("addmm", addmm) == []
    assert path("getitem", named(graph, "getitem_1")) is None, "no path from one part to another"


def test_candidates_come_in_the_order_of_allocation() -> None:
    analysis = analyse(capture_toy("convolutions"))
    positions = analysis.joint.positions()
    order = [positions[candidate.storage.allocator] for candidate in analysis.candidates]
    assert len(order) > 5
    assert order == sorted(order)


def test_a_candidate_moves_or_says_why_not() -> None:
    for name in ("mlp", "attention", "norms", "convolutions"):
        for candidate in analyse(capture_toy(name)).candidates:
            assert (candidate.representative is None) == bool(candidate.reason_to_keep)
