"""Gives this process a simulated accelerator: see ``device.cpp``. Import it before torch.

It takes the place of ``torch.cuda``, of which only the parts that the package, Dynamo and AOTAutograd use are replaced.
With another ``$SIMULATED_TYPE`` than ``cuda``, it is a device of this name that torch does not know, and that the
package finds by ``torch.accelerator``. ``$SIMULATED_DEVICE`` is the path of the library, built for one of the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import sync_counts


def _load() -> ctypes.CDLL:
    """Load the library before torch asks for the first time whether there is CUDA, and remembers the answer."""
    assert "torch" not in sys.modules
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(os.environ["SIMULATED_DEVICE"])  # its functions release the GIL


_library = _load()

import torch

TYPE = os.environ["SIMULATED_TYPE"]
if TYPE != "cuda":
    torch.utils.rename_privateuse1_backend(TYPE)

import torch._meta_registrations  # shapes of operators whose meta kernels are in Python
from torch import Tensor

DEVICE_COUNT = 2


class Memory(NamedTuple):
    """Bytes on one device."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    limit_bytes: int


class Paced(NamedTuple):
    """The spans of a stream that take an exact time."""

    enqueued: int
    over: int
    latest_s: float
    """By how much the end of a span was late at most, since this was last asked: what else the machine does."""


class Counts(NamedTuple):
    """What happened since the counts were reset."""

    syncs: dict[tuple[int, str], int]
    """How often a thread waited for the device, by its native number and the kind of wait."""
    kernels: dict[str, int]
    """How often each operator was launched."""

    def syncs_of_training(self) -> dict[str, int]:
        """The waits of threads that do not belong to the engine."""
        return sync_counts.of_training(self.syncs)


