"""What a user can pass, and the errors for wrong values."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import settled_statistics
from test_training_loops import Tower

import ssdtrain_fx
from ssdtrain_fx import ConfigError, OffloadConfig, backend, explain, rok
from ssdtrain_fx.compiler import inductor
from ssdtrain_fx.runtime.config import EngineConfig
from ssdtrain_fx.testing import assert_same_bits, gradients_of

OPTIONS = [field.name for field in dataclasses.fields(OffloadConfig)]


def compile_and_run(**options: Any) -> None:
    torch._dynamo.reset()
    torch.compile(Tower(), **options)(torch.randn(8, 32)).backward()


def test_the_backend_is_found_by_name() -> None:
    before = ssdtrain_fx.statistics()
    compile_and_run(backend="ssdtrain", options={"min_tensor_bytes": 0, "policy": "all"})
    assert ssdtrain_fx.statistics().since(before).offloads > 0
    assert "ssdtrain" in torch._dynamo.list_backends()


def test_an_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(Exception, match=r"Unknown option 'ssd_dirr'.*Did you mean 'ssd_dir'") as caught:
        compile_and_run(backend="ssdtrain", options={"ssd_dirr": "/nowhere"})
    for name in OPTIONS:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("inner", "eager", "one of 'inductor', 'aot_eager'"),
        ("policy", "some", "one of 'auto', 'all'"),
        ("costs", "exact", "one of 'roofline', 'measured', 'steps'"),
        ("costs", True, "one of 'roofline', 'measured', 'steps'"),
        ("replan", "on", "one of 'off', 'auto'"),
        ("io", "gds", "one of 'auto', 'posix', 'aio', 'kvikio'"),
        ("min_tensor_bytes", -1, "at least 0"),
        ("min_tensor_bytes", "1MiB", "an integer number of bytes"),
        ("min_tensor_bytes", True, "an integer number of bytes"),
        ("host_budget_bytes", 0, "at least 1"),
        ("local_ranks", 0, "at least 1"),
        ("local_ranks", "4", "an integer number of ranks, or None"),
        ("drive_ranks", 0, "at least 1"),
        ("forwards_in_flight", 0, "at least 1"),
        ("forwards_in_flight", None, "an integer number of forwards"),
        ("disk_reserve_bytes", -1, "at least 0"),
        ("disk_reserve_bytes", "1G", "an integer number of bytes, or None"),
        ("memory_budget_bytes", 1.5, "an integer number of bytes, 'auto', or None"),
        ("memory_budget_bytes", "automatic", "an integer number of bytes, 'auto', or None"),
        ("memory_budget_bytes", True, "an integer number of bytes, 'auto', or None"),
        ("memory_budget_bytes", [], "an integer number of bytes, 'auto', or None"),
        ("memory_budget_bytes", 0, "at least 1"),
        ("max_slowdown", -0.1, "a finite number >= 0"),
        ("max_slowdown", "fast", "a number"),
        ("checksum", 1, "True or False"),
        ("io_timeout_s", 0, "a finite number of seconds > 0, or None"),
        ("io_timeout_s", float("inf"), "a finite number of seconds > 0, or None"),
        ("io_timeout_s", "5 min", "a number of seconds"),
        ("io_timeout_s", True, "a number of seconds"),
        ("ssd_dir", 3, "a path, a sequence of at least one path, or None"),
        ("ssd_dir", [], "a path, a sequence of at least one path, or None"),
        ("ssd_dir", ["/fast", 3], "a path, a sequence of at least one path, or None"),
    ],
)
def test_a_wrong_value_names_the_option_and_what_was_expected(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_options({name: value})
    assert f"{name!r}" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert expected in str(caught.value)


def test_the_constructor_names_an_unknown_option_as_the_dictionary_does() -> None:
    with pytest.raises(ConfigError) as by_name:
        OffloadConfig(max_slowdon=0.1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError) as by_dictionary:
        OffloadConfig.from_options({"max_slowdon": 0.1})
    assert "Unknown option 'max_slowdon' for backend 'ssdtrain'. Did you mean 'max_slowdown'?" in str(by_name.value)
    assert str(by_name.value) == str(by_dictionary.value)
    with pytest.raises(ConfigError, match="Unknown option '1' for"):
        OffloadConfig.from_options({1: 0.1})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("options", ["max_slowdown=0.1", ["max_slowdown"]])
def test_options_that_are_not_a_dictionary(options: Any) -> None:
    with pytest.raises(
        Exception, match=r"ConfigError: The options of backend 'ssdtrain' are .*; expected a dictionary"
    ):
        compile_and_run(backend="ssdtrain", options=options)


@pytest.mark.parametrize("config", [{"max_slowdown": 0.1}, "/mnt/nvme0", OffloadConfig])
def test_what_is_not_a_configuration_is_refused(config: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: backend(config),
        lambda: explain(torch.nn.Linear(2, 2), torch.randn(2, 2), config=config),
        lambda: rok(lambda batch: (torch.nn.Linear(2, 2), ()), batch_sizes=[1], config=config),
    ]
    for call in calls:
        with pytest.raises(
            ConfigError, match=r"The configuration of backend 'ssdtrain' is .*; expected an OffloadConfig"
        ):
            call()


@pytest.mark.parametrize("inputs", [(), (torch.zeros(2, 2),)])
def test_a_curve_needs_a_model_and_a_tuple_of_its_inputs(inputs: tuple[Any, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"make_model returned Linear.* at batch size 2; expected a model and a tuple"
    ):
        rok(lambda batch: (torch.nn.Linear(2, 2), *inputs), batch_sizes=[2])


def test_an_option_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes its options by name, such as ssd_dir=\.\.\.; found '/tmp' without"):
        OffloadConfig("/tmp")  # pyright: ignore[reportCallIssue]


def test_the_configuration_is_a_plain_dataclass_otherwise() -> None:
    config = OffloadConfig(max_slowdown=0.1, ssd_dir="/tmp")
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert dataclasses.replace(config, max_slowdown=0.01) == OffloadConfig(ssd_dir="/tmp")
    assert repr(config).startswith("OffloadConfig(ssd_dir='/tmp', inner='inductor', ")
    assert list(inspect.signature(OffloadConfig).parameters) == OPTIONS
    with pytest.raises(ConfigError, match="Did you mean 'policy'"):
        dataclasses.replace(config, polizy="all")  # pyright: ignore[reportCallIssue]


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().policy = "all"  # pyright: ignore[reportAttributeAccessIssue]


def test_options_beside_a_configuration_are_refused() -> None:
    with pytest.raises(Exception, match="Put them into its OffloadConfig"):
        compile_and_run(backend=backend(OffloadConfig()), options={"policy": "all"})


def test_compiled_autograd_needs_inductor() -> None:
    """It traces backward again, and there the layouts of reloaded tensors are not known with aot_eager."""
    config = OffloadConfig(inner="aot_eager", policy="all", min_tensor_bytes=0)
    loss = torch.compile(Tower(), backend=backend(config))(torch.randn(8, 32))
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(Exception, match="Use inner='inductor', or leave compiled autograd off"),
    ):
        loss.backward()


@pytest.mark.usefixtures("one_thread")
def test_compiled_autograd_makes_one_graph_of_all_backwards() -> None:
    """It traces the backward of two compiled graphs, ``reload`` and ``wait`` included, and compiles it once more."""

    def train(compiler: Any) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Tower()

        def halves(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            torch._dynamo.graph_break()
            return torch.tanh(loss).square().sum()

        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled = torch.compile(halves, backend=compiler)
            for seed in range(2):
                compiled(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))).backward()
        return gradients_of(model)

    expected, before = train("inductor"), settled_statistics()
    found = train(backend(OffloadConfig(policy="all", min_tensor_bytes=0)))
    assert_same_bits(found, expected)
    moved = settled_statistics().since(before)
    assert moved.offloads == moved.reloads > 0
    assert settled_statistics().slots_in_use == 0


def test_mode_is_refused_where_nothing_uses_it() -> None:
    with pytest.raises(Exception, match="Leave mode out, or use inner='inductor'"):
        compile_and_run(backend=backend(OffloadConfig(inner="aot_eager")), mode="max-autotune")


def test_mode_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import ssdtrain_fx.compiler.inductor as inductor

    seen: list[dict[str, Any]] = []
    original = inductor.private.compile_fx

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["config_patches"])
        return original(*args, **kwargs)

    monkeypatch.setattr(inductor.private, "compile_fx", compile_fx)
    compile_and_run(backend="ssdtrain", mode="max-autotune-no-cudagraphs")
    assert seen[0]["max_autotune"] is True


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(Exception, match="fastest"):
        compile_and_run(backend="ssdtrain", mode="fastest")


def test_a_missing_directory_is_an_error_before_tracing(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match="does not exist"):
        backend(OffloadConfig(ssd_dir=missing))


def test_several_directories(tmp_path: Path) -> None:
    config = OffloadConfig(ssd_dir=["/fast", Path("/faster")])
    assert config == OffloadConfig(ssd_dir=("/fast", Path("/faster")))
    assert hash(config)
    engine = config.engine_config()
    assert engine.ssd_dir == ("/fast", "/faster")
    assert EngineConfig.from_argument(engine.to_argument()) == engine
    with pytest.raises(ConfigError, match="directory 2 of 2 in ssd_dir is"):
        backend(OffloadConfig(ssd_dir=[tmp_path, tmp_path / "missing"]))


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        backend(OffloadConfig(ssd_dir=file))


def test_a_directory_that_takes_no_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no file can be created"):
        backend(OffloadConfig(ssd_dir="/proc"))


def test_the_environment_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDTRAIN_DIR", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="SSDTRAIN_DIR"):
        backend()


def test_equal_configurations_are_equal_backends() -> None:
    assert backend(OffloadConfig(policy="all")) == backend(OffloadConfig(policy="all"))
    assert backend(OffloadConfig(policy="all")) != backend(OffloadConfig())


def test_logging_shows_the_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    """``TORCH_LOGS=+ssdtrain_fx`` sets the level of the package's loggers."""
    with caplog.at_level(logging.DEBUG, logger="ssdtrain_fx"):
        compile_and_run(backend=backend(OffloadConfig(inner="aot_eager", policy="all", min_tensor_bytes=0)))
    text = caplog.text
    assert "predicted activation peak" in text
    assert "scheduled joint graph with offloads" in text
    assert "torch.ops.ssdtrain.offload.default" in text


