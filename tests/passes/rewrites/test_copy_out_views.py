"""A small saved view no longer keeps a large storage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Program, capture_program, live_at_marker, matrix, names, random_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_backend import rewriting_backend
from steps import small_model
from torch import Tensor, nn
from torch.nn.functional import gelu

from ssdtrain_fx.passes.analysis.candidates import find_candidates
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph, split
from ssdtrain_fx.passes.rewrites.copy_out_views import COPY, copy_out_views
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
    named,
    save_all,
    train,
)

aten = torch.ops.aten


def class_token() -> CapturedStep:
    """addmm [4, 16, 8] takes 2 KiB. A classifier reads its first token [4, 8], which is saved for backward."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = (x @ w).view(4, 16, 8)
        return (h[:, 0] @ v).sum() + h.sum()

    return capture_step(function, matrix(64, 6), matrix(6, 8), matrix(8, 8))


def copy_out(analysis: GraphAnalysis, min_saved_bytes: int = 1, **options: Any) -> ScheduledJointGraph:
    return copy_out_views(analysis.joint, min_tensor_bytes=0, min_saved_bytes=min_saved_bytes, **options)


def test_before() -> None:
    assert_expected_inline(
        listing(class_token().join().graph),
        """\
primals_1: f32[64, 6]
primals_2: f32[6, 8]
primals_3: f32[8, 8]
tangents_1: f32[]
mm: f32[64, 8] = mm(primals_1, primals_2)
view: f32[4, 16, 8] = view(mm, [4, 16, 8])
select: f32[4, 8] = select.int(view, 1, 0)
mm_1: f32[4, 8] = mm(select, primals_3)
sum_1: f32[] = sum(mm_1)
sum_2: f32[] = sum(view)
add: f32[] = add(sum_1, sum_2)
backward_starts()
expand: f32[4, 16, 8] = expand(tangents_1, [4, 16, 8])
expand_1: f32[4, 8] = expand(tangents_1, [4, 8])
t: f32[8, 4] = t(select)
mm_2: f32[8, 8] = mm(t, expand_1)
t_1: f32[8, 8] = t(primals_3)
mm_3: f32[4, 8] = mm(expand_1, t_1)
select_backward: f32[4, 16, 8] = select_backward(mm_3, [4, 16, 8], 1, 0)
add_1: f32[4, 16, 8] = add(expand, select_backward)
view_1: f32[64, 8] = view(add_1, [64, 8])
t_2: f32[6, 64] = t(primals_1)
mm_4: f32[6, 8] = mm(t_2, view_1)
t_3: f32[8, 6] = t(primals_2)
mm_5: f32[64, 6] = mm(view_1, t_3)
return ((add), (mm_5, mm_4, mm_2))""",
    )


def test_after() -> None:
    assert_expected_inline(
        changes(listing(class_token().join().graph), listing(copy_out(analyse(class_token())).graph)),
        """\
...
 mm: f32[64, 8] = mm(primals_1, primals_2)
+view_2: f32[4, 16, 8] = view(mm, [4, 16, 8])
+select_1: f32[4, 8] = select.int(view_2, 1, 0)
+lift_fresh_copy_default: f32[4, 8] = lift_fresh_copy(select_1)
 view: f32[4, 16, 8] = view(mm, [4, 16, 8])
...
 expand_1: f32[4, 8] = expand(tangents_1, [4, 8])
-t: f32[8, 4] = t(select)
+t: f32[8, 4] = t(lift_fresh_copy_default)
 mm_2: f32[8, 8] = mm(t, expand_1)""",
    )


def test_less_is_alive_where_backward_begins() -> None:
    """Counted on real storages: the matrix product is freed, and its first token is left."""
    step = class_token()
    before, after = (live_at_marker(step, joint) for joint in (step.join(), copy_out(analyse(step))))
    assert before - after == (4 * 16 * 8 - 4 * 8) * 4


