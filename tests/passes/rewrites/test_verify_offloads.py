"""The verifier accepts the graphs that the rewrite makes, and names the fault of any other graph.

Each rejection test takes a good graph and breaks one thing:

    exp | offload | tanh | release, offload | exp_1 ... | backward_starts() | reload | wait | ...
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor, fx

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.graph.joint_graph import ScheduledJointGraph
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELEASE, RELOAD, WAIT, find, site_of
from ssdtrain_fx.passes.planning.transfer_problem import HostTier
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.testing import TOYS, analyse, calls, capture_step, capture_toy, named, toy_hardware

aten = torch.ops.aten


def good() -> ScheduledJointGraph:
    """Three storages of 256 bytes, all offloaded, and logits that are returned."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.exp().tanh().exp()
        logits = hidden.sin()
        return logits.sum(), logits

    analysis = analyse(capture_step(function, torch.randn(8, 8, requires_grad=True)))
    return analysis.rewrite(analysis.plan(disk=256))


def chain(joint: ScheduledJointGraph) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """The offload, release, reload and wait of the first storage, which ``exp`` allocates."""
    offload = find(joint.graph, OFFLOAD)[0]
    (release,) = offload.users
    (reload,) = release.users
    (wait,) = reload.users
    assert offload.args[0] is named(joint.graph, "exp")
    return offload, release, reload, wait


def insert(joint: ScheduledJointGraph, before: fx.Node, target: object, *args: object) -> fx.Node:
    with joint.graph.inserting_before(before):
        node = joint.graph.call_function(target, args)  # type: ignore[arg-type]
    source = next(argument for argument in args if isinstance(argument, fx.Node))
    node.meta = dict(source.meta)
    return node


def assert_rejected(joint: ScheduledJointGraph, offender: fx.Node, message: str) -> None:
    """The message names the offender and shows it with the nodes around it."""
    with pytest.raises(InternalError) as raised:
        verify_offloads(joint)
    text = str(raised.value)
    first, *around = text.splitlines()
    assert first.startswith(f"{offender.name}: ")
    assert message in first
    nodes = list(joint.graph.nodes)
    at = nodes.index(offender)
    (marked,) = [line for line in around if line.startswith("->")]
    assert re.match(rf"->\s+{at}\s+%{offender.name} ", marked)
    for neighbour in nodes[max(0, at - 5) : at + 6]:
        assert any(re.match(rf"(->|  )\s+{nodes.index(neighbour)}  ", line) for line in around), neighbour
    assert "bug in ssdtrain_fx" in text


@pytest.mark.parametrize("disk", [1e9, 2048, 600, 1])
@pytest.mark.parametrize("name", TOYS)
def test_what_the_rewrite_makes_is_accepted(name: str, disk: float) -> None:
    analysis = analyse(capture_toy(name))
    joint = analysis.rewrite(analysis.plan(disk=disk))
    assert find(joint.graph, WAIT)
    verify_offloads(joint)


def test_symbolic_sizes_are_accepted() -> None:
    analysis = analyse(capture_toy("attention", dynamic=True))
    joint = analysis.rewrite(analysis.plan())
    assert find(joint.graph, WAIT)
    verify_offloads(joint)


def test_a_graph_without_offloads_is_accepted() -> None:
    verify_offloads(capture_toy("mlp").join())


def test_the_graph_that_is_broken_below_is_good() -> None:
    joint = good()
    assert [len(find(joint.graph, op)) for op in (OFFLOAD, RELEASE, RELOAD, WAIT)] == [3, 3, 3, 3]
    verify_offloads(joint)


def test_a_read_in_forward_after_the_release() -> None:
    joint = good()
    _, release, _, _ = chain(joint)
    late = insert(joint, joint.marker, aten.neg.default, named(joint.graph, "exp"))
    assert_rejected(joint, late, f"reads exp after {release}")


