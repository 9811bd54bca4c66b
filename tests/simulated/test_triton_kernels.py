"""On a GPU, Inductor generates the same Triton kernels with and without offloading, so the bits are the same.

Triton adds up in another order if a kernel has another result, writes to other memory, or reads what may not be
aligned. On an H200, gradients differed in their last bits for each of these reasons.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import build
import pytest
from device_process import TESTS, environment

from ssdtrain_fx._torch_private.arena import ArenaUnavailableError

TRITON = Path(sys.prefix) / "triton"
"""Where `make test` installs Triton: not on the path of other tests, which it would slow down."""

pytestmark = pytest.mark.skipif(not TRITON.is_dir(), reason="Triton is not installed (`make test` installs it)")


@functools.cache
def generate(name: str, dtype: str) -> Any:
    try:
        library = build.build()
    except ArenaUnavailableError as error:
        pytest.skip(f"the simulated device cannot be built: {error}")
    variables = environment(library)
    variables["PYTHONPATH"] += os.pathsep + str(TRITON)
    program = TESTS / "simulated" / "triton_kernels.py"
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, str(program), name, dtype, directory],
            env={**variables, "TORCHINDUCTOR_CACHE_DIR": directory},
            capture_output=True,
            text=True,
            timeout=250,
        )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", "float32"),
        ("bert", "bfloat16"),
        ("softmax", "float32"),
        ("batch_norm", "float32"),
        pytest.param("gpt2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("t5", "bfloat16", marks=pytest.mark.slow),
        pytest.param("t5", "float32", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_are_those_of_inductor_alone(name: str, dtype: str) -> None:
    report = generate(name, dtype)
    for plain, offloading in zip(report["plain"], report["offloading"], strict=True):
        expected = Counter(map(tuple, plain["kernels"]))
        found = Counter(map(tuple, offloading["kernels"]))
        assert expected
        assert list((found - expected).elements()) == []
        assert list((expected - found).elements()) == []
        # The order decides which of them write in place.
        assert offloading["kernels"] == plain["kernels"]


def test_reloads_are_spread_over_a_backward_without_matrix_products() -> None:
    order = [line.split()[0] for line in generate("norms", "float32")["offloading"][1]["order"]]
    places = [order[:at].count("kernel") for at, kind in enumerate(order) if kind == "reload"]
    assert len(set(places)) > 4


@pytest.mark.parametrize("half", [0, 1])
def test_our_ops_run_between_these_kernels(half: int) -> None:
    """An offload does not wait for the end of forward, and a reload begins before the kernel that reads it."""
    order = [line.split() for line in generate("gpt2", "float32")["offloading"][half]["order"]]
    kernels_before: list[int] = []
    for kind, *_ in order:
        kernels_before.append((kernels_before[-1] if kernels_before else 0) + (kind == "kernel"))
    total = kernels_before[-1]
    moved = [line for line in order if line[0] == ("offload", "reload")[half]]
    assert len(moved) > 20
    if half == 0:
        for _, owner, x in moved:
            written = max(at for at, (kind, *names) in enumerate(order) if kind == "kernel" and x in names)
            released = next(at for at, line in enumerate(order) if line[0] == "release" and line[2] == owner)
            assert released > written  # the last kernel that has it as an argument
        early = sum(kernels_before[at] < total / 2 for at, line in enumerate(order) if line[0] == "release")
        assert early > len(moved) / 4
        return
    ahead = 0
    for _, reloading, _ in moved:
        begins = next(at for at, line in enumerate(order) if line[:2] == ["reload", reloading])
        waits = next(at for at, line in enumerate(order) if line[0] == "wait" and line[2] == reloading)
        y = order[waits][1]
        reads = [at for at, (kind, *names) in enumerate(order) if kind == "kernel" and y in names]
        first = min(reads, default=len(order))
        assert begins < waits < first
        assert all(line[0] != "kernel" for line in order[waits:first])
        ahead += any(line[0] == "kernel" for line in order[begins:waits])
    assert ahead > 0
    late = sum(kernels_before[at] > total / 2 for at, line in enumerate(order) if line[0] == "reload")
    assert late > len(moved) / 4
