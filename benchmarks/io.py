"""Compare throughput and CPU time of ways to transfer bytes between page-aligned memory and a file.

    python benchmarks/io.py --ssd-dir /mnt/nvme --size-mib 1024 --rounds 7 --json io.json

The ways are `threads` (Python threads with `pwrite` and `preadv`, as in the thread lane) and `aio` (native AIO, as in
the AIO lane), each with small pages (4 KiB) and huge pages. If `fio` is installed, it is the reference. It uses 4 KiB
pages, and io_uring, or libaio if the system refuses io_uring. All ways use O_DIRECT on a preallocated file on the same
file system, with the number of blocks in flight that their name states.

Every round runs every way once, in turns. A ratio is the median of the ratios within the rounds, so that other load on
the machine cancels out. CPU time is the time of the process. It includes neither the kernel's time in interrupts nor,
for fio, the time of kernel threads that io_uring uses.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import datetime
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from ssdtrain_fx.machine.reference_rates import FIO_ENGINES
from ssdtrain_fx.runtime.lanes.aio.kernel import READ, WRITE, AioUnavailableError, KernelAio
from ssdtrain_fx.runtime.storage.directory import check_directories, file_system_type
from ssdtrain_fx.runtime.storage.spill_file import SpillFile

MIB = 1 << 20
HUGE_PAGE_BYTES = 2 * MIB

Engine = Literal["threads", "aio", "fio"]
Direction = Literal["write", "read"]
DIRECTIONS: tuple[Direction, ...] = ("write", "read")


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    engine: Engine
    in_flight: int
    """Number of threads, or queue depth."""
    block_mib: int
    huge_pages: bool = False
    fio_engine: str = ""

    @property
    def name(self) -> str:
        shape = f"{self.in_flight} x {self.block_mib} MiB"
        if self.engine == "fio":
            return f"fio {self.fio_engine} {shape}"
        return f"{self.engine} {shape} {'huge' if self.huge_pages else 'small'}"

    @property
    def in_flight_bytes(self) -> int:
        return self.in_flight * self.block_mib * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The result of one way in one direction and one round."""

    bytes_per_s: float
    cpu_s_per_gb: float


class Memory:
    """Touched memory that starts at a huge-page boundary."""

    def __init__(self, size_bytes: int, *, huge_pages: bool) -> None:
        self._map = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        skip = -ctypes.addressof(ctypes.c_char.from_buffer(self._map)) % HUGE_PAGE_BYTES
        self.view = memoryview(self._map)[skip : skip + size_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map, skip))
        ctypes.memset(self.address, 1, size_bytes)


def run_threads(file: SpillFile, way: Way, direction: Direction, size_bytes: int, memory: Memory) -> None:
    block = way.block_mib * MIB
    transfer = file.write if direction == "write" else file.read

    def work(number: int) -> None:
        data = memory.view[number * block : (number + 1) * block]
        for offset in range(number * block, size_bytes, way.in_flight * block):
            transfer(data, offset)

    with concurrent.futures.ThreadPoolExecutor(way.in_flight) as pool:
        for future in [pool.submit(work, number) for number in range(way.in_flight)]:
            future.result()


def run_aio(file: SpillFile, way: Way, direction: Direction, size_bytes: int, memory: Memory, aio: KernelAio) -> None:
    block = way.block_mib * MIB
    opcode = WRITE if direction == "write" else READ
    free = list(range(way.in_flight))
    in_use: dict[int, int] = {}
    for cookie in range(1, size_bytes // block + 1):
        if not free:
            _take_answers(aio, in_use, free, block)
        slot = free.pop()
        in_use[cookie] = slot
        if not aio.submit(opcode, file.fileno(), memory.address + slot * block, block, (cookie - 1) * block, cookie):
            raise OSError("the AIO queue is full")
    while in_use:
        _take_answers(aio, in_use, free, block)


def _take_answers(aio: KernelAio, in_use: dict[int, int], free: list[int], block: int) -> None:
    aio.reap(10.0)
    for cookie, result in aio.answers():
        if result != block:
            raise OSError(f"a transfer of {block} bytes ended with {result}")
        free.append(in_use.pop(cookie))


def run_fio(path: Path, way: Way, direction: Direction, size_bytes: int) -> Sample:
    command = ["fio", "--name=io", f"--filename={path}", f"--rw={direction}", f"--bs={way.block_mib}m"]
    command += [f"--size={size_bytes}", f"--iodepth={way.in_flight}", f"--ioengine={way.fio_engine}"]
    command += ["--direct=1", "--invalidate=0", "--fallocate=none"]
    output = subprocess.run([*command, "--output-format=json"], check=True, capture_output=True, text=True).stdout
    job = json.loads(output)["jobs"][0]
    seconds = job[direction]["runtime"] / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Sample(job[direction]["io_bytes"] / seconds, cpu_s / (size_bytes / 1e9))


def find_fio_engine(directory: Path) -> str | None:
    """Return the first fio engine that works; kernels and containers may refuse io_uring."""
    if shutil.which("fio") is None:
        return None
    with tempfile.NamedTemporaryFile(dir=directory, prefix="ssdtrain-io-") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * MIB)
        for engine in FIO_ENGINES:
            with contextlib.suppress(subprocess.CalledProcessError, ValueError, KeyError, ZeroDivisionError):
                run_fio(Path(file.name), Way("fio", 1, 1, fio_engine=engine), "write", 2 * MIB)
                return engine
    return None


