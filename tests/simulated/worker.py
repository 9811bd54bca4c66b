"""The process that has the simulated device. It runs the tests that :mod:`device_process` names, one at a time."""

from __future__ import annotations

import faulthandler

faulthandler.enable()

import simulated_cuda  # before torch

simulator = simulated_cuda.install()

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ssdtrain_fx.runtime import ops

HANGS_AFTER_S = 100


def run_case(module: str, function: str, arguments: dict[str, Any]) -> str | None:
    """Run a test as pytest would. Returns the traceback if it fails."""
    case: Callable[..., object] = getattr(importlib.import_module(module), function)
    torch._dynamo.reset()
    torch.manual_seed(0)
    simulator.configure()
    simulator.take_counts()
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    try:
        case(sim=simulator, **arguments)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
    except BaseException:
        return traceback.format_exc()
    finally:
        simulator.repair()
        simulator.limit_memory(0, 0)
        simulator.limit_memory(0, 1)
        torch._dynamo.reset()
        with contextlib.suppress(Exception):
            ops.close()
        faulthandler.cancel_dump_traceback_later()
    return None


def main() -> None:
    torch.set_num_threads(1)  # the kernels of the device have one thread, and sums must be in the same order
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run_case(**json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
