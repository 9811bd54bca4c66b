"""The option ``chunk_loss``: gradients, memory, the choice of ``auto``, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from steps import Autocast, counted, machine
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain_fx import ConfigError, OffloadConfig, _torch_private, backend, explain
from ssdtrain_fx._torch_private.inductor_chunker import LossHead
from ssdtrain_fx.compiler.chunk_loss import MAX_CHUNKS, count_chunks
from ssdtrain_fx.passes.planning.plan import Plan
from ssdtrain_fx.runtime.memory.step_memory import memory_stats, reset_peak_memory_stats
from ssdtrain_fx.testing import assert_same_bits, gradients_of

VOCABULARY, WIDTH, ROWS = 1024, 32, 512
LOGITS_BYTES = ROWS * VOCABULARY * 4
EVERYTHING: dict[str, Any] = {"policy": "all", "min_tensor_bytes": 0}

needs_chunker = pytest.mark.skipif(not _torch_private.has_auto_chunker(), reason="torch has no auto-chunker")
pytestmark = [pytest.mark.usefixtures("one_thread")]
SLOW = pytest.mark.slow
"""For losses and sizes beside the first one of a kind."""

Loss = Callable[["Tower", Tensor, Tensor], Any]


def cross_entropy(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(tower.head(x), labels)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Tower(nn.Module):
    """Some layers, and a head whose logits take much more memory than all the rest."""

    def __init__(self, loss: Loss = cross_entropy, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self, x, labels)


def batch(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(VOCABULARY, (rows,), generator=generator) for _ in range(2))
    return tokens, labels


def chunked_inductor(num_chunks: int) -> dict[str, Any]:
    """The settings that a user of Inductor would make."""
    return {
        "auto_chunker.enable": True,
        "auto_chunker.num_chunk": num_chunks,
        "auto_chunker.amplify_ratio_threshold": 2,
    }


def train(
    model: nn.Module, compiler: Any, *, rows: int = ROWS, settings: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """The losses and accumulated gradients of two batches."""
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    with inductor_config.patch(settings or {}):
        compiled = torch.compile(model, backend=compiler)
        losses: list[Tensor] = []
        for seed in range(2):
            loss = compiled(*batch(seed, rows))
            losses.append(loss.detach())
            (loss * 0.7).backward()
    return gradients_of(model) | {"losses": torch.stack(losses)}


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What this package has logged. torch logs, too."""
    return [record for record in caplog.records if record.name.startswith("ssdtrain_fx")]


def plan_of(model: nn.Module, **options: Any) -> Plan:
    torch._dynamo.reset()
    return explain(model, *batch(0), config=OffloadConfig(**options)).plan


# -- numbers -----------------------------------------------------------------------------------------------------------


@needs_chunker
@pytest.mark.parametrize(
    "kind", ["tied", *(pytest.param(kind, marks=SLOW) for kind in ("plain", "bias", "uneven", "bfloat16"))]
)
def test_gradients_equal_those_of_chunked_inductor(kind: str) -> None:
    """To the bit, over two backwards, with everything offloaded. Without chunks, they are equal within rounding."""
    torch.manual_seed(0)
    model: nn.Module = Tower(tied=kind == "tied", bias=kind == "bias")
    rows = {"uneven": 500, "bfloat16": 1024}.get(kind, ROWS)
    if kind == "bfloat16":
        model = Autocast(model)
    plain = train(model, "inductor", rows=rows)
    expected = train(model, "inductor", rows=rows, settings=chunked_inductor(8))
    found: dict[str, Tensor] = {}
    compiler = backend(OffloadConfig(chunk_loss=8, **EVERYTHING))
    assert counted(lambda: found.update(train(model, compiler, rows=rows))).offloads > 0
    assert_same_bits(found, expected)
    assert any(not torch.equal(found[name], plain[name]) for name in plain), "nothing was computed in chunks"
    error = 2e-2 if kind == "bfloat16" else 1e-5
    for name in plain:
        assert (found[name] - plain[name]).abs().max() <= error * plain[name].abs().max(), name