def test_a_read_of_a_view_after_the_release() -> None:
    """The view itself comes before the release, but its memory is read after it."""
    joint = good()
    offload, release, _, _ = chain(joint)
    view = insert(joint, offload, aten.detach.default, named(joint.graph, "exp"))
    late = insert(joint, joint.marker, aten.neg.default, view)
    assert_rejected(joint, late, f"reads {view} after {release}")


def test_backward_reads_the_original() -> None:
    joint = good()
    _, release, _, wait = chain(joint)
    reader = next(iter(wait.users))
    reader.replace_input_with(wait, named(joint.graph, "exp"))
    assert_rejected(joint, reader, f"reads exp after {release}")


def test_a_release_before_the_last_read() -> None:
    joint = good()
    offload, release, _, _ = chain(joint)
    offload.append(release)
    (reader,) = calls(joint.graph, aten.tanh.default)
    assert_rejected(joint, reader, f"reads exp after {release}")


def test_a_release_of_another_tensor() -> None:
    joint = good()
    _, release, _, _ = chain(joint)
    release.update_arg(1, named(joint.graph, "primals_1"))
    assert_rejected(joint, release, "must be in forward and take the offloaded tensor itself")


def test_a_release_of_a_view_of_the_tensor() -> None:
    """The compiler may copy a view. Then nothing holds the memory that is still being written to the SSD."""
    joint = good()
    offload, release, _, _ = chain(joint)
    release.update_arg(1, insert(joint, offload, aten.detach.default, named(joint.graph, "exp")))
    assert_rejected(joint, release, "must be in forward and take the offloaded tensor itself")


def test_a_release_in_backward() -> None:
    joint = good()
    _, release, reload, _ = chain(joint)
    reload.prepend(release)
    assert_rejected(joint, release, "must be in forward")


def test_no_release() -> None:
    joint = good()
    offload, release, _, _ = chain(joint)
    release.replace_all_uses_with(offload)
    joint.graph.erase_node(release)
    assert_rejected(joint, offload, "expected one user, a ssdtrain.release.default; found [reload_default")


def test_two_releases() -> None:
    joint = good()
    offload, _, _, _ = chain(joint)
    insert(joint, joint.marker, RELEASE, offload, named(joint.graph, "exp"))
    assert_rejected(joint, offload, "expected one user, a ssdtrain.release.default; found [")


def test_a_release_without_an_offload() -> None:
    joint = good()
    _, release, _, _ = chain(joint)
    stray = insert(joint, joint.marker, RELEASE, release, named(joint.graph, "sum_1"))
    joint.graph.output_node().prepend(stray)
    message = "uses the token of a release"
    assert_rejected(joint, stray, message)
    stray.update_arg(0, named(joint.graph, "sum_1"))
    assert_rejected(joint, stray, "a release must take the token that an offload returned")


def test_a_reload_in_forward() -> None:
    joint = good()
    _, _, reload, _ = chain(joint)
    joint.marker.prepend(reload)
    assert_rejected(joint, reload, "the reload is in forward")


def test_a_reload_of_a_token_that_no_release_returned() -> None:
    joint = good()
    _, _, reload, wait = chain(joint)
    stray = insert(joint, wait, RELOAD, named(joint.graph, "sum_1"), *reload.args[1:])
    assert_rejected(joint, stray, "must take the token that a release returned")


def test_what_is_never_reloaded() -> None:
    joint = good()
    _, release, reload, wait = chain(joint)
    wait.replace_all_uses_with(named(joint.graph, "tangents_1"))
    joint.graph.erase_node(wait)
    joint.graph.erase_node(reload)
    assert_rejected(joint, release, "the storage is never reloaded")


def test_a_token_that_something_else_reads() -> None:
    joint = good()
    _, release, _, _ = chain(joint)
    reader = insert(joint, joint.marker, aten.neg.default, release)
    assert_rejected(joint, reader, "uses the token of a release")


def test_two_waits_for_one_reload() -> None:
    joint = good()
    _, _, reload, wait = chain(joint)
    insert(joint, wait, WAIT, reload, *wait.args[1:])
    assert_rejected(joint, reload, "expected one user, a ssdtrain.wait.default; found [wait_default")


