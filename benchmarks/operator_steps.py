"""What ``operators.py`` does with each operator, and the operators that cannot be compared."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import torch
from operator_sources import operators
from torch import Tensor

import ssdtrain_fx
from ssdtrain_fx import OffloadConfig, Statistics, _torch_private
from ssdtrain_fx.passes.analysis.candidates import TOKEN_BYTES, find_candidates
from ssdtrain_fx.passes.analysis.chains import find_activations
from ssdtrain_fx.passes.analysis.find_recomputations import find_recomputations
from ssdtrain_fx.passes.graph.alias_sets import find_alias_sets
from ssdtrain_fx.passes.joint_graph import JointPass, ScheduledJointGraph
from ssdtrain_fx.passes.rewrites.insert_recomputations import insert_recomputations
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.testing import assert_same_bits, toy_hardware

pytree = importlib.import_module("torch.utils._pytree")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "complex64": torch.complex64}
EXAMINED_SAMPLES = 60
"""Some operators have thousands of samples."""
HARDWARE = toy_hardware(disk_bytes_per_s=1e9, kernel_s=1e-3)

Inner = Literal["aot_eager", "inductor"]

PSEUDOINVERSES = ("pinverse", "linalg.pinv", "linalg.pinv.singular")
EXCEPTIONS: dict[str, str] = {
    "higher_order.invoke_quant.simple": "torch cannot partition its backward",
    "sparse.mm.reduce bfloat16": "torch has no such kernel",
    **dict.fromkeys((f"{name} complex64" for name in PSEUDOINVERSES), "compiled by torch, its gradient is wrong"),
}
"""Operators that cannot be compared, with the cause; a name may be followed by a dtype."""
READS_UNINITIALISED: dict[str, str] = dict.fromkeys(
    ("linalg.lstsq", "linalg.lstsq.grad_oriented"),
    "torch passes uninitialised pivots to LAPACK's gelsy, which takes them as input",
)
"""Operators whose results depend on uninitialised memory, with the cause. Here, torch fills such memory for them
(``torch.utils.deterministic.fill_uninitialized_memory``)."""


@torch.library.custom_op("ssdtrain_fx_benchmarks::produce", mutates_args=())
def produce(x: Tensor) -> Tensor:
    """A copy that neither torch's partitioner nor the planner computes again, so it is saved."""
    return x.clone()


@produce.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _produce_backward(context: object, gradient: Tensor) -> Tensor:
    return produce(gradient)


produce.register_autograd(_produce_backward)


