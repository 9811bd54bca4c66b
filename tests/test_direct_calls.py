"""How generated code calls the ops: as functions if only our ops read their results, else through the dispatcher."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from steps import FAST_DISK, generated_code, settled_statistics
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from ssdtrain_fx import OffloadConfig, _torch_private, backend
from ssdtrain_fx._torch_private import inductor as private
from ssdtrain_fx._torch_private.direct_calls import DirectCall
from ssdtrain_fx.errors import InternalError
from ssdtrain_fx.passes.graph.joint_graph import SAVED
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, RELEASE, RELOAD, WAIT
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.testing import assert_same_bits, train

DISPATCHED = "torch.ops.ssdtrain."


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


@pytest.fixture
def engine(ssd_dir: str) -> str:
    private.install_lowerings(offload=OFFLOAD, release=RELEASE, reload=RELOAD, wait=WAIT, saved=SAVED)
    return EngineConfig(ssd_dir=ssd_dir).to_argument()


def test_code_that_a_cache_keeps_imports_what_it_calls() -> None:
    config = OffloadConfig(policy="all", min_tensor_bytes=0)
    codes = generated_code(Layers(), torch.randn(8, 16), compiler=config)
    for code, names in zip(codes, (("offload", "release"), ("reload", "wait")), strict=True):
        assert DISPATCHED not in code
        for name in names:
            assert f"from ssdtrain_fx.runtime.ops import {name} as ssdtrain_{name}\n" in code
            assert f" = ssdtrain_{name}(" in code


def test_parts_of_a_call_come_as_a_tuple_or_as_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a tuple until torch 2.13 and an object from 2.14 on. This test uses the form of the other versions."""
    names = ("example_output", "tensor_args", "non_tensor_args", "unflatten_args", "unbacked_bindings")
    process = cast(Any, DirectCall).process_kernel

    def process_otherwise(*args: Any, **kwargs: Any) -> Any:
        parts = process(*args, **kwargs)
        if isinstance(parts, tuple):
            return types.SimpleNamespace(**dict(zip(names, cast("tuple[Any, ...]", parts), strict=True)))
        return tuple(getattr(parts, name) for name in names)

    monkeypatch.setattr(DirectCall, "process_kernel", process_otherwise)
    config = OffloadConfig(policy="all", min_tensor_bytes=0)
    codes = generated_code(Layers(), torch.randn(8, 16), compiler=config)
    assert all(" = ssdtrain_" in code for code in codes)


@pytest.mark.parametrize("name", ["ssdtrain_offload", "torch.ops.ssdtrain.offload.default"])
def test_strides_are_read_from_both_kinds_of_code(name: str) -> None:
    code = private.WrappedCode(lambda inputs: inputs)
    code.source_code = f"""
buf1 = {name}(buf0, [4, 1], 'name=mm;out_s=0.1|')
buf2 = {name}(buf0, [max(1, s7)*(s8 // 2), 1], 'name=dynamic|')
buf3 = {name}(buf0, [u0, 1], 'name=unknown|')
buf3 = {name}(buf0, [s8 // (s7 - 3), 1], 'name=no value|')
buf4 = other(buf0, [1, 4], 'mm')
"""
    strides = private.offload_strides_in(code, OFFLOAD, {"s7": 3, "s8": 8})
    assert strides == {"name=mm;out_s=0.1|": (4, 1), "name=dynamic|": (12, 1)}


def test_what_others_read_is_a_tensor(engine: str) -> None:
    """A token leaves the graph, so all ops of the graph go through the dispatcher."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(x @ x)
        return torch.ops.ssdtrain.offload(y, y.stride(), f"name=y|{engine}"), y

    x = torch.randn(8, 8)
    token, y = torch.compile(program, fullgraph=True)(x)
    assert isinstance(token, Tensor)
    kept = torch.ops.ssdtrain.release(token, y)
    layout = (y.size(), y.stride(), y.dtype, y.device)
    assert torch.equal(torch.ops.ssdtrain.wait(torch.ops.ssdtrain.reload(kept, *layout), *layout), y)


def test_nothing_but_objects_of_ours_goes_past_the_dispatcher(engine: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(x @ x)
        token = torch.ops.ssdtrain.release(torch.ops.ssdtrain.offload(y, y.stride(), f"name=y|{engine}"), y)
        layout = (y.size(), y.stride(), y.dtype, y.device)
        return torch.ops.ssdtrain.wait(torch.ops.ssdtrain.reload(token, *layout), *layout) * 2, y

    x = torch.randn(8, 8)
    (result, y), (code,) = cast(Any, run_and_get_code)(torch.compile(program, fullgraph=True), x)
    assert DISPATCHED not in code
    assert code.count(" = ssdtrain_") == 4
    assert torch.equal(result, y * 2)


@pytest.mark.slow
def test_cpp_code_can_call_the_ops(tmp_path: Path) -> None:
    """Its compiler gets the arguments of the ops as they are: no string may contain a quote or a backslash."""
    directory = tmp_path / "a \"drive\" \\ of 'mine'"
    directory.mkdir()
    model, batches = Layers(), [(torch.randn(8, 16),) for _ in range(2)]
    config = OffloadConfig(policy="all", min_tensor_bytes=0, ssd_dir=str(directory), hardware=FAST_DISK)
    before = settled_statistics()
    with torch._inductor.config.patch(cpp_wrapper=True, fx_graph_cache=False):
        expected = train(model, batches, backend="inductor")
        found, codes = cast(Any, run_and_get_code)(train, model, batches, backend=backend(config))
    assert_same_bits(found, expected)
    assert len(codes) == 2
    assert all(text in codes[0] for text in ("ssdtrain::offload", "ssdtrain::release"))
    assert settled_statistics().since(before).reloads > 0


def test_a_reloading_is_good_for_one_wait(engine: str) -> None:
    x = torch.randn(10)
    token = ops.release(ops.offload(x, [1], f"name=x|{engine}"), x)
    reloading = ops.reload(token, [10], [1])
    assert torch.equal(ops.wait(reloading), x)
    with pytest.raises(InternalError, match="another wait has already taken"):
        ops.wait(reloading)


def test_a_tensor_on_other_memory_begins_where_that_begins() -> None:
    base = torch.arange(12.0)
    other = _torch_private.reinterpret(base, (3, 4), (1, 3))
    assert (other.storage_offset(), other.data_ptr()) == (0, base.data_ptr())
    assert torch.equal(other, base.reshape(4, 3).t())
    assert other._base is None and not other.requires_grad