@pytest.mark.parametrize("options", [{"min_saved_bytes": 1921}, {"min_parts": 17}])
def test_nothing_changes_where_it_does_not_pay(options: dict[str, int]) -> None:
    """The copy takes a 16th of the storage and would free 1920 bytes."""
    analysis = analyse(class_token())
    before = listing(analysis.joint.graph)
    assert copy_out(analysis, **options) is analysis.joint
    assert listing(analysis.joint.graph) == before


def test_the_thresholds_are_inclusive() -> None:
    analysis = analyse(class_token())
    assert copy_out(analysis, min_saved_bytes=1920, min_parts=16) is not analysis.joint


def refused(function: Callable[..., Any], *inputs: Tensor) -> None:
    analysis = analyse(capture_step(function, *inputs))
    assert analysis.candidates
    assert copy_out(analysis) is analysis.joint


def test_what_the_caller_holds_is_not_copied() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return (h[:2] @ v).sum(), h

    refused(function, matrix(64, 6), matrix(6, 8), matrix(8, 8))


def test_expanded_views_are_not_copied() -> None:
    """The copy of one expanded row would be as large as all rows."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        return (h[:1].expand(64, 8) * v).sum() + h.sum()

    refused(function, matrix(64, 6), matrix(6, 8), matrix(64, 8))


def scaled_token(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    h = (x @ w).view(64, 16, 100)
    return (h[:, 0] * scale).sum() + h.sum()


def strided_gelu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = x @ w
    return (gelu(h[:, 3]) * v).sum() + h.sum()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(scaled_token, ((1024, 6), (6, 100), ())), (strided_gelu, ((1000, 6), (6, 16), (1000,)))],
)
def test_a_view_that_is_read_by_other_ops_than_products_is_not_copied(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    """Their loops over a dense copy would add in another order, or compute other elements by vector code."""
    generator = torch.Generator().manual_seed(0)
    refused(function, *(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_gradient_of_the_scale_of_a_token_has_the_same_bits(inner: Literal["aot_eager", "inductor"]) -> None:
    """Inductor multiplies and adds in one loop, whose order is that of the view."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(32, 100), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return torch.sin(h[:, 0] * self.scale).sum() + h.mean()

    torch.manual_seed(0)
    model, batches = Scaled(), [(torch.randn(64, 16, 32),)]
    found = train(model, batches, rewriting_backend(lambda joint: copy_out(analyse(joint)), inner))
    assert_same_bits(found, train(model, batches, inner))


def test_two_saved_views_are_two_copies_and_a_view_of_one_is_taken_from_it() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        first, last = h[:2], h[-2:]
        return (first @ v).sum() + (v @ first.t()).sum() + (last @ v).sum() + h.sum()

    step = capture_step(function, matrix(64, 6), matrix(6, 8), matrix(8, 8))
    analysis = analyse(step)
    storage = analysis.alias_sets.of(named(analysis.joint.graph, "mm"))
    joint = copy_out(analysis)
    copies = calls(joint.graph, COPY)
    assert [tuple(copy.meta["val"].shape) for copy in copies] == [(2, 8), (2, 8)]
    assert storage is not None
    assert not set(joint.saved) & set(storage.members)
    assert {node for node in joint.saved if node.op != "placeholder"} >= set(copies)
    assert_same_bits(step.run(joint), step.run())


def test_the_copy_is_made_where_the_storage_is() -> None:
    """A copy after the view could be too late: a view for backward alone may be at the end of forward."""
    joint = copy_out(analyse(class_token()))
    (copy,) = calls(joint.graph, COPY)
    assert joint.positions()[copy] < joint.positions()[calls(joint.graph, aten.sum.default)[0]]


