"""The scripts of examples/ run, at a tiny size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.usefixtures("accelerate")
def test_finetune_trainer(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    sizes = ["--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "64", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune_trainer.py"), *sizes, "--output", str(tmp_path)],
        env={**os.environ, "SSDTRAIN_OPTIONS": '{"policy": "all", "min_tensor_bytes": 0}'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "A step adds " in done.stdout
    assert "Nothing was moved" not in done.stdout
    assert "3/3" in done.stderr  # the progress bar
    assert (tmp_path / "memory.png").stat().st_size > 1000
    assert (tmp_path / "adapter_model.safetensors").exists()
