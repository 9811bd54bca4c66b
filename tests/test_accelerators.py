"""Which devices are supported, and what is said of the others. ``tests/simulated`` runs on an accelerator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.accelerators import Accelerator, device_functions, find_accelerator, reason_to_refuse
from ssdtrain_fx.config import device_of
from ssdtrain_fx.errors import ConfigError


def accelerator_is(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    found = None if name is None else torch.device(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)


def test_the_accelerator_of_this_torch_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator_is(monkeypatch, None)
    assert [reason_to_refuse(name) for name in ("cpu", "cuda")] == ["", ""]
    assert reason_to_refuse("xpu") == "xpu is not one of cpu, cuda"
    accelerator_is(monkeypatch, "xpu")
    assert reason_to_refuse("xpu") == ""
    assert reason_to_refuse("hpu") == "hpu is not one of cpu, cuda, xpu"


def test_a_device_that_shares_the_memory_of_the_cpu_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator_is(monkeypatch, "mps")
    assert reason_to_refuse("hpu") == "hpu is not one of cpu, cuda"
    with pytest.raises(ConfigError, match="cannot offload from 'mps': mps shares its memory with the CPU"):
        OffloadConfig().load_hardware("mps")
    with FakeTensorMode():
        x = torch.empty(1, device="mps")
    with pytest.raises(ConfigError, match="cannot offload from 'mps': mps shares its memory with the CPU"):
        device_of([x])


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator_is(monkeypatch, "xpu")
    monkeypatch.setattr(Accelerator, "is_available", lambda self: False)
    with pytest.raises(ConfigError, match="The device is 'xpu', but torch sees no xpu device"):
        OffloadConfig().load_hardware("xpu")


def test_the_first_tensor_on_an_accelerator_is_found() -> None:
    with FakeTensorMode():
        here, there = torch.empty(1), torch.empty(1, device="xpu:1")
    assert find_accelerator([here, 3, None, there]) == torch.device("xpu:1")
    assert find_accelerator([here, torch.empty(1, device="meta")]) is None


def test_cuda_keeps_its_own_functions_and_others_have_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_functions("cuda") is torch.cuda
    names = [name for name in dir(Accelerator) if not name.startswith("_")]
    assert all(callable(getattr(torch.cuda, name)) for name in names)
    monkeypatch.setattr(
        torch, "get_device_module", lambda name: SimpleNamespace(get_device_name=lambda device: "GPU 1")
    )
    assert Accelerator("xpu").get_device_name() == "GPU 1"
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace())
    assert Accelerator("xpu").get_device_name() == "xpu"
