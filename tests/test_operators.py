"""Every differentiable operator and module of torch gives the same bits when its step offloads or recomputes.

``benchmarks/operator_steps.py`` has the steps, what is done with them, and the operators that cannot be compared.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdtrain_fx.passes.joint_graph import ScheduledJointGraph
from ssdtrain_fx.testing import assert_same_bits

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PARTS = 40
"""The operators are divided into so many tests: finding their names takes seconds, too long for a list of tests."""

FLOAT32 = [
    "__getitem__",
    "as_strided",
    "cdist",
    "gather",
    "index_put",
    "linalg.eigh",
    "linalg.qr",
    "masked_select",
    "scatter_add",
    "sort",
    "sparse.sampled_addmm",
    "split",
    "unbind",
    "view_as_complex",
]
FUNCTIONAL = [
    "batch_norm",
    "conv2d",
    "dropout",
    "embedding_bag",
    "fractional_max_pool2d",
    "grid_sample",
    "layer_norm",
    "max_pool2d",
    "rrelu",
    "scaled_dot_product_attention",
]
SELECTION = [
    *((name, "float32") for name in FLOAT32),
    *((f"nn.functional.{name}", "float32") for name in FUNCTIONAL),
    *((name, "bfloat16") for name in ("nn.functional.gelu", "std")),
    *((name, "complex64") for name in ("linalg.solve", "stft")),
    *((f"module.nn.{name}", "float32") for name in ("BatchNorm1d", "LSTM", "MultiheadAttention")),
    *((name, "float32") for name in ("higher_order.cond.simple", "autograd_function.NumpyMulAutogradFunction")),
]


@pytest.fixture(scope="module")
def sources(steps: ModuleType) -> ModuleType:
    """``benchmarks/operator_sources.py``."""
    return importlib.import_module("operator_sources")


@pytest.fixture(scope="module")
def steps() -> Iterator[ModuleType]:
    """``benchmarks/operator_steps.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        module = importlib.import_module("operator_steps")
        module.operators()
        gc.freeze()  # what has been imported: collections would take half of the time
        yield module
        gc.unfreeze()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "dtype"), SELECTION)
def test_a_selection(steps: ModuleType, ssd_dir: str, name: str, dtype: str) -> None:
    row = steps.check(name, dtype, samples=1, ssd_dir=ssd_dir)
    assert row.result == "equal"
    assert row.offloads > 0 or name.startswith("sparse.")


