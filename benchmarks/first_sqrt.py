"""Count fresh processes whose first vector-math call is wrong, on a busy machine, without and with a call before it.

    python benchmarks/first_sqrt.py --processes 100

Each process multiplies a few matrices, which starts torch's threads, and then computes ``torch.sqrt`` of 65,536
elements twice. A process deviates if the two results differ. Half of the processes call
``ssdtrain_fx.vector_math.settle_vector_math`` first; none of them may deviate, or the exit code is 1. Processes of
both kinds take turns. They are forked from one that has imported torch and computed nothing: importing torch on a
busy machine takes far longer than the call. The load is of this program's own making.

A second table shows the cause without a race. MKL keeps one number for all of its vector-math functions: which code
suits this processor. Before the first call has found it, the number is -1; while it is being found, it is an
intermediate number for some instructions. The table sets that number and shows what each function computes then. On
processors where the intermediate number equals the final one, no first call can be wrong; the table then shows the
numbers of an Intel processor with AVX-512 if this processor can run that code.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from ssdtrain_fx.studies.busy_machine import busy_machine
from ssdtrain_fx.vector_math import settle_vector_math

FUNCTIONS = (
    *("sqrt", "exp", "tanh", "erf", "erfc", "erfinv", "log", "log2", "log10"),
    *("sin", "cos", "tan", "asin", "acos", "atan"),
)
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
MOV_FROM_MEMORY = b"\x8b\x05"
"""``mov eax, [rip + offset]``, followed by the offset: how MKL's function begins."""
AVX512_NUMBERS = (9, 5)
"""Intermediate and final number on an Intel processor with AVX-512."""


def code_number() -> ctypes.c_int32 | None:
    """MKL's number for the code of all vector-math functions, -1 before the first call. None: not this MKL."""
    try:
        function = ctypes.CDLL(str(LIBRARY)).mkl_vml_serv_cpu_detect
    except (OSError, AttributeError):
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    code = ctypes.string_at(address, 6)
    if code[:2] != MOV_FROM_MEMORY:
        return None
    return ctypes.c_int32.from_address(address + 6 + int.from_bytes(code[2:], "little", signed=True))


def intermediate_number() -> int:
    """What the first call stores for some instructions."""
    return int(ctypes.CDLL(str(LIBRARY)).mkl_serv_vml_cpu_detect())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """What a function computes while the number is the intermediate one."""

    function: str
    wrong: int
    """Of 65,536 elements."""
    relative: float
    """Largest relative difference."""


def show_cause(number: ctypes.c_int32, intermediate: int, final: int) -> list[Cause]:
    """Compute each function with both numbers. Leaves the number as it was."""
    before, threads = number.value, torch.get_num_threads()
    torch.set_num_threads(1)
    values = torch.rand(65536, generator=torch.Generator().manual_seed(0)) * 0.98 + 0.01
    causes: list[Cause] = []
    try:
        for name in FUNCTIONS:
            function: Any = getattr(torch, name)
            number.value = final
            right = function(values)
            number.value = intermediate
            wrong = function(values)
            relative = float(((wrong - right).abs() / right.abs()).nan_to_num().max())
            causes.append(Cause(function=name, wrong=int((wrong != right).sum()), relative=relative))
    finally:
        number.value = before
        torch.set_num_threads(threads)
    return causes


def first_call(kind: str, answer: Connection) -> None:
    """Body of a fresh process."""
    if kind == "settled":
        settle_vector_math()
    values = torch.rand(65536, generator=torch.Generator().manual_seed(0)) + 0.01
    matrix = torch.ones(256, 256)
    for _ in range(4):
        torch.mm(matrix, matrix)  # starts the threads of torch
    first, second = torch.sqrt(values), torch.sqrt(values)
    wrong = cast(list[int], (first != second).nonzero().flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
    relative = float(((first - second).abs() / second).max())
    answer.send({"wrong": len(wrong), "relative": relative, "first": wrong[:1], "last": wrong[-1:]})


def in_fresh_process(kind: str) -> dict[str, Any]:
    """What a process finds that is forked from this one, in which torch has computed nothing yet."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=first_call, args=(kind, send))
    process.start()
    send.close()  # so that recv() ends if the process dies
    try:
        return receive.recv()
    finally:
        process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=100, help="of each kind")
    parser.add_argument("--processors", type=int, help="processes that compute beside; default: one per core")
    parser.add_argument("--json", metavar="PATH")
    chosen = parser.parse_args(arguments)
    console = Console()

    found: dict[str, list[dict[str, Any]]] = {"plain": [], "settled": []}
    with tempfile.TemporaryDirectory() as directory, busy_machine(directory, processors=chosen.processors):
        for _ in range(chosen.processes):
            for kind, results in found.items():
                results.append(in_fresh_process(kind))
    table = Table(title=f"First torch.sqrt of 65,536 elements, torch {torch.__version__}")
    for column in ("processes", "deviate", "elements", "largest relative difference"):
        table.add_column(column, justify="right")
    for kind, results in found.items():
        wrong = [one for one in results if one["wrong"]]
        worst = max((one["relative"] for one in wrong), default=0.0)
        name = "with a call before it" if kind == "settled" else "as it is"
        table.add_row(f"{len(results)} {name}", str(len(wrong)), str([one["wrong"] for one in wrong]), f"{worst:.1e}")
    console.print(table)

    settle_vector_math()
    number = code_number()
    written: dict[str, Any] = {"found": found, "torch": torch.__version__}
    if number is None:
        console.print("This torch does not contain the MKL that the second table is about.")
    else:
        numbers = (intermediate_number(), number.value)
        console.print(f"MKL's intermediate and final number on this processor: {numbers[0]}, {numbers[1]}.")
        written["numbers"] = numbers
        if numbers[0] == numbers[1]:
            console.print("They are equal, so no first call can be wrong here.")
            numbers = AVX512_NUMBERS
        if numbers != AVX512_NUMBERS or torch.backends.cpu.get_cpu_capability() == "AVX512":
            causes = show_cause(number, *numbers)
            written["causes"] = [dataclasses.asdict(cause) for cause in causes]
            table = Table(title=f"What {numbers[0]} in place of {numbers[1]} computes")
            for column in ("function", "elements that differ, of 65,536", "largest relative difference"):
                table.add_column(column, justify="right")
            for cause in causes:
                table.add_row(cause.function, f"{cause.wrong:,}", f"{cause.relative:.1e}")
            console.print(table)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(written, indent=1))
    return 1 if any(one["wrong"] for one in found["settled"]) else 0


if __name__ == "__main__":
    sys.exit(main())
