"""Prints, as JSON, the Triton kernels that Inductor generates for a model on a GPU, with and without offloading.

    python triton_kernels.py gpt2 float32 DIRECTORY

Runs in a process with the simulated device, which computes nothing here: kernels are generated, and not compiled. The
GPU whose properties Inductor asks for is an H200.
"""

from __future__ import annotations

import simulated_device  # before torch

simulator = simulated_device.install()

import json
import re
import sys
import types
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import triton
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import run_and_get_code
from triton.backends.compiler import GPUTarget

from ssdtrain_fx import OffloadConfig, backend
from ssdtrain_fx.studies import zoo
from ssdtrain_fx.testing import toy_hardware

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=140 << 30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=60 << 20,
    gcnArchName="",
)


class Softmax(nn.Module):
    """Inductor replaces the saved maximum and sum by other nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.cat([self.one(x), self.two(x)], -1)
        return z.view(256, 2, 256).transpose(0, 1).softmax(-1).pow(2).sum()


class BatchNorm(nn.Module):
    """Views of the statistics are saved, and only backward reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


class Norms(nn.Module):
    """Every kernel could be fused with others: there is no matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = torch.sin(norm(x.cumsum(0)))
        return x.sum()


OWN_MODELS = {"softmax": Softmax, "batch_norm": BatchNorm, "norms": Norms}


class Driver:
    """The part of Triton's driver that generating code needs."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class Kernel:
    """A kernel that does nothing."""

    def run(self, *_: object, **__: object) -> None:
        pass


def install() -> None:
    """Let Inductor generate code for the GPU, and let the code run as far as it needs no kernel."""
    cuda: Any = torch.cuda
    private: Any = torch._C
    cuda.get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda._exchange_device = lambda index: 0
    cuda._maybe_exchange_device = lambda index: 0  # Dynamo wants another object
    # Zeros are valid indices.
    private._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    ).zero_()
    triton.runtime.driver._active = Driver()
    compiler: Any = AsyncCompile
    compiler.triton = lambda self, name, source, device_str="cuda": Kernel()
    inductor_config.fx_graph_cache = False
    inductor_config.shape_padding = False  # it measures on the device
    functorch_config.enable_autograd_cache = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def generate(name: str, dtype: torch.dtype, compiler: Any) -> list[str]:
    """The code of forward and backward."""
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    torch.manual_seed(0)
    if name in OWN_MODELS:
        model, values = OWN_MODELS[name](), (torch.randn(256, 256),)
    else:
        model, make_batch = zoo.build(name, layers=2, hidden=256, batch=8, sequence=256, vocab=1024, dropout=0.1)
        values = make_batch(torch.Generator().manual_seed(1))
    batch = [value.to("cuda", dtype if value.is_floating_point() else value.dtype) for value in values]
    compiled = torch.compile(model.to("cuda", dtype), backend=compiler, dynamic=False)
    _, codes = run_and_get_code(lambda: compiled(*batch).backward())
    return codes


def kernels_in(code: str) -> list[tuple[str, str]]:
    """What is launched, in order: each kernel's source and what it is compiled with, without its name."""
    found: dict[str, tuple[str, str]] = {}
    definition = r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)"
    for match in re.finditer(definition, code, re.DOTALL | re.MULTILINE):
        settings, body = match[2].rsplit("@triton.jit", 1)
        settings = re.sub(
            r"'(kernel_name|backend_hash)': '[^']*'", "", settings[settings.index("@triton_heuristics") :]
        )
        found[match[1]] = (re.sub(r"def triton_\w+", "def kernel", body), settings)
    return [found[name] for name in re.findall(r"(triton_\w+)\.run\(", code)]


def only_copies(kernel: tuple[str, str]) -> bool:
    """Whether the kernel computes nothing. Its values are the same whatever its loops are."""
    return "tl.sum" not in kernel[0] and not re.search(r"tmp\d+ = (?!tl\.load)", kernel[0])


def ops_in(code: str) -> list[str]:
    """The order in which our ops (``offload result argument``) and kernels (``kernel`` and its buffers) run.

    A buffer that writes to the memory of another one has its name.
    """
    order: list[str] = []
    named: dict[str, str] = {}

    def names(line: str) -> list[str]:
        return [named.get(name, name) for name in re.findall(r"\bbuf\d+\b", line)]

    for line in code[code.index("def call(") :].splitlines():
        if match := re.match(r"\s*(\w+) = ssdtrain_(\w+)\((\w+)", line):
            order.append(f"{match[2]} {match[1]} {named.get(match[3], match[3])}")
        elif re.search(r"^[^#]*(\.run\(|extern_kernels\.|aten\.)", line):
            order.append(" ".join(["kernel", *names(line)]))
        elif match := re.match(r"\s*(buf\d+) = .*?\b(buf\d+)\b.*# reuse", line):
            named[match[1]] = named.get(match[2], match[2])
    return order


def main(name: str, dtype: str, directory: str) -> None:
    install()
    hardware = toy_hardware(disk_bytes_per_s=1e12, device="gpu", kernel_s=1e-3)
    offloading = backend(
        OffloadConfig(policy="all", min_tensor_bytes=0, hardware=hardware, io="posix", ssd_dir=directory)
    )
    report: dict[str, Any] = {}
    for label, compiler in (("plain", "inductor"), ("offloading", offloading)):
        codes = generate(name, getattr(torch, dtype), compiler)
        report[label] = [
            {"kernels": [one for one in kernels_in(code) if not only_copies(one)], "order": ops_in(code)}
            for code in codes
        ]
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
