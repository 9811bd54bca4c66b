"""The package does not touch the heap of the user's process: no setting of it, and no advice about its pages.

Training runs in a process whose calls of ``mallopt``, ``madvise``, ``mmap`` and ``munmap`` are recorded by a library
that is loaded before the C library. The C library's own calls are not seen, so the recorded mappings are not its heap.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import mmap
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPER = Path(getattr(mmap, "__file__", "")).name
"""The file of Python's module for mappings."""

OBSERVER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* One line for each call: what is called, by which file, address or name of the setting, length or value, advice. */
static void record(const char *name, void *caller, unsigned long first, unsigned long second, int third) {
  static int file = -2;
  if (file == -2) {
    const char *path = getenv("RECORDED_CALLS");
    file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  }
  if (file < 0) return;
  Dl_info info;
  const char *module = dladdr(caller, &info) && info.dli_fname ? info.dli_fname : "?";
  const char *slash = strrchr(module, '/');
  char line[512];
  const char *file_name = slash ? slash + 1 : module;
  int length = snprintf(line, sizeof line, "%s %s %lu %lu %d\n", name, file_name, first, second, third);
  if (write(file, line, length) != length) abort();
}

#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int mallopt(int setting, int value);

int mallopt(int setting, int value) {
  record("mallopt", CALLER, (unsigned long)setting, (unsigned long)value, 0);
  return REAL(mallopt)(setting, value);
}

int madvise(void *address, size_t length, int advice) {
  record("madvise", CALLER, (unsigned long)address, length, advice);
  return REAL(madvise)(address, length, advice);
}

void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset) {
  void *memory = REAL(mmap)(address, length, protection, flags, file, offset);
  if (memory != MAP_FAILED) record("mmap", CALLER, (unsigned long)memory, length, flags & MAP_ANONYMOUS ? 1 : 0);
  return memory;
}

void *mmap64(void *address, size_t length, int protection, int flags, int file, off64_t offset) {
  void *memory = REAL(mmap64)(address, length, protection, flags, file, offset);
  if (memory != MAP_FAILED) record("mmap", CALLER, (unsigned long)memory, length, flags & MAP_ANONYMOUS ? 1 : 0);
  return memory;
}

int munmap(void *address, size_t length) {
  record("munmap", CALLER, (unsigned long)address, length, 0);
  return REAL(munmap)(address, length);
}
"""

CHILD = """
import os, sys
del os.environ["LD_PRELOAD"]  # the compilers that this process starts are of no interest
import torch
from torch import nn
import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from steps import FAST_DISK

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

inner, ssd_dir = sys.argv[1:]
config = OffloadConfig(inner=inner, ssd_dir=ssd_dir, policy="all", min_tensor_bytes=0, hardware=FAST_DISK)
model = torch.compile(Blocks(), backend=ssdtrain_fx.backend(config))
for _ in range(3):
    model(torch.randn(16384, 64)).backward()
statistics = ssdtrain_fx.statistics()
assert statistics.offloads >= 12 and statistics.reloads >= 12, statistics
ssdtrain_fx.runtime.ops.close()
"""

OFFENDER = """
import ctypes, mmap, torch
mapping = mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
mapping.madvise(mmap.MADV_DONTFORK)
c_library = ctypes.CDLL(None)
c_library.mallopt(-2, 1 << 20)
x = torch.zeros(1 << 24)
page = -(-x.data_ptr() // 4096) * 4096
assert c_library.madvise(ctypes.c_void_p(page), ctypes.c_size_t(1 << 21), 14) in (0, -1)
"""

ON_ANOTHER_HEAP = """
import os
del os.environ["LD_PRELOAD"]
import torch
from ssdtrain_fx.runtime.memory.step_memory import _return_garbage_of_compiling
tensors = [torch.full((1000,), number) for number in range(1000)]
for _ in range(3):
    del tensors[::2]
    _return_garbage_of_compiling()
assert all(bool((x == x[0]).all()) for x in tensors)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    name: str
    module: str
    """The name of the file that the caller was loaded from."""
    first: int
    second: int
    third: int

    @property
    def is_ours(self) -> bool:
        """Only this package makes mappings with Python's module, and it alone has an arena."""
        return self.module == MAPPER or self.is_of_the_arena

    @property
    def is_of_the_arena(self) -> bool:
        return re.fullmatch(r"arena-\w+\.so", self.module) is not None


def record_calls(tmp_path: Path, script: str, *arguments: str) -> list[Call]:
    """Run ``script`` in a process and return what it has called, in order."""
    if not MAPPER:
        pytest.skip("the mmap module of this Python is a part of the interpreter, which makes mappings of its own")
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the observer is a library for Linux, and is compiled with g++, which is not there")
    source, library, record = tmp_path / "observer.c", tmp_path / "observer.so", tmp_path / "calls"
    source.write_text(OBSERVER)
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"], check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "LD_PRELOAD": str(library),
        "RECORDED_CALLS": str(record),
    }
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    calls: list[Call] = []
    for line in record.read_text().splitlines():
        name, module, *numbers = line.split(" ")
        calls.append(Call(name, module, *map(int, numbers)))
    return calls


def find_advice_elsewhere(calls: list[Call]) -> list[Call]:
    """The calls of ``madvise`` on memory that is not in a mapping of this package at that time."""
    mappings: dict[int, int] = {}
    elsewhere: list[Call] = []
    for call in calls:
        if call.name == "mmap" and call.is_ours and call.third:
            mappings[call.first] = call.first + call.second
        elif call.name == "munmap":
            mappings.pop(call.first, None)
        elif call.name == "madvise":
            end = call.first + call.second
            if not any(start <= call.first and end <= limit for start, limit in mappings.items()):
                elsewhere.append(call)
    return elsewhere


@pytest.mark.parametrize("inner", [pytest.param("aot_eager", marks=pytest.mark.slow), "inductor"])
def test_training_leaves_the_heap_alone(tmp_path: Path, ssd_dir: str, inner: str) -> None:
    calls = record_calls(tmp_path, CHILD, inner, ssd_dir)
    assert [call for call in calls if call.name == "mallopt"] == []
    assert any(call.name == "madvise" and call.is_of_the_arena for call in calls), "nothing was observed"
    assert find_advice_elsewhere(calls) == []


def test_a_process_that_does_not_leave_its_heap_alone_is_noticed(tmp_path: Path) -> None:
    """This keeps the test above from passing because nothing is seen."""
    calls = record_calls(tmp_path, OFFENDER)
    (setting,) = [call for call in calls if call.name == "mallopt"]
    assert (setting.first & 0xFFFFFFFF, setting.second) == (0xFFFFFFFE, 1 << 20)
    _, advice = [call for call in calls if call.name == "madvise"]
    assert find_advice_elsewhere(calls) == [advice]
    assert (advice.second, advice.third) == (1 << 21, 14)


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc_minimal"])
def test_a_process_with_another_heap_is_unharmed(tmp_path: Path, name: str) -> None:
    """``malloc_trim`` is still there and finds the heap of the C library empty."""
    library = ctypes.util.find_library(name)
    if library is None:
        pytest.skip(f"lib{name} is not installed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LD_PRELOAD": library}
    command = [sys.executable, "-c", ON_ANOTHER_HEAP]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