def measure(directory: str, ways: list[Way], size_bytes: int, rounds: int) -> dict[tuple[Way, Direction], list[Sample]]:
    """Return the samples of every way and direction, in the order of rounds. Raises OSError when a transfer fails."""
    samples: dict[tuple[Way, Direction], list[Sample]] = {(way, verb): [] for way in ways for verb in DIRECTIONS}
    memory_bytes = max(way.in_flight_bytes for way in ways)
    memories = {huge: Memory(memory_bytes, huge_pages=huge) for huge in {way.huge_pages for way in ways}}
    file = SpillFile(directory)
    aio = KernelAio() if any(way.engine == "aio" for way in ways) else None
    fio_file = tempfile.NamedTemporaryFile(dir=directory, prefix="ssdtrain-io-")  # noqa: SIM115 - closed below
    try:
        error = file.grow(size_bytes)
        if error is not None:
            raise error
        if any(way.engine == "fio" for way in ways):
            os.posix_fallocate(fio_file.fileno(), 0, size_bytes)
        for number in range(rounds + 1):  # the first round writes fresh blocks and does not count
            for (way, direction), taken in samples.items():
                if way.engine == "fio":
                    sample = run_fio(Path(fio_file.name), way, direction, size_bytes)
                else:
                    start_s, start_cpu_s = time.perf_counter(), time.process_time()
                    if way.engine == "threads":
                        run_threads(file, way, direction, size_bytes, memories[way.huge_pages])
                    elif aio is not None:
                        run_aio(file, way, direction, size_bytes, memories[way.huge_pages], aio)
                    cpu_s, wall_s = time.process_time() - start_cpu_s, time.perf_counter() - start_s
                    sample = Sample(size_bytes / wall_s, cpu_s / (size_bytes / 1e9))
                if number:
                    taken.append(sample)
    finally:
        if aio is not None:
            aio.close()
        file.close()
        fio_file.close()
    return samples


def summarise(samples: dict[tuple[Way, Direction], list[Sample]], base: Way) -> list[dict[str, Any]]:
    """Return one row per way and direction. Ratios are relative to ``base`` in the same direction."""
    rows: list[dict[str, Any]] = []
    for (way, direction), taken in samples.items():
        pairs = list(zip(taken, samples[base, direction], strict=True))
        rows.append(
            {
                "way": way.name,
                "direction": direction,
                "gb_per_s": statistics.median(sample.bytes_per_s for sample in taken) / 1e9,
                "throughput_ratio": statistics.median(a.bytes_per_s / b.bytes_per_s for a, b in pairs),
                "cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in taken),
            }
        )
    return rows


def render(rows: list[dict[str, Any]], base: Way) -> Table:
    table = Table(title=f"Ratios relative to {base.name}; core %: share of one core per GB/s")
    table.add_column("", no_wrap=True)
    for direction in DIRECTIONS:
        for column in ("GB/s", "ratio", "core %"):
            table.add_column(f"{direction}\n{column}", justify="right", no_wrap=True)
    for name in dict.fromkeys(row["way"] for row in rows):
        cells = [
            text
            for row in rows
            if row["way"] == name
            for text in (f"{row['gb_per_s']:.2f}", f"{row['throughput_ratio']:.2f}", f"{100 * row['cpu_s_per_gb']:.1f}")
        ]
        table.add_row(name, *cells)
    return table


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Throughput and CPU time of threads, native AIO and fio on one file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ssd-dir", help="directory on the SSD")
    parser.add_argument("--size-mib", type=int, default=512, help="size of the file; a multiple of 64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = parser.parse_args(arguments)
    if chosen.size_mib < 64 or chosen.size_mib % 64:
        parser.error("--size-mib must be a multiple of 64, and at least 64.")
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1.")
    try:
        chosen.ssd_dir = check_directories(chosen.ssd_dir)[0]
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse_arguments(arguments)
    console = Console()
    engines: list[Engine] = ["threads"]
    try:
        KernelAio().close()
        engines.append("aio")
    except AioUnavailableError as reason:
        console.print(f"Native AIO is left out: {reason}", highlight=False)
    shapes = ((4, 16), (2, 2))  # the shape to compare with fio, and the shape that the lanes use
    ways = [Way(engine, *shape, huge_pages=huge) for engine in engines for shape in shapes for huge in (False, True)]
    base = Way("threads", 4, 16, huge_pages=True)
    fio_engine = find_fio_engine(Path(chosen.ssd_dir))
    if fio_engine is None:
        console.print("fio is left out: it is not installed, or it fails with every engine.", highlight=False)
    else:
        ways += [Way("fio", *shape, fio_engine=fio_engine) for shape in shapes]
        base = next(way for way in ways if way.engine == "fio")
    try:
        samples = measure(chosen.ssd_dir, ways, chosen.size_mib * MIB, chosen.rounds)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"a transfer in {chosen.ssd_dir} failed: {error}")
    rows = summarise(samples, base)
    console.print(render(rows, base))
    if chosen.json is not None:
        written = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "ssd_file_system": file_system_type(chosen.ssd_dir),
            },
            "base": base.name,
            "size_mib": chosen.size_mib,
            "rounds": chosen.rounds,
            "results": rows,
        }
        chosen.json.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
