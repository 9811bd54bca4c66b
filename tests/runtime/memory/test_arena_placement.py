"""Where the arena puts blocks: best fit at first, and with foresight once a step has repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from arena_help import HUGE_PAGE_BYTES, MIB, PAGE_BYTES, ROOT, run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain_fx._torch_private import arena
from ssdtrain_fx._torch_private.arena import ArenaState


class ModelArena:
    """Best fit over a list of free ranges, written as plainly as possible."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        self.end = 0
        self.end_peak = 0
        self.allocated_peak = 0
        self.live: dict[int, tuple[int, int]] = {}

    def allocate(self, number: int, byte_count: int) -> int:
        size = -(-byte_count // PAGE_BYTES) * PAGE_BYTES
        fitting = [(length, start) for start, length in self.free if length >= size]
        if fitting:
            length, start = min(fitting)
            self.free.remove((start, length))
            if length > size:
                self.free.append((start + size, length - size))
        else:
            start, self.end = self.end, self.end + size
        self.end_peak = max(self.end_peak, self.end)
        self.live[number] = (start, size)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return start

    @property
    def allocated(self) -> int:
        return sum(size for _, size in self.live.values())

    def release(self, number: int) -> None:
        self.free.append(self.live.pop(number))
        merged: list[tuple[int, int]] = []
        for start, length in sorted(self.free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        if merged and sum(merged[-1]) == self.end:
            self.end = merged.pop()[0]
        self.free = merged


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., Any]]:
    """A process whose arena only the test uses."""
    program = Path(__file__).with_name("arena_program.py")
    with subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def send(sequence: list[tuple[str, int]], runs: Sequence[list[tuple[str, int]]] = ()) -> Any:
            stdin.write(json.dumps([sequence, runs]) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        yield send
        stdin.close()


SIZES = st.one_of(
    st.integers(arena.MIN_BYTES, 4 * arena.MIN_BYTES), st.sampled_from([MIB, MIB + 1, HUGE_PAGE_BYTES, 3 * MIB])
)


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[str, int]]:
    live: list[int] = []
    steps: list[tuple[str, int]] = []
    for _ in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            number = draw(st.sampled_from(live))
            live.remove(number)
            steps.append(("release", number))
        else:
            live.append(len(steps))
            steps.append(("allocate", draw(SIZES)))
    return steps


