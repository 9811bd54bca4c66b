"""A process with an arena that allocates and frees as it is told, one JSON value per line."""

from __future__ import annotations

import json
import sys

from torch import Tensor

from ssdtrain_fx import _torch_private
from ssdtrain_fx.runtime.memory.step_memory import step_memory


def main() -> None:
    library = step_memory.library
    assert library is not None
    with step_memory.inside():
        base = _torch_private.empty_cpu(1 << 20).data_ptr()  # the arena is empty, so this is its first byte
    for line in sys.stdin:
        blocks: dict[int, Tensor] = {}
        addresses: list[int] = []
        library.trim()
        library.reset_peaks()
        for number, (name, value) in enumerate(json.loads(line)):
            if name == "allocate":
                with step_memory.inside():
                    block = _torch_private.empty_cpu(value)
                block.fill_(number % 251)
                blocks[number] = block
                addresses.append(block.data_ptr() - base)
                del block
            else:
                kept = blocks.pop(value)
                assert bool((kept == value % 251).all()), "another block was written over this one"
                del kept
        state = library.describe()
        blocks.clear()
        sys.stdout.write(json.dumps([addresses, state, library.describe()]) + "\n")
        sys.stdout.flush()


main()
