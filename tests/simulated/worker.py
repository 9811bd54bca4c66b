"""The process that has the device. It runs the tests that :mod:`device_process` names, one at a time.

The device is simulated if ``$SIMULATED_DEVICE`` is set, and the GPU otherwise.
"""

from __future__ import annotations

import faulthandler

faulthandler.enable()

import os

if "SIMULATED_DEVICE" in os.environ:
    import simulated_device  # before torch

    simulator = simulated_device.install()
else:
    import real_cuda

    simulator = real_cuda.install()

import contextlib
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest  # what tests import is imported once, not by every forked process
import torch
import torch._dynamo
from device_under_test import gpu
from real_cuda import SKIPPED

torch._dynamo.reset()  # imports most of Dynamo

HANGS_AFTER_S = 100
FORKED_HANGS_AFTER_S = 60


def run_case(module: str, function: str, arguments: dict[str, Any], repetition: int) -> str | None:
    """Run a test as pytest would. Returns the traceback if it fails."""
    try:
        case: Callable[..., object] = getattr(importlib.import_module(module), function)
        torch._dynamo.reset()
        torch.manual_seed(0)
        simulator.repetition = repetition
        simulator.configure()
        simulator.take_counts()
        case(sim=simulator, **arguments)
        for index in range(0 if simulator.failed else gpu.device_count()):
            gpu.synchronize(index)
    except pytest.skip.Exception as reason:
        return f"{SKIPPED}{reason}"
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    finally:
        simulator.repair()
        simulator.limit_memory(0, 0)
        simulator.limit_memory(0, 1)
        torch._dynamo.reset()
        with contextlib.suppress(Exception):
            importlib.import_module("ssdtrain_fx.runtime.ops").close()
    return None


def run_forked(package_root: str, request: dict[str, Any]) -> str | None:
    """Run a test on the package in ``package_root``, in a process of its own."""
    for name in ("networkx", "scipy.optimize", "torch._inductor.compile_fx", "xxhash"):
        importlib.import_module(name)  # here, not in every process
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(FORKED_HANGS_AFTER_S, exit=True)
        sys.path.insert(0, package_root)
        os.write(writing, json.dumps((run_case(**request) or "")[-20_000:]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return f"the process ended with status {status}" if status or not text else str(json.loads(text) or "") or None


def main() -> None:
    torch.set_num_threads(1)  # the kernels of the device have one thread, and sums must be in the same order
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        root = request.pop("package_root")
        if root is None:
            faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
            failure = run_case(**request)
            faulthandler.cancel_dump_traceback_later()
        else:
            failure = run_forked(root, request)
        answers.write(json.dumps(failure) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
