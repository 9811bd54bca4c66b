"""What a process leaves behind, and what its children inherit."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ssdtrain_fx

PRELUDE = """
import os, sys, threading
import torch
import ssdtrain_fx.runtime.ops as runtime
from ssdtrain_fx.runtime.config import EngineConfig

ops = torch.ops.ssdtrain
engine = EngineConfig(ssd_dir=sys.argv[1]).to_argument()

def offload(x):
    return ops.release(ops.offload(x, x.stride(), "name=x|" + engine), x)

def fetch(token, x):
    ticket = ops.reload(token, x.size(), x.stride(), x.dtype, x.device)
    return ops.wait(ticket, x.size(), x.stride(), x.dtype, x.device)

torch.set_num_threads(1)  # OpenMP does not work in a forked child
x = torch.arange(3_000_000)
"""


def start(script: str, directory: Path) -> subprocess.Popen[str]:
    root = str(Path(ssdtrain_fx.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(directory)],
        env=os.environ | {"PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, directory: Path) -> tuple[int, str, str]:
    with start(script, directory) as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("raise ValueError('the user made a mistake')", 1),
        pytest.param("del token", 0, marks=pytest.mark.slow),
        pytest.param("runtime.close()", 0, marks=pytest.mark.slow),
    ],
)
def test_exit_with_transfers_in_flight(tmp_path: Path, ending: str, code: int) -> None:
    script = f"""
        tokens = [offload(x) for _ in range(3)]
        token = ops.offload(x, x.stride(), "name=x|" + engine)
        ticket = ops.reload(tokens[0], x.size(), x.stride(), x.dtype, x.device)
        {ending}
    """
    returncode, _, errors = run(script, tmp_path)
    assert returncode == code, errors
    assert errors.count("Traceback") == errors.count("ValueError: the user made a mistake") <= 2
    assert ("Traceback" in errors) == (code == 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("doing", ["idle", "writing"])
def test_kill_leaves_nothing(tmp_path: Path, doing: str) -> None:
    process = start(
        f"""
        token = offload(x)
        print("offloaded", flush=True)
        while {doing == "writing"}:
            offload(x)
        sys.stdin.read()
        """,
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "offloaded\n"
    assert list(tmp_path.iterdir()) == []
    links = [str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert [link.endswith(" (deleted)") for link in links if link.startswith(str(tmp_path))] == [True]
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_records_no_trace(tmp_path: Path) -> None:
    script = """
        from pathlib import Path
        path = Path(sys.argv[1], "trace.json")
        with runtime.trace(path):
            token = offload(x)
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                assert not path.exists()
            else:
                own = offload(x)
        if child == 0:
            os._exit(1 if path.exists() else 0)
        print(path.read_text().count('"offload"'))
    """
    returncode, output, errors = run(script, tmp_path)
    assert (returncode, output) == (0, "1\n"), errors


def test_a_forked_child_has_separate_engines(tmp_path: Path) -> None:
    script = """
        from ssdtrain_fx.errors import ActivationLostError
        token = offload(x)
        lock = runtime._engines._lock
        ledger = runtime._engines.open(engine)._ledger
        with lock, ledger.lock:  # a fork may happen in any state of the locks
            child = os.fork()
        if child == 0:
            try:
                fetch(token, x)
            except ActivationLostError as error:
                assert "made before this process was forked" in str(error)
            else:
                os._exit(1)
            del token
            assert runtime.statistics().offloads == 0
            own = offload(x + 1)
            ok = torch.equal(fetch(own, x), x + 1) and runtime.statistics().offloads == 1
            runtime.close()
            os._exit(0 if ok else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(fetch(token, x), x)
        print(runtime.statistics().offloads)
    """
    returncode, output, errors = run(script, tmp_path)
    assert (returncode, output) == (0, "1\n"), errors
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_wait_for_a_reload_of_its_parent(tmp_path: Path) -> None:
    """The ticket knows its engine, whose lock another thread holds, and whose transfers end in the parent."""
    script = """
        from ssdtrain_fx.errors import ActivationLostError
        token = offload(x)
        runtime._engines.open(engine).wait_until_idle()
        ticket = ops.reload(token, x.size(), x.stride(), x.dtype, x.device)
        ledger = runtime._engines.open(engine)._ledger
        held, may_go_on = threading.Event(), threading.Event()

        def hold():
            with ledger.lock:
                held.set()
                may_go_on.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if child == 0:
            try:
                ops.wait(ticket, x.size(), x.stride(), x.dtype, x.device)
            except ActivationLostError as error:
                os._exit(0 if "was opened before this process was forked" in str(error) else 2)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        may_go_on.set()
        holder.join()
        print(code, torch.equal(ops.wait(ticket, x.size(), x.stride(), x.dtype, x.device), x))
    """
    returncode, output, errors = run(script, tmp_path)
    assert (returncode, output) == (0, "0 True\n"), errors


def test_a_forked_child_finds_every_lock_free(tmp_path: Path) -> None:
    """Another thread holds the locks at the fork, as while it compiles. It does not exist in the child."""
    script = """
        from ssdtrain_fx.machine.call_times import _loaded_lock
        from ssdtrain_fx.machine.probe import _known_lock
        from ssdtrain_fx.runtime.memory.step_memory import step_memory
        locks = [_known_lock, _loaded_lock, step_memory._lock]
        held, may_go_on = threading.Event(), threading.Event()

        def hold():
            with locks[0].current, locks[1].current, locks[2].current:
                held.set()
                may_go_on.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if child == 0:
            os._exit(sum(not lock.current.acquire(blocking=False) for lock in locks))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert all(lock.current.locked() for lock in locks)
        may_go_on.set()
        holder.join()
        assert not any(lock.current.locked() for lock in locks)
        print(code)
    """
    returncode, output, errors = run(script, tmp_path)
    assert (returncode, output) == (0, "0\n"), errors


HANGING = {
    "posix": """
        from ssdtrain_fx.runtime.storage.spill_file import SpillFile
        SpillFile.write = lambda *arguments: threading.Event().wait()
    """,
    "aio": """
        from ssdtrain_fx.runtime.lanes.aio.kernel import KernelAio
        KernelAio.submit = lambda *arguments: True
        KernelAio.close = lambda *arguments: threading.Event().wait()
    """,
}


WATCH_CHILD = """
import time
from pathlib import Path

def held_by(process):
    links = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except FileNotFoundError:  # the descriptor of this listing
            pass
    return [link for link in links if link.startswith(sys.argv[1])]

def fork_and_live():
    parent_lives, parents_end = os.pipe()
    child_lives, childs_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(parents_end)
        os.write(childs_end, b"!")
        os.read(parent_lives, 1)  # until the parent ends
        os._exit(0)
    os.close(parent_lives)
    os.read(child_lives, 1)
    return child

def free_bytes():
    status = os.statvfs(sys.argv[1])
    return status.f_bavail * status.f_frsize

def comes_free(byte_count):
    # Other processes write to this file system, too.
    for _ in range(100):
        if free_bytes() > byte_count:
            return True
        time.sleep(0.1)
    return False
"""


@pytest.mark.parametrize("io", ["posix", "aio"])
def test_a_child_does_not_hold_the_file_that_its_parent_closes(tmp_path: Path, io: str) -> None:
    """KvikIO opens the file a second time; the descriptor is its own. The parent uses both as before."""
    script = f"""
        engine = EngineConfig(ssd_dir=sys.argv[1], io={io!r}).to_argument()
        token = offload(x)
        descriptor = runtime._engines.open(engine)._ledger.file.fileno()
        second = os.open(f"/proc/self/fd/{{descriptor}}", os.O_RDWR)
        child = fork_and_live()
        assert len(held_by(os.getpid())) == 2
        assert torch.equal(fetch(token, x), x)
        assert torch.equal(fetch(offload(x + 1), x), x + 1)
        print(held_by(child))
        full_bytes = free_bytes()
        os.close(second)
        runtime.close()
        print(held_by(os.getpid()), comes_free(full_bytes + (100 << 20)))
    """
    returncode, output, errors = run(WATCH_CHILD + textwrap.dedent(script), tmp_path)
    assert (returncode, output) == (0, "[]\n[] True\n"), errors


@pytest.mark.parametrize("io", [pytest.param("posix", marks=pytest.mark.slow), "aio"])
def test_a_child_does_not_hold_the_file_of_an_engine_that_was_given_up(tmp_path: Path, io: str) -> None:
    script = f"""
        {HANGING[io].strip()}
        engine = EngineConfig(ssd_dir=sys.argv[1], io={io!r}, io_timeout_s=0.2).to_argument()
        token = offload(torch.arange(1000))
        runtime.close()
        child = fork_and_live()
        print(len(held_by(os.getpid())), held_by(child))
    """
    returncode, output, errors = run(WATCH_CHILD + textwrap.dedent(script), tmp_path)
    assert (returncode, output) == (0, "1 []\n"), errors


def test_what_a_child_does_with_an_inherited_file_reaches_no_other_file(tmp_path: Path) -> None:
    """The number of the descriptor is not given to the next file that the child opens."""
    script = """
        from pathlib import Path
        token = offload(x)
        inherited = runtime._engines.open(engine)._ledger.file
        child = os.fork()
        if child == 0:
            own = Path(sys.argv[1], "own")
            with own.open("w") as file:
                file.write("precious")
                file.flush()
                try:
                    inherited.read(memoryview(bytearray(4096)), 0)
                    os._exit(1)
                except OSError as error:
                    assert "short read" in str(error)
                inherited.write(memoryview(bytes(4096)), 0)
                inherited.close()
                file.write("!")
            os._exit(0 if own.read_text() == "precious!" else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print(torch.equal(fetch(token, x), x))
    """
    returncode, output, errors = run(script, tmp_path)
    assert (returncode, output) == (0, "True\n"), errors


@pytest.mark.parametrize("io", HANGING)
@pytest.mark.parametrize(
    "ending", ["", pytest.param("raise ValueError('the user made a mistake')", marks=pytest.mark.slow)]
)
def test_exit_while_the_disk_hangs(tmp_path: Path, io: str, ending: str) -> None:
    script = f"""
        {HANGING[io].strip()}
        engine = EngineConfig(ssd_dir=sys.argv[1], io={io!r}, io_timeout_s=0.2).to_argument()
        token = offload(torch.arange(1000))
        {ending}
    """
    returncode, _, errors = run(script, tmp_path)
    assert returncode == (1 if "mistake" in ending else 0), errors
    assert errors.count("closed an engine although its transfers do not finish") == 1
    assert ("Traceback" in errors) == ("mistake" in ending)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("io", ["posix", "aio"])
def test_a_fork_disturbs_no_transfer(tmp_path: Path, io: str) -> None:
    """Fork while the tensor is written and while it is read; the parent writes to other memory at the same time."""
    script = f"""
        engine = EngineConfig(ssd_dir=sys.argv[1], io={io!r}).to_argument()
        children = []

        def fork():
            child = os.fork()
            if child == 0:
                other.fill_(-1)
                os._exit(0)
            children.append(child)

        other = torch.zeros(100_000)
        for number in range(10):
            z = x + number
            token = ops.offload(z, z.stride(), "name=x|" + engine)
            fork()
            token = ops.release(token, z)
            runtime._engines.open(engine).wait_until_idle()
            ticket = ops.reload(token, z.size(), z.stride(), z.dtype, z.device)
            fork()
            other += 1
            y = ops.wait(ticket, z.size(), z.stride(), z.dtype, z.device)
            assert torch.equal(y, z)
            del token, ticket, y
        assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
        assert other.eq(10).all()
        print(runtime.statistics().slots_in_use)
    """
    returncode, output, errors = run(script, tmp_path)
    assert (returncode, output) == (0, "0\n"), errors
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_is_opened_again_and_old_tokens_say_so(tmp_path: Path) -> None:
    script = """
        token = offload(x)
        runtime.close()
        assert runtime.statistics().io_path == "none yet"
        try:
            fetch(token, x)
        except ssdtrain_fx.ActivationLostError as error:
            print(error)
        assert torch.equal(fetch(offload(x), x), x)
    """
    returncode, output, errors = run("import ssdtrain_fx" + textwrap.dedent(script), tmp_path)
    assert returncode == 0, errors
    assert "belongs to an engine that was closed" in output
