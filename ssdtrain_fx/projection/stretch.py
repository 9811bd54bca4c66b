"""Turn the planning problem of a model with a few equal layers into that of the same model with many.

Why: tracing a transformer takes about a second per layer, and the eightieth layer is like the third. A problem is plain
numbers, so layers can be added to it::

    traced        pre  L L L L  t t t t  post | post'  L' L' L' L'  pre'
    stretched     pre  L L L L L L  t t t t t t  post | post'  L' L' L' L' L' L'  pre'

Layers are found by repetition: the longest part of forward, and of backward, in which everything repeats with one
period. A third part may be at the end of forward (``t``): what only backward reads is computed there, last layer first.

A storage of an added layer has the positions of its model in a traced layer, moved by whole periods. For the i-th of N
added layers these are i periods in forward, and N - i periods in backward and in ``t``, where the last layer comes
first.

The result equals what tracing the deep model gives, which the tests check. Only nodes that take no time, such as views,
may be elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem

MIN_PERIODS = 3
"""Of which the last but one is copied: what its storages have in common with those before and after it is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Repetition:
    """Positions ``[begin, end)`` that repeat with a period of one layer or more."""

    begin: int
    end: int
    period: int
    layers: int
    """In one period. Inductor may store the sum of a residual stream in every second layer only."""

    def of(self, layers: int) -> _Repetition:
        """The same part, with a period of so many layers, a multiple of its own."""
        return dataclasses.replace(self, period=self.period * layers // self.layers, layers=layers)

    def repeats(self, layers: int) -> bool:
        """Whether there are enough periods of so many layers."""
        return self.end - self.begin >= MIN_PERIODS * self.of(layers).period


def stretch(problem: TransferProblem, traced_layers: int, layers: int) -> TransferProblem:
    """The problem of a model with ``layers`` layers.

    Args:
        problem: of a traced model with ``traced_layers`` layers, most of them equal.

    Raises:
        ConfigError: too few layers are equal, or the difference is no multiple of the layers that repeat together.
    """
    added = layers - traced_layers
    if not added:
        return problem
    kinds, seconds = _kinds(problem), np.array(problem.node_s)

    def find(begin: int, end: int) -> _Repetition | None:
        return _find_repetition(kinds, seconds, begin, end, traced_layers)

    forward, backward = find(0, problem.marker), find(problem.marker + 1, len(problem.node_s))
    tail = None if forward is None else find(forward.end, problem.marker)
    together = math.lcm(*(part.layers for part in (forward, tail, backward) if part is not None))
    if forward is None or backward is None or not (forward.repeats(together) and backward.repeats(together)):
        raise ConfigError(
            f"The {traced_layers} traced layers do not repeat often enough to add others like them. Trace more layers."
        )
    if added < 0 or added % together:
        raise ConfigError(
            f"{together} layers repeat together, so {added} cannot be added to the {traced_layers} traced ones. "
            f"Trace {traced_layers + added % together}."
        )
    tails = [] if tail is None or not tail.repeats(together) else [tail.of(together)]
    parts = [*tails, backward.of(together)]
    return _Stretching(problem, forward.of(together), parts, added // together).result()


@dataclasses.dataclass(frozen=True, slots=True)
class _Kinds:
    """One number per position. At positions with equal numbers, the same happens."""

    timed: NDArray[np.int64]
    """The same time passes, and the same storages that may move begin and end."""
    all: NDArray[np.int64]
    """And the same bytes of other storages."""


def _kinds(problem: TransferProblem) -> _Kinds:
    events: list[list[tuple[str, int]]] = [[] for _ in range(len(problem.node_s) + 1)]
    for movable in problem.movables:
        for event, position in (("made", movable.offload), ("read", movable.wait), ("dead", movable.live_end)):
            events[position].append((event, movable.size_bytes))
    timed = [(seconds, tuple(sorted(events[p]))) for p, seconds in enumerate(problem.node_s)]
    changes = np.diff(np.array(problem.fixed_live_bytes, dtype=np.int64), append=0).tolist()
    return _Kinds(_numbers(timed), _numbers(list(zip(timed, changes, strict=True))))


def _numbers(values: Sequence[object]) -> NDArray[np.int64]:
    known: dict[object, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)


def _find_repetition(
    kinds: _Kinds, seconds: NDArray[np.float64], begin: int, end: int, layers: int
) -> _Repetition | None:
    """The longest part of ``[begin, end)`` that repeats at least ``MIN_PERIODS`` times and takes time.

    A part of a layer may repeat, too, such as two layer norms, or only two layers together. So a layer is what repeats
    about as often as there are ``layers``.
    """
    takes_time = seconds[begin:end] > 0
    timed, whole = kinds.timed[begin:end], kinds.all[begin:end]
    layer = _longest_run(timed, takes_time, range(1, len(timed) // MIN_PERIODS + 1))
    if layer is None:
        return None
    first, last, one = layer
    repeats = (last - first) / one
    in_one = max(1, round(layers / repeats))
    one *= max(1, round(repeats / layers))
    periods = range(one, (last - first) // MIN_PERIODS + 1, one)
    found = _longest_run(whole[first:last], takes_time[first:last], periods)
    if found is None:
        return None
    return _Repetition(begin + first + found[0], begin + first + found[1], found[2], found[2] // one * in_one)


def _longest_run(
    kinds: NDArray[np.int64], takes_time: NDArray[np.bool_], periods: range
) -> tuple[int, int, int] | None:
    """The longest run that repeats: where it begins and ends, and its period. Of several periods, the shortest."""
    best: tuple[int, int, int] | None = None
    for period in periods:
        equal = np.concatenate(([False], kinds[:-period] == kinds[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            length = last - first + period
            is_longest = best is None or length > best[1] - best[0]
            if is_longest and length >= MIN_PERIODS * period and takes_time[first : first + period].any():
                best = first, first + length, period
    return best


class _Stretching:
    """``layer`` is where the copied layer begins in forward. Each turn is where one of the parts that begin with the
    last layer comes to what the copied layer left to it."""

    def __init__(
        self, problem: TransferProblem, forward: _Repetition, descending: Sequence[_Repetition], added: int
    ) -> None:
        self._problem = problem
        self._forward, self._descending = forward, descending
        self._added = added
        periods = (forward.end - forward.begin) // forward.period
        self._layer = forward.begin + (periods - 2) * forward.period  # a whole layer follows, and one comes before
        self._next_layer = self._layer + forward.period
        copied = [movable for movable in problem.movables if self._layer < movable.offload <= self._next_layer]
        self._turns = [self._find_turn(part, copied) for part in descending]

    @staticmethod
    def _find_turn(part: _Repetition, copied: Sequence[Movable]) -> int:
        there = [
            position
            for movable in copied
            for position in (movable.earliest_release, movable.wait)
            if part.begin <= position < part.end
        ]
        return min(min(there, default=part.begin), part.end - part.period)

    def result(self) -> TransferProblem:
        problem, count = self._problem, self._added
        layers = [(self._layer, self._forward.period), *zip(self._turns, self._periods, strict=True)]
        node_s: list[float] = []
        done = 0
        for number, (begin, period) in enumerate(layers):
            insert_at = begin if number else begin + period  # the same seconds either way
            node_s += problem.node_s[done:insert_at] + problem.node_s[begin : begin + period] * count
            done = insert_at
        movables = [moved for movable in problem.movables for moved in self._move(movable)]
        movables.sort(key=lambda movable: (movable.offload, movable.idx))
        marker_parts = [self._forward, *self._descending[:-1]]
        return dataclasses.replace(
            problem,
            node_s=(*node_s, *problem.node_s[done:]),
            marker=problem.marker + count * sum(part.period for part in marker_parts),
            fixed_live_bytes=tuple(self._fixed_live_bytes()),
            movables=tuple(dataclasses.replace(one, idx=idx) for idx, one in enumerate(movables)),
        )

    @property
    def _periods(self) -> list[int]:
        return [part.period for part in self._descending]

    def _fixed_live_bytes(self) -> Sequence[int]:
        """What each layer leaves in memory adds up: what it saves in forward, until its backward, and its gradients."""
        fixed, count = np.array(self._problem.fixed_live_bytes, dtype=np.int64), self._added
        layer, after, period = self._layer, self._next_layer, self._forward.period
        left = int(fixed[layer] - fixed[layer - period])
        """By each added layer, at the current position."""
        parts = [fixed[:after]]
        parts += [fixed[layer:after] + number * left for number in range(1, count + 1)]
        done = after
        for part, turn in zip(self._descending, self._turns, strict=True):
            parts.append(fixed[done:turn] + count * left)
            before = turn - part.period if turn - part.period >= part.begin else turn
            then = left + int(fixed[before + part.period] - fixed[before])  # once this part of the layer has run
            parts += [
                fixed[turn : turn + part.period] + (count - number) * left + number * then for number in range(count)
            ]
            left, done = then, turn
        parts.append(fixed[done:] + count * left)
        return np.concatenate(parts).tolist()

    def _move(self, movable: Movable) -> list[Movable]:
        """``movable`` in the stretched problem, and its copies in the added layers."""
        if self._layer < movable.offload <= self._next_layer:
            return [self._moved(movable, number) for number in range(self._added + 1)]
        for part, turn in zip(self._descending[:-1], self._turns, strict=False):
            if turn < movable.offload <= turn + part.period:
                return [self._moved(movable, number) for number in range(self._added + 1)]
        return [self._moved(movable, None)]

    def _moved(self, movable: Movable, number: int | None) -> Movable:
        """``movable`` as that of the added layer ``number``. 0: of the copied layer. None: of no copied layer."""
        is_early = number is None and movable.offload <= self._layer

        def moved(position: int) -> int:
            count = self._added
            if position <= self._forward.end and position < self._descending[0].begin:
                in_forward = position > self._next_layer if is_early else number is None
                return position + (count if in_forward else number or 0) * self._forward.period
            shift = count * self._forward.period
            for part, turn in zip(self._descending, self._turns, strict=True):
                if position >= part.end:
                    shift += count * part.period
                elif position >= part.begin:
                    if number is not None:
                        shift += (count - number) * part.period
                    elif is_early and position >= turn:
                        shift += count * part.period
            return position + shift

        positions = ("live_start", "offload", "earliest_release", "wait", "live_end")
        return dataclasses.replace(movable, **{name: moved(getattr(movable, name)) for name in positions})
