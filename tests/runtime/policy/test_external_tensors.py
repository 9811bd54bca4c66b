"""What is remembered of tensors from outside a graph."""

from __future__ import annotations

import torch

from ssdtrain_fx.runtime.policy.external_tensors import MIN_SWEEP, Content, ExternalTensors


def content(number: int) -> Content:
    return (number, b"", (1,), (1,), torch.float32)


def test_n_tensors_take_a_number_of_steps_that_grows_with_n() -> None:
    """All of them stay known, as the activations of a forward do."""
    asked = 0

    def is_known(handle: int) -> bool:
        nonlocal asked
        asked += 1
        return True

    external = ExternalTensors()
    count = 64 * MIN_SWEEP
    for number in range(count):
        external.add(content(number), number, is_known)
    assert asked <= 3 * count
    assert all(external.find(content(number)) == number for number in range(count))


def test_what_is_not_known_any_more_is_forgotten() -> None:
    """Ten tensors are known at any time, out of very many."""
    external = ExternalTensors()
    for number in range(64 * MIN_SWEEP):
        external.add(content(number), number, lambda handle, last=number: handle > last - 10)
        assert len(external) <= MIN_SWEEP
    assert external.find(content(64 * MIN_SWEEP - 1)) == 64 * MIN_SWEEP - 1
