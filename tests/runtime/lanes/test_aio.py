"""The kernel's native AIO, tested on a real file."""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdtrain_fx.runtime.lanes.aio import kernel
from ssdtrain_fx.runtime.lanes.aio.kernel import READ, WRITE, AioUnavailableError, KernelAio
from ssdtrain_fx.runtime.memory.staging import StagingBuffer


@pytest.fixture(params=["ring", "calls"])
def aio(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelAio]:
    """Answers come from the ring where its layout is known, or from system calls as on other machines."""
    if request.param == "calls":
        monkeypatch.setattr(kernel, "RING_MAGIC", 0)
    try:
        aio = KernelAio(4)
    except AioUnavailableError as reason:
        pytest.skip(str(reason))
    yield aio
    aio.close()
    aio.close()


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield descriptor
    os.close(descriptor)


def answers_of(aio: KernelAio, count: int) -> dict[int, int]:
    answers: dict[int, int] = {}
    while len(answers) < count:
        aio.reap(10.0)
        answers |= aio.answers()
    return answers


def test_what_was_written_is_read(aio: KernelAio, descriptor: int) -> None:
    source, target = StagingBuffer(8192), StagingBuffer(8192)
    source.view[:] = bytes(range(256)) * 32
    assert aio.submit(WRITE, descriptor, source.address, 8192, 4096, 7)
    assert answers_of(aio, 1) == {7: 8192}
    assert aio.submit(READ, descriptor, target.address, 4096, 8192, 8)
    assert aio.submit(READ, descriptor, target.address + 4096, 4096, 4096, 9)
    assert answers_of(aio, 2) == {8: 4096, 9: 4096}
    assert target.view == source.view[4096:].tobytes() + source.view[:4096].tobytes()


def test_answers_come_once(aio: KernelAio, descriptor: int) -> None:
    aio.reap(0.0)
    assert aio.answers() == []
    buffer = StagingBuffer(4096)
    assert aio.submit(WRITE, descriptor, buffer.address, 4096, 0, 1)
    assert answers_of(aio, 1) == {1: 4096}
    aio.reap(0.0)
    assert aio.answers() == []


def test_answers_come_once_however_they_are_asked_for(aio: KernelAio, descriptor: int) -> None:
    """Far more answers than the ring holds, collected alternately with and without blocking."""
    buffer = StagingBuffer(4096)
    answers: list[tuple[int, int]] = []
    cookies = range(1, 5001)
    for cookie in cookies:
        while not aio.submit(WRITE, descriptor, buffer.address, 4096, 0, cookie):
            aio.reap(10.0)
            answers += aio.answers()
        if cookie % 3 == 0:
            aio.reap(10.0 * (cookie % 2))
            answers += aio.answers()
    while len(answers) < len(cookies):
        aio.reap(10.0)
        answers += aio.answers()
    assert sorted(answers) == [(cookie, 4096) for cookie in cookies]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the order of reads is known only for x86-64")
@pytest.mark.parametrize("aio", ["ring"], indirect=True)
def test_answers_need_no_call_of_the_kernel(aio: KernelAio, descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_getevents", None)
    buffer = StagingBuffer(4096)
    assert aio.submit(WRITE, descriptor, buffer.address, 4096, 0, 1)
    answers: list[tuple[int, int]] = []
    while not answers:
        aio.reap(0.0)
        answers = aio.answers()
    assert answers == [(1, 4096)]
    aio.close()
    assert aio.answers() == []


def test_short_reads_and_errors_are_told(aio: KernelAio, descriptor: int, tmp_path: Path) -> None:
    buffer = StagingBuffer(8192)
    os.ftruncate(descriptor, 4096)
    assert aio.submit(READ, descriptor, buffer.address, 8192, 0, 1)
    assert answers_of(aio, 1) == {1: 4096}
    with pytest.raises(OSError, match="Bad file descriptor"):
        aio.submit(READ, 10_000, buffer.address, 4096, 0, 2)
    with open(tmp_path / "file", "rb") as only_for_reading, pytest.raises(OSError) as caught:  # noqa: PTH123, PT011
        aio.submit(WRITE, only_for_reading.fileno(), buffer.address, 4096, 0, 3)
    assert caught.value.errno == errno.EBADF


def test_a_full_queue_takes_nothing(aio: KernelAio, descriptor: int) -> None:
    """The kernel accepts more requests than the depth, but not without limit, until the answers are read."""
    buffer = StagingBuffer(4096)
    accepted = 0
    while aio.submit(WRITE, descriptor, buffer.address, 4096, 0, accepted + 1):
        accepted += 1
    assert accepted >= 4
    assert answers_of(aio, accepted) == dict.fromkeys(range(1, accepted + 1), 4096)
    assert aio.submit(WRITE, descriptor, buffer.address, 4096, 0, 1)


def test_an_exception_of_a_signal_handler_ends_the_wait(aio: KernelAio) -> None:
    """Ctrl-C must not have to wait for the disk."""

    class InterruptedByTestError(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedByTestError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start_s = time.monotonic()
        with pytest.raises(InterruptedByTestError):
            aio.reap(60.0)
        assert time.monotonic() - start_s < 30
        assert aio.answers() == []
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_exception_after_any_call_within_answers_loses_none(
    aio: KernelAio, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signal handlers run when a call returns, here a call that clears the answers."""
    buffer = StagingBuffer(4096)
    for cookie in (1, 2, 3):
        assert aio.submit(WRITE, descriptor, buffer.address, 4096, 0, cookie)
    aio.reap(10.0)
    memset = ctypes.memset

    def interrupted(*arguments: int) -> None:
        memset(*arguments)
        raise KeyboardInterrupt

    found: dict[int, int] = {}
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(ctypes, "memset", interrupted)
        found |= aio.answers()
    if len(found) < 3:
        found |= aio.answers()
    assert found == {1: 4096, 2: 4096, 3: 4096}
    assert aio.answers() == []


def test_a_forked_child_leaves_the_context_alone(aio: KernelAio, descriptor: int) -> None:
    child = os.fork()
    if child == 0:
        aio.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    buffer = StagingBuffer(4096)
    assert aio.submit(WRITE, descriptor, buffer.address, 4096, 0, 1)
    assert answers_of(aio, 1) == {1: 4096}


def test_where_it_is_not_available_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AioUnavailableError, match=r"io_setup: (EINVAL|EAGAIN)"):
        KernelAio(1 << 30)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(AioUnavailableError, match="native AIO is not supported for linux on riscv64"):
        KernelAio()