def test_a_module_is_an_operator_over_its_parameters(sources: ModuleType) -> None:
    op = sources.operators()["module.nn.Linear"]
    sample = next(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    module, (state, args, kwargs) = sample.input, sample.args
    doubled = {name: 2 * value.detach() for name, value in state.items()}
    expected = module(*args, **kwargs)
    assert_same_bits(op.op(module, state, args, kwargs), expected)
    assert_same_bits(op.op(module, doubled, args, kwargs), 2 * expected)


def test_the_source_of_a_name(sources: ModuleType) -> None:
    names = ("softmax", "linalg.qr", "module.nn.Linear", "higher_order.cond.simple", "custom_op.NumpyMulCustomOp")
    assert set(names) <= sources.operators().keys()
    assert [sources.source_of(name) for name in names] == [
        "operator",
        "operator",
        "module",
        "higher order",
        "custom op",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator(steps: ModuleType, sources: ModuleType, ssd_dir: str, part: int) -> None:
    """Also that each exception is still needed."""
    work = [
        steps.Row(op=name, dtype=dtype, samples=1)
        for dtype in steps.DTYPES
        for name, op in steps.operators().items()
        if sources.has_gradient(op, steps.DTYPES[dtype])
    ]
    rows = [steps.check(row.op, row.dtype, samples=3 if row.cause else 1, ssd_dir=ssd_dir) for row in work[part::PARTS]]
    assert [row for row in rows if not row.is_as_expected] == []


FILL_FREED_AND_NEW_MEMORY = -6
"""``M_PERTURB`` of the GNU C library: new memory gets the complement of a byte."""


@pytest.mark.slow  # it tells about torch, and not every version reads what this fills
@pytest.mark.usefixtures("one_thread")
def test_results_that_depend_on_uninitialised_memory(steps: ModuleType) -> None:
    """If this fails for an operator, its row need not be compared with filled memory any more."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        pytest.skip("needs the GNU C library")
    for name in steps.READS_UNINITIALISED:
        op = steps.operators()[name]
        differing = 0
        for sample in steps.choose_samples(op, torch.float32, 3):
            results: list[Tensor] = []
            try:
                for byte in [0xFF, 0x01] * 5:
                    library.mallopt(FILL_FREED_AND_NEW_MEMORY, byte)
                    results.append(op.op(sample.input, *sample.args, **sample.kwargs)[0])
            finally:
                library.mallopt(FILL_FREED_AND_NEW_MEMORY, 0)
            differing += sum(not torch.equal(result, results[0]) for result in results)
        assert differing > 0, name


def test_every_exception_is_documented(steps: ModuleType) -> None:
    page = (BENCHMARKS.parent / "docs" / "reference" / "operators.md").read_text()
    for name, cause in {**steps.EXCEPTIONS, **steps.READS_UNINITIALISED}.items():
        assert f"`{name}`" in page and cause in " ".join(page.split())


@dataclasses.dataclass
class Sample:
    input: Tensor
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def output_process_fn_grad(self, result: Any) -> Any:
        return result


@dataclasses.dataclass
class Operator:
    """Stands for an operator that torch tests."""

    op: Callable[[Tensor], Tensor]

    def sample_inputs(self, device: str, dtype: torch.dtype, *, requires_grad: bool) -> list[Sample]:
        return [Sample(torch.ones(8, 8, dtype=dtype, requires_grad=requires_grad))]


def return_zeros_instead(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    (tanh,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    tanh.target = torch.ops.aten.zeros_like.default
    joint.gm.recompile()
    return joint


def test_other_bits_are_found(steps: ModuleType, ssd_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "operators", lambda: {"tanh": Operator(torch.tanh)})
    monkeypatch.setitem(steps.PASSES, "aot_eager", return_zeros_instead)
    row = steps.check("tanh", "float32", ssd_dir=ssd_dir)
    assert re.match(r"recomputed: AssertionError: \[0\]\[0\]: 64 of 64 elements differ, the first is 0\.0 ", row.result)
    assert not row.is_as_expected


def test_what_the_compiler_alone_does_is_told_apart(
    steps: ModuleType, ssd_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @torch.compiler.disable
    def count(x: Tensor) -> Tensor:
        return x * next(counter)

    def fail(x: Tensor) -> Tensor:
        raise ValueError("not today")

    counter = itertools.count()
    monkeypatch.setattr(steps, "operators", lambda: {"count": Operator(count), "fail": Operator(fail)})
    assert steps.check("count", "float32", ssd_dir=ssd_dir).result.startswith(
        "the inner compiler alone gives other bits in a second run: AssertionError: "
    )
    failed = steps.check("fail", "float32", ssd_dir=ssd_dir)
    assert failed.result == "the inner compiler alone fails: ValueError: not today"


def test_a_gradient_that_the_compiler_alone_gets_wrong_is_told_apart(
    steps: ModuleType, ssd_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(x: Tensor) -> Tensor:
        return torch.tanh(x) if torch.compiler.is_compiling() else 100 * torch.tanh(x)

    monkeypatch.setattr(steps, "operators", lambda: {"differs": Operator(differs)})
    monkeypatch.setitem(steps.PASSES, "aot_eager", return_zeros_instead)
    assert steps.check("differs", "float32", ssd_dir=ssd_dir).result.startswith(
        "the inner compiler alone is far from eager PyTorch: "
    )


@pytest.mark.parametrize(
    ("result", "cause", "is_as_expected"),
    [
        ("equal", "", True),
        ("equal", "it draws addresses", False),
        ("the inner compiler alone fails: ValueError", "", False),
        ("the inner compiler alone fails: ValueError", "it draws addresses", True),
        ("offloaded: AssertionError; the inner compiler alone fails: ValueError", "it draws addresses", False),
    ],
)
def test_an_exception_excuses_only_what_the_compiler_alone_does(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, result: str, cause: str, is_as_expected: bool
) -> None:
    monkeypatch.setattr(steps, "EXCEPTIONS", {"exp float32": cause} if cause else {})
    assert steps.Row(op="exp", dtype="float32", samples=1, result=result).is_as_expected == is_as_expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_operator_that_ends_its_process_does_not_cost_the_others(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(pipe: Any, work: list[tuple[str, str]], options: dict[str, Any]) -> None:
        for name, dtype in work:
            if name == "exit":
                os._exit(3)
            pipe.send(steps.Row(op=name, dtype=dtype, samples=1))

    program = importlib.import_module("operators")
    monkeypatch.setattr(program, "serve", serve)
    rows = program.rows_of([(name, "float32") for name in ("exp", "exit", "log")], 100, {})
    assert [(row.op, row.result) for row in rows] == [
        ("exp", "equal"),
        ("exit", "its process ended with 3"),
        ("log", "equal"),
    ]


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    """In a process of its own: it forks, which a process whose threads have computed must not do."""
    rows, table = tmp_path / "rows.json", tmp_path / "table.md"
    command = [
        sys.executable,
        str(BENCHMARKS / "operators.py"),
        "--op",
        "softmax",
        "--op",
        "abs",
        "--samples",
        "1",
        "--dtype",
        "complex64",
    ]
    done = subprocess.run(
        [*command, "--ssd-dir", str(tmp_path), "--json", str(rows), "--markdown", str(table)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| operator | complex64 | 1 | 1 | 1 |" in done.stdout  # softmax takes no complex numbers
    (row,) = json.loads(rows.read_text())
    assert (row["op"], row["dtype"], row["samples"], row["result"]) == ("abs", "complex64", 1, "equal")
    assert row["offloads"] > 0 and row["moved_bytes"] > 0
    assert table.read_text().splitlines()[2].startswith("| abs | complex64 | 1 | ")


TESTS_OF_TORCH = """
import ssdtrain_fx
import torch

def train(backend):
    x = torch.randn(64, 64, requires_grad=True)
    torch.compile(lambda x: ((x @ x).tanh() @ x).tanh().sum(), backend=backend, mode="default")(x).backward()

def test_step():
    train("eager")

def test_that_looks_at_its_own_backend():
    asked = []
    train(lambda gm, inputs: asked.append(gm) or gm)
    assert asked

def test_without_offloads():
    train("eager")
    assert not ssdtrain_fx.statistics().offloads, "tensors were moved"
"""


def test_the_tests_of_torch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever backend a test asks for is replaced, and a test that fails only with offloading is found."""
    program = importlib.import_module("torch_tests")
    (tmp_path / "test_steps.py").write_text(TESTS_OF_TORCH)
    assert program.main(["--tests", str(tmp_path), "--file", "test_steps.py", "--ssd-dir", str(tmp_path)]) == 1
    output = capfd.readouterr().out
    assert "| `test_steps.py` | 3 | 2 | 1 | 1 |" in output
    assert "test_steps.py::test_without_offloads: AssertionError: tensors were moved" in output