def test_no_wait() -> None:
    joint = good()
    _, _, reload, wait = chain(joint)
    wait.replace_all_uses_with(reload)
    joint.graph.erase_node(wait)
    assert_rejected(joint, reload, "expected one user, a ssdtrain.wait.default; found [")


def test_a_wait_that_asks_for_something_else_than_its_reload() -> None:
    joint = good()
    _, _, _, wait = chain(joint)
    wait.update_arg(2, [1, 8])
    assert_rejected(joint, wait, "waits for ([8, 8], [1, 8], torch.float32")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: torch.empty(8, 8).t(), "torch.float32 (8, 8) with strides (1, 8) on cpu"),
        (lambda: torch.empty(8, 8, dtype=torch.float64), "torch.float64 (8, 8) with strides (8, 1) on cpu"),
        (lambda: torch.empty(64), "torch.float32 (64,) with strides (1,) on cpu"),
        (lambda: torch.empty(8, 8, device="cuda"), "torch.float32 (8, 8) with strides (8, 1) on cuda:0"),
    ],
)
def test_something_else_comes_back_than_left(make: object, found: str) -> None:
    joint = good()
    _, _, _, wait = chain(joint)
    with wait.meta["val"].fake_mode:
        wait.meta["val"] = make()  # type: ignore[operator]
    was = "torch.float32 (8, 8) with strides (8, 1) on cpu"
    assert_rejected(joint, wait, f"reloads {found}, but {was} was offloaded")


@pytest.mark.parametrize(("position", "argument"), [(1, [64]), (2, [1, 8]), (3, torch.float64)])
def test_reload_and_wait_agree_on_something_else_than_left(position: int, argument: object) -> None:
    """The arguments are what runs. The metadata of the wait tells what they should be."""
    joint = good()
    _, _, reload, wait = chain(joint)
    for node in (reload, wait):
        node.update_arg(position, argument)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="was offloaded"):
        verify_offloads(joint)


def test_an_offload_of_an_input() -> None:
    joint = good()
    offload, release, _, _ = chain(joint)
    for node, position in ((offload, 0), (release, 1)):
        node.update_arg(position, named(joint.graph, "primals_1"))
    assert_rejected(joint, offload, "the offloaded storage is held outside the graph")


@pytest.mark.parametrize(("deferred", "exclusive"), [((True,), {}), ((), {"exclusive": True})])
def test_an_input_that_is_left_to_the_engine(deferred: tuple[bool, ...], exclusive: dict[str, bool]) -> None:
    joint = good()
    offload, release, _, _ = chain(joint)
    for node, position in ((offload, 0), (release, 1)):
        node.update_arg(position, named(joint.graph, "primals_1"))
    offload.update_arg(2, "name=primals_1;graph_name=graph;external=true|")
    release.args, release.kwargs = (*release.args[:2], *deferred), exclusive
    assert_rejected(joint, release, "leaves an input to the engine, although the caller may write to it")


def test_an_offload_of_an_output() -> None:
    joint = good()
    (logits,) = [node for node in joint.forward_outputs if isinstance(node, fx.Node) and node.name == "sin"]
    insert(joint, joint.marker, OFFLOAD, logits, [], "name=sin|")
    assert_rejected(joint, find(joint.graph, OFFLOAD)[-1], "the offloaded storage is held outside the graph")


def test_an_offload_of_a_view_of_an_output() -> None:
    joint = good()
    view = insert(joint, joint.marker, aten.detach.default, named(joint.graph, "sin"))
    offload = insert(joint, joint.marker, OFFLOAD, view, [], "name=view|")
    assert_rejected(joint, offload, "the offloaded storage is held outside the graph")


def test_an_offload_in_backward() -> None:
    joint = good()
    (made_in_backward,) = calls(joint.graph, aten.tanh_backward.default)
    offload = insert(joint, joint.graph.output_node(), OFFLOAD, made_in_backward, [], "name=late|")
    assert_rejected(joint, offload, "the offload is in backward")


