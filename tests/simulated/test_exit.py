"""A process that ends while its device still works: it ends in time, by itself, and leaves nothing on the disk."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import build
import pytest
from device_process import environment

from ssdtrain_fx._torch_private.arena import ArenaUnavailableError

PROGRAM = """
    import sys
    import simulated_device
    simulator = simulated_device.install()
    simulator.configure(default_us=200, side_us={side_us})
    import torch
    from ssdtrain_fx import OffloadConfig, backend
    from ssdtrain_fx.testing import toy_hardware
    from device_under_test import TYPE, gpu

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))
    model = model.to(TYPE)
    hardware = toy_hardware(disk_bytes_per_s=1e9, device="simulated", kernel_s=1e-3)
    options = dict(inner="aot_eager", policy="all", min_tensor_bytes=0, io="posix", ssd_dir=sys.argv[1])
    compiled = torch.compile(model, backend=backend(OffloadConfig(hardware=hardware, **options)))
    x = torch.randn(512, 64, device=TYPE)
    compiled(x).sum().backward()
    gpu.synchronize()
    if sys.argv[2] == "held":
        simulator.set_held(gpu.current_stream(), True)
    loss = compiled(x).sum()
    print("at the end", flush=True)
    if sys.argv[2] == "raises":
        raise RuntimeError("the user's")
"""


@pytest.mark.parametrize(
    ("how", "device_type"),
    [
        ("held", "cuda"),
        pytest.param("held", "simulated", marks=pytest.mark.slow),
        *(
            pytest.param(how, device_type, marks=pytest.mark.slow)
            for how in ("returns", "raises")
            for device_type in ("cuda", "simulated")
        ),
    ],
)
def test_a_process_ends_with_work_queued(how: str, device_type: str, ssd_dir: str) -> None:
    """``held``: the device does nothing any more, so the engine gives up after its timeout for exits."""
    try:
        variables = environment(build.build(device_type), device_type)
    except ArenaUnavailableError as error:
        pytest.skip(f"the simulated device cannot be built: {error}")
    program = textwrap.dedent(PROGRAM).format(side_us=20_000)
    command = [sys.executable, "-c", program, ssd_dir, how]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "at the end\n", ended.stderr
    assert ended.returncode == (1 if how == "raises" else 0), ended.stderr
    assert ("RuntimeError: the user's" in ended.stderr) == (how == "raises")
    assert list(Path(ssd_dir).iterdir()) == []
