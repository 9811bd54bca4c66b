"""A stretched problem is that of the deep model, traced."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.planning.place_transfers import choose_lowest_peak
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem
from ssdtrain_fx.projection.catalog import find_drive, find_gpu
from ssdtrain_fx.projection.machine import machine
from ssdtrain_fx.projection.stretch import stretch
from ssdtrain_fx.projection.trace import trace_whole
from ssdtrain_fx.projection.transformer import Family, Shape

HARDWARE = machine(find_gpu("a100 sxm"), find_drive("980 pro 1tb"), 2)


@functools.cache
def traced(family: Family, layers: int, **changes: Any) -> TransferProblem:
    shape = Shape(family=family, layers=layers, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=1024, sequence=1024)
    return trace_whole(dataclasses.replace(shape, **changes), micro_batch=2, hardware=HARDWARE)


def timed(problem: TransferProblem) -> tuple[Any, ...]:
    """The problem without the nodes that take no time: a view may be anywhere between two kernels."""
    rank = [0, *itertools.accumulate(int(seconds > 0) for seconds in problem.node_s)]
    at = [position for position, seconds in enumerate(problem.node_s) if seconds > 0]
    return (
        [problem.node_s[position] for position in at],
        [problem.fixed_live_bytes[position] for position in at],
        rank[problem.marker],
        sorted(
            (
                one.size_bytes,
                *(rank[p] for p in (one.live_start, one.offload, one.earliest_release, one.wait, one.live_end)),
            )
            for one in problem.movables
        ),
    )


@pytest.mark.parametrize(
    ("family", "few", "many", "changes"),
    [
        ("llama", 5, 8, {"kv_heads": 2, "tied": False}),
        pytest.param("gpt", 9, 13, {}, marks=pytest.mark.slow),
        pytest.param("gpt", 9, 15, {"dropout": 0.1}, marks=pytest.mark.slow),
        pytest.param("bert", 9, 11, {"dropout": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_a_stretched_problem_is_that_of_the_deep_model(
    family: Family, few: int, many: int, changes: dict[str, Any]
) -> None:
    stretched, deep = stretch(traced(family, few, **changes), few, many), traced(family, many, **changes)
    (stretched_s, *rest), (deep_s, *expected) = timed(stretched), timed(deep)
    assert rest == expected
    assert stretched_s == pytest.approx(deep_s, rel=1e-4)  # the seeds of all dropouts are drawn by one kernel
    assert len({movable.idx for movable in stretched.movables}) == len(deep.movables) > 3 * many
    choices = [choose_lowest_peak(problem, max_slowdown=0.05) for problem in (stretched, deep)]
    assert choices[0].peak_bytes == choices[1].peak_bytes
    assert choices[0].simulation.exposed_s == pytest.approx(choices[1].simulation.exposed_s, rel=1e-3)


def test_no_layer_is_added() -> None:
    problem = traced("llama", 5, kv_heads=2, tied=False)
    assert stretch(problem, 5, 5) is problem


def test_few_layers_do_not_repeat_often_enough() -> None:
    with pytest.raises(ConfigError, match="The 2 traced layers do not repeat often enough"):
        stretch(traced("llama", 2), 2, 8)


def test_fewer_layers_than_were_traced() -> None:
    with pytest.raises(ConfigError, match="1 layers repeat together, so -1 cannot be added to the 5 traced ones"):
        stretch(traced("llama", 5, kv_heads=2, tied=False), 5, 4)


def by_hand(layers: int, *, shared_until: int | None = None, in_pairs: bool = False) -> TransferProblem:
    """Each layer has two kernels and saves one storage of 8 bytes, and 1 byte that cannot move, 10 after its backward.

    ``shared_until``: the first node makes a storage that all layers read, until the one with this number.
    ``in_pairs``: every second layer saves 2 bytes more.
    """
    node_s = [0.5, *[1.0, 2.0] * layers, 0.7]
    marker = len(node_s)
    node_s += [0.0, 0.9, *[3.0, 4.0] * layers, 0.3]
    fixed = [100]
    saved = 0
    for layer in range(layers):
        saved += 3 if in_pairs and layer % 2 else 1
        fixed += [100 + saved - 1, 100 + saved]
    fixed += [100 + saved] * 3
    grads = 0
    for layer in reversed(range(layers)):
        fixed.append(100 + saved + grads)
        grads += 10
        saved -= 3 if in_pairs and layer % 2 else 1
        fixed.append(100 + saved + grads)
    fixed.append(100 + saved + grads)
    movables = [
        Movable(
            idx=layer,
            size_bytes=8,
            live_start=1 + 2 * layer,
            offload=2 + 2 * layer,
            earliest_release=3 + 2 * layer,  # the next kernel of its layer reads it
            wait=marker + 2 + 2 * (layers - 1 - layer),
            live_end=marker + 3 + 2 * (layers - 1 - layer),
        )
        for layer in range(layers)
    ]
    if shared_until is not None:
        movables.append(
            Movable(
                idx=layers,
                size_bytes=5,
                live_start=0,
                offload=1,
                earliest_release=2 + 2 * shared_until,
                wait=marker + 2,  # the last layer reads it first
                live_end=len(node_s) - 1,
            )
        )
    movables.sort(key=lambda movable: (movable.offload, movable.idx))
    return TransferProblem(
        node_s=tuple(node_s),
        marker=marker,
        fixed_live_bytes=tuple(fixed),
        movables=tuple(dataclasses.replace(one, idx=idx) for idx, one in enumerate(movables)),
        hardware=HARDWARE,
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("added", [1, 2, 7])
def test_by_hand(added: int, shared: bool) -> None:
    few, many = 5, 5 + added
    stretched = stretch(by_hand(few, shared_until=few - 1 if shared else None), few, many)
    assert stretched == by_hand(many, shared_until=many - 1 if shared else None)


def test_layers_that_repeat_in_pairs_are_added_in_pairs() -> None:
    problem = by_hand(8, in_pairs=True)
    assert stretch(problem, 8, 12) == by_hand(12, in_pairs=True)
    with pytest.raises(
        ConfigError, match=r"2 layers repeat together, so 3 cannot be added to the 8 traced ones. Trace 9"
    ):
        stretch(problem, 8, 11)


def test_pairs_of_layers_whose_movable_storages_differ() -> None:
    """No single layer repeats, so a pair is the shortest period."""

    def alternating(layers: int) -> TransferProblem:
        problem = by_hand(layers)
        sizes = [dataclasses.replace(one, size_bytes=8 if one.idx % 2 else 16) for one in problem.movables]
        return dataclasses.replace(problem, movables=tuple(sizes))

    assert stretch(alternating(8), 8, 12) == alternating(12)
    with pytest.raises(ConfigError, match="2 layers repeat together, so 1 cannot be added"):
        stretch(alternating(8), 8, 9)
