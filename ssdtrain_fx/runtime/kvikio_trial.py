"""The program that tests whether KvikIO can be used: ``python -m ssdtrain_fx.runtime.kvikio_trial cuda:0 DIR``.

It writes a pattern through KvikIO and reads it through the system, and vice versa, so that it does not rely on KvikIO's
own reports alone. Then it times a set of tensors on both paths, in turns. It prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import mmap
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssdtrain_fx.runtime.config import EngineConfig, IOPath
from ssdtrain_fx.runtime.engine import Engine
from ssdtrain_fx.runtime.lanes.open_lanes import Parts
from ssdtrain_fx.runtime.lanes.threads.kvikio import DeviceFile
from ssdtrain_fx.runtime.lanes.threads.kvikio_choice import Kvikio, Trial, TrialError
from ssdtrain_fx.runtime.storage.spill_file import ChunkFile
from ssdtrain_fx.runtime.storage.striped_file import open_spill_file

PATTERN_BYTES = 1 << 20
TENSOR_BYTES = 16 << 20
TENSOR_COUNT = 8
ROUNDS = 4
"""The first round uses blocks that were never written, and does not count."""


def check_bytes(kvikio: Any, file: ChunkFile, device: torch.device) -> None:
    """Transfer a pattern both ways. Raises TrialError if a byte changes, and OSError if a transfer fails."""
    sent = torch.randint(256, (PATTERN_BYTES,), dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    host = mmap.mmap(-1, PATTERN_BYTES)
    error = file.grow(2 * PATTERN_BYTES)
    if error is not None:
        raise error
    _synchronize(device)  # KvikIO does not wait for the stream
    device_file = DeviceFile(kvikio, file)
    try:
        device_file.write(sent, 0)
        file.read(memoryview(host), 0)
        if host[:] != bytes(sent.cpu().numpy()):
            raise TrialError("the file does not hold the bytes that KvikIO wrote")
        file.write(memoryview(host), PATTERN_BYTES)
        device_file.read(received, PATTERN_BYTES)
        if not torch.equal(sent, received):
            raise TrialError("KvikIO did not read the bytes that the file holds")
    finally:
        device_file.close()


def round_trip_s(engine: Engine, tensors: list[Tensor]) -> float:
    """Time to offload all ``tensors`` and reload them."""
    device = tensors[0].device
    _synchronize(device)
    start_s = time.perf_counter()
    tokens = [engine.release(engine.offload(x, "trial"), x) for x in tensors]
    engine.wait_until_idle()
    reloaded = [
        engine.reload(token, x.size(), x.stride(), x.dtype, x.device) for token, x in zip(tokens, tensors, strict=True)
    ]
    for y, token in zip(reloaded, tokens, strict=True):
        engine.wait(y, token)
    engine.wait_until_idle()
    _synchronize(device)
    seconds = time.perf_counter() - start_s
    if engine.statistics().kept_bytes:
        raise TrialError("writes to the drive failed")
    if not all(torch.equal(x, y) for x, y in zip(tensors, reloaded, strict=True)):
        raise TrialError("a reloaded tensor differs from the offloaded one")
    return seconds


def compare(direct: Engine, staged: Engine, tensors: list[Tensor], *, gds: bool) -> Trial:
    """Measure the shortest round trip on each path."""
    rounds = [(round_trip_s(direct, tensors), round_trip_s(staged, tensors)) for _ in range(ROUNDS)]
    kvikio_s, staged_s = (min(times) for times in zip(*rounds[1:], strict=True))
    return Trial(gds=gds, kvikio_s=kvikio_s, staged_s=staged_s)


def run_trial(device: torch.device, directories: tuple[str, ...]) -> Trial:
    """Run the trial. Raises TrialError, OSError, or an error of KvikIO."""
    kvikio = importlib.import_module("kvikio")
    gds = bool(importlib.import_module("kvikio.cufile_driver").get("is_gds_available"))
    with contextlib.closing(open_spill_file(directories)) as file:
        check_bytes(kvikio, file, device)
    tensors = [torch.randint(256, (TENSOR_BYTES,), dtype=torch.uint8, device=device) for _ in range(TENSOR_COUNT)]
    config = EngineConfig(ssd_dir=directories)

    def use_kvikio(io: IOPath, directories: Sequence[str], cuda: Any) -> Kvikio:
        return Kvikio(kvikio, gds)

    with (
        Engine(config, Parts(choose_kvikio=use_kvikio)) as direct,
        Engine(dataclasses.replace(config, io="posix")) as staged,
    ):
        return compare(direct, staged, tensors, gds=gds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    chosen = torch.device(sys.argv[1])
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    sys.stdout.write(json.dumps(dataclasses.asdict(run_trial(chosen, tuple(sys.argv[2:])))) + "\n")
