"""Run torch's own tests with everything offloaded, and the same tests with the inner compiler alone.

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
    python benchmarks/torch_tests.py --tests pytorch/test
    python benchmarks/torch_tests.py --tests pytorch/test --inner inductor --only nested

Whatever backend a test asks for, it gets ``aot_eager``: in one run alone, in the other with ``policy="all"`` and
``min_tensor_bytes=0``. Many tests then fail in both runs, because they look at what their own backend got. A test that
passes only with the inner compiler alone shows a fault: it is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from result_tables import markdown

FILES = ("dynamo/test_activation_checkpointing.py", "inductor/test_compiled_autograd.py")
"""Tests that compile with ``torch.compile``."""
TIMEOUT_S = 300
"""Of one test."""
Results = dict[str, dict[str, Any]]
"""By test: its outcome, how many tensors were offloaded, and its error."""


def run_tests(tests: Path, file: str, *, inner: str, ssd_dir: str | None, only: str) -> Results:
    with tempfile.TemporaryDirectory() as name:
        lines = Path(name, "results")
        lines.touch()
        wanted = {"inner": inner, "ssd_dir": ssd_dir, "results": str(lines)}
        environment = {
            **os.environ,
            "REPLACED_BACKEND": json.dumps(wanted),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "replaced_backend",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
        ]
        options = [f"--timeout={TIMEOUT_S}", "--timeout-method=signal", *(["-k", only] if only else [])]
        done = subprocess.run(
            [*pytest, *options, file], cwd=tests, env=environment, capture_output=True, text=True, check=False
        )
        results = [json.loads(line) for line in lines.read_text().splitlines()]
        if not results:
            raise RuntimeError(f"no test of {file} has run:\n{(done.stdout + done.stderr)[-4000:]}")
        return {result["test"]: result for result in results}


def faults(alone: Results, offloading: Results) -> list[str]:
    """The tests that pass with the inner compiler alone, and do not with offloading."""
    errors = {test: next(iter(result["error"].splitlines()), "") for test, result in offloading.items()}
    return [
        f"{test}: {errors.get(test, 'has no result')}"
        for test, result in alone.items()
        if result["outcome"] == "passed" and offloading.get(test, {}).get("outcome") != "passed"
    ]


def row_of(file: str, alone: Results, offloading: Results) -> tuple[str, ...]:
    passed = [test for test in alone if alone[test]["outcome"] == "passed"]
    equal = [test for test in passed if offloading.get(test, {}).get("outcome") == "passed"]
    counts = (
        sum(result["outcome"] != "skipped" for result in alone.values()),
        len(passed),
        len(equal),
        sum(offloading[test]["offloads"] > 0 for test in equal),
    )
    return (f"`{file}`", *map(str, counts))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", type=Path, required=True, help="the folder test of a checkout of torch")
    parser.add_argument("--file", action="append", help=f"default: {', '.join(FILES)}")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="select tests, as pytest -k")
    parser.add_argument("--inner", choices=["aot_eager", "inductor"], default="aot_eager")
    parser.add_argument("--ssd-dir", default=tempfile.gettempdir())
    chosen = parser.parse_args(arguments)
    for file in chosen.file or FILES:
        if not (chosen.tests / file).is_file():
            parser.error(f"--tests: {chosen.tests / file} does not exist. Give the folder test of a checkout of torch.")
    return chosen


def main(arguments: Sequence[str]) -> int:
    chosen = parse_arguments(arguments)
    rows: list[tuple[str, ...]] = [("tests of torch", "run", "pass", "pass with offloading", "of these, tensors moved")]
    found: list[str] = []
    for file in chosen.file or FILES:
        common: Mapping[str, Any] = {"inner": chosen.inner, "only": chosen.only}
        alone = run_tests(chosen.tests, file, ssd_dir=None, **common)
        offloading = run_tests(chosen.tests, file, ssd_dir=chosen.ssd_dir, **common)
        rows.append(row_of(file, alone, offloading))
        found += faults(alone, offloading)
    print(markdown(rows))
    for fault in found:
        print(f"\n{fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
