"""Runs tests in a process whose ``torch.cuda`` is the simulated device, or a GPU, from a process in which it is not."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
ANSWER_TIMEOUT_S = 280.0


def environment(library: Path | None, device_type: str = "cuda", package_root: Path = TESTS.parent) -> dict[str, str]:
    """For a process with the simulated device; without a library of it, with a GPU."""
    roots = [package_root, TESTS / "simulated", TESTS, TESTS / "runtime"]
    if library is not None:
        device = {"SIMULATED_DEVICE": str(library), "SIMULATED_TYPE": device_type}
    else:
        # cuBLAS gives equal bits only with workspaces of a fixed size. A stream that is held must not hold others.
        device = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    return {
        **os.environ,
        **device,
        "PYTHONPATH": os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")]),
        "OMP_WAIT_POLICY": "passive",
    }


class DeviceProcess:
    """One process that runs test after test, in itself or in processes that it forks."""

    def __init__(self, library: Path | None, device_type: str = "cuda", package_root: Path = TESTS.parent) -> None:
        """``library`` is what :func:`build.build` returns for ``device_type``; None: a GPU."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "simulated" / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(library, device_type, package_root),
        )

    def run(
        self,
        module: str,
        function: str,
        arguments: dict[str, Any],
        package_root: Path | None = None,
        *,
        repetition: int = 0,
    ) -> str | None:
        """Run one test. Returns what went wrong, or None. Each ``repetition`` has other delays.

        With a ``package_root``, the test runs in a forked process, on the package there. A process runs all of its
        tests in this way, or none.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        start = self._errors.seek(0, os.SEEK_END)
        root = None if package_root is None else str(package_root)
        request = {
            "module": module,
            "function": function,
            "arguments": arguments,
            "repetition": repetition,
            "package_root": root,
        }
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass
        ready, _, _ = select.select([stdout], [], [], ANSWER_TIMEOUT_S)
        answer = stdout.readline() if ready else b""
        if answer:
            failure: str | None = json.loads(answer)
            return None if failure is None else failure + self._printed(start)
        self._process.wait(10) if ready else self._process.kill()
        self._process.communicate()
        what = f"ended with {self._process.returncode}" if ready else f"did not answer within {ANSWER_TIMEOUT_S:.0f} s"
        return f"the process of the simulated device {what}\n{self._printed(start)}"

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process at once: nothing of it is needed."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _printed(self, start: int) -> str:
        self._errors.seek(start)
        return self._errors.read()[-10_000:].decode(errors="replace")


def run_on_gpu(
    module: str,
    function: str,
    arguments: dict[str, Any],
    package_root: Path = TESTS.parent,
    *,
    repetition: int = 0,
) -> str | None:
    """Run one test in a process of its own: a CUDA context that has failed cannot be repaired, or forked."""
    process = DeviceProcess(None, package_root=package_root)
    try:
        return process.run(module, function, arguments, repetition=repetition)
    finally:
        process.close()