@settings(max_examples=150)
@given(sequences())
def test_blocks_are_where_best_fit_puts_them(ask: Callable[..., Any], sequence: list[tuple[str, int]]) -> None:
    model = ModelArena()
    expected: list[int] = []
    for number, (name, value) in enumerate(sequence):
        if name == "allocate":
            expected.append(model.allocate(number, value))
        else:
            model.release(value)
    addresses, during, after = ask(sequence)
    assert addresses == expected
    state, empty = ArenaState(*during), ArenaState(*after)
    assert state.allocated_bytes == model.allocated and state.blocks == len(model.live)
    assert state.allocated_peak_bytes == model.allocated_peak
    assert state.end_peak_bytes == model.end_peak
    assert state.committed_bytes == -(-model.end_peak // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    assert empty.allocated_bytes == empty.blocks == 0


@settings(max_examples=30)
@given(st.lists(sequences(), min_size=2, max_size=3), st.integers(2, 5))
def test_blocks_of_repeating_steps_never_overlap(
    ask: Callable[..., Any], runs: list[list[tuple[str, int]]], repetitions: int
) -> None:
    """Whatever was learned, a block is where nothing else is. What a run leaves is freed in the next one."""
    addresses, _, after = ask([("run", number) for _ in range(repetitions) for number in range(len(runs))], runs)
    assert len(addresses) == repetitions * sum(name == "allocate" for run in runs for name, _ in run)
    assert ArenaState(*after).allocated_bytes == 0


@pytest.mark.parametrize("graphs", ["whole", pytest.param("same", marks=pytest.mark.slow), "pairs"])
def test_a_step_that_repeats_is_laid_out_with_foresight(graphs: str) -> None:
    """Every layer leaves two blocks and has two for itself. Best fit leaves holes and ends 8 MiB above what is in use;
    the layout leaves none. The layers are one graph, a graph that runs for each, or two graphs that alternate.

    In a process of its own, so that nothing else lies in the arena.
    """
    done = run_python(
        """
        import sys
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

        MIB = 1 << 20
        library = step_memory.library
        kept = []

        def block(mib):
            return torch.empty(mib * MIB // 4)

        def forward(args):
            (layer,) = args
            first, one = block(8), block(3)
            del first
            kept.append((one, block(6)))
            last = block(5 + layer % 2)
            del last

        def backward(args):
            first = block(8)
            kept.pop()
            second = block(5)
            del first, second

        def compiled(function):
            return in_step_memory(function, planned_peak_bytes=0)

        def layers(function):
            return lambda args: [function([layer]) for layer in args]

        if sys.argv[1] == "whole":
            runs = [(compiled(layers(forward)), [0, 1, 0, 1]), (compiled(layers(backward)), [0] * 4)]
        elif sys.argv[1] == "same":
            forward, backward = compiled(forward), compiled(backward)
            runs = [(forward, [layer]) for layer in (0, 1, 0, 1)] + [(backward, [0])] * 4
        else:
            even, odd, of_even, of_odd = map(compiled, (forward, forward, backward, backward))
            runs = [(even, [0]), (odd, [1])] * 2 + [(of_odd, [0]), (of_even, [0])] * 2

        def step():
            library.reset_peaks()
            for graph, args in runs:
                graph(args)
            state = library.describe()
            assert state.allocated_bytes == 0
            return state.allocated_peak_bytes // MIB, state.end_peak_bytes // MIB

        steps = [step() for _ in range(12)]
        assert steps[0] == (44, 52), steps
        assert steps[-1] == (44, 44), steps

        # A step with other sizes is served all the same, and learned in its turn.
        def forward(args):
            kept.append([torch.full((MIB + 1024 * number,), float(number)) for number in range(80)])

        def backward(args):
            for number, tensor in enumerate(kept.pop()):
                assert bool((tensor == number).all())

        forward = in_step_memory(forward, planned_peak_bytes=0)
        backward = in_step_memory(backward, planned_peak_bytes=0)
        for _ in range(6):
            forward([])
            backward([])
        assert library.describe().allocated_bytes == 0
        """,
        graphs,
    )
    assert done.returncode == 0, done.stderr


def test_the_block_that_ends_highest_chooses_first_the_next_time() -> None:
    """At most 21 MiB are in use. Neither the largest first nor the longest first ends there: both end at 24 MiB."""
    done = run_python(
        """
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

        MIB = 1 << 20
        SIZES = [6, 6, 3, 3, 9, 6, 9]
        library = step_memory.library

        def forward(args):
            live = {}
            for name, block in zip("+-++++--+-+---", [0, 0, 1, 2, 3, 4, 2, 4, 5, 3, 6, 6, 1, 5], strict=True):
                if name == "+":
                    live[block] = torch.empty(SIZES[block] * MIB // 4)
                else:
                    del live[block]

        def backward(args):
            torch.empty(MIB // 4)

        graphs = [in_step_memory(function, planned_peak_bytes=0) for function in (forward, backward)]
        for _ in range(8):
            library.reset_peaks()
            for graph in graphs:
                graph([])
        state = library.describe()
        peaks = state.allocated_peak_bytes // MIB, state.end_peak_bytes // MIB
        assert peaks == (21, 21), peaks
        """
    )
    assert done.returncode == 0, done.stderr


def test_an_order_is_given_up_at_the_first_block_that_ends_too_high() -> None:
    """So there is time for thousands of orders of 700 blocks. The first 300 end 1.8 % above the most in use."""
    done = run_python(
        """
        import random
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

        MIB = 1 << 20
        COUNT = 700
        generator = random.Random(36)
        lives = [generator.choice([1, 2, 3, 4, 6, 20, 60]) for _ in range(COUNT)]
        sizes = [generator.choice([6, 16, 18, 24, 24]) for _ in range(COUNT)]

        def forward(args):
            live = {}
            for number, (life, mib) in enumerate(zip(lives, sizes, strict=True)):
                live[number + life, number] = torch.empty(mib * MIB // 4)
                for key in sorted(live):
                    if key[0] <= number:
                        del live[key]
            for key in sorted(live):
                del live[key]

        def backward(args):
            torch.empty(MIB // 4)

        graphs = [in_step_memory(function, planned_peak_bytes=0) for function in (forward, backward)]
        for _ in range(6):
            step_memory.library.reset_peaks()
            for graph in graphs:
                graph([])
        state = step_memory.library.describe()
        assert state.end_peak_bytes == state.allocated_peak_bytes, state
        """
    )
    assert done.returncode == 0, done.stderr


def test_many_runs_without_a_backward_cost_little_and_do_no_harm() -> None:
    done = run_python(
        """
        import time
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

        def compiled(function):
            return in_step_memory(function, planned_peak_bytes=0)

        kept = []

        def forward(args):
            first = torch.empty(1 << 21)
            kept.append(torch.empty(1 << 20))
            last = torch.empty(1 << 21)
            return first.numel() + last.numel()

        def backward(args):
            kept.pop()

        forward, backward = compiled(forward), compiled(backward)
        for _ in range(5000):
            forward([])
            kept.clear()
        for _ in range(12):
            step_memory.library.reset_peaks()
            forward([])
            backward([])
        state = step_memory.library.describe()
        assert state.end_peak_bytes == state.allocated_peak_bytes, state
        """
    )
    assert done.returncode == 0, done.stderr


HOLES = """
    import re
    from pathlib import Path
    import torch
    from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

    MIB = 1 << 20
    library = step_memory.library
    with step_memory.inside():
        base = torch.empty(MIB).data_ptr()  # the arena is empty, so this is its first byte

    def resident_mib():
        resident = 0
        for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
            if base <= int(mapping.split("-")[0], 16) < base + 1024 * MIB:
                resident += int(re.search(r"Rss: +(\\d+)", mapping)[1])
        return resident / 1024

    def leave_holes(rounds=8):
        # 215 MiB are in use, and the last block ends at 348 MiB: no block fits a hole of an earlier round.
        kept = []
        for number in range(rounds):
            hole = torch.full(((16 + number) * MIB // 4,), -1.0)
            kept.append(torch.full((24 * MIB // 4,), float(number)))
            del hole
        for number, block in enumerate(kept):
            assert bool((block == number).all()), "a page that is in use was returned"
        return resident_mib()
"""


def test_holes_of_a_first_step_are_not_resident() -> None:
    done = run_python(
        HOLES
        + """
    with step_memory.inside():
        for mib in (100, 50, 75):
            torch.ones(mib * MIB // 4)
            assert resident_mib() >= 100, "memory that was in use before is not returned"

        library.reset_peaks()
        resident = leave_holes()
    state = library.describe()
    assert (state.allocated_peak_bytes // MIB, state.end_peak_bytes // MIB) == (215, 348), state
    assert 8 * 24 <= resident <= 215 + 16, resident

    with step_memory.inside():
        for mib in (200, 50, 100):
            torch.ones(mib * MIB // 4)
            assert resident_mib() >= 200, "memory that was in use before is not returned"

    for _ in range(5):
        library.trim()
        assert resident_mib() == 0
        with step_memory.inside():
            resident = leave_holes(rounds=4)
    assert 4 * 24 <= resident <= 115 + 16, "an earlier step needed more, but returned it"
    """
    )
    assert done.returncode == 0, done.stderr


def test_holes_of_other_steps_after_a_known_one_are_not_resident() -> None:
    """Such as after a first step with a small batch. The step that is known touches no fresh page."""
    done = run_python(
        HOLES
        + """
    import resource

    def graphs(mib):
        kept = []

        def forward(args):
            for number in range(8):
                hole = torch.ones((16 + number) * mib * MIB // 64)
                kept.append(torch.ones(24 * mib * MIB // 64))
                del hole

        return [in_step_memory(function, planned_peak_bytes=0) for function in (forward, lambda args: kept.clear())]

    def faults(forward, backward):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        forward([])
        found = resident_mib()
        backward([])
        return found, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first, second = graphs(1), graphs(16)
    for _ in range(4):
        faults(*first)
    steps = [faults(*second) for _ in range(12)]
    assert steps[0][0] <= 215 + 16, steps
    assert steps[-1][1] < 64, f"as few as reading its own memory takes: {steps}"
    """
    )
    assert done.returncode == 0, done.stderr


def test_small_holes_stay_resident() -> None:
    """A step of one graph is never known, and would touch them again each time."""
    done = run_python(
        HOLES
        + """
    found = []

    def run(args):
        kept = []
        for mib in (4, 5):
            hole = torch.ones(mib * MIB // 4)
            kept.append(torch.ones(6 * MIB // 4))
            del hole
        found.append(resident_mib())

    graph = in_step_memory(run, planned_peak_bytes=0)
    for _ in range(6):
        graph([])
    assert found[-1] >= 21, found
    """
    )
    assert done.returncode == 0, done.stderr


def test_memory_that_is_poisoned_stays_poisoned() -> None:
    """A page that is returned reads as zeros, with which a tensor that is read too late may go unnoticed."""
    done = run_python(
        HOLES
        + """
    import ctypes

    library.configure(poison=True)
    with step_memory.inside():
        hole, kept = torch.zeros(16 * MIB // 4), torch.zeros(MIB // 4)
        address = hole.data_ptr()
        del hole
        torch.zeros(48 * MIB // 4)
    assert ctypes.string_at(address + 5 * MIB, 1) == bytes([0xCB])
    """
    )
    assert done.returncode == 0, done.stderr


def test_scattered_blocks_count_as_in_use_after_a_trim() -> None:
    """Otherwise each later step would return its memory: 40 blocks of 64 KiB lie on as many huge pages."""
    done = run_python(
        HOLES
        + """
    with step_memory.inside():
        holes, kept = [], []
        for number in range(40):
            kept.append(torch.ones(64 * 1024 // 4))
            holes.append(torch.ones((5 * MIB + number * 128 * 1024) // 4))
        holes.clear()
        library.trim()
        before = resident_mib()
        torch.ones(20 * MIB // 4)
        assert resident_mib() >= before + 18, (before, resident_mib())
        torch.ones(6 * MIB // 4)
        assert resident_mib() >= before + 18, "memory that was in use before is not returned"
    """
    )
    assert done.returncode == 0, done.stderr
