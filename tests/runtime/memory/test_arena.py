"""The arena: what comes from it, what it gives back, where there is none, and what processes share."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from arena_help import MIB, PAGE_BYTES, allocated_bytes, run_python
from torch import Tensor

import ssdtrain_fx
from ssdtrain_fx._torch_private import arena
from ssdtrain_fx._torch_private.arena import ArenaLibrary, ArenaUnavailableError
from ssdtrain_fx.runtime.memory.step_memory import in_step_memory, step_memory

# -- what comes from the arena, and what it gives back -----------------------------------------------------------------


@pytest.mark.usefixtures("library")
def test_tensors_come_from_the_arena_in_compiled_code_only() -> None:
    before = allocated_bytes()
    outside = torch.empty(MIB)
    with step_memory.inside():
        small = torch.empty(1024)
        large = torch.empty(MIB)
        in_thread: list[Tensor] = []
        thread = threading.Thread(target=lambda: in_thread.append(torch.empty(MIB)))
        thread.start()
        thread.join()
    assert allocated_bytes() - before == large.nbytes
    assert large.data_ptr() % PAGE_BYTES == 0
    later = torch.empty(MIB)
    assert allocated_bytes() - before == large.nbytes
    del large
    assert allocated_bytes() == before
    del outside, small, later


@pytest.mark.usefixtures("library")
def test_a_block_may_die_on_another_thread() -> None:
    before = allocated_bytes()
    with step_memory.inside():
        tensors = [torch.empty(MIB)]
    assert allocated_bytes() > before
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert allocated_bytes() == before


def test_free_memory_stays_mapped_until_it_is_asked_for(library: ArenaLibrary) -> None:
    with step_memory.inside():
        first = torch.zeros(4 * MIB)
        second = torch.zeros(4 * MIB)
    in_use = library.describe().committed_bytes
    del first
    assert library.describe().committed_bytes == in_use
    ssdtrain_fx.empty_cache()
    assert library.describe().committed_bytes == in_use, "the second block is above the first"
    assert bool((second == 0).all())
    del second
    assert library.describe().committed_bytes == in_use
    ssdtrain_fx.empty_cache()
    assert library.describe().committed_bytes <= in_use - 32 * MIB


def test_memory_that_no_step_uses_goes_back_after_a_while(library: ArenaLibrary) -> None:
    def run(size: int) -> int:
        in_step_memory(lambda args: torch.empty(size).numel(), planned_peak_bytes=0)([])
        return library.describe().committed_bytes

    library.configure(unused_runs=4, unused_milliseconds=0)
    for _ in range(16):  # forget the steps of other tests
        run(MIB)
    start = library.describe().committed_bytes
    large = run(8 * MIB)
    assert large == 32 * MIB > start
    sizes = [run(MIB) for _ in range(8)]
    assert sizes[0] == large, "the memory of the large step stays at first"
    assert sizes[-1] <= start + 6 * MIB, sizes


def test_the_smallest_tensors_are_the_same_in_python_and_in_cpp() -> None:
    """``allocate_block`` pads what it allocates to ``MIN_BYTES``, so that the block comes from the arena."""
    (found,) = re.findall(r"size_t min_bytes = size_t\{(\d+)\} << (\d+);", (arena.SOURCES / "range.h").read_text())
    assert int(found[0]) << int(found[1]) == arena.MIN_BYTES


# -- where there is no arena, or not enough of it ----------------------------------------------------------------------


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ArenaUnavailableError, match=r"`false .*arena\.cpp"):
        arena.load_arena_library()
    assert not list((tmp_path / "ssdtrain_fx").glob("*")), "nothing is left behind"


def test_without_a_home_directory_there_is_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``docker run --user 12345``."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(arena.Path, "home", home)
    with pytest.raises(ArenaUnavailableError, match="home directory"):
        arena.load_arena_library()


def test_without_a_compiler_the_message_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArenaUnavailableError, match=r"no C\+\+ compiler \(looked for \$CXX, g\+\+"):
        arena.load_arena_library()


def test_where_the_system_grants_no_more_memory_the_heap_serves() -> None:
    done = run_python(
        """
        import torch
        from ssdtrain_fx.runtime.memory import step_memory as module
        library = module.load_arena_library()
        library.install(16 << 20)
        library.enter(0)
        inside, outside = torch.empty(2 << 20), torch.empty(4 << 20)
        library.leave(False)
        inside.fill_(1); outside.fill_(2)
        assert library.describe().allocated_bytes == inside.nbytes
        assert float(inside.sum()) == 2 << 20 and float(outside.mean()) == 2
        """
    )
    assert done.returncode == 0, done.stderr


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_inherits_what_is_in_use_and_nothing_else() -> None:
    """The parent holds 64 MiB in use and 256 MiB free. The child reads the first, does not map the second, and has an
    arena of its own. What it frees is not freed in the parent."""
    done = run_python(
        """
        import os, sys
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import step_memory

        def resident_bytes():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        torch.set_num_threads(1)
        MIB = 1 << 20
        with step_memory.inside():
            kept = torch.full((16 * MIB,), 3.0)
            free = torch.full((64 * MIB,), 4.0)
        library = step_memory.library
        del free
        committed = library.describe().committed_bytes
        assert committed >= 320 * MIB
        parent_bytes = resident_bytes()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert parent_bytes - resident_bytes() > 200 * MIB, "the free memory is not there"
                assert bool((kept == 3).all())
                assert library.describe().allocated_bytes == 0
                with step_memory.inside():
                    own = torch.full((2 * MIB,), 5.0)
                assert library.describe().allocated_bytes == own.nbytes
                kept.fill_(6)
                del kept
                assert library.describe().allocated_bytes == own.nbytes
                assert bool((own == 5).all())
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert bool((kept == 3).all())
        with step_memory.inside():
            again = torch.full((64 * MIB,), 7.0)
        assert library.describe().committed_bytes == committed, "the free memory is still there"
        assert bool((again == 7).all())
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_within_a_run_leaves_the_child_an_arena_of_its_own() -> None:
    done = run_python(
        """
        import os
        import torch
        from ssdtrain_fx.runtime.memory.step_memory import in_step_memory

        def graph(args):
            before = torch.full((1 << 20,), 1.0)
            child = os.fork()
            if child == 0:
                own = torch.full((1 << 20,), 2.0)
                os._exit(0 if bool((before == 1).all()) and bool((own == 2).all()) else 1)
            return os.waitpid(child, 0)[1]

        torch.set_num_threads(1)
        run = in_step_memory(graph, planned_peak_bytes=0)
        assert [run([]) for _ in range(3)] == [0, 0, 0]
        """
    )
    assert done.returncode == 0, done.stderr
