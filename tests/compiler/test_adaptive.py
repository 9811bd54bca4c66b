"""Training on a disk that is slower than planned: tensors stay in memory, and the gradients are the same to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from steps import FAST_DISK, settled_statistics
from test_training_loops import INNERS, Tower, everything
from torch import Tensor, nn

from ssdtrain_fx import backend, statistics
from ssdtrain_fx.runtime.book.admission import Admission
from ssdtrain_fx.runtime.memory import layout
from ssdtrain_fx.runtime.policy import residents
from ssdtrain_fx.testing import assert_same_bits, gradients_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Admitting:
    """Stands in for :class:`Admission`: ``choose`` decides what is admitted, and a release may wait forever."""

    def __init__(self, choose: Callable[[int], bool]) -> None:
        self.choose = choose
        self.asked = 0

    def admits(self, stall_s: float) -> bool:
        self.asked += 1
        return self.choose(self.asked)

    def charge(self, stall_s: float) -> None:
        return

    def patience_s(self) -> float:
        return float("inf")


@pytest.fixture(params=["nothing", "every second", "every third"])
def admitting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Admitting:
    """Decides which tensors are admitted; the others stay in memory."""
    choices: dict[str, Callable[[int], bool]] = {
        "nothing": lambda number: False,
        "every second": lambda number: number % 2 == 0,
        "every third": lambda number: number % 3 == 0,
    }
    admitting = Admitting(choices[request.param])
    for name in ("admits", "charge", "patience_s"):
        monkeypatch.setattr(Admission, name, lambda self, *args, name=name: getattr(admitting, name)(*args))
    return admitting


def train(model: nn.Module, compiler: Any, batches: list[Tensor], *, twice: bool) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model, backend=compiler)
    for batch in batches:
        loss = compiled(batch)
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
    return gradients_of(model)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that the engine copies within memory."""
    copies: list[Tensor] = []

    def copy_with_layout(x: Tensor) -> Tensor:
        copies.append(x)
        return layout.copy_with_layout(x)

    monkeypatch.setattr(residents, "copy_with_layout", copy_with_layout)
    return copies


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "retain_graph"])
def test_what_stays_gives_the_same_gradients(
    inner: str, twice: bool, admitting: Admitting, copies: list[Tensor]
) -> None:
    """Forward makes no copy. Backward makes one only if another backward may follow."""
    torch.manual_seed(0)
    model = Tower()
    batches = [torch.randn(8, 32) for _ in range(3)]
    with functorch_config.patch(donated_buffer=not twice):
        with inductor_config.patch(fx_graph_cache=False):  # the cache may hold code that overwrites saved tensors
            expected = train(model, inner, batches, twice=twice)
        before = statistics()
        config = dataclasses.replace(everything(inner), hardware=FAST_DISK)  # nothing is measured
        found = train(model, backend(config), batches, twice=twice)
    assert_same_bits(found, expected)
    done = settled_statistics().since(before)
    assert done.offloads == admitting.asked > 0
    assert done.kept_for_time == sum(not admitting.choose(number) for number in range(1, admitting.asked + 1))
    assert done.reloads == done.offloads * (2 if twice else 1)
    assert len(copies) == done.kept_for_time * twice
    assert done.slots_in_use == 0
