"""A process with an arena that allocates and frees as it is told, one JSON value per line.

A line is ``[sequence, runs]``. A sequence has ``["allocate", bytes]``, ``["release", number]`` of an earlier item of
the same sequence, and ``["run", number]``: the sequence ``runs[number]`` as a compiled graph of this number. What a run
does not release is released when that graph has run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from torch import Tensor

from ssdtrain_fx import _torch_private
from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory


class Blocks:
    """Tensors by number, each filled with its number: a block that overlaps another one changes it."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}

    def check_and_release(self, number: int) -> None:
        tensor = self.tensors.pop(number)
        assert bool((tensor == number % 251).all()), "another block was written over this one"

    def close(self) -> None:
        for number in tuple(self.tensors):
            self.check_and_release(number)


def follow(sequence: Sequence[tuple[str, int]], blocks: Blocks, addresses: list[int]) -> None:
    for number, (name, value) in enumerate(sequence):
        if name == "allocate":
            with step_memory.inside():
                tensor = _torch_private.empty_cpu(value)
            tensor.fill_(number % 251)
            addresses.append(tensor.data_ptr())
            blocks.tensors[number] = tensor
            del tensor
        else:
            blocks.check_and_release(value)


def as_a_graph(sequence: Sequence[tuple[str, int]], addresses: list[int]) -> Callable[[Blocks], None]:
    def run(blocks: Blocks) -> None:
        for number, (name, value) in enumerate(sequence):
            if name == "allocate":
                blocks.tensors[number] = _torch_private.empty_cpu(value)
                blocks.tensors[number].fill_(number % 251)
                addresses.append(blocks.tensors[number].data_ptr())
            else:
                del blocks.tensors[value]

    return in_step_memory(run, planned_peak_bytes=0)


def main() -> None:
    library = step_memory.library
    assert library is not None
    with step_memory.inside():
        base = _torch_private.empty_cpu(1 << 20).data_ptr()  # the arena is empty, so this is its first byte
    for line in sys.stdin:
        sequence, runs = json.loads(line)
        addresses: list[int] = []
        library.trim()
        library.reset_peaks()
        held: dict[int, Blocks] = {}
        blocks = Blocks()
        if runs:
            graphs = [as_a_graph(run, addresses) for run in runs]
            for _, graph in sequence:
                new = Blocks()
                graphs[graph](new)
                if graph in held:
                    held[graph].close()
                held[graph] = new
        else:
            follow(sequence, blocks, addresses)
        state = library.describe()
        for left in (blocks, *held.values()):
            left.close()
        del blocks, held
        sys.stdout.write(json.dumps([[address - base for address in addresses], state, library.describe()]) + "\n")
        sys.stdout.flush()


main()
