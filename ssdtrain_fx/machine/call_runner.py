"""Run calls of ops by themselves, on their real device, and take the time: CUDA events, ``perf_counter`` on a CPU.

One call after the other: its tensors are made, it runs once to warm up and then a few times, of which the median
counts, and all is freed again. So the memory that is needed is that of one node. The calls go round a few times, since
what disturbs them can only add time: the shortest round counts. Layouts and dtypes are the real ones; the numbers are
made up: random ones in [0, 1), indices in range, zeros for all other integers and for booleans.

Nothing of it reaches the user. It happens in a thread of its own, where no mode, autocast or device of theirs holds,
and without autograd. Random numbers come from another generator, and for ops that draw from the global ones, these are
put back. No setting is changed, so what a user has set for determinism or precision holds here too.

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

from ssdtrain_fx.machine.clocks import Clock, clock_of
from ssdtrain_fx.machine.probe_kernels import BUSY_KERNEL_S
from ssdtrain_fx.passes.analysis.node_calls import Call, Seconds, TensorLayout

log = logging.getLogger(__name__)

ROUNDS = 3
RUNS = 3
"""Of a call in each round, behind one that warms up."""
LONG_S = 0.1
"""A call that takes so long is in one round only."""

SHORTEST_S = 1e-9
"""Nothing takes no time, whatever the resolution of a clock."""

MAX_REASON = 200
"""Letters of an error that are kept."""

_RANDOM_BYTES = 1 << 22
"""More than this is copies: random numbers take longer to draw than to copy."""

ClockFor = Callable[[torch.device], Clock]


def run_calls(calls: Sequence[Call], clock_for: ClockFor = clock_of, cuda: Any = torch.cuda) -> list[Seconds]:
    """Seconds of each of ``calls``, or the error of one that cannot be run."""
    with ThreadPoolExecutor(1) as pool:  # modes belong to threads: under the FakeTensorMode of a trace nothing is run
        return pool.submit(_run_calls, calls, clock_for, cuda).result()


def _run_calls(calls: Sequence[Call], clock_for: ClockFor, cuda: Any) -> list[Seconds]:
    torch.get_num_threads()  # makes this thread know how many threads were set; a product would take one per core
    with torch.no_grad():
        seconds = [_run_call(call, clock_for, cuda) for call in calls]
        for _ in range(ROUNDS - 1):
            for at, call in enumerate(calls):
                before = seconds[at]
                if isinstance(before, float) and before < LONG_S:
                    again = _run_call(call, clock_for, cuda)
                    seconds[at] = min(before, again) if isinstance(again, float) else before
        devices = {call.device.type for call in calls}
        if "cpu" in devices:
            _warn_if_busy(clock_for(torch.device("cpu")))
        if "cuda" in devices:
            cuda.empty_cache()  # what was freed here is of no size that training needs
    return seconds


def _run_call(call: Call, clock_for: ClockFor, cuda: Any) -> Seconds:
    try:
        with _on_device(call.device, cuda):
            return time_call(call, clock_for(call.device))
    except Exception as error:  # whatever an op raises for made-up arguments: nobody has to know all of it
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"[:MAX_REASON]


@contextlib.contextmanager
def _on_device(device: torch.device, cuda: Any) -> Generator[None]:
    """``device`` is the current one, and global random numbers are afterwards what they were."""
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    with cuda.device(device), torch.random.fork_rng(devices=[]):
        state = cuda.get_rng_state(device)
        try:
            yield
        finally:
            cuda.set_rng_state(state, device)


def time_call(call: Call, clock: Clock) -> float:
    """Median seconds of a few runs, behind one that warms up.

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
            "An empty kernel takes %.1f ms: the machine is busy, or torch has more threads than cores. The times of "
            "nodes that were measured now are too long; delete node-times-*.json beside the hardware profiles to "
            "measure again.",
            1e3 * kernel_s,
        )


def make_arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for one run of ``call``, with tensors in the place of layouts."""
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
    """Integers are below ``bound``; 0 stands for zeros."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    if 0 in layout.shape:
        span = 0
    # Elements of a tensor may share memory (expanded dimensions), so numbers are drawn for the memory.
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
    """For the arguments that are indices: what these must be below.

    Zeros are in range wherever there is anything, so an op that is missing here is only looked up in one row.
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
