"""The baselines compute the same gradients, by the mechanism that they are named after."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ssdtrain_fx.studies.rivals import SavedTensorsOnDisk, with_activation_budget, with_hooks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).t().contiguous().t()  # strides that a dense copy would lose
        return x.square().sum()


def gradients(net: Net, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


def test_hooks_write_activations_and_bring_them_back(tmp_path: Path) -> None:
    net = Net()
    hooks = SavedTensorsOnDisk(str(tmp_path), min_tensor_bytes=64)
    step = with_hooks(net, hooks)
    sizes: list[int] = []
    for batch in (32, 32, 8):
        x = torch.randn(batch, 16)
        found, expected = gradients(net, step(x)), gradients(net, net(x))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        sizes.append(hooks.file_bytes)
    assert sizes == [sizes[0]] * 3, "the next step reuses the space"
    assert sizes[0] >= 3 * 32 * 16 * 4, "the input of every layer"
    assert list(tmp_path.iterdir()) == []
    hooks.close()


def test_a_budget_of_nothing_saves_less() -> None:
    saved: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        saved[-1] += 0 if isinstance(tensor, nn.Parameter) else tensor.numel()
        return tensor

    net, x = Net(), torch.randn(64, 16)
    expected = gradients(net, net(x))
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        saved.append(0)
        compiled = with_activation_budget(torch.compile(net, backend="aot_eager_decomp_partition"), budget)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        found = gradients(net, with_hooks(compiled, hooks)(x))
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max(), "other kernels may round differently"
    assert saved[1] < saved[0]
