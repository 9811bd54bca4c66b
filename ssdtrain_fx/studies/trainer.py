"""The inside of a worker process: it trains one model, one step per request, and measures every step.

`ssdtrain_fx.studies.measure.Worker` starts it as a program. It sends requests to stdin, and reads replies from stdout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from ssdtrain_fx import _torch_private
from ssdtrain_fx.accelerators import device_functions, find_accelerator
from ssdtrain_fx.compiler.dynamo_backend import backend as make_backend
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.passes.planning.policy import Budget, Costs, Decision, StepAnalysis
from ssdtrain_fx.runtime import ops
from ssdtrain_fx.runtime.statistics import Statistics
from ssdtrain_fx.studies import rivals, zoo
from ssdtrain_fx.studies.measure import Rest, Run, Step
from ssdtrain_fx.studies.own_models import is_own_model
from ssdtrain_fx.studies.process_memory import Course, peak_bytes, reset_peak, return_unused_memory, used_bytes
from ssdtrain_fx.vector_math import settle_vector_math


class Trainer:
    """A model, its optimizer and its batches."""

    def __init__(self, run: Run) -> None:
        settle_vector_math()  # for all variants: what is compared must not differ by chance
        torch.use_deterministic_algorithms(True)
        # Filling every fresh tensor would cost time and touch memory that the step itself never touches.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.manual_seed(run.seed)
        self._run = run
        self._dtype = None if is_own_model(run.model) else getattr(torch, run.dtype)
        """None: parameters and inputs keep their types."""
        module, make_batch = zoo.build(
            run.model,
            layers=run.layers,
            hidden=run.hidden,
            batch=run.batch,
            sequence=run.sequence,
            vocab=run.vocab,
            dropout=run.dropout,
        )
        self._make_batch = zoo.text_batches(batch=run.batch, sequence=run.sequence) if run.text else make_batch
        self._module = module.to(run.device, self._dtype)
        if "checkpoint" in run.variant or run.variant == "selective":
            zoo.checkpoint_every_layer(self._module, selective=run.variant == "selective")
        self._compiled = _compile(self._module, run)
        parameters = list(self._module.parameters())
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=1e-2) if run.optimizer == "sgd" else torch.optim.AdamW(parameters, lr=3e-4)
        )

    def describe(self) -> dict[str, Any]:
        return {"parameters": sum(parameter.numel() for parameter in self._module.parameters())}

    def step(self, index: int, *, sampled: bool, gate: str | None = None) -> Step:
        """With ``gate``, the path of a file: `_run_alone`, and unused device memory is given back."""
        run = self._run
        self._optimizer.zero_grad(set_to_none=True)
        batch = self._batch(index)
        before = self._statistics()
        torch.manual_seed(run.seed + index)
        if sampled:  # a heap that is full of free memory would hide what the step needs
            return_unused_memory()
        course = Course(run.device) if sampled else None
        _synchronize(run.device)
        peak_was_reset = reset_peak(run.device)
        with _run_alone(gate) if gate else contextlib.nullcontext(), course or contextlib.nullcontext():
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            began_s = time.perf_counter()
            loss = self._compiled(*batch)
            if not (isinstance(loss, Tensor) and loss.numel() == 1):
                raise RuntimeError(f"{run.model} returned {_name(loss)}; expected its loss, a tensor with one element.")
            loss.backward()
            self._optimizer.step()
            _synchronize(run.device)
            duration_s = time.perf_counter() - began_s
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            if gate and run.device != "cpu":
                device_functions(run.device).empty_cache()
        process_peak_bytes = peak_bytes(run.device)
        hashed = sampled or run.hashed_steps is None or index < run.hashed_steps
        return Step(
            index=index,
            loss_hex=float(loss.item()).hex(),
            gradients=digests(self.gradients()) if hashed else {},
            duration_ms=1e3 * duration_s,
            process_peak_bytes=process_peak_bytes,
            peak_was_reset=peak_was_reset,
            samples=course.samples if course else [],
            page_faults=faults,
            statistics=self._statistics().since(before),
        )

    def rest(self) -> Rest:
        gradient_bytes = _size_bytes(self.gradients().values())
        self._optimizer.zero_grad(set_to_none=True)
        return_unused_memory()
        states: Iterable[dict[str, Any]] = self._optimizer.state.values()
        return Rest(
            process_bytes=used_bytes(self._run.device),
            parameter_bytes=_size_bytes(self._module.parameters()),
            gradient_bytes=gradient_bytes,
            optimizer_bytes=_size_bytes(
                value for state in states for value in state.values() if isinstance(value, Tensor)
            ),
        )

    def _batch(self, index: int) -> zoo.Batch:
        generator = torch.Generator().manual_seed(1_000_003 * (self._run.seed + 1) + index)
        return tuple(self._place(value) for value in self._make_batch(generator))

    def _place(self, value: Any) -> Any:
        """An input of the model, on its device and, if it is a tensor of numbers, with its dtype."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self._run.device, self._dtype if value.is_floating_point() else None)

    def _statistics(self) -> Statistics:
        return ops.statistics() if self._run.variant.startswith("ssdtrain") else Statistics()

    def save_gradients(self, names: Sequence[str], path: str) -> dict[str, Any]:
        torch.save({name: self.gradients()[name].cpu() for name in names}, path)
        return {}

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step, by the name of the parameter. Parameters that are not trained have none."""
        parameters = self._module.named_parameters()
        gradients = {name: parameter.grad.detach() for name, parameter in parameters if parameter.grad is not None}
        if not gradients:
            raise RuntimeError("No parameter has a gradient.")
        return gradients

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._module.named_parameters()}


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor."""
    if find_accelerator(tensors.values()) is not None:  # on a CPU, threads would add heaps to a process
        with ThreadPoolExecutor() as pool:
            return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    raw = tensor.cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(cast(Any, raw.numpy())).hexdigest()


