"""The activation peak of a step that is several graphs: what each of them adds, and the most at a time.

    forward 1 -> forward 2 -> ... -> forward n,  backward n -> ... -> backward 2 -> backward 1

While one half runs, all graphs between their forward and their backward hold what they have saved. So the peak of the
step is neither the largest peak of a graph nor their sum:

    graphs   half running     held by others      this half      in memory
    2        forward 1                    0             10              10
             forward 2                    6             10              16   <- peak
             backward 2                   6              9              15
             backward 1                   0              9               9

A result that the backward of its graph reads, and that another graph reads too, is in memory once. Who knows which
results become which inputs takes such inputs out of the second graph with ``without_inputs``.

Not counted: a gradient that passes over a graph, because a graph reads a result of one that is not right before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, Phase] = ("forward", "backward")


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a half during which it has the same inputs in memory."""

    phase: Phase
    most_bytes: int
    """The most at a time, with these inputs."""
    inputs: tuple[tuple[int, int], ...]
    """Inputs that other graphs have made and that are in memory since then: the number and the size of each."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChainMemory:
    """What one graph has in memory at each stage of a step of several graphs, in bytes. Parameters do not count."""

    forward_bytes: int = 0
    """The most while its forward runs. Inputs that other graphs have made count until they are released."""
    held_bytes: int = 0
    """Between its forward and its backward, without results that only other graphs read."""
    backward_bytes: int = 0
    """The most while its backward runs, with the gradients with which it begins."""
    result_bytes: int = 0
    """Results of its forward that its backward does not read. The next graph counts those that it reads as inputs."""
    gradient_bytes: int = 0
    """Gradients that its backward returns and that no other graph reads: those of parameters."""
    stretches: tuple[Stretch, ...] = ()
    """Parts of both halves, in order."""
    held_results: tuple[int, ...] = ()
    """The numbers of the results that are in memory until its backward, and count in ``held_bytes``."""

    @property
    def held_inputs(self) -> Mapping[int, int]:
        """The inputs in ``held_bytes`` that other graphs have made: size by number."""
        return dict(next((one.inputs for one in self.stretches if one.phase == "backward"), ()))

    def without_inputs(self, numbers: Collection[int]) -> ChainMemory:
        """The same graph where inputs with these numbers are in memory anyway, from its forward to its backward."""
        if not any(number in numbers for stretch in self.stretches for number, _ in stretch.inputs):
            return self
        stretches = tuple(
            Stretch(
                one.phase,
                one.most_bytes - sum(size_bytes for number, size_bytes in one.inputs if number in numbers),
                tuple((number, size_bytes) for number, size_bytes in one.inputs if number not in numbers),
            )
            for one in self.stretches
        )
        forward, backward = ([one.most_bytes for one in stretches if one.phase == phase] for phase in PHASES)
        return dataclasses.replace(
            self,
            forward_bytes=max(forward),
            held_bytes=self.held_bytes - sum(self.held_inputs[one] for one in numbers if one in self.held_inputs),
            backward_bytes=max(backward),
            stretches=stretches,
        )


class Half(NamedTuple):
    """A half of a graph that runs in a step."""

    graph: int
    """Index of the graph."""
    phase: Phase
    kept_bytes: int = 0
    """What the caller keeps from here on until the step ends, beside parameter gradients: what a stage of a pipeline
    has sent, with some schedules."""


def in_a_row(count: int) -> list[Half]:
    """The order of a chain of ``count`` graphs: all forwards, then their backwards in reverse order."""
    forwards = [Half(graph, "forward") for graph in range(count)]
    return [*forwards, *(Half(graph, "backward") for graph in reversed(range(count)))]


def peak_of_chain(
    graphs: Sequence[ChainMemory], order: Iterable[Half], *, keep_gradients: bool = True, keep_results: bool = False
) -> int:
    """The most bytes that are in memory at a time while halves run in this order.

    Args:
        order: a graph may run several times, once for each micro-batch.
        keep_gradients: the gradients of parameters stay. Those of later runs of a graph are added to those of its first
            one. With False, they are gone before the next half: FSDP keeps only a shard, which is no longer memory of
            compiled code.
        keep_results: the caller holds the results of a forward until its backward, as a stage of a pipeline does.
    """
    held = kept = peak = 0
    have_gradients: set[int] = set()
    for graph, phase, kept_bytes in order:
        memory = graphs[graph]
        of_results = memory.result_bytes if keep_results else 0
        if phase == "forward":
            peak = max(peak, held + kept + memory.forward_bytes)
            held += memory.held_bytes + of_results
        else:
            held -= memory.held_bytes + of_results
            peak = max(peak, held + of_results + kept + memory.backward_bytes)
            if keep_gradients and graph not in have_gradients:
                have_gradients.add(graph)
                kept += memory.gradient_bytes
        kept += kept_bytes
    return peak