class Simulator:
    """What tests do to the device."""

    failed = False
    """A device that has failed is repaired after the test."""
    repetition = 0
    """Another number, other delays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.simulated_configure.argtypes = [ctypes.c_uint64, *[ctypes.c_int] * 4]
        library.simulated_hold.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_bool]
        library.simulated_fail_next.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.simulated_host_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.simulated_host_unregister.argtypes = [ctypes.c_void_p]
        library.simulated_memory.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.simulated_limit_memory.argtypes = [ctypes.c_int, ctypes.c_size_t]
        library.simulated_generator.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_bool]
        library.simulated_report.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]
        library.simulated_settle.restype = ctypes.c_bool
        library.simulated_peek.argtypes = library.simulated_poke.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
        ]
        library.simulated_report.restype = ctypes.c_size_t
        library.simulated_is_pinned.argtypes = [ctypes.c_void_p]
        library.simulated_is_pinned.restype = ctypes.c_bool
        library.simulated_refuse_pinning.argtypes = [ctypes.c_bool]
        library.simulated_pace_begin.argtypes = library.simulated_clock.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.simulated_pace_end.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        library.simulated_pace_copies.argtypes = [ctypes.c_double, ctypes.c_double]
        library.simulated_paced.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p]
        library.simulated_clock.restype = ctypes.c_int64
        library.simulated_paced_ends.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t]
        library.simulated_paced_ends.restype = ctypes.c_size_t
        library.simulated_install()

    def configure(
        self, *, seed: int = 1, default_us: int = 0, side_us: int = 0, percent: int = 100, hold_limit_s: float = 20.0
    ) -> None:
        """Delay ``percent`` of the kernels and copies by up to ``default_us`` microseconds on default streams, and by
        up to ``side_us`` on others. A stream that is held for ``hold_limit_s`` goes on, and its device fails."""
        self._library.simulated_configure(
            seed + 1000 * self.repetition, default_us, side_us, percent, int(hold_limit_s * 1000)
        )

    @contextlib.contextmanager
    def hold(self, stream: torch.Stream | None = None) -> Iterator[None]:
        """Within the block, the stream begins nothing. None: the current stream."""
        chosen = torch.accelerator.current_stream() if stream is None else stream
        self.set_held(chosen, True)
        try:
            yield
        finally:
            self.set_held(chosen, False)

    def set_held(self, stream: torch.Stream, held: bool) -> None:
        self._library.simulated_hold(stream.device_index, stream.stream_id, held)

    def settle(self) -> None:
        """Return when every stream is idle, held, or waits for another one that is."""
        assert self._library.simulated_settle(), "the streams do not come to rest"

    def peek(self, x: Tensor) -> bytes:
        """The bytes of contiguous ``x`` now, whatever the streams do: what a drive reads directly."""
        data = ctypes.create_string_buffer(x.nbytes)
        self._library.simulated_peek(x.data_ptr(), ctypes.addressof(data), x.nbytes)
        return data.raw

    def poke(self, x: Tensor, data: bytes) -> None:
        """The same for writing."""
        self._library.simulated_poke(x.data_ptr(), data, len(data))

    def fail_next(self, stream: torch.Stream) -> None:
        """The next kernel that is enqueued on ``stream`` fails, and everything on the device that would run later."""
        self._library.simulated_fail_next(stream.device_index, stream.stream_id)

    def is_pinned(self, address: int) -> bool:
        """Whether copies may access host memory asynchronously."""
        return self._library.simulated_is_pinned(address)

    @contextlib.contextmanager
    def refuse_pinning(self) -> Iterator[None]:
        """Within the block, no host memory can be pinned."""
        self._library.simulated_refuse_pinning(True)
        try:
            yield
        finally:
            self._library.simulated_refuse_pinning(False)

    def repair(self) -> None:
        for index in range(DEVICE_COUNT):
            self._library.simulated_repair(index)

    def memory(self, device: Any = None) -> Memory:
        numbers = (ctypes.c_int64 * 4)()
        self._library.simulated_memory(_index(device), ctypes.addressof(numbers))
        return Memory(*numbers)

    def limit_memory(self, limit_bytes: int, device: Any = None) -> None:
        """Allow ``limit_bytes`` to be allocated; 0: as much as there is. Also resets the peak."""
        self._library.simulated_limit_memory(_index(device), limit_bytes)

    def take_counts(self) -> Counts:
        """The counts since the last call."""
        text = ctypes.create_string_buffer(1 << 20)
        length = self._library.simulated_report(ctypes.addressof(text), len(text), True)
        syncs: dict[tuple[int, str], int] = {}
        kernels: dict[str, int] = {}
        for line in text.raw[:length].decode().splitlines():
            kind, *words = line.split()
            if kind == "sync":
                syncs[int(words[0]), words[1]] = int(words[2])
            else:
                kernels[words[0]] = int(words[1])
        return Counts(syncs, kernels)

    # -- paced time: see device.cpp ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def paced(self, duration_s: float, stream: torch.Stream | None = None) -> Iterator[None]:
        """What is enqueued on ``stream`` within the block takes ``duration_s``. None: the current stream."""
        chosen = torch.accelerator.current_stream() if stream is None else stream
        self._library.simulated_pace_begin(chosen.device_index, chosen.stream_id)
        yield
        self._library.simulated_pace_end(chosen.device_index, chosen.stream_id, round(duration_s * 1e9))

    def pace_copies(self, out_bytes_per_s: float = 0.0, in_bytes_per_s: float = 0.0) -> None:
        """Asynchronous copies between pinned memory and devices have these rates; 0: they are as fast as they are."""
        self._library.simulated_pace_copies(out_bytes_per_s, in_bytes_per_s)

    def count_paced(self, stream: torch.Stream | None = None) -> Paced:
        chosen = torch.accelerator.current_stream() if stream is None else stream
        numbers = (ctypes.c_int64 * 3)()
        self._library.simulated_paced(chosen.device_index, chosen.stream_id, ctypes.addressof(numbers))
        return Paced(numbers[0], numbers[1], numbers[2] / 1e9)

    def take_ends_s(self, stream: torch.Stream | None = None) -> list[float]:
        """When the spans since the last call ended, on the clock of :meth:`clock_s`."""
        chosen = torch.accelerator.current_stream() if stream is None else stream
        numbers = (ctypes.c_int64 * 100_000)()
        count = self._library.simulated_paced_ends(
            chosen.device_index, chosen.stream_id, ctypes.addressof(numbers), len(numbers)
        )
        return [number / 1e9 for number in numbers[:count]]

    def clock_s(self, stream: torch.Stream | None = None) -> float:
        """Wait for the stream, and return when its last span ended: exact, by ``time.perf_counter``."""
        chosen = torch.accelerator.current_stream() if stream is None else stream
        return self._library.simulated_clock(chosen.device_index, chosen.stream_id) / 1e9

    # -- what torch.cuda calls -----------------------------------------------------------------------------------------

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        return self._library.simulated_host_register(address, size_bytes)

    def cudaHostUnregister(self, address: int) -> int:
        return self._library.simulated_host_unregister(address)

    def generator(self, device: Any, state: tuple[int, int] | None = None) -> tuple[int, int]:
        numbers = (ctypes.c_int64 * 2)(*(state or (0, 0)))
        self._library.simulated_generator(_index(device), ctypes.addressof(numbers), state is not None)
        return numbers[0], numbers[1]


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Event(torch.Event):
    """``torch.cuda.Event``. What is made is no subclass, because ``elapsed_time`` takes none."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event(device=TYPE, enable_timing=enable_timing)


