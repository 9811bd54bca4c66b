"""`ssdtrain-fx pass`: every pass on a saved graph, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ssdtrain_fx.cli import app
from ssdtrain_fx.config import OffloadConfig
from ssdtrain_fx.hardware import Hardware
from ssdtrain_fx.passes.graph.graph_json import from_json, to_json
from ssdtrain_fx.passes.graph.op_targets import OFFLOAD, site_of
from ssdtrain_fx.passes.rewrites.verify_offloads import verify_offloads
from ssdtrain_fx.report.pass_runner import PASSES, run_pass
from ssdtrain_fx.testing import calls, capture_toy, toy_hardware

REWRITING = {"copy_out_views", "insert_offloads"}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """The profile of a machine on which offloading is cheap."""
    hardware: Hardware = toy_hardware(1e9, kernel_s=1e-3)
    path = tmp_path / "profile.json"
    path.write_text(hardware.to_json())
    return path


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(to_json(capture_toy("deep").join()))
    return path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["pass", *map(str, arguments)])


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_runs_and_prints_json_and_a_table(name: str, graph: Path, profile: Path) -> None:
    done = run(name, graph, "--json", "-", "--option", f"hardware={profile}", "--option", "min_tensor_bytes=64")
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert written["pass"] == name
    assert written["summary"] in done.stderr
    assert (written["graph"] is not None) == (name in REWRITING)
    assert len({tuple(row) for row in written["rows"]}) <= 1, "rows have different columns"


def test_rows_say_what_the_analyses_say(graph: Path, profile: Path) -> None:
    """The toy model has six layers with 64 x 8 floats each."""
    joint = from_json(graph.read_text())
    config = OffloadConfig(hardware=profile, min_tensor_bytes=64, max_slowdown=1.0)
    candidates = run_pass("candidates", joint, config).rows
    layers = [row for row in candidates if row["moves"] is not None]
    assert [row["bytes"] for row in layers] == [64 * 8 * 4] * len(layers) and len(layers) >= 5
    intervals = {row["storage"]: row for row in run_pass("liveness", joint, config).rows}
    assert all(intervals[row["storage"]]["bytes"] == row["bytes"] for row in layers)
    plan = run_pass("plan", joint, config)
    assert {row["decision"] for row in plan.rows} == {"keep", "offload"}
    for row in plan.rows:
        if row["decision"] == "offload":
            assert row["offload"] <= row["release"] <= row["reload"] <= row["wait"]


def test_a_rewritten_graph_can_be_saved_and_is_verified(graph: Path, profile: Path, tmp_path: Path) -> None:
    after = tmp_path / "after.json"
    options = ("--option", f"hardware={profile}", "--option", "min_tensor_bytes=64", "--option", "policy=all")
    done = run("insert_offloads", graph, *options, "--save-graph", after)
    assert done.exit_code == 0, done.output
    assert "torch.ops.ssdtrain.reload.default" in done.stdout
    joint = from_json(after.read_text())
    verify_offloads(joint)
    assert len(calls(joint.graph, OFFLOAD)) >= 5
    assert run("verify_offloads", after).exit_code == 0


def test_the_host_tier_is_shown_saved_and_verified(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has staging for 16 chunks. Of these, 14 may stay, which is enough for all that the toy model saves."""
    monkeypatch.setenv("COLUMNS", "300")
    gpu = tmp_path / "gpu.json"
    gpu.write_text(toy_hardware(1e9, kernel_s=1e-3, device="toy GPU", staging_bytes=32 << 20).to_json())
    after = tmp_path / "after.json"
    options = ("--option", f"hardware={gpu}", "--option", "min_tensor_bytes=64", "--option", "policy=all")
    done = run("insert_offloads", graph, *options, "--save-graph", after)
    assert done.exit_code == 0, done.output
    assert "offload to host" in done.stdout
    sites = [site_of(offload) for offload in calls(from_json(after.read_text()).graph, OFFLOAD)]
    assert len(sites) >= 5
    assert all(site.host for site in sites)
    assert [site.reload_order for site in sites] == list(reversed(range(len(sites))))
    assert run("verify_offloads", after, *options).exit_code == 0
    refused = run("verify_offloads", after, *options, "--option", "host_budget_bytes=4194304")
    assert refused.exit_code == 1
    assert "the host tier would hold" in refused.output


def test_a_graph_that_breaks_an_invariant_is_exit_code_1(graph: Path, profile: Path, tmp_path: Path) -> None:
    """Backward reads what was released."""
    after = tmp_path / "after.json"
    options = ("--option", f"hardware={profile}", "--option", "min_tensor_bytes=64", "--option", "policy=all")
    run("insert_offloads", graph, *options, "--save-graph", after)
    content = json.loads(after.read_text())
    by_target = {node["target"]: node for node in reversed(content["nodes"])}  # the first of each op
    reloaded = {"node": by_target["ssdtrain::wait.default"]["name"]}
    reader = next(node for node in content["nodes"] if reloaded in node.get("args", ()))
    reader["args"] = [{"node": "tanh"} if argument == reloaded else argument for argument in reader["args"]]
    after.write_text(json.dumps(content))
    done = run("verify_offloads", after)
    assert done.exit_code == 1
    assert "reads tanh after" in done.output


def test_the_list_names_every_pass_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--list")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PASSES)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plam", "{graph}"), 2, "'plam' is not one of alias_sets"),
        (("plan", "{graph}", "--option", "max_slowdwn=1"), 2, "Did you mean 'max_slowdown'?"),
        (("plan", "{graph}.txt"), 2, "does not exist"),
        (("plan", "{graph}", "--save-graph", "/nowhere/at/all.json"), 2, "does not exist"),
        (("plan", "{profile}"), 3, "not a saved graph"),
        (("plan", "{graph}", "--option", "hardware=/nowhere/at/all"), 3, "which cannot be used"),
        (
            ("plan", "{graph}", "--option", "hardware={profile}", "--option", "memory_budget_bytes=1"),
            3,
            "Raise the budget",
        ),
    ],
)
def test_what_cannot_be_run_is_said(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    graph: Path,
    profile: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    done = run(*(argument.format(graph=graph, profile=profile) for argument in arguments))
    assert done.exit_code == code, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_a_graph_with_chunks_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "graph.json"
    done = CliRunner().invoke(app, ["explain", "encoder", "--option", "chunk_loss=4", "--save-graph", str(path)])
    assert (done.exit_code, path.exists()) == (2, False)
    assert "computed in chunks cannot be saved" in done.output


def test_explain_saves_the_graph_that_a_pass_takes(tmp_path: Path, profile: Path) -> None:
    """The second command knows no model."""
    path = tmp_path / "graph.json"
    arguments = ["explain", "encoder", "--layers", "1", "--hidden", "64", "--batch", "2", "--sequence", "32"]
    done = CliRunner().invoke(app, [*arguments, "--hardware", str(profile), "--save-graph", str(path)])
    assert done.exit_code == 0, done.output
    assert str(path) in done.stdout
    done = run("plan", path, "--option", f"hardware={profile}")
    assert done.exit_code == 0, done.output
    assert "of the step time" in done.stdout
