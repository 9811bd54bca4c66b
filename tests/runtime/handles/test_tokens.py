import collections
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import MemoryFile, engine_on

from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.runtime.handles.tokens import Owner, handle_of, make_token

ENGINE: Any = object()


def test_owner_dies_with_the_last_storage() -> None:
    dead: collections.deque[int] = collections.deque()
    owner = Owner(ENGINE, 2**40 + 7, dead.append)
    first, second = make_token(owner), make_token(owner)
    del owner
    assert handle_of(first) == handle_of(second) == 2**40 + 7
    assert (first.shape, first.dtype, first.device.type) == ((1,), torch.int64, "cpu")
    del first
    assert not dead
    view = second.view(1, 1)
    del second
    assert not dead
    del view
    assert list(dead) == [2**40 + 7]


def test_each_token_has_separate_memory() -> None:
    """A compiler may write another tensor into the memory of a dead token."""
    owner = Owner(ENGINE, 5, collections.deque().append)
    first, second = make_token(owner), make_token(owner)
    first.fill_(-1)
    assert handle_of(second) == 5


def test_saved_for_backward_keeps_the_token(tmp_path: Path) -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, token):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(token)
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad, None

    dead: collections.deque[int] = collections.deque()
    x = torch.ones(3, requires_grad=True)
    y = Save.apply(x, make_token(Owner(ENGINE, 1, dead.append)))
    gc.collect()
    assert not dead
    y.sum().backward(retain_graph=True)
    assert not dead
    y.sum().backward()
    assert list(dead) == [1]


def test_a_token_may_die_while_the_engine_holds_its_lock(tmp_path: Path) -> None:
    """Garbage collection may run a finaliser on the thread that holds the lock."""
    with engine_on(MemoryFile(), str(tmp_path)) as engine:
        x = torch.arange(10)
        cycle: list[object] = [engine.release(engine.offload(x, "x"), x)]
        cycle.append(cycle)
        with engine._ledger.lock:
            del cycle
            gc.collect()
        engine.wait_until_idle()
        assert engine.statistics().slots_in_use == 0


def test_an_engine_that_was_closed_takes_no_notice_of_late_tokens(tmp_path: Path) -> None:
    with engine_on(MemoryFile(), str(tmp_path)) as engine:
        x = torch.arange(10)
        token = engine.release(engine.offload(x, "x"), x)
    del token
    gc.collect()
    assert engine.statistics().in_flight_bytes >= 0
    engine.close()


def test_a_token_elsewhere_is_refused() -> None:
    """Its memory cannot be read from here."""
    with pytest.raises(InternalError, match="expected a token in CPU memory, found a tensor on meta"):
        handle_of(torch.zeros(1, dtype=torch.int64, device="meta"))
