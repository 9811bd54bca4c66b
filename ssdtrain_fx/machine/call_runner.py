"""Run op calls alone on their real device and time them, with CUDA events or, on a CPU, with ``perf_counter``.

Calls run one at a time. The tensors of a call are allocated, the op runs once to warm up and then a few times, the
median counts, and the tensors are freed. So this needs the memory of one node only. All calls are repeated for a few
rounds, and the shortest round counts, because a disturbance can only add time. Layouts and dtypes are the real ones.
Values are made up: random numbers in [0, 1), indices in range, and zeros for all other integers and for booleans.

The user's program is not affected. Calls run without autograd in a separate thread, where the user's modes, autocast
and default device do not apply. Random numbers come from a separate generator. For ops that draw from the global
generators, the state of these is saved and set back. No setting is changed, so the user's settings for determinism and
precision apply here too.

The code for CUDA has not yet run on a GPU; it is tested against stand-ins.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from ssdtrain_fx.accelerators import device_functions, is_accelerator
from ssdtrain_fx.machine.clocks import Clock, clock_of
from ssdtrain_fx.machine.probe_kernels import BUSY_KERNEL_S
from ssdtrain_fx.passes.analysis.node_calls import Call, Seconds, TensorLayout

log = logging.getLogger(__name__)

ROUNDS = 3
RUNS = 3
"""Timed runs of a call in each round, after one warm-up run."""
LONG_S = 0.1
"""A call that takes this long runs in one round only."""

SHORTEST_S = 1e-9
"""Lower bound of a measured time, whatever the resolution of the clock."""

MAX_REASON = 200
"""Characters of an error message that are kept."""

_RANDOM_BYTES = 1 << 22
"""Beyond this size, random numbers are copied: drawing them takes longer than copying."""

ClockFor = Callable[[torch.device], Clock]


def run_calls(calls: Sequence[Call], clock_for: ClockFor = clock_of, functions: Any = None) -> list[Seconds]:
    """Seconds of each call, or the error message of a call that cannot run."""
    with ThreadPoolExecutor(1) as pool:  # modes are per thread: under the FakeTensorMode of a trace no op runs
        return pool.submit(_run_calls, calls, clock_for, functions).result()


def _run_calls(calls: Sequence[Call], clock_for: ClockFor, functions: Any) -> list[Seconds]:
    torch.get_num_threads()  # initializes the number of threads here; else a product would use one per core
    with torch.no_grad():
        seconds = [_run_call(call, clock_for, functions) for call in calls]
        for _ in range(ROUNDS - 1):
            for at, call in enumerate(calls):
                before = seconds[at]
                if isinstance(before, float) and before < LONG_S:
                    again = _run_call(call, clock_for, functions)
                    seconds[at] = min(before, again) if isinstance(again, float) else before
        devices = {call.device for call in calls}
        if torch.device("cpu") in devices:
            _warn_if_busy(clock_for(torch.device("cpu")))
        for device_type in {device.type for device in devices if is_accelerator(device)}:
            # Training needs blocks of other sizes than those freed here.
            (functions or device_functions(device_type)).empty_cache()
    return seconds


def _run_call(call: Call, clock_for: ClockFor, functions: Any) -> Seconds:
    try:
        with _on_device(call.device, functions):
            return time_call(call, clock_for(call.device))
    except Exception as error:  # an op may raise anything for made-up arguments
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"[:MAX_REASON]


@contextlib.contextmanager
def _on_device(device: torch.device, functions: Any) -> Generator[None]:
    """Make ``device`` the current one. Afterwards, the state of the global random generators is as before."""
    if not is_accelerator(device):
        with torch.random.fork_rng(devices=[]):
            yield
        return
    functions = functions or device_functions(device.type)
    with functions.device(device), torch.random.fork_rng(devices=[]):
        state = functions.get_rng_state(device)
        try:
            yield
        finally:
            functions.set_rng_state(state, device)


def time_call(call: Call, clock: Clock) -> float:
    """Median seconds of a few runs, after one warm-up run.

    Raises:
        Exception: whatever the op raises.
    """
    args, kwargs = make_arguments(call)

    def run() -> None:
        call.target(*args, **kwargs)

    run()
    return max(statistics.median(clock.seconds(run) for _ in range(RUNS)), SHORTEST_S)


def _warn_if_busy(clock: Clock) -> None:
    x = torch.ones(1 << 16)  # the smallest op that wakes all threads
    kernel_s = statistics.median(clock.seconds(lambda: x.add_(1)) for _ in range(5))
    if kernel_s > BUSY_KERNEL_S:
        log.warning(
            "An empty kernel takes %.1f ms: the machine is busy, or torch has more threads than cores. The node times "
            "measured now are too long. To measure again, delete node-times-*.json in the directory of the hardware "
            "profiles.",
            1e3 * kernel_s,
        )


def make_arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for one run of ``call``, with a tensor for each layout."""
    bounds = _index_bounds(call)
    args = [_make(arg, bounds.get(at, 0)) for at, arg in enumerate(call.args)]
    return args, {name: _make(arg, 0) for name, arg in call.kwargs.items()}


def _make(value: Any, bound: int | tuple[int, ...]) -> Any:
    if isinstance(value, TensorLayout):
        return _make_tensor(value, bound if isinstance(bound, int) else 0)
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        bounds = bound if isinstance(bound, tuple) else (bound,) * len(items)
        return [_make(item, one) for item, one in zip(items, bounds, strict=True)]
    return value


def _make_tensor(layout: TensorLayout, bound: int) -> Tensor:
    """A tensor with made-up values. Integers are below ``bound``; if it is 0, they are zeros."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    if 0 in layout.shape:
        span = 0
    # Elements may share memory (expanded dimensions), so numbers are drawn for the memory, not per element.
    flat = torch.empty(span, dtype=layout.dtype, device=layout.device)
    drawn = flat[: _RANDOM_BYTES // layout.dtype.itemsize]
    generator = torch.Generator(layout.device).manual_seed(0)
    if layout.dtype.is_floating_point or layout.dtype.is_complex:
        drawn.copy_(torch.rand(len(drawn), generator=generator, device=layout.device))
    elif bound > 1:
        drawn.copy_(torch.randint(bound, (len(drawn),), generator=generator, device=layout.device))
    else:
        drawn.zero_()
    for start in range(len(drawn), span, max(1, len(drawn))):
        flat[start : start + len(drawn)].copy_(drawn[: span - start])
    return flat.as_strided(layout.shape, layout.stride)


def _index_bounds(call: Call) -> Mapping[int, int | tuple[int, ...]]:
    """Exclusive upper bounds of the arguments that are indices.

    Zeros are in range of every dimension that is not empty, so an op that is missing here reads one row only.
    """
    args = call.args
    match call.target.overloadpacket.__name__:
        case "embedding":
            return {1: args[0].shape[0]}
        case "embedding_dense_backward":
            return {1: args[2]}
        case "index" | "_unsafe_index" | "index_put" | "index_put_" | "_unsafe_index_put":
            return {1: args[0].shape[: len(args[1])]}
        case "gather" | "index_select" | "index_add" | "scatter" | "scatter_" | "scatter_add" | "scatter_add_":
            return {2: args[0].shape[args[1]]} if args[0].shape else {}
        case _:
            return {}