def test_an_offload_of_something_without_a_storage() -> None:
    joint = good()
    number = insert(joint, joint.marker, aten.sym_size.int, named(joint.graph, "exp"), 0)
    number.meta["val"] = 8
    release = chain(joint)[1]
    release.prepend(number)
    offload = insert(joint, joint.marker, OFFLOAD, number, [], "name=number|")
    assert_rejected(joint, offload, f"{number} is not a tensor with a storage")


def test_a_storage_that_is_offloaded_twice() -> None:
    joint = good()
    offload, release, _, _ = chain(joint)
    twice = insert(joint, release, OFFLOAD, *offload.args)
    assert_rejected(joint, twice, "the storage is offloaded twice")


def test_a_storage_that_is_written_in_place() -> None:
    """exp | offload | mul_ | release: the written bytes are neither the old nor the new data."""
    joint = good()
    _, release, _, _ = chain(joint)
    insert(joint, release, aten.mul_.Tensor, named(joint.graph, "exp"), 2)
    with pytest.raises(InternalError, match="writ"):
        verify_offloads(joint)


def test_a_graph_that_is_not_even_in_order() -> None:
    joint = good()
    offload, release, _, _ = chain(joint)
    offload.prepend(release)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        verify_offloads(joint)


# The host tier


def good_with_host() -> ScheduledJointGraph:
    """Like :func:`good`, with the last two of three storages in the host tier."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.exp().tanh().exp()
        logits = hidden.sin()
        return logits.sum(), logits

    analysis = analyse(capture_step(function, torch.randn(8, 8, requires_grad=True)))
    joint = analysis.rewrite(analysis.plan(disk=256, host_bytes=512))
    sites = [site_of(node) for node in find(joint.graph, OFFLOAD)]
    assert [(site.host, site.reload_order) for site in sites] == [(False, 2), (True, 1), (True, 0)]
    return joint


def assert_refused(
    joint: ScheduledJointGraph, offload: fx.Node, message: str, host: HostTier | None, hardware: Hardware | None = None
) -> None:
    with pytest.raises(InternalError, match=rf"^{offload.name}: {re.escape(message)}\."):
        verify_offloads(joint, host=host, hardware=hardware)


def test_the_host_tier_is_kept_by_the_bytes_of_the_graph() -> None:
    joint = good_with_host()
    last = find(joint.graph, OFFLOAD)[-1]
    verify_offloads(joint, host=HostTier(budget_bytes=512))
    assert_refused(joint, last, "the host tier would hold 512 bytes; its budget is 511", HostTier(budget_bytes=511))
    chunked = toy_hardware(staging_chunk_bytes=300)
    verify_offloads(joint, host=HostTier(budget_bytes=600), hardware=chunked)
    message = "the host tier would hold 600 bytes; its budget is 599"
    assert_refused(joint, last, message, HostTier(budget_bytes=599), chunked)


def test_a_device_without_a_host_tier() -> None:
    joint = good_with_host()
    first = find(joint.graph, OFFLOAD)[1]
    assert_refused(joint, first, "offloads to the host tier, but there is none", None)


@pytest.mark.parametrize(
    ("turn", "orders"), [(2, (3, 1, 0)), (1, (1, 2, 0)), (0, (2, 1, None)), (1, (2, 2, 0)), (0, (3, 2, 1))]
)
def test_a_reload_has_another_turn_than_said(turn: int, orders: tuple[int | None, ...]) -> None:
    """The message names the first wrong offload, in the order of backward."""
    joint = good_with_host()
    offloads = find(joint.graph, OFFLOAD)
    for offload, order in zip(offloads, orders, strict=True):
        offload.update_arg(2, dataclasses.replace(site_of(offload), reload_order=order).to_argument())
    wrong = offloads[2 - turn]
    message = f"has a wrong reload_order: it is reloaded as number {turn}, counted from 0"
    assert_refused(joint, wrong, message, HostTier(budget_bytes=512))