def test_a_budget_out_of_reach_says_what_is_reachable() -> None:
    with pytest.raises(Exception, match="cannot get below"):
        compile_and_run(backend=backend(OffloadConfig(inner="aot_eager", memory_budget_bytes=1, min_tensor_bytes=0)))


def test_a_step_that_fits_its_budget_offloads_nothing() -> None:
    before = ssdtrain_fx.statistics()
    compile_and_run(backend=backend(OffloadConfig(inner="aot_eager", memory_budget_bytes=1 << 30, min_tensor_bytes=0)))
    assert ssdtrain_fx.statistics().since(before).offloads == 0


def _mount_tmpfs(path: Path) -> bool:
    return os.system(f"mount -t tmpfs -o size=1m tmpfs {path} 2>/dev/null") == 0


@pytest.mark.filterwarnings("ignore")
def test_a_full_disk_keeps_tensors_in_memory_and_training_goes_on(tmp_path: Path) -> None:
    """On a real file system of 1 MiB, most of a step does not fit."""
    if not _mount_tmpfs(tmp_path):
        pytest.skip("mounting a small tmpfs needs root")
    try:
        model, x = Tower(width=256), torch.randn(256, 256)
        gradients: list[list[torch.Tensor]] = []
        for compiler in (
            "aot_eager",
            backend(OffloadConfig(inner="aot_eager", ssd_dir=tmp_path, policy="all", min_tensor_bytes=0)),
        ):
            torch._dynamo.reset()
            model.zero_grad(set_to_none=True)
            torch.compile(model, backend=compiler)(x).backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
        assert ssdtrain_fx.statistics().kept > 0
    finally:
        from ssdtrain_fx.runtime import ops

        ops.close()
        os.system(f"umount {tmp_path}")


def test_compile_caches_depend_on_every_file_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older pass, or an older op, must not answer from the cache: hazard 5."""
    read: list[str] = []
    read_bytes = Path.read_bytes

    def record(path: Path) -> bytes:
        read.append(path.name)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", record)
    inductor._source_hash.__wrapped__()
    assert {"config.py", "pipeline.py", "insert_offloads.py", "ops.py", "engine.py", "inductor.py"} <= set(read)