def _name(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _size_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _compile(module: nn.Module, run: Run) -> Callable[..., object]:
    if run.variant.endswith("hooks_disk"):
        called = module if run.variant.startswith("eager") else _compile_with(module, run)
        return rivals.with_hooks(called, rivals.SavedTensorsOnDisk(run.options.get("ssd_dir")))
    return module if run.variant.startswith("eager") else _compile_with(module, run)


def _compile_with(module: nn.Module, run: Run) -> Any:
    backend: Any = "inductor"
    settings: dict[str, Any] | None = rivals.CHUNKED_LOSS if run.variant.startswith("chunked") else None
    if run.variant.startswith("ssdtrain"):
        backend = make_backend(OffloadConfig.from_options(run.options))
    elif run.variant == "rewrites":
        backend = make_backend(OffloadConfig.from_options({**run.options, "policy": _keep_all}))
    compiled: Any = module
    if run.regional:
        for layer in zoo.find_layers(module):
            layer.compile(backend=backend, options=settings, dynamic=False, fullgraph=True)
    else:
        fullgraph = not is_own_model(run.model)
        compiled = torch.compile(module, backend=backend, options=settings, dynamic=False, fullgraph=fullgraph)
    if run.variant == "budget":
        return rivals.with_activation_budget(compiled, run.options["activation_memory_budget"])
    if run.variant == "hooks_host":
        return rivals.with_hooks(compiled, torch.autograd.graph.save_on_cpu(pin_memory=run.device != "cpu"))
    return compiled


def _keep_all(analysis: StepAnalysis, costs: Costs, budget: Budget) -> dict[str, Decision]:
    """A policy."""
    return {}


@contextlib.contextmanager
def _run_alone(gate: str) -> Generator[None]:
    """From the moment when a compilation has ended, no other process with the same ``gate`` is at this point."""
    with open(gate) as file, _torch_private.on_compiled(lambda: fcntl.flock(file, fcntl.LOCK_EX)):  # noqa: PTH123
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked process has the file open as well


def _synchronize(device: str) -> None:
    if device != "cpu":
        device_functions(device).synchronize()


@contextlib.contextmanager
def _replies_to_stdout() -> Generator[IO[str]]:
    """Keep the pipe for replies; whatever else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        yield replies


def serve(run: Run) -> None:
    """Answer requests on stdin, one JSON value per line, until it ends."""
    with _replies_to_stdout() as replies:
        trainer = Trainer(run)
        for line in sys.stdin:
            replies.write(json.dumps(_reply(trainer, json.loads(line))) + "\n")
            replies.flush()


def _reply(trainer: Trainer, request: dict[str, Any]) -> dict[str, Any]:
    match request:
        case {"step": index, "sampled": sampled, **gate}:
            return dataclasses.asdict(trainer.step(index, sampled=sampled, **gate))
        case {"gradients": names, "path": path}:
            return trainer.save_gradients(names, path)
        case {"rest": _}:
            return dataclasses.asdict(trainer.rest())
        case _:
            return trainer.describe()


if __name__ == "__main__":
    serve(Run(**json.loads(sys.argv[1])))
