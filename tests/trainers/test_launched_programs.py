"""DeepSpeed, torchtitan and torchao, started by torchrun on CPUs, train with the bits of plain Inductor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(sys.prefix) / "programs"
"""Where `make test` installs them: not on the path of other tests. transformers and Accelerate import DeepSpeed if they
can, which takes seconds."""
TRITON = Path(sys.prefix) / "triton"
"""torchtitan imports it."""
HERE = Path(__file__).parent

pytestmark = pytest.mark.usefixtures("accelerate")


@pytest.mark.parametrize(
    ("ranks", "arguments", "comparisons"),
    [
        pytest.param(1, ["deepspeed", "--stages", "2"], 1, id="zero-2"),
        pytest.param(1, ["deepspeed", "--stages", "0", "1", "3"], 3, marks=pytest.mark.slow, id="zero-0-1-3"),
        pytest.param(1, ["deepspeed", "--stages", "2", "3", "--bfloat16"], 2, marks=pytest.mark.slow, id="bfloat16"),
        pytest.param(1, ["deepspeed", "--stages", "2", "3", "--trainer"], 2, marks=pytest.mark.slow, id="trainer"),
        pytest.param(2, ["deepspeed", "--stages", "1", "2", "3"], 6, marks=pytest.mark.slow, id="zero-2-ranks"),
        pytest.param(1, ["torchtitan"], 1, id="titan"),
        pytest.param(
            1, ["torchtitan", "--checkpoint", "full", "selective"], 2, marks=pytest.mark.slow, id="titan-checkpoints"
        ),
        pytest.param(2, ["torchtitan"], 2, marks=pytest.mark.slow, id="titan-2-ranks"),
        pytest.param(1, ["torchao", "float8", "int8", "frozen_int8"], 3, id="torchao"),
    ],
)
def test_bits_are_equal(tmp_path: Path, ranks: int, arguments: list[str], comparisons: int) -> None:
    assert run(tmp_path, ranks, arguments).count(": equal, ") == comparisons
    assert list((tmp_path / "ssd").iterdir()) == []


@pytest.mark.slow
def test_torchtitan_refuses_its_flex_attention(tmp_path: Path) -> None:
    """As docs/howto/trainers.md says."""
    assert "Use 'inductor' or 'aot_eager'" in run(tmp_path, 1, ["torchtitan", "--flex"])


def run(tmp_path: Path, ranks: int, arguments: list[str]) -> str:
    program, *others = arguments
    if not (PROGRAMS / program).is_dir() or not TRITON.is_dir():
        pytest.skip(f"{program} or Triton is not installed (`make test` installs them)")
    (tmp_path / "ssd").mkdir()
    path = (PROGRAMS, TRITON, HERE.parents[1], HERE.parent, HERE)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SSDTRAIN_DIR": str(tmp_path / "ssd"),
        # With two threads, the first vector-math call of a process can have other bits. Accelerate would set two.
        "OMP_NUM_THREADS": "1",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, str(HERE / f"{program}_training.py"), *others],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
