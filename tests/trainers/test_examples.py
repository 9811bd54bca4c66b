"""The scripts of examples/ run, at a tiny size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"layers": 1, "hidden": 64, "batch": 2, "steps": 3}
SCRIPTS = {
    "train_in_a_loop": {"sequence": 64},
    "train_in_a_loop-experts": {"sequence": 64, "experts": 4},
    "finetune_llama": {"sequence": 64},
    "train_bert": {"sequence": 64},
    "train_t5": {"sequence": 64},
    "train_vit": {"pixels": 32},
}
"""The sizes of each script, whose name may be followed by a variant."""
QUICK = "train_in_a_loop"


def test_every_script_is_tried() -> None:
    assert {name.partition("-")[0] for name in SCRIPTS} == {path.stem for path in EXAMPLES.glob("*.py")} - {"shared"}


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS if name != QUICK)]
)
@pytest.mark.usefixtures("accelerate")
def test_an_example(tmp_path: Path, name: str) -> None:
    if name == "finetune_llama":
        pytest.importorskip("peft", reason="peft is not installed")
    sizes = [word for size, value in {**TINY, **SCRIPTS[name]}.items() for word in (f"--{size}", str(value))]
    script = EXAMPLES / f"{name.partition('-')[0]}.py"
    done = subprocess.run(
        [sys.executable, str(script), *sizes, "--output", str(tmp_path)],
        env={**os.environ, "SSDTRAIN_OPTIONS": '{"policy": "all", "min_tensor_bytes": 0}'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "A step adds " in done.stdout
    assert "Nothing was moved" not in done.stdout
    assert "3/3" in done.stderr or "100%" in done.stdout  # the progress bar
    assert (tmp_path / "memory.png").stat().st_size > 1000
    if name == "finetune_llama":
        assert (tmp_path / "adapter_model.safetensors").exists()