def after_zeros(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    """The gradient of a weight reads the zeros, and backward can make them again."""
    return cross_entropy(tower, x + torch.tanh(tower.layers[0](torch.zeros_like(x))), labels)


@needs_chunker
def test_recomputation_keeps_the_bits() -> None:
    model = Tower(after_zeros)
    options: dict[str, Any] = {"chunk_loss": 8, "min_tensor_bytes": 0, "hardware": machine(1.0), "max_slowdown": 5.0}
    assert plan_of(model, **options).recomputed
    found = train(model, backend(OffloadConfig(**options)))
    assert_same_bits(found, train(model, "inductor", settings=chunked_inductor(8)))


@needs_chunker
def test_off_is_the_default_and_changes_no_bit() -> None:
    torch.manual_seed(0)
    model = Tower()
    assert OffloadConfig() == OffloadConfig(chunk_loss="off")
    assert plan_of(model, **EVERYTHING).loss_chunks == 0
    assert_same_bits(train(model, backend(OffloadConfig(**EVERYTHING))), train(model, "inductor"))


@needs_chunker
def test_code_of_other_options_is_never_used() -> None:
    """With warm caches, each option gives its own numbers, and Inductor's settings are as before."""
    torch.manual_seed(0)
    model = Tower()
    settings: Any = inductor_config
    before = (settings.auto_chunker.enable, settings.auto_chunker.num_chunk, settings.joint_custom_pre_pass)
    expected: dict[Any, dict[str, Tensor]] = {
        "off": train(model, "inductor"),
        4: train(model, "inductor", settings=chunked_inductor(4)),
        8: train(model, "inductor", settings=chunked_inductor(8)),
    }
    assert not torch.equal(expected[4]["head.weight"], expected[8]["head.weight"])
    for option in ("off", 8, 4, 8, "off"):
        assert_same_bits(train(model, backend(OffloadConfig(chunk_loss=option))), expected[option])
    assert before == (settings.auto_chunker.enable, settings.auto_chunker.num_chunk, settings.joint_custom_pre_pass)


@SLOW
@needs_chunker
def test_rows_that_cannot_make_so_many_chunks_make_fewer() -> None:
    """``torch.chunk`` cuts 513 rows for 200 chunks into 171 of 3 rows. By itself, the auto-chunker fails there."""
    tokens, labels = batch(0, rows=513)
    config = OffloadConfig(chunk_loss=200, inner="inductor")
    assert explain(Tower(), tokens, labels, config=config).plan.loss_chunks == 171


# -- memory and time ---------------------------------------------------------------------------------------------------


@needs_chunker
def test_the_real_peak_is_the_planned_one() -> None:
    """The arena counts what a step really takes. The plan counts the logits inside of a chunk, too."""
    peaks: list[int] = []
    for num_chunks in (4, 8, 16):
        options: dict[str, Any] = {"chunk_loss": num_chunks, **EVERYTHING}
        model = Tower()
        planned_bytes = plan_of(model, **options).peak_after_bytes
        compiled = torch.compile(model, backend=backend(OffloadConfig(**options)))
        reset_peak_memory_stats()
        earlier_bytes = memory_stats().allocated_bytes  # of tests before
        compiled(*batch(0)).backward()
        peaks.append(memory_stats().allocated_peak_bytes - earlier_bytes)
        assert peaks[-1] == pytest.approx(planned_bytes, rel=0.2)
    assert LOGITS_BYTES > peaks[0] > peaks[1] > peaks[2]
    assert peaks[2] < LOGITS_BYTES / 3


@needs_chunker
def test_auto_takes_chunks_where_the_peak_falls_in_time() -> None:
    """On this machine a kernel takes 1 us, and chunks need more kernels."""
    model = Tower()
    wide = plan_of(model, chunk_loss="auto", hardware=machine(1.0), max_slowdown=100.0)
    assert wide.loss_chunks == count_chunks(LossHead(ROWS, WIDTH, VOCABULARY)) == 4
    narrow = plan_of(model, chunk_loss="auto", hardware=machine(1.0), max_slowdown=0.0)
    assert narrow.loss_chunks == 0
    assert narrow == plan_of(model, hardware=machine(1.0), max_slowdown=0.0)
    assert wide.peak_after_bytes < LOGITS_BYTES < narrow.peak_after_bytes


@needs_chunker
def test_with_chunks_less_is_moved_in_the_same_time() -> None:
    """With all of ``max_slowdown`` for its transfers, the step with chunks would take longer than is allowed."""
    model, hardware = Tower(), machine(1e9)
    step_s = plan_of(model, hardware=hardware).step_s
    for_chunks = plan_of(model, chunk_loss=4, hardware=hardware).step_s / step_s - 1
    options: dict[str, Any] = {"hardware": hardware, "max_slowdown": 4 * for_chunks, "min_tensor_bytes": 0}
    limit_s = step_s * (1 + options["max_slowdown"])
    whole = plan_of(model, chunk_loss=4, **options)
    assert whole.step_s < limit_s < whole.step_s + whole.exposed_s
    chosen = plan_of(model, chunk_loss="auto", **options)
    assert chosen.loss_chunks == 4
    assert chosen.exposed_s > 0
    assert chosen.step_s + chosen.exposed_s <= limit_s


@needs_chunker
def test_auto_gives_the_numbers_of_as_many_chunks() -> None:
    torch.manual_seed(0)
    model = Tower()
    options: dict[str, Any] = {"hardware": machine(1.0), "max_slowdown": 100.0}
    found = train(model, backend(OffloadConfig(chunk_loss="auto", **options)))
    assert_same_bits(found, train(model, "inductor", settings=chunked_inductor(4)))


@needs_chunker
def test_auto_takes_chunks_where_only_they_meet_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    model, budget = Tower(), {"memory_budget_bytes": LOGITS_BYTES}
    assert plan_of(model, chunk_loss="auto", hardware=machine(1.0), **budget).loss_chunks == 4
    assert "does not fit into memory_budget_bytes" not in caplog.text
    roomy = plan_of(model, chunk_loss="auto", hardware=machine(1.0), memory_budget_bytes=100 * LOGITS_BYTES)
    assert roomy.loss_chunks == 0, "the step fits as it is, and takes less time"


@needs_chunker
def test_explain_says_what_the_peak_is_for() -> None:
    """Without chunks, it is the logits; with a few, it is the loss of one chunk."""
    cases: tuple[tuple[Any, str, str], ...] = (
        ("off", "logits", "logits and values of their size, "),
        (4, "chunk", "inside one chunk of the loss, "),
    )
    for option, role, advice in cases:
        report = explain(Tower(), *batch(0), config=OffloadConfig(chunk_loss=option))
        peak = report.plan.peak_after
        assert peak.parts[0].role == role
        assert sum(part.size_bytes for part in peak.parts) == peak.size_bytes
        assert advice in report.text()
        assert Plan.from_json(report.plan.to_json()) == report.plan
        last = "chunk_loss may lower it" if option == "off" else "more than 4 chunks may lower it"
        assert last in report.text()


def test_a_chunk_of_auto_takes_about_the_memory_of_the_weight() -> None:
    assert count_chunks(LossHead(rows=4096, features=768, columns=32768)) == 11
    assert count_chunks(LossHead(rows=4096, features=4096, columns=32768)) == 2
    assert count_chunks(LossHead(rows=100, features=64, columns=32768)) == 1
    assert count_chunks(LossHead(rows=1 << 20, features=64, columns=32768)) == MAX_CHUNKS


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found", "hint"),
    [
        ("atuo", "'atuo'", " (did you mean 'auto'?)"),
        (1, "1", ""),
        (True, "True", ""),
        (2.5, "2.5", ""),
        (None, "None", ""),
    ],
)
def test_a_wrong_value_is_explained(value: Any, found: str, hint: str) -> None:
    expected = (
        f"Option 'chunk_loss' of backend 'ssdtrain' is {found}; expected 'off', 'auto', or a number of chunks >= 2"
    )
    with pytest.raises(ConfigError) as error:
        OffloadConfig(chunk_loss=value)
    assert str(error.value) == f"{expected}{hint}."