class _Device:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    if stream is None:
        yield
        return
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device_index)
    torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(stream.device_index)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


class _Properties(NamedTuple):
    name: str = "simulated"
    major: int = 8
    minor: int = 0
    total_memory: int = 8 << 30
    multi_processor_count: int = 1
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    gcnArchName: str = ""


def install() -> Simulator:
    """Replace ``torch.cuda``, or register another device, and return the simulator behind it."""
    simulator = Simulator(_library)

    def get_rng_state(device: Any = None) -> Tensor:
        return torch.tensor(simulator.generator(device), dtype=torch.int64).view(torch.uint8)

    def set_rng_state(state: Tensor, device: Any = None) -> None:
        seed, offset = state.view(torch.int64).tolist()
        simulator.generator(device, (seed, offset))

    def seed_all(seed: int) -> None:
        for index in range(DEVICE_COUNT):
            simulator.generator(index, (seed, 0))

    def memory_stats(device: Any = None) -> dict[str, int]:
        memory = simulator.memory(device)
        return {"allocated_bytes.all.current": memory.allocated_bytes, "allocated_bytes.all.peak": memory.peak_bytes}

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = simulator.memory(device)
        return memory.limit_bytes - memory.allocated_bytes, memory.limit_bytes

    replaced = {
        "_initialized": True,
        "_is_compiled": lambda: True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICE_COUNT,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "device": _Device,
        "Stream": torch.Stream,
        "Event": Event,
        "stream": _stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "cudart": lambda: simulator,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": lambda device=None: _Properties(),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: simulator.memory(device).allocated_bytes,
        "max_memory_allocated": lambda device=None: simulator.memory(device).peak_bytes,
        "reset_peak_memory_stats": lambda device=None: torch.accelerator.reset_peak_memory_stats(_index(device)),
        "memory_reserved": lambda device=None: simulator.memory(device).allocated_bytes,
        "memory_stats": memory_stats,
        "mem_get_info": mem_get_info,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(index) for index in range(DEVICE_COUNT)],
        "set_rng_state_all": lambda states: [set_rng_state(state, i) for i, state in enumerate(states)],
        "manual_seed": lambda seed: simulator.generator(None, (int(seed), 0)),
        "manual_seed_all": seed_all,
    }
    if TYPE == "cuda":
        _replace_cuda(replaced)
    else:
        _register_device(replaced)
    return simulator


def _replace_cuda(functions: dict[str, Any]) -> None:
    private: Any = torch._C
    private._cuda_getCurrentRawStream = lambda index: 0  # Dynamo imports it
    for name, value in functions.items():
        setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, functions[name])


def _register_device(functions: dict[str, Any]) -> None:
    from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

    module: Any = types.ModuleType(f"torch.{TYPE}")
    for name, value in {**functions, "get_amp_supported_dtype": list, "_is_in_bad_fork": lambda: False}.items():
        setattr(module, name, value)
    torch._register_device_module(TYPE, module)

    class Interface(DeviceInterface):
        pass

    for name in (
        "Event",
        "Stream",
        "current_device",
        "current_stream",
        "device_count",
        "is_available",
        "set_device",
        "synchronize",
    ):
        setattr(Interface, name, module.Event if name == "Event" else staticmethod(getattr(module, name)))
    register_interface_for_device(TYPE, Interface)
