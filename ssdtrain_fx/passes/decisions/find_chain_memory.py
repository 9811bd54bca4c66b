"""What a graph adds to the memory of a step of several graphs; see ``planning/chain_memory.py``.

A step of one graph ends with it, so that graph's plan lets all results live to the end. In a chain, the next graph
takes a result over: it is in memory until this forward ends, and for longer only if this backward reads it as well. The
same holds for inputs. A gradient with which backward begins was made by the next graph, and is in memory until it is
read for the last time; so is an input that the graph before has made, unless this graph moves it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from ssdtrain_fx import _torch_private
from ssdtrain_fx.passes.analysis.analyse import Analysis
from ssdtrain_fx.passes.graph.alias_sets import Storage, storages_of
from ssdtrain_fx.passes.planning.chain_memory import ChainMemory, Stretch
from ssdtrain_fx.passes.planning.live_intervals import LiveInterval, memory_profile


def find_chain_memory(analysis: Analysis, live: Iterable[LiveInterval]) -> ChainMemory:
    """What the graph of ``analysis`` adds.

    Args:
        live: what is live in a step of this graph alone. An index that is no storage's is one of ``Analysis.extras``.
    """
    joint, storages = analysis.joint, analysis.alias_sets.storages
    positions = joint.positions()
    backward = positions[joint.marker] + 1  # a kernel may stand at the marker, and is the last one of forward
    gradients = storages_of(joint.gradients, analysis.alias_sets)
    stay = gradients - _gradients_for_other_graphs(analysis)
    results = storages_of(joint.forward_outputs, analysis.alias_sets) - gradients

    numbers = {
        storage.idx: number
        for storage in storages
        if (number := _activation_number(analysis, storage.allocator)) is not None
    }

    spans: list[LiveInterval] = []
    result_bytes = 0
    for span in live:
        if span.storage_idx in results and span.end == len(positions):
            read_until = _read_until(storages[span.storage_idx], positions)
            result_bytes += span.size_bytes if read_until <= backward else 0
            span = dataclasses.replace(span, end=max(backward, read_until))
        if span.storage_idx in numbers and span.start == positions[storages[span.storage_idx].allocator]:
            span = dataclasses.replace(span, start=0)
        spans.append(span)
    spans += _made_by_other_graphs(analysis, positions)
    live_bytes = memory_profile(spans, len(positions)).live_bytes
    held = [span for span in spans if span.start < backward < span.end]
    held_storages = {span.storage_idx for span in held}
    return ChainMemory(
        forward_bytes=max(live_bytes[:backward]),
        held_bytes=sum(span.size_bytes for span in held),
        backward_bytes=max(live_bytes[backward:]),
        result_bytes=result_bytes,
        gradient_bytes=sum(span.size_bytes for span in spans if span.storage_idx in stay and span.start >= backward),
        stretches=tuple(_stretches(spans, numbers, live_bytes, backward)),
        held_results=tuple(number for number, idx in _results(analysis) if idx in held_storages),
    )


def _stretches(
    spans: Iterable[LiveInterval], numbers: Mapping[int, int], live_bytes: Sequence[int], backward: int
) -> Iterator[Stretch]:
    """Both halves, divided where an input that another graph has made leaves memory.

    Args:
        numbers: of these inputs, by the index of their storage.
    """
    inputs = [span for span in spans if span.start == 0 and span.storage_idx in numbers]
    for start, end in itertools.pairwise(sorted({0, backward, len(live_bytes), *(span.end for span in inputs)})):
        there = tuple((numbers[span.storage_idx], span.size_bytes) for span in inputs if span.end >= end)
        yield Stretch("forward" if end <= backward else "backward", max(live_bytes[start:end]), there)


def _activation_number(analysis: Analysis, node: fx.Node) -> int | None:
    """The number of an input that another graph has made; None for all other nodes."""
    number = _torch_private.input_number(node.meta.get("desc"))
    return number if node.op == "placeholder" and number in analysis.joint.activation_inputs else None


def _results(analysis: Analysis) -> Iterator[tuple[int, int]]:
    """The number of each result of forward, with the index of each of its storages."""
    joint = analysis.joint
    descriptors, _ = joint.graph.output_node().meta["desc"]
    for value, descriptor in zip(joint.forward_outputs, descriptors, strict=True):
        number = _torch_private.result_number(descriptor)
        if number is not None:
            yield from ((number, idx) for idx in sorted(storages_of([value], analysis.alias_sets)))


def _made_by_other_graphs(analysis: Analysis, positions: Mapping[fx.Node, int]) -> Iterator[LiveInterval]:
    """Inputs that the graphs before and after have made, without those that ``analysis`` may move."""
    joint = analysis.joint
    for storage in analysis.alias_sets.storages:
        node = storage.allocator
        is_of_backward = node in joint.backward_inputs
        is_activation = _activation_number(analysis, node) is not None
        if node.op != "placeholder" or node in analysis.activations:
            continue
        if is_activation or (is_of_backward and _is_gradient(node)):
            start = positions[joint.marker] + 1 if is_of_backward else 0
            with contextlib.suppress(ValueError):  # its size depends on data
                size_bytes = storage.hint_bytes
                yield LiveInterval(storage.idx, start, max(start, _read_until(storage, positions)), size_bytes)


def _is_gradient(node: fx.Node) -> bool:
    """Whether an input of backward is no state of a random number generator."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _read_until(storage: Storage, positions: Mapping[fx.Node, int]) -> int:
    """The position after the last node that reads a storage; 0 if none does."""
    readers = (user for holder in storage.holders for user in holder.users if user.op != "output")
    return max((positions[reader] + 1 for reader in readers), default=0)


def _gradients_for_other_graphs(analysis: Analysis) -> set[int]:
    """The storages of gradients of inputs that other graphs have made."""
    joint = analysis.joint
    _, descriptors = joint.graph.output_node().meta["desc"]
    numbers = map(_torch_private.differentiated_input_number, descriptors)
    nodes = [node for node, number in zip(joint.gradients, numbers, strict=True) if number in joint.activation_inputs]
    return storages_of(nodes, analysis.alias_sets)
