"""Every model trains as one graph. Batches differ between steps, but not between runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ssdtrain_fx.studies import zoo

SMALL = {"layers": 2, "hidden": 64, "batch": 2, "sequence": 64, "vocab": 128}


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_model_is_one_graph_and_every_parameter_gets_a_gradient(name: str, dropout: float) -> None:
    torch.manual_seed(0)
    module, make_batch = zoo.build(name, **SMALL, dropout=dropout)
    graphs: list[torch.fx.GraphModule] = []

    def count_graphs(gm: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    torch.compiler.reset()
    compiled = torch.compile(module, backend=count_graphs, fullgraph=True, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        loss = compiled(*make_batch(generator))
        assert loss.shape == ()
        loss.backward()
    assert len(graphs) == 1
    assert [key for key, parameter in module.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", zoo.MODELS)
def test_batches_depend_on_the_generator_alone(name: str) -> None:
    _, make_batch = zoo.build(name, **SMALL)
    generator = torch.Generator().manual_seed(3)
    first, second = make_batch(generator), make_batch(generator)
    torch.manual_seed(5)
    again = make_batch(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_seed_fixes_the_weights() -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return list(zoo.build("gpt2", **SMALL)[0].parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(), weights(), strict=True))


def test_text_is_source_code_with_one_token_per_byte() -> None:
    (tokens,) = zoo.text_batches(batch=4, sequence=256)(torch.Generator().manual_seed(0))
    assert tokens.shape == (4, 256)
    assert tokens.dtype == torch.int64
    text = bytes(tokens.flatten().tolist()).decode("utf-8", errors="replace")
    assert "self" in text or "def " in text or "import" in text


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"Unknown model 'gpt3'\. Valid models: gpt2, bert, t5"):
        zoo.build("gpt3")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers is 0; expected at least 1"),
        ({"dropout": 1.0}, "dropout is 1.0; expected 0 <= dropout < 1"),
        ({"hidden": 100}, "hidden is 100; expected a multiple of 64"),
    ],
)
def test_a_wrong_size_is_named(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.build("gpt2", **sizes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gpt2" else [pytest.mark.slow]) for name in zoo.MODELS]
)
def test_checkpointing_every_layer_keeps_one_graph_and_the_loss(name: str, selective: bool) -> None:
    torch.manual_seed(0)
    module, make_batch = zoo.build(name, **SMALL)
    batch = make_batch(torch.Generator().manual_seed(0))
    expected = module(*batch).item()
    expected_layers = 4 if name == "resnet" else SMALL["layers"]  # one in each of its stages
    assert zoo.checkpoint_every_layer(module, selective=selective) == expected_layers
    torch.compiler.reset()
    loss = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)(*batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_selective_checkpoints_compute_no_matrix_product_twice() -> None:
    flops: dict[str, int] = {}
    for kind in ("none", "selective", "all"):
        torch.manual_seed(0)
        module, make_batch = zoo.build("gpt2", **SMALL)
        if kind != "none":
            zoo.checkpoint_every_layer(module, selective=kind == "selective")
        batch = make_batch(torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) as counter:
            module(*batch).backward()
        flops[kind] = counter.get_total_flops()
    assert flops["selective"] == flops["none"] < flops["all"]