def recompute_aot_eager(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    """A pass that recomputes whatever may be recomputed, at any cost."""
    return _recompute(joint, fused=False)


def recompute_inductor(joint: ScheduledJointGraph) -> ScheduledJointGraph:
    return _recompute(joint, fused=True)


def _recompute(joint: ScheduledJointGraph, *, fused: bool) -> ScheduledJointGraph:
    alias_sets = find_alias_sets(joint.graph)
    candidates = find_candidates(joint, alias_sets, min_tensor_bytes=0, activations=find_activations(joint))
    found = find_recomputations(joint, alias_sets, candidates, fused=fused)
    Found.recomputed += len(found)
    return insert_recomputations(joint, alias_sets=alias_sets, recomputations=tuple(found.values()))


class Found:
    """What the pass above has done in this process."""

    recomputed = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One operator with one dtype."""

    op: str
    dtype: str
    samples: int
    offloads: int = 0
    moved_bytes: int = 0
    recomputed: int = 0
    """Storages that were recomputed, of all samples."""
    result: str = "equal"
    """Or what was found instead."""

    @property
    def cause(self) -> str:
        """Why this row cannot be compared; empty if there is no such reason."""
        return EXCEPTIONS.get(f"{self.op} {self.dtype}", EXCEPTIONS.get(self.op, ""))

    @property
    def is_as_expected(self) -> bool:
        return not self.cause if self.result == "equal" else bool(self.cause) and self.result.startswith(ALONE)


ALONE = "the inner compiler alone"


def choose_samples(op: Any, dtype: torch.dtype, count: int) -> list[Any]:
    """The largest one, and others from the first to the last of those that are larger than a token."""
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=True)
    samples = (sample for sample in samples if any(t.requires_grad for t in _tensors_of(_arguments(sample))))
    made: list[Any] = list(itertools.islice(samples, EXAMINED_SAMPLES))
    if max(map(_input_bytes, made), default=0) <= TOKEN_BYTES:  # those that may move come later
        made += samples
    largest = max(made, key=_input_bytes)
    others = [sample for sample in made if sample is not largest]
    others = [sample for sample in others if _input_bytes(sample) > TOKEN_BYTES] or others
    step = max(1, len(others) // max(1, count - 1))
    return [largest, *others[::step][: count - 1]]


def _input_bytes(sample: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors_of(_arguments(sample)) if t.requires_grad)


def _arguments(sample: Any) -> tuple[Any, ...]:
    return sample.input, sample.args, sample.kwargs


def _tensors_of(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def make_step(op: Any, sample: Any) -> tuple[Callable[..., list[Any]], list[Tensor]]:
    """The step, and the tensors that it takes. A view of a part of a storage is taken from a copy of the storage."""
    values, structure = pytree.tree_flatten(_arguments(sample))
    at = [position for position, value in enumerate(values) if isinstance(value, Tensor)]
    views = [_layout_in_storage(values[position]) for position in at]
    plain = [None if isinstance(value, Tensor) else value for value in values]
    finish = sample.output_process_fn_grad

    def step(*tensors: Tensor) -> list[Any]:
        arguments, copies = list(plain), []
        for position, view, tensor in zip(at, views, tensors, strict=True):
            value = tensor
            if tensor.requires_grad:
                value = produce(tensor)
                copies.append(value)
            arguments[position] = value if view is None else value.as_strided(*view)
        x, positional, named = pytree.tree_unflatten(arguments, structure)
        results: list[Any] = [*pytree.tree_leaves(finish(op.op(x, *positional, **named))), *copies]
        return [y * y if isinstance(y, Tensor) and y.requires_grad else y for y in results]

    taken = [values[p] if view is None else _whole_storage(values[p]) for p, view in zip(at, views, strict=True)]
    return step, taken


def _layout_in_storage(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int] | None:
    if not tensor.requires_grad or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return None
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _whole_storage(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,)).requires_grad_()


def make_batches(tensors: Sequence[Tensor], *, transpose: bool) -> list[list[Tensor]]:
    """Two batches with different data, because a backend that returns the data of the first step must not pass."""

    def leaf(tensor: Tensor, factor: float) -> Tensor:
        if not tensor.requires_grad:
            return tensor.clone()  # some operators write to it
        value = tensor.detach() * factor
        if transpose and value.layout == torch.strided and value.ndim > 1:
            value = value.mT.contiguous().mT
        return value.requires_grad_()

    return [[leaf(tensor, factor) for tensor in tensors] for factor in (1.0, 0.75)]


def train(compiled: Callable[..., list[Any]], batches: Sequence[Sequence[Tensor]]) -> list[Any]:
    """All results and gradients, of every way to call the two halves of a step."""
    found: list[Any] = []

    def forward(which: int) -> tuple[Sequence[Tensor], list[Any]]:
        torch.manual_seed(which)
        return batches[which], compiled(*batches[which])

    def backward(made: tuple[Sequence[Tensor], list[Any]], *, retain_graph: bool = False) -> None:
        batch, results = made
        differentiable = [y for y in _tensors_of(results) if y.requires_grad]
        generator = torch.Generator().manual_seed(0)
        tangents = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in differentiable]
        leaves = [tensor for tensor in batch if tensor.requires_grad]
        gradients = torch.autograd.grad(differentiable, leaves, tangents, retain_graph=retain_graph, allow_unused=True)
        found.append([dense(value) for value in (*results, *gradients)])

    made = forward(0)
    settle()  # so that the bytes come back from the file
    backward(made)
    made = forward(1)
    backward(made, retain_graph=True)
    backward(made)
    made, other = forward(0), forward(1)
    backward(made)
    backward(other)
    made, other = forward(0), None
    made = None  # dropped without a backward
    backward(forward(1))
    found.append([dense(tensor) for batch in batches for tensor in batch])
    return found


FAR = 0.1
"""A relative error that no rounding explains."""


def relative_error(found: Any, expected: Any) -> float:
    """The largest error of all tensors in two nested lists, relative to the largest value of its tensor."""
    pairs = zip(_tensors_of(found), _tensors_of(expected), strict=True)
    return max((_error(one, other) for one, other in pairs if one.numel()), default=0.0)


def _error(found: Tensor, expected: Tensor) -> float:
    largest = expected.abs().max().item()
    return (found - expected).abs().max().item() / largest if largest else 0.0


def dense(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value if value.layout == torch.strided else value.to_dense()).detach().clone()


def settle() -> None:
    """Wait until nothing is in flight."""
    for engine in tuple(ops._engines._by_config.values()):
        engine.wait_until_idle()


def check_sample(
    op: Any, sample: Any, *, inner: Inner, dynamic: bool, ssd_dir: str, transpose: bool
) -> tuple[list[str], Statistics]:
    """What is wrong; nothing if all bits are equal. With ``transpose``, the inputs have the memory of their transposed
    matrices, if the operator takes them."""
    step, tensors = make_step(op, sample)

    def run(backend: Any) -> list[Any]:
        torch._dynamo.reset()
        batches = make_batches(tensors, transpose=transpose)
        return train(torch.compile(step, backend=backend, dynamic=dynamic), batches)

    def run_with(*passes: JointPass) -> list[Any]:
        config = OffloadConfig(
            inner=inner, policy="all", min_tensor_bytes=0, passes=passes, ssd_dir=ssd_dir, hardware=HARDWARE
        )
        return run(ssdtrain_fx.backend(config))

    before = ssdtrain_fx.statistics()
    try:
        expected = run(inner)
    except Exception as error:
        if transpose:
            return check_sample(op, sample, inner=inner, dynamic=dynamic, ssd_dir=ssd_dir, transpose=False)
        return [f"{ALONE} fails: {brief(error)}"], ssdtrain_fx.statistics().since(before)
    wrong: list[str] = []
    for name, passes in (("offloaded", ()), ("recomputed", (PASSES[inner],))):
        try:
            assert_same_bits(run_with(*passes), expected)
        except Exception as error:
            wrong.append(f"{name}: {brief(error)}")
    if wrong:
        try:
            assert_same_bits(run(inner), expected)
        except Exception as error:
            wrong = [f"{ALONE} gives other bits in a second run: {brief(error)}"]
        else:
            error = relative_error(expected, train(step, make_batches(tensors, transpose=transpose)))
            if error > FAR:
                wrong = [f"{ALONE} is far from eager PyTorch: its largest error is {error:.1g} of the largest value"]
    settle()
    after = ssdtrain_fx.statistics()
    if after.slots_in_use or after.in_flight_bytes:
        wrong.append(f"{after.slots_in_use} slots are in use, {after.in_flight_bytes} bytes in flight")
    return wrong, after.since(before)


PASSES: dict[Inner, JointPass] = {"aot_eager": recompute_aot_eager, "inductor": recompute_inductor}


@contextlib.contextmanager
def filled_memory() -> Generator[None]:
    """``torch.empty`` fills what it returns."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def check(
    name: str, dtype: str, *, inner: Inner = "aot_eager", samples: int = 3, dynamic: bool = False, ssd_dir: str
) -> Row:
    """Compare an operator. One thread should compute: several add up in any order."""
    op = operators()[name]
    Found.recomputed = 0
    wrong: list[str] = []
    total = Statistics()
    with (
        warnings.catch_warnings(),
        filled_memory() if name in READS_UNINITIALISED else contextlib.nullcontext(),
        _torch_private.functorch_config_patch(donated_buffer=False),  # retain_graph=True needs it
        torch._dynamo.config.patch(allow_rnn=True),  # otherwise modules like nn.LSTM are not compiled
    ):
        warnings.simplefilter("ignore")
        chosen = choose_samples(op, DTYPES[dtype], samples)
        for number, sample in enumerate(chosen):
            found, moved = check_sample(
                op, sample, inner=inner, dynamic=dynamic, ssd_dir=ssd_dir, transpose=number == 2
            )
            wrong += [one for one in found if one not in wrong]
            total += moved
    return Row(
        op=name,
        dtype=dtype,
        samples=len(chosen),
        offloads=total.offloads,
        moved_bytes=total.bytes_written + total.cancelled_bytes + total.kept_bytes,
        recomputed=Found.recomputed,
        # What the inner compiler does by itself comes last: it does not excuse anything else.
        result="; ".join(sorted(wrong, key=lambda one: one.startswith(ALONE))) or "equal",
    )