@pytest.mark.parametrize(
    ("view", "stride"),
    [
        (lambda h: h[:4], (8, 1)),
        (lambda h: h[:4].t(), (1, 8)),
        (lambda h: h.view(4, 16, 8)[:, 0], (8, 1)),
        (lambda h: h.view(4, 16, 8)[:, 0].t(), (1, 8)),
    ],
)
def test_copies_keep_the_order_of_strides_and_tell_where_they_come_from(
    view: Callable[[Tensor], Tensor], stride: tuple[int, int]
) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        part = view(h)
        return (part @ v.view(part.shape[1], -1)).sum() + h.sum()

    step = capture_step(function, matrix(64, 6), matrix(6, 8), matrix(4, 8))
    joint = copy_out(analyse(step))
    (copy,) = calls(joint.graph, COPY)
    assert copy.meta["stack_trace"]
    on_copy = find_alias_sets(joint.graph).by_node[copy]
    (saved,) = (node for node in joint.saved if find_alias_sets(joint.graph).by_node[node] == on_copy)
    assert saved.meta["val"].stride() == stride
    assert_same_bits(step.run(joint), step.run())


def test_what_backward_views_lies_on_the_copy() -> None:
    joint = copy_out(analyse(class_token()))
    (copy,) = calls(joint.graph, COPY)
    alias_sets = find_alias_sets(joint.graph)
    views = [user for user in copy.users if user.target is aten.t.default]
    assert views
    for view in views:
        assert alias_sets.by_node[view] == alias_sets.by_node[copy]
        assert view.meta["val"].stride() == (1, 8)


def test_split_saves_what_is_said_to_be_saved() -> None:
    joint = copy_out(analyse(class_token()))
    forward, _ = split(joint)
    results = forward.graph.output_node().args[0]
    assert isinstance(results, tuple)
    assert names(results[len(joint.forward_outputs) :]) == names(joint.saved)


class LineCounter:
    """Counts the lines of passes that run: a measure of time that does not depend on the machine."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> LineCounter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if "passes" not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self._trace


@pytest.mark.parametrize(
    "nested", [pytest.param(False, id="slices", marks=pytest.mark.slow), pytest.param(True, id="slices of slices")]
)
def test_time_grows_linearly_with_the_views_of_a_storage(nested: bool) -> None:
    """Twice as many views take at most 2.2 times as many lines. Each view by every other one would be four times."""

    def capture(count: int) -> CapturedStep:
        def function(x: Tensor, w: Tensor) -> Tensor:
            h = x @ w
            parts = [h[row] for row in range(count)]
            if nested:
                view = h
                parts = [(view := view[1:])[0] for _ in range(count)]
            return torch.stack([part[None] @ w for part in parts]).sum()

        return capture_step(function, matrix(count + 2, 4), matrix(4, 4), partition=save_all)

    lines: list[int] = []
    for count in (100, 200):
        analysis = analyse(capture(count))
        assert any(len(candidate.saved_nodes) == count for candidate in analysis.candidates)
        with LineCounter() as counter:
            find_candidates(analysis.joint, analysis.alias_sets, min_tensor_bytes=0)
            if not nested:
                copy_out(analysis, min_parts=1)
        lines.append(counter.count)
    assert lines[1] <= 2.2 * lines[0]


def check_bits(step: CapturedStep, min_parts: int) -> None:
    joint = copy_out(analyse(step), min_parts=min_parts)
    joint.graph.lint()
    assert_same_bits(step.run(joint), step.run())
    split(joint)


@pytest.mark.parametrize("name", TOYS)
def test_copies_give_the_same_bits(name: str) -> None:
    check_bits(capture_toy(name), 1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(program=random_programs(), min_parts=st.sampled_from([1, 2, 4]))
def test_random_graphs_give_the_same_bits(program: Program, min_parts: int) -> None:
    check_bits(capture_program(program), min_parts)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_models_train_to_the_same_bits(name: str, inner: Literal["aot_eager", "inductor"]) -> None:
    """ViT classifies by a single token of its last layer."""
    done: list[int] = []

    def rewrite(joint: ScheduledJointGraph) -> ScheduledJointGraph:
        before = len(calls(joint.graph, COPY))
        rewritten = copy_out(analyse(joint))
        done.append(len(calls(rewritten.graph, COPY)) - before)
        return rewritten

    model, batches = small_model(name, dropout=0.1)
    assert_same_bits(train(model, batches, rewriting_backend(rewrite, inner)), train(model, batches, inner))
    assert name != "vit" or done == [1]
