"""The registered ops: in eager code, under FakeTensors, and compiled."""

from pathlib import Path

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ssdtrain_fx.errors import ActivationLostError, InternalError
from ssdtrain_fx.runtime import ops as runtime
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.engines import Engines
from ssdtrain_fx.runtime.handles.tokens import make_token

ops = torch.ops.ssdtrain


@pytest.fixture
def engine(tmp_path: Path) -> str:
    return EngineConfig(ssd_dir=str(tmp_path)).to_argument()


def fetch(token: Tensor, like: Tensor) -> Tensor:
    ticket = ops.reload(token, like.size(), like.stride(), like.dtype, like.device)
    return ops.wait(ticket, like.size(), like.stride(), like.dtype, like.device)


def test_round_trip(engine: str) -> None:
    x = torch.randn(100, 50).t()
    expected = x.clone()
    before = runtime.statistics()
    token = ops.release(ops.offload(x, x.stride(), f"name=x|{engine}"), x)
    x.zero_()
    first, second = fetch(token, x), fetch(token, x)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    step = runtime.statistics().since(before)
    assert (step.offloads, step.reloads) == (1, 2)
    assert "posix" in step.io_path


def test_of_cpu_tensors_the_host_tier_takes_none(engine: str) -> None:
    x = torch.randn(10)
    token = ops.release(ops.offload(x, x.stride(), f"name=x;host=true;reload_order=3|{engine}"), x)
    owner = runtime._engines.owner_of(token)
    entry = owner.engine.find_entry(owner)
    assert entry is not None
    assert (entry.host, entry.reload_order) == (False, 3)
    assert torch.equal(fetch(token, x), x)


def test_a_ticket_is_good_for_one_wait(engine: str) -> None:
    x = torch.randn(10)
    token = ops.release(ops.offload(x, x.stride(), f"name=x|{engine}"), x)
    ticket = ops.reload(token, x.size(), x.stride(), x.dtype, x.device)
    ops.wait(ticket, x.size(), x.stride(), x.dtype, x.device)
    with pytest.raises(InternalError, match="ticket with number"):
        ops.wait(ticket, x.size(), x.stride(), x.dtype, x.device)


def test_a_token_that_no_engine_made_is_refused() -> None:
    with pytest.raises(InternalError, match="handle -5, which no engine issued"):
        ops.reload(torch.tensor([-5]), (1,), (1,), torch.float32, torch.device("cpu"))


def test_a_copied_token_is_good_while_the_original_lives(engine: str) -> None:
    x = torch.randn(10)
    token = ops.release(ops.offload(x, x.stride(), f"name=x|{engine}"), x)
    copied = token.clone()
    assert torch.equal(fetch(copied, x), x)
    del token
    with pytest.raises(ActivationLostError, match=r"is a copy, .* saved-tensor hook .* Run compiled steps without it"):
        fetch(copied, x)
    with pytest.raises(InternalError, match="which no engine issued: its memory was overwritten"):
        fetch(copied + 1_000_000, x)


def test_closing_goes_on_after_an_engine_that_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[Engine] = []

    def close(engine: Engine, *, timeout_s: float) -> None:
        closed.append(engine)
        raise RuntimeError(f"engine {len(closed)}")

    engines = Engines()
    arguments = [EngineConfig(ssd_dir=str(tmp_path), checksum=flag).to_argument() for flag in (False, True)]
    opened = [engines.open(argument) for argument in arguments]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "close", close)
        with pytest.raises(RuntimeError, match="engine 1"):
            engines.close()
    assert closed == opened
    assert "engine 2" in caplog.text
    for engine in opened:
        engine.close()


def test_the_engine_is_found_by_the_token(tmp_path: Path) -> None:
    """Backward has only the token; the two engines must not use each other's handles."""
    engines = Engines()
    arguments = [EngineConfig(ssd_dir=str(tmp_path), checksum=flag).to_argument() for flag in (False, True)]
    first, second = (engines.open(argument) for argument in arguments)
    assert engines.open(arguments[0]) is first
    assert engines.open(EngineConfig(checksum=True, ssd_dir=str(tmp_path)).to_argument()) is second
    x = torch.arange(5)
    for engine in (first, second, first):
        owner = engine.release(engine.offload(x, "x"), x)
        assert engines.owner_of(make_token(owner)) is owner
        assert owner.engine is engine
    assert engines.statistics().offloads == 3
    engines.close()


def test_fakes_with_symbolic_sizes() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rows = mode.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
        x = torch.empty_strided((6, 4), (1, 6), dtype=torch.bfloat16)
        token = ops.release(ops.offload(x, x.stride(), "name=x|"), x)
        assert (token.shape, token.dtype, token.device.type) == ((1,), torch.int64, "cpu")
        ticket = ops.reload(token, (rows, 4), (4, 1), torch.bfloat16, torch.device("cpu"))
        y = ops.wait(ticket, (rows, 4), (4, 1), torch.bfloat16, torch.device("cpu"))
        assert (y.stride(), y.dtype, y.device.type) == ((4, 1), torch.bfloat16, "cpu")
        assert y.size(0) is rows or y.size(0).node.expr == rows.node.expr


def test_traces_into_a_graph_and_runs_from_it(engine: str) -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        token = ops.release(ops.offload(y, y.stride(), f"name=mul|{engine}"), y)
        z = fetch(token, y)
        return z + 1

    graph = torch.fx.experimental.proxy_tensor.make_fx(program, tracing_mode="fake")(torch.ones(7, 3))
    targets = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("ssdtrain")]
    assert targets == [f"ssdtrain.{name}.default" for name in ("offload", "release", "reload", "wait")]
    assert torch.equal(graph(torch.full((7, 3), 4.0)), torch.full((7, 3), 9.0))


def test_tags() -> None:
    for name in ("offload", "release", "reload", "wait"):
        assert {torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe} <= set(getattr(ops, name).default.tags)


def test_a_ticket_that_is_never_used_frees_its_tensor(engine: str) -> None:
    """Backward may raise between reload and wait."""
    x = torch.randn(10)
    token = ops.release(ops.offload(x, x.stride(), f"name=x|{engine}"), x)
    before = runtime.statistics().slots_in_use
    ticket = ops.reload(token, x.size(), x.stride(), x.dtype, x.device)
    del token
    assert runtime.statistics().slots_in_use == before  # the ticket holds it
    del ticket
    runtime._engines.open(engine).wait_until_idle()
    assert runtime.statistics().slots_in_use == before - 1


def test_the_step_after_an_interrupt_opens_another_engine(engine: str) -> None:
    """The call site has been seen before, and its engine has failed meanwhile."""
    x = torch.randn(10)
    site = f"name=x|{engine}"
    failed = runtime.offload(x, x.stride(), site).engine
    assert isinstance(failed, Engine)
    failed._ledger.stop_because_of(KeyboardInterrupt())
    owner = runtime.offload(x, x.stride(), site)
    assert owner.engine is not failed
    assert torch.equal(fetch(runtime.release(owner, x), x), x)
