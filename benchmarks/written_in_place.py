"""Compare the gradients of plain Inductor and of this backend with those of eager PyTorch, for one model.

    python benchmarks/written_in_place.py

Torch 2.13 can run a kernel that reads a buffer before the kernel that adds to it (``inductor_mutations.py`` says why).
For the UNet of ``other_families.py``, that happens in plain Inductor. ``mended`` is plain Inductor with the dependency
that it forgets. It must have the bits of this backend, otherwise the exit code is 1. All of it takes ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from result_tables import markdown
from torch import Tensor, nn
from torch._inductor import config

from ssdtrain_fx._torch_private.inductor_mutations import keeping_writers_in_front
from ssdtrain_fx.studies.own_models import load_model_function
from ssdtrain_fx.vector_math import settle_vector_math

FAR = 1e-3
"""Of the largest element of a gradient: more than rounding."""
Gradients = dict[str, Tensor]


def gradients(model: nn.Module, step: Callable[..., Tensor], batch: Sequence[Any]) -> Gradients:
    model.zero_grad()
    step(*batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def row_of(name: str, found: Gradients, eager: Gradients, ours: Gradients) -> tuple[str, ...]:
    far = sum(bool((found[n] - g).abs().max() > FAR * g.abs().max()) for n, g in eager.items())
    zero = sum(not found[n].any() and bool(g.any()) for n, g in eager.items())
    other = sum(not torch.equal(found[n], g) for n, g in ours.items())
    return name, str(len(found)), str(far), str(zero), str(other)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="benchmarks.other_families:unet", help="module:callable")
    parser.add_argument("--ssd-dir", default=tempfile.gettempdir())
    parser.add_argument("--max-slowdown", type=float, default=0.05)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # several add to one element in any order
    settle_vector_math()
    torch.manual_seed(0)
    model, batch = load_model_function(chosen.model)()
    options = {"ssd_dir": chosen.ssd_dir, "max_slowdown": chosen.max_slowdown}
    compilers: Mapping[str, Mapping[str, Any]] = {
        "ssdtrain": {"backend": "ssdtrain", "options": options},
        "Inductor, mended": {},
        "Inductor": {},
    }
    eager, found = gradients(model, model, batch), dict[str, Gradients]()
    for name, how in compilers.items():
        torch._dynamo.reset()
        mend = keeping_writers_in_front() if "mended" in name else contextlib.nullcontext()
        with mend, config.patch(force_disable_caches=True):
            compiled: Any = torch.compile(model, **how)
            found[name] = gradients(model, compiled, batch)
    head = ("compiler", "gradients", "far from eager's", "zero", "other bits than ssdtrain")
    rows = [row_of(name, one, eager, found["ssdtrain"]) for name, one in found.items()]
    print(markdown([head, *rows]))
    return int(rows[1][-1] != "0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
