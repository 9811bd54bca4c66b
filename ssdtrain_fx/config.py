"""Options of the backend: one frozen value, checked before anything is traced."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from ssdtrain_fx.accelerators import find_accelerator, reason_to_refuse
from ssdtrain_fx.errors import ConfigError
from ssdtrain_fx.function_names import cache_name
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.local_ranks import count_local_ranks, warn_of_unknown_ranks
from ssdtrain_fx.machine.automatic_budget import automatic_budget, trained_parameter_bytes
from ssdtrain_fx.memory_limit import read_device_memory, read_memory_limit
from ssdtrain_fx.option_checks import (
    as_functions,
    as_paths,
    as_wishes,
    check_chunk_loss,
    require_choice,
    require_int,
    wrong,
)
from ssdtrain_fx.passes.analysis.module_wishes import Wish
from ssdtrain_fx.passes.graph.joint_graph import JointPass
from ssdtrain_fx.passes.planning.policy import Policy
from ssdtrain_fx.passes.planning.step_budget import StepBudget, budget_in_process
from ssdtrain_fx.passes.planning.transfer_problem import HostTier
from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import may_use_kvikio
from ssdtrain_fx.runtime.memory.staging import CHUNK_BYTES, CPU_BUDGET_BYTES, pinned_chunk_bytes

if TYPE_CHECKING:
    from ssdtrain_fx.machine.call_times import CallTimes

Inner = Literal["inductor", "aot_eager"]
PolicyName = Literal["auto", "all"]
AutomaticBudget = Literal["auto"]
Replan = Literal["off", "auto"]
Costs = Literal["roofline", "measured", "steps"]
ChunkLoss = Literal["off", "auto"]

SHARE_IN_TRANSIT = 1 / 8
"""Share of the staging memory that is reserved for transfers in flight when the host tier is full. A guess."""
UNPLANNED_SHARE = 0.5
"""Share of ``max_slowdown`` that stalls outside the plan may add. With a smaller share, a hiccup of the disk would
leave tensors in memory. With a larger one, a slow disk could cost twice the allowed slowdown. A guess."""


T = TypeVar("T")


def _explains_unknown_options(cls: type[T]) -> type[T]:
    """Let the constructor of a keyword-only dataclass raise a ConfigError where it would raise a TypeError."""
    generated = cls.__init__
    valid = [field.name for field in dataclasses.fields(cast(Any, cls))]

    @functools.wraps(generated)
    def initialise(self: T, *values: object, **options: Any) -> None:
        if values:
            raise ConfigError(
                f"{cls.__name__} takes its options by name, such as {valid[0]}=...; found {values[0]!r} without a name."
            )
        for name in options:
            if name not in valid:
                near = difflib.get_close_matches(name, valid, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"Unknown option {name!r} for backend 'ssdtrain'.{hint} Valid options: {', '.join(valid)}."
                )
        generated(self, **options)

    cls.__init__ = initialise
    return cls


@_explains_unknown_options
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Options of the ``ssdtrain`` backend.

    Raises:
        ConfigError: an option is unknown (the message lists all of them) or has no name, or a value has the wrong type
            or is out of range (the message names the option).
    """

    ssd_dir: str | Path | Sequence[str | Path] | None = None
    """Directory on the SSD, or several directories, best on equal drives: tensors are striped over them. None:
    ``$SSDTRAIN_DIR`` (one path, or several separated by ``:``), else the system's temporary directory. The files there
    are unnamed."""

    inner: Inner = "inductor"
    """Compiler for the rewritten forward and backward graphs."""

    min_tensor_bytes: int = 1 << 20
    """Storages smaller than this stay in memory."""

    policy: PolicyName | Policy = "auto"
    """``auto`` offloads the storages that lower the peak at little cost. ``all`` offloads every eligible storage at any
    cost. A function makes its own decisions (``ssdtrain_fx.passes.policy``); compile caches are used only if it is
    defined at the top level of a module."""

    passes: Sequence[JointPass] = ()
    """Functions that take a ``ScheduledJointGraph`` and return one. They run in this order, before anything is planned.
    Compile caches are used as for ``policy``."""

    recompute: bool = True
    """With ``policy="auto"``: recompute storages in backward where that lowers the peak further, or costs less time,
    than offloading them. Only ops that give the same bits are recomputed: under Inductor on a GPU, none."""

    modules: Mapping[str, Wish] | Sequence[tuple[str, Wish]] = ()
    """What happens to the storages that single modules make: ``{"layers.*.mlp": "offload"}``. Names are those of
    ``model.named_modules()``, ``*`` stands for any text, a pattern includes the modules inside, and the last match
    counts. ``keep`` leaves them in memory, ``offload`` offloads them at any cost in time, and ``recompute`` recomputes
    those that give the same bits. All others are planned as before. Not with a policy of your own."""

    memory_budget_bytes: int | AutomaticBudget | None = None
    """What a step may add to the memory of the process. The plan meets it at the least cost in time, and offloads
    nothing if the step already fits. On a CPU, it is resident memory: intermediate results, saved and reloaded tensors,
    gradients, and staging. On a GPU, it is device memory. ``auto``: what is left of the memory limit of this process
    when the step is compiled, less a reserve for the optimizer. If no plan fits into that, a warning says so, and the
    plan with the lowest peak is used. None: the peak is as low as ``max_slowdown`` allows."""

    host_budget_bytes: int | None = None
    """Maximum pinned memory (GPU) or staging memory (CPU) that the engine may hold. None: chosen per device, 1 GiB for
    each directory on a GPU. On a GPU it is also the host tier: what is needed soonest stays in it and is never written
    to the SSD. The ranks on one machine share this number of bytes."""

    local_ranks: int | None = None
    """Ranks of a distributed run on this machine. They share ``host_budget_bytes``, and with
    ``memory_budget_bytes="auto"`` what the memory limit leaves. None: as the launcher says (``LOCAL_WORLD_SIZE``, which
    torchrun sets), else 1."""

    drive_ranks: int | None = None
    """Ranks that use the drives in ``ssd_dir`` at the same time, this one included. A plan counts with its share of
    their rates. None: all ranks on this machine."""

    disk_reserve_bytes: int | None = None
    """Free space that offloading leaves on the file system of each directory, for checkpoints and other files. What
    would need it stays in memory, with a warning. None: 1 GiB, but at most 5 % of the file system."""

    max_slowdown: float = 0.01
    """Maximum increase of the step time that the planner may predict, as a share of the step time without offloading.
    If the disk is slower than predicted, stalls outside the plan take at most half of this share: tensors whose
    transfers do not fit into it stay in memory.
    On a CPU, the processor itself makes the copies, so every byte costs time: allow 0.05 or more there for a much lower
    peak. Has no effect with ``memory_budget_bytes`` or ``policy="all"``."""

    forwards_in_flight: int = 1
    """How many forwards of a graph run before the first of their backwards: the micro-batches that a pipeline stage
    holds at once. With several, the memory between forward and backward counts so many times, so a plan moves as many
    bytes there as ``max_slowdown`` allows. ``memory_budget_bytes`` is then the budget of each graph."""

    hardware: Hardware | str | Path | None = None
    """Hardware to plan for: a profile, or the path of one that ``ssdtrain-fx probe --json`` wrote. None: this machine,
    which is measured in a few seconds if no profile of it is stored."""

    costs: Costs = "roofline"
    """Source of the node times for the plan. ``roofline`` computes them from shapes and the rates in ``hardware``.
    ``measured`` runs ops alone on this machine, once for each op and layout: those that Inductor takes from libraries
    (matrix products, convolutions, attention), or every op with ``inner="aot_eager"``. Ops that Inductor fuses keep
    their roofline time. The times are stored next to the hardware profiles, so the next compilation measures nothing
    and makes the same plan. To measure again, delete ``node-times-*.json`` there.

    ``steps``, on a CPU: as by roofline, times what steps of an earlier process took in comparison. Steps are measured
    while they run. The first process plans by roofline; the next one compiles once more, with what was measured. The
    ratios are stored in ``step-times-*.json``."""

    chunk_loss: int | ChunkLoss = "off"
    """Compute the loss in chunks of rows, so that the logits and their gradient, which are the peak with a large
    vocabulary, exist for one chunk at a time. A number: this many chunks. ``auto``: where the plan with chunks has a
    lower peak and ``max_slowdown`` allows its time, or where ``memory_budget_bytes`` is met faster with them. Gradients
    then equal those of Inductor's auto-chunker with as many chunks to the bit, and those without chunks within
    rounding. It needs torch 2.13 and ``inner="inductor"``."""

    replan: Replan = "off"
    """``auto`` plans and compiles a step again when the disk has been 1.5 times faster or slower than planned for
    several steps, at most every ten minutes. Off by default: a compilation in the middle of a training run may take a
    minute, and what would stall the step stays in memory anyway. Graphs with dynamic shapes keep their plan."""

    io: IOPath = "auto"
    """``posix`` uses threads that transfer through host memory. ``kvikio`` transfers directly between GPU and file.
    ``aio`` transfers CPU tensors with Linux native AIO, without threads. ``auto``: on a GPU, the faster of those that
    work; for CPU tensors, ``aio`` where the kernel and the file system support it, else threads."""

    checksum: bool = False
    """Verify every byte reloaded from the file with 64-bit XXH3. This costs some CPU time."""

    io_timeout_s: float | None = 300.0
    """Seconds without a completed transfer, while the step waits for one, after which an error is raised. None: wait
    forever. The default leaves the kernel time to reset a drive and to report the real error. It is below the 600 s
    after which NCCL gives up, so the rank with the broken disk reports the error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ssd_dir", as_paths(self.ssd_dir))
        require_choice("inner", self.inner, get_args(Inner))
        if not callable(self.policy):
            require_choice("policy", self.policy, get_args(PolicyName), or_else="a function")
        object.__setattr__(self, "passes", as_functions("passes", self.passes))
        object.__setattr__(self, "modules", as_wishes(self.modules))
        if self.modules and callable(self.policy):
            raise ConfigError(
                "Options modules and policy of backend 'ssdtrain' contradict each other: a policy of your own decides "
                "about every storage. Remove one of them."
            )
        require_choice("costs", self.costs, get_args(Costs))
        require_choice("replan", self.replan, get_args(Replan))
        check_chunk_loss(self.chunk_loss, get_args(ChunkLoss), inner=self.inner)
        require_choice("io", self.io, get_args(IOPath))
        require_int("min_tensor_bytes", self.min_tensor_bytes, minimum=0)
        if self.memory_budget_bytes is not None and self.memory_budget_bytes not in get_args(AutomaticBudget):
            require_int("memory_budget_bytes", self.memory_budget_bytes, minimum=1, or_else="'auto', or None")
        if self.host_budget_bytes is not None:
            require_int("host_budget_bytes", self.host_budget_bytes, minimum=1)
        if self.disk_reserve_bytes is not None:
            require_int("disk_reserve_bytes", self.disk_reserve_bytes, minimum=0, or_else="or None")
        require_int("forwards_in_flight", self.forwards_in_flight, minimum=1, of="forwards")
        for name in ("local_ranks", "drive_ranks"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum=1, of="ranks", or_else="or None")
        if self.policy == "all" and self.memory_budget_bytes is not None:
            raise ConfigError(
                "Options policy='all' and memory_budget_bytes of backend 'ssdtrain' contradict each other: the "
                "first offloads everything, the second only as much as needed. Remove one of them."
            )
        if self.memory_budget_bytes == "auto" and self.forwards_in_flight > 1:
            raise ConfigError(
                f"Options memory_budget_bytes='auto' and forwards_in_flight={self.forwards_in_flight} of backend "
                "'ssdtrain' contradict each other: each of the forwards would get all that the memory limit leaves. "
                "Use max_slowdown, or a number of bytes for each of them."
            )
        if isinstance(self.max_slowdown, bool) or not isinstance(self.max_slowdown, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong("max_slowdown", self.max_slowdown, "a number such as 0.01")
        if not 0 <= self.max_slowdown < float("inf"):
            raise wrong("max_slowdown", self.max_slowdown, "a finite number >= 0")
        if not isinstance(self.hardware, (Hardware, str, Path, types.NoneType)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong("hardware", self.hardware, "a Hardware, the path of a profile, or None")
        for name in ("recompute", "checksum"):
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, getattr(self, name), "True or False")
        if self.io_timeout_s is not None:
            if isinstance(self.io_timeout_s, bool) or not isinstance(self.io_timeout_s, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise wrong("io_timeout_s", self.io_timeout_s, "a number of seconds such as 300, or None")
            if not 0 < self.io_timeout_s < float("inf"):
                raise wrong("io_timeout_s", self.io_timeout_s, "a finite number of seconds > 0, or None")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> OffloadConfig:
        """Build the configuration from ``torch.compile(..., options=options)``.

        Raises:
            ConfigError: an option is unknown (all valid ones are listed) or has a wrong value.
        """
        return cls(**{str(name): value for name, value in (options or {}).items()})

    def load_hardware(self, device: str) -> Hardware:
        """The profile to plan with, for tensors on ``device`` (``cpu`` or ``cuda``).

        Raises:
            ConfigError: ``hardware`` names a file that is missing or holds no profile.
        """
        if self.local_ranks is None and self.drive_ranks is None:
            warn_of_unknown_ranks()
        hardware = self._find_hardware(device).shared_by(self.drive_ranks or self._ranks)
        staging_bytes = self._planned_staging_bytes(hardware)
        chunk_bytes = pinned_chunk_bytes(staging_bytes) if hardware.has_host_tier else CHUNK_BYTES
        return dataclasses.replace(hardware, staging_bytes=staging_bytes, staging_chunk_bytes=chunk_bytes)

    def _planned_staging_bytes(self, hardware: Hardware) -> int:
        """Staging on the path that the engine will take. If none was measured, that was through KvikIO."""
        if not hardware.has_host_tier:
            return hardware.staging_bytes
        if self.io == "kvikio" or (hardware.staging_bytes == 0 and not self.checksum and may_use_kvikio(self.io)):
            return 0
        return self._own_host_budget_bytes or hardware.staging_bytes

    def _find_hardware(self, device: str) -> Hardware:
        if isinstance(self.hardware, Hardware):
            return self.hardware
        if self.hardware is None:
            from ssdtrain_fx.machine.probe import load_hardware

            # In a separate thread: modes are per thread, and under the FakeTensorMode of a trace no op really runs.
            interrupted = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(load_hardware, device, self.engine_config().ssd_dir, interrupted=interrupted)
                try:
                    return found.result()
                except KeyboardInterrupt:
                    interrupted.set()  # the thread may wait for another process; leaving the pool waits for the thread
                    raise
        try:
            return Hardware.from_json(Path(self.hardware).read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"Option 'hardware' of backend 'ssdtrain' names {str(self.hardware)!r}, which cannot be used "
                f"({error}); expected the path of a profile that `ssdtrain-fx probe --json` wrote."
            ) from error

    def host_tier(self, hardware: Hardware) -> HostTier | None:
        """The part of staging that may be planned as the host tier. None on a CPU, and where staging is not used."""
        if not hardware.has_host_tier or self.io == "kvikio":
            return None
        in_transit_bytes = math.ceil(hardware.staging_bytes * SHARE_IN_TRANSIT)
        return HostTier(budget_bytes=hardware.staging_bytes - in_transit_bytes)

    def find_budget(self, example_inputs: Sequence[Any] = ()) -> StepBudget | None:
        """What a step with these inputs may add to the memory of the process. None: ``memory_budget_bytes`` is None.

        With ``auto``, the answer depends on the memory that is in use now. Call it once per compilation.

        Raises:
            ConfigError: ``auto``, but the system shows no limit.
        """
        if self.memory_budget_bytes is None:
            return None
        if self.memory_budget_bytes != "auto":
            return StepBudget(size_bytes=self.memory_budget_bytes)
        accelerator = find_accelerator(example_inputs)
        limit = read_memory_limit(ranks=self._ranks) if accelerator is None else read_device_memory(accelerator)
        if limit is None:
            raise ConfigError(
                "Option 'memory_budget_bytes' of backend 'ssdtrain' is 'auto', but the system shows no limit: there is "
                "no cgroup with a limit, no resource limit, and no /proc/meminfo. Give a number of bytes."
            )
        return automatic_budget(limit, trained_bytes=trained_parameter_bytes(example_inputs))

    def budget_of_plan(self, budget: StepBudget | None, hardware: Hardware) -> StepBudget | None:
        """``budget``, less what a step on ``hardware`` needs besides its plan."""
        if budget is None:
            return None
        return budget_in_process(budget, on_gpu=hardware.is_gpu, staging_bytes=self._expected_staging_bytes(hardware))

    def _expected_staging_bytes(self, hardware: Hardware) -> int:
        """Staging that the engine will fill on a CPU. Native AIO moves all but small tensors without staging."""
        if hardware.staging_bytes == 0 and self.io != "posix":
            return 0
        drive_count = len(self.ssd_dir) if isinstance(self.ssd_dir, tuple) else 1
        return self._own_host_budget_bytes or hardware.staging_bytes or CPU_BUDGET_BYTES * drive_count

    def load_call_times(self, device: str) -> CallTimes | None:
        """The measured times of ops on ``device``, such as ``cpu`` or ``cuda``; None unless ``costs="measured"``.

        Raises:
            ConfigError: there is no such device here.
        """
        if self.costs != "measured":
            return None
        from ssdtrain_fx.machine.call_times import load_call_times

        return load_call_times(device)

    @property
    def _ranks(self) -> int:
        return self.local_ranks or count_local_ranks()

    @property
    def _own_host_budget_bytes(self) -> int | None:
        """The part of ``host_budget_bytes`` that is this rank's."""
        return None if self.host_budget_bytes is None else max(1, self.host_budget_bytes // self._ranks)

    @property
    def module_wishes(self) -> tuple[tuple[str, Wish], ...]:
        """:attr:`modules` as pairs."""
        return cast("tuple[tuple[str, Wish], ...]", self.modules)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions: the policy, if it is a function, and the passes."""
        return (self.policy, *self.passes) if callable(self.policy) else tuple(self.passes)

    def cache_key(self) -> str:
        """A string that covers everything here that a plan depends on.

        It is equal in every process. If a function has no stable name, every call returns another string.
        """
        plain = dataclasses.replace(
            self, local_ranks=self._ranks, policy="auto" if callable(self.policy) else self.policy, passes=()
        )
        return f"{plain!r} {callable(self.policy)} {[cache_name(function) for function in self.functions]}"

    def engine_config(self) -> EngineConfig:
        """The part that the runtime needs; it is stored in the compiled graph."""
        # A memory budget and policy="all" promise memory, not time.
        in_time = self.policy == "auto" and self.memory_budget_bytes is None
        return EngineConfig(
            ssd_dir=_strings(self.ssd_dir),
            io=self.io,
            host_budget_bytes=self._own_host_budget_bytes,
            disk_reserve_bytes=self.disk_reserve_bytes,
            checksum=self.checksum,
            io_timeout_s=self.io_timeout_s,
            max_stall_share=UNPLANNED_SHARE * self.max_slowdown if in_time else None,
        )


def device_of(example_inputs: Sequence[Any]) -> str:
    """The kind of device that a graph with these inputs is planned for: ``cpu`` if none is on an accelerator.

    Raises:
        ConfigError: nothing can be offloaded from that device.
    """
    accelerator = find_accelerator(example_inputs)
    if accelerator is None:
        return "cpu"
    refused = reason_to_refuse(accelerator.type)
    if refused:
        raise ConfigError(f"ssdtrain_fx cannot offload from {accelerator.type!r}: {refused}.")
    return accelerator.type


def _strings(ssd_dir: str | Path | Sequence[str | Path] | None) -> str | tuple[str, ...] | None:
    if ssd_dir is None or isinstance(ssd_dir, (str, Path)):
        return None if ssd_dir is None else str(ssd_dir)
    return tuple(str(path) for path in ssd_dir)
