"""Train a step around every differentiable operator and module of torch, and compare all bits with the inner compiler.

    python benchmarks/operators.py --json operators.json --markdown operators.md
    python benchmarks/operators.py --dtype bfloat16 --op softmax --op linalg.qr
    python benchmarks/operators.py --only module --only "higher order"
    python benchmarks/operators.py --inner inductor --choose 60

The operators and their inputs are those of torch's own tests (``op_db``), and so are the modules, the higher-order
operators, the custom operators and the autograd functions (``operator_sources.py``). Each step copies the inputs, calls
the operator, and squares its results and the copies, so that operator and squares save tensors that may leave memory.
A step is compiled by the inner compiler alone, with everything offloaded, and with everything recomputed that may be
recomputed and the rest offloaded. Each of the three makes the same forwards and backwards: one by one, with
``retain_graph=True``, two forwards before their backwards, and a forward whose results are dropped. The memory of
compiled steps is overwritten as soon as it is free. Afterwards, nothing may be left on the disk.

``EXCEPTIONS`` in ``operator_steps.py`` lists the operators that cannot be compared, with the cause. For each of them,
the inner compiler alone already fails, or gives other bits in a second run. The exit code is 1 if any other row is not
equal, and if an exception is. An operator that takes longer than ``--timeout-s`` costs only its own row.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import importlib
import json
import logging
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from operator_sources import SOURCES, has_gradient, operators, source_of
from operator_steps import DTYPES, READS_UNINITIALISED, Row, check

from ssdtrain_fx._torch_private.arena import ArenaLibrary
from ssdtrain_fx.runtime.memory.step_memory import step_memory
from ssdtrain_fx.units import format_bytes

OPERATORS_PER_PROCESS = 40


def make_hostile(library: ArenaLibrary) -> ArenaLibrary:
    """Every tensor of compiled code comes from the arena, and what is freed is overwritten at once."""
    library.configure(min_bytes=1, poison=True)
    return library


def serve(pipe: Connection, work: Sequence[tuple[str, str]], options: dict[str, Any]) -> None:
    """Body of a process: sends a row for each operator."""
    torch.set_num_threads(1)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it warns of every graph break
    load = step_memory._load
    step_memory._load = lambda: make_hostile(load())
    for name, dtype in work:
        pipe.send(check(name, dtype, **options))


def rows_of(work: Sequence[tuple[str, str]], timeout_s: float, options: dict[str, Any]) -> Iterator[Row]:
    """One row for each operator, also if its process dies or hangs."""
    fork = multiprocessing.get_context("fork")
    begin = 0
    while begin < len(work):
        chunk = work[begin : begin + OPERATORS_PER_PROCESS]
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=serve, args=(theirs, chunk, options), daemon=True)
        process.start()
        theirs.close()  # so that recv() ends if the process dies
        for name, dtype in chunk:
            begin += 1
            if not ours.poll(timeout_s):
                yield Row(op=name, dtype=dtype, samples=0, result=f"no result in {timeout_s:.0f} s")
                break
            try:
                yield ours.recv()
            except EOFError:
                process.join()
                yield Row(op=name, dtype=dtype, samples=0, result=f"its process ended with {process.exitcode}")
                break
        process.kill()
        process.join()
        ours.close()


def write_rows(rows: Sequence[Row]) -> str:
    """All rows as a Markdown table."""
    lines = ["| operator | dtype | samples | offloads | moved | recomputed | result |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        result = row.result.replace("|", "\\|")
        if row.result == "equal" and row.op in READS_UNINITIALISED:
            result = f"equal with filled memory: {READS_UNINITIALISED[row.op]}"
        elif row.cause and row.is_as_expected:
            result = f"exception: {row.cause}"
        moved = format_bytes(row.moved_bytes)
        lines.append(
            f"| {row.op} | {row.dtype} | {row.samples} | {row.offloads} | {moved} | {row.recomputed} | {result} |"
        )
    return "\n".join(lines) + "\n"


def write_summary(rows: Sequence[Row]) -> str:
    """Counts by source and dtype as a Markdown table, and the rows that are not equal."""
    lines = [
        "| of torch | dtype | count | equal | with offloads | with recomputations | exceptions | unexplained |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for source, dtype in dict.fromkeys((source_of(row.op), row.dtype) for row in rows):
        here = [row for row in rows if (source_of(row.op), row.dtype) == (source, dtype)]
        equal = [row for row in here if row.result == "equal"]
        counts = collections.Counter(row.is_as_expected for row in here if row.result != "equal")
        lines.append(
            f"| {source} | {dtype} | {len(here)} | {len(equal)} | {sum(row.offloads > 0 for row in equal)} "
            f"| {sum(row.recomputed > 0 for row in equal)} | {counts[True]} | {counts[False]} |"
        )
    causes: dict[str, list[str]] = {}
    for row in rows:
        if row.result != "equal":
            name = f"`{row.op}` {row.dtype}"
            causes.setdefault(row.cause or f"**unexplained:** {row.result}", []).append(name)
    if causes:
        lines += ["", "| exceptions | cause |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {cause} |" for cause, names in causes.items()]
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", action="append", metavar="NAME", help="default: all")
    parser.add_argument("--only", action="append", choices=SOURCES, help="default: all")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="default: all")
    parser.add_argument("--choose", type=int, metavar="COUNT", help="only so many, chosen at random with a fixed seed")
    parser.add_argument("--inner", choices=["aot_eager", "inductor"], default="aot_eager")
    parser.add_argument("--dynamic", action="store_true", help="compile for symbolic sizes")
    parser.add_argument("--samples", type=int, default=3, help="of inputs, for each operator and dtype")
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--ssd-dir", default=tempfile.gettempdir())
    parser.add_argument("--json", metavar="PATH", help="where the rows are written after each operator")
    parser.add_argument("--markdown", metavar="PATH", help="where the table of all rows is written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    by_name = operators()
    unknown = [name for name in chosen.op or () if name not in by_name]
    if unknown:
        print(f"No differentiable operator of this torch is named {', '.join(unknown)}.", file=sys.stderr)
        return 2
    names = [(name, dtype) for dtype in chosen.dtype or DTYPES for name in chosen.op or by_name]
    work = [
        (name, dtype)
        for name, dtype in names
        if source_of(name) in (chosen.only or SOURCES) and has_gradient(by_name[name], DTYPES[dtype])
    ]
    if chosen.choose is not None:
        work = random.Random(0).sample(work, min(chosen.choose, len(work)))
    if chosen.inner == "inductor":
        importlib.import_module("ssdtrain_fx.compiler.inductor")  # once, not in each process
    options = {"inner": chosen.inner, "dynamic": chosen.dynamic, "samples": chosen.samples, "ssd_dir": chosen.ssd_dir}
    gc.freeze()  # collections take a third of the time of a process that has imported so much
    rows: list[Row] = []
    for row in rows_of(work, chosen.timeout_s, options):
        rows.append(row)
        state = row.result if row.result == "equal" or not row.is_as_expected else f"exception: {row.cause}"
        print(f"{len(rows)} of {len(work)}: {row.op} {row.dtype}, {row.offloads} offloads: {state}", flush=True)
        if chosen.json:
            Path(chosen.json).write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=1))
    if chosen.markdown:
        Path(chosen.markdown).write_text(write_rows(rows))
    print(write_summary(rows))
    return 0 if all(row.is_as_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