def test_aot_eager_has_no_chunker(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"inner='aot_eager' has no auto-chunker\. Use inner='inductor', or leave"):
        OffloadConfig(chunk_loss=8, inner="aot_eager")
    model = Tower()
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "ssdtrain_fx"):
        torch.compile(model, backend=backend(OffloadConfig(chunk_loss="auto", inner="aot_eager")))(*batch(0)).backward()
    assert "the loss is not computed in chunks: inner='aot_eager' has no auto-chunker" in caplog.text


def test_an_old_torch_has_no_chunker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(ConfigError, match=r"torch 2\.13 is the oldest with one\. Use a newer torch"):
        OffloadConfig(chunk_loss=8)
    with caplog.at_level(logging.INFO, "ssdtrain_fx"):
        assert plan_of(Tower(), chunk_loss="auto").loss_chunks == 0
    assert "the loss is not computed in chunks: torch " in caplog.text


def returns_logits(tower: Tower, x: Tensor, labels: Tensor) -> Any:
    logits = tower.head(x)
    return F.cross_entropy(logits, labels), logits


def cuts_logits(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    logits = tower.head(x.view(4, -1, WIDTH))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.view(4, -1)[:, 1:].flatten())


def in_float16(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((x.half() @ tower.head.weight.half().t()).float(), labels)


def in_float64(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.double() @ tower.head.weight.double().t(), labels)


def times_another_loss(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(tower.head(x), labels) * x.square().mean()


def per_row(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(tower.head(x), labels, reduction="none")


def picks_rows(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    logits = tower.head(x)
    return logits.gather(0, labels[:, None] % ROWS).sum() + logits.exp().sum()


def narrow_head(tower: Tower, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels % WIDTH)


REFUSED: dict[Loss, str] = {
    returns_logits: "call_function nodes",
    cuts_logits: "aten.view.default fail",
    in_float16: "would become zero",
    in_float64: "The logits are torch.float64; only float32 and bfloat16 are safe",
    times_another_loss: "The gradient tangents_1 of a result is also needed outside of the chunks",
    per_row: "",
    picks_rows: "gather works along the dimension that is cut",
    narrow_head: "no amplifier node found",
}


QUICK = {returns_logits, times_another_loss}


@needs_chunker
@pytest.mark.parametrize(
    "loss",
    [loss if loss in QUICK else pytest.param(loss, marks=SLOW) for loss in REFUSED],
    ids=[loss.__name__ for loss in REFUSED],
)
def test_what_cannot_be_chunked_is_left_as_it_is(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    """One warning says why, in every process, and the gradients have the bits of Inductor without chunks."""

    def gradients(compiler: Any) -> dict[str, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Tower(loss)
        result = torch.compile(model, backend=compiler)(*batch(0, rows=2 * ROWS))
        (result if isinstance(result, Tensor) else result[0]).sum().mul(0.7).backward()
        return gradients_of(model)

    expected = gradients("inductor")
    for _ in range(2):  # the second time with warm caches, as in another process
        caplog.clear()
        assert_same_bits(gradients(backend(OffloadConfig(chunk_loss=8))), expected)
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.startswith("chunk_loss=8 has no effect on this graph: torch's auto-chunker cannot compute its")
        assert REFUSED[loss] in warning and warning.endswith("chunk_loss='auto' does not warn.")
    caplog.clear()
    with caplog.at_level(logging.INFO, "ssdtrain_fx"):
        assert (
            explain(Tower(loss), *batch(0, rows=2 * ROWS), config=OffloadConfig(chunk_loss="auto")).plan.loss_chunks
            == 0
        )
    assert "the loss is not computed in chunks: " in caplog.text
    assert not [record for record in own_records(caplog) if record.levelno >= logging.WARNING]


@needs_chunker
def test_dynamic_shapes_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Tower(), backend=backend(OffloadConfig(chunk_loss=8)), dynamic=True)
    compiled(*batch(0)).backward()
    assert (
        "The shapes are dynamic, and the size of a chunk must be a number. Compile with dynamic=False." in caplog.text
    )


@SLOW
@needs_chunker
def test_a_link_of_a_chain_has_no_loss_to_warn_about(caplog: pytest.LogCaptureFixture) -> None:
    """Only the last of the graphs has a loss, and that one is computed in chunks."""
    torch._dynamo.reset()
    model = Tower()
    for layer in model.layers:
        layer.compile(backend=backend(OffloadConfig(chunk_loss=8)))
    loss = torch.compile(cross_entropy, backend=backend(OffloadConfig(chunk_loss=8)))
    uncached = _torch_private.functorch_config_patch(enable_autograd_cache=False)
    with uncached, caplog.at_level(logging.INFO, "ssdtrain_fx"):
        x = model.embedding(batch(0)[0])
        for layer in model.layers:
            x = x + torch.relu(layer(x))
        loss(model, x, batch(0)[1]).backward()
    assert not [record for record in own_records(caplog) if record.levelno >= logging.WARNING]
    assert caplog.text.count("the loss is not computed in chunks") == 1  # both layers are one code
