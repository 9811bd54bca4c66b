"""One thread alone makes the first vector-math call: before the backend compiles, and before a study builds its model.

The race itself cannot be forced. What can be tested is the number that it is about: MKL's choice of code, which is -1
until the first call (``benchmarks/first_sqrt.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIRST_SQRT = Path(__file__).parents[1] / "benchmarks" / "first_sqrt.py"

PROGRAM = """
import importlib.util, json, sys
import torch

specification = importlib.util.spec_from_file_location("first_sqrt", sys.argv[1])
first_sqrt = importlib.util.module_from_spec(specification)
sys.modules["first_sqrt"] = first_sqrt
specification.loader.exec_module(first_sqrt)
number = first_sqrt.code_number()

from ssdtrain_fx.compiler import dynamo_backend
from ssdtrain_fx.studies import measure, trainer

seen = []
def record(*_, **__):
    seen.append(number.value)
    raise InterruptedError

def start_backend():
    with torch.device("meta"):  # the call must not go to the default device
        dynamo_backend.backend()(None, [])

dynamo_backend._compile_once = trainer.zoo.build = record
if number is not None:
    for start in (start_backend, lambda: trainer.Trainer(measure.Run())):
        seen.append(number.value)
        try:
            start()
        except InterruptedError:
            number.value = -1
print(json.dumps(seen))
"""


def test_one_thread_makes_the_first_call_before_the_backend_compiles_and_before_a_study_builds_its_model() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(FIRST_SQRT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    if not seen:
        pytest.skip("this torch computes vector math without the MKL that needs the call")
    before_backend, in_backend, before_study, in_study = seen
    assert before_backend == before_study == -1
    assert in_backend >= 0
    assert in_study >= 0
