"""A plugin for pytest, used by ``torch_tests.py``: every compilation gets the backend that the environment names.

``REPLACED_BACKEND`` is a JSON object: ``inner`` is the inner compiler; ``ssd_dir`` is where everything is offloaded, or
null for the inner compiler alone; ``results`` is the file to which a line is appended for each test.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig
from ssdtrain_fx.testing import toy_hardware

WANTED: dict[str, Any] = json.loads(os.environ["REPLACED_BACKEND"])


def chosen_backend() -> Any:
    if WANTED["ssd_dir"] is None:
        return WANTED["inner"]
    return ssdtrain_fx.backend(
        OffloadConfig(
            inner=WANTED["inner"],
            policy="all",
            min_tensor_bytes=0,
            ssd_dir=WANTED["ssd_dir"],
            hardware=toy_hardware(disk_bytes_per_s=1e9, kernel_s=1e-3),
        )
    )


def with_backend(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """``torch.compile``, but with this backend. Modes and options belong to the one that was asked for."""

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("mode", "options")}
        return function(*args, **{**kwargs, "backend": backend})

    return replaced


def pytest_configure() -> None:
    torch.set_num_threads(1)  # several add up in any order
    torch.compile = with_backend(cast(Any, torch.compile), chosen_backend())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    before = ssdtrain_fx.statistics().offloads
    try:
        return (yield)
    finally:
        item.user_properties.append(("offloads", ssdtrain_fx.statistics().offloads - before))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "offloads": dict(report.user_properties).get("offloads", 0),
            "error": "" if crash is None else crash.message,
        }
        with Path(WANTED["results"]).open("a") as results:
            results.write(json.dumps(line) + "\n")
