"""Content of a report: summary, table, drive lifetime, JSON, graphs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from ssdtrain_fx import ConfigError, OffloadConfig, Report, SSDTrainError
from ssdtrain_fx.passes.planning.plan import Keep, Offload, Plan, SavedStorage
from ssdtrain_fx.report.decisions import style_of
from ssdtrain_fx.report.endurance import ASSUMED_ENDURANCE_BYTES, DAY_S, TB, YEAR_S, Endurance, format_lifetime
from ssdtrain_fx.report.table import COLUMNS, make_rows

OPS = ("offload", "release", "reload", "wait")
NOTHING = Report(())


def storage(name: str, size_bytes: int = 8, **changes: Any) -> SavedStorage:
    plain: dict[str, Any] = {
        "saved_nodes": (name,),
        "op": "aten.mm.default",
        "shape": ("2",),
        "dtype": "float32",
        "device": "cpu",
        "is_input": False,
        "source": "model.py:1 x = f(x)",
        "decision": Keep("small"),
        **changes,
    }
    return SavedStorage(name=name, size_bytes=size_bytes, **plain)


# The text


def test_the_summary_comes_first_then_the_peaks_then_the_table(report: Report) -> None:
    report = dataclasses.replace(report, measured=None)  # as in a process that has run no step
    (graph,) = report.graphs
    plan = graph.plan
    first, before, after, parts, floor, decided, costs, empty, header, rule, *rows, inputs = str(report).splitlines()
    assert re.fullmatch(
        r"predicted activation peak [\d.]+ KiB -> [\d.]+ KiB; [\d.]+ KiB out and back per step; "
        r"[\d.]+ (ms|µs) exposed in a step of [\d.]+ (ms|µs) \(\+[\d.]+ %\); "
        r"at this rate a drive rated for 600 TB lasts [\d.,]+ (days|years)",
        first,
    )
    assert (
        before.startswith("before ")
        and after.startswith("after  ")
        and parts.startswith("  parts  ") is False
        and "floor" in floor
    )
    made = [saved for saved in plan.storages if not saved.is_input]
    assert decided == f"{len(made)} saved storages: {len(plan.offloaded)} offload"
    taking_time = sum(seconds > 0 for seconds in graph.problem.node_s)
    assert costs == f"seconds per node: 0 measured, {taking_time} by roofline"
    assert empty == ""
    assert header.split() == [name for name in COLUMNS if name != "module"], "an empty column is left out"
    assert set(rule) == {"-"}
    assert inputs.startswith(f"and {len(plan.storages) - len(made)} inputs, ")
    assert sum(int(row.split()[1]) for row in rows) == len(made), "every storage is in one row"


def test_layers_that_are_alike_are_one_row(report: Report) -> None:
    (graph,) = report.graphs
    (row,) = graph.rows()
    assert [saved.op for saved in row.storages] == ["aten.tanh.default"] * 6
    assert row.size_bytes == 6 * 64 * 32 * 4
    assert "6 x 8.00 KiB" in graph.table()
    assert len(graph.rows(fold=False)) == 6


def test_rows_fold_only_what_is_alike() -> None:
    modules = {"a": "h.0.up", "b": "h.1.up", "c": "h.3.up", "d": "h.2.down", "e": "h.4.up", "f": "h.5.up"}
    moved = Offload("e", 1, 2, 3, 4, 0.1, 0.2, "away")
    storages = [storage(name) for name in "abcd"] + [storage("e", decision=moved), storage("f", 16)]
    rows = make_rows(storages, modules)
    assert [(row.module, "".join(one.name for one in row.storages)) for row in rows] == [
        ("h.0..1,3.up", "abc"),
        ("h.2.down", "d"),
        ("h.4.up", "e"),
        ("h.5.up", "f"),
    ]


def test_numbers_that_belong_to_a_name_are_not_layers() -> None:
    rows = make_rows([storage("a"), storage("b")], {"a": "h.0.norm_1", "b": "h.0.norm_2"})
    assert [row.module for row in rows] == ["h.0.norm_1", "h.0.norm_2"]


def test_the_table_can_be_sorted() -> None:
    moved = Offload("a", 1, 2, 3, 4, 0.1, 0.2, "away")
    storages = [storage("a_10", 1), storage("a_9", 3), storage("b", 2, decision=moved)]

    def names(**options: Any) -> list[str]:
        return [row.storages[0].name for row in make_rows(storages, {}, **options)]

    assert names() == ["a_10", "a_9", "b"]
    assert names(sort="size") == ["a_9", "b", "a_10"]
    assert names(sort="name") == ["a_9", "a_10", "b"]
    assert names(sort="decision") == ["a_9", "a_10", "b"]
    with pytest.raises(
        ConfigError, match="Sort order 'colour' is unknown; expected one of order, size, name, decision"
    ):
        names(sort="colour")


def test_nothing_to_tell() -> None:
    assert str(NOTHING).startswith("No graph of this call saves anything for backward")
    assert NOTHING.diff() == ""
    assert NOTHING.endurance.lifetime_s == float("inf")


# The host tier


def test_what_stays_in_host_memory_is_said(tiered_report: Report) -> None:
    """In the summary, the counts, the table, the activities of every storage, and the line of the exact planner."""
    (graph,) = tiered_report.graphs
    first, *_ = lines = str(tiered_report).splitlines()
    assert "48.00 KiB out and back per step, up to 4.00 MiB in host memory; " in first
    assert "6 saved storages: 4 offload, 2 host" in lines
    on_ssd, on_host = graph.rows()
    assert [style_of(row.storages[0].decision).name for row in (on_ssd, on_host)] == ["offload", "host"]
    assert [len(row.storages) for row in (on_ssd, on_host)] == [4, 2]
    assert "in host memory between forward and backward" in graph.table()
    staying = {saved.name for saved in on_host.storages}
    for kind in ("copy_out", "copy_in"):
        assert {one.storage for one in graph.timeline.activities if one.kind == kind} == staying
    assert staying.isdisjoint(one.storage for one in graph.timeline.activities if one.kind in ("write", "read"))
    said = graph.optimality(OffloadConfig(max_slowdown=0.1), time_limit_s=5)
    assert re.search(
        r"allowed, no host tier: no placement has a peak below .*; this plan has a host tier and is ", said
    )


def test_json_with_a_host_tier_goes_there_and_back(tiered_report: Report) -> None:
    assert Report.from_json(tiered_report.to_json()) == tiered_report
    (graph,) = tiered_report.graphs
    assert Plan.from_json(graph.plan.to_json()) == graph.plan


# The drive


def test_lifetime_is_rated_bytes_by_bytes_per_time() -> None:
    """1 GB every 4 seconds: 250 MB/s use up 600 TB in 2.4 million seconds."""
    assert Endurance(600 * TB, 10**9, 4.0).lifetime_s == pytest.approx(2.4e6)
    assert str(Endurance(600 * TB, 10**9, 4.0)) == "at this rate a drive rated for 600 TB lasts 28 days"
    assert str(Endurance(1200 * TB, 0, 4.0)) == "a drive rated for 1,200 TB is not written to"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5 * DAY_S, "1.5 days"), (700 * DAY_S, "700 days"), (3 * YEAR_S, "3.0 years"), (float("inf"), "forever")],
)
def test_lifetimes_for_people(seconds: float, text: str) -> None:
    assert format_lifetime(seconds) == text


def test_the_report_rates_the_drive_by_the_plan(report: Report) -> None:
    plan = report.plan
    expected_s = ASSUMED_ENDURANCE_BYTES / plan.offloaded_bytes * (plan.step_s + plan.exposed_s)
    assert report.endurance.lifetime_s == pytest.approx(expected_s)
    twice = Report(report.graphs * 2, 2 * ASSUMED_ENDURANCE_BYTES)
    assert twice.endurance.lifetime_s == pytest.approx(2 * expected_s), "twice the bytes in twice the time"


def test_the_host_tier_does_not_wear_the_drive(report: Report, tiered_report: Report) -> None:
    """Two of six storages of 8 KiB are not written."""
    assert tiered_report.plan.offloaded_bytes == report.plan.offloaded_bytes == 6 * 8192
    assert tiered_report.endurance.written_bytes == 4 * 8192


def test_a_rating_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="rated endurance of the drive is 0 bytes; expected a number above 0"):
        Endurance(0, 1, 1.0)


# JSON


def test_json_goes_there_and_back(report: Report) -> None:
    text = report.to_json()
    assert Report.from_json(text) == report
    assert Report.from_json(text).to_json() == text
    assert json.loads(text)["schema"] == "ssdtrain_fx.report/3"


def test_json_of_nothing() -> None:
    assert Report.from_json(NOTHING.to_json()) == NOTHING


def test_other_json_is_refused(report: Report) -> None:
    with pytest.raises(ValueError, match="not JSON: Expecting property name"):
        Report.from_json("{")
    with pytest.raises(ValueError, match=r"The schema of this report is None; expected 'ssdtrain_fx\.report/3'"):
        Report.from_json("[]")
    plain = json.loads(report.to_json())
    plain["graphs"][0]["plan"]["storages"][0]["size_bytes"] = "large"
    with pytest.raises(ValueError, match=r"\.plan\.storages\[0\]\.size_bytes is 'large'; expected int"):
        Report.from_json(json.dumps(plain))
    del plain["graphs"][0]["plan"]["storages"][0]["size_bytes"]
    with pytest.raises(ValueError, match="expected the fields of SavedStorage: decision, device"):
        Report.from_json(json.dumps(plain))


def test_every_field_of_the_json_is_documented(tiered_report: Report) -> None:
    """docs/report.md names every field of every object in code type. The fields come from the JSON itself."""
    document = (Path(__file__).parent.parent.parent / "docs" / "report.md").read_text()
    documented = set(re.findall(r"`(\w+)`", document))
    named_freely = {"flops_per_s", "elements_per_s"}

    def fields(value: Any, parent: str = "") -> set[str]:
        if isinstance(value, list):
            return {name for one in value for name in fields(one)}
        if isinstance(value, dict) and parent not in named_freely:
            return set(value) | {name for key, one in value.items() for name in fields(one, key)}
        return set()

    found = fields(json.loads(tiered_report.to_json()))
    assert len(found) > 60
    assert found - documented == set()


def test_the_plan_of_the_only_graph(report: Report) -> None:
    assert report.plan == report.graphs[0].plan
    with pytest.raises(ValueError, match="This report has 2 graphs; expected one"):
        _ = Report(report.graphs * 2).plan


# Graphs


def test_the_diff_has_the_nodes_of_every_storage(report: Report) -> None:
    (graph,) = report.graphs
    diff = graph.diff().splitlines()
    assert diff[:2] == ["--- before", "+++ after"]
    for op in OPS:
        assert sum(f"ssdtrain.{op}.default(" in line for line in diff if line[0] == "+") == len(graph.plan.offloaded)
    assert not any("ssdtrain." in line for line in diff if line[0] != "+")
    assert not any(line.endswith("= None") for line in diff), "frees of values are left out"
    unmoved = dataclasses.replace(graph, joint_after=graph.joint_before)
    assert unmoved.diff() == ""


def test_networkx_knows_who_reads_whom(report: Report) -> None:
    (graph,) = report.graphs
    (after,) = report.to_networkx()
    before = graph.to_networkx(after=False)
    moved = graph.plan.offloaded[0].name
    executed = [name for name, data in after.nodes(data=True) if data["kind"] == "node"]
    chain = [name for name in executed if after.nodes[name]["storage"] == moved]
    assert [after.nodes[name]["op"].split(".")[1] for name in chain] == list(OPS)
    assert [after.has_edge(*pair) for pair in zip([moved, *chain], chain, strict=False)] == [True] * 4
    assert [after.nodes[name]["phase"] for name in chain] == ["forward", "forward", "backward", "backward"]
    in_backward = [name for name in before[moved] if before.nodes[name]["phase"] == "backward"]
    backward_readers = [name for name in in_backward if before.edges[moved, name]["relation"] == "feeds"]
    assert backward_readers
    for reader in backward_readers:
        assert after.has_edge(chain[-1], reader) and not after.has_edge(moved, reader)
    assert [after.nodes[name]["position"] for name in executed] == list(range(len(executed)))
    assert sum(after.nodes[name]["seconds"] for name in executed) == pytest.approx(graph.timeline.after.step_s)
    (made,) = (name for name in after[moved] if after.edges[moved, name]["relation"] == "makes")
    assert after.nodes[made]["size_bytes"] == graph.plan.offloaded[0].size_bytes
    assert after.edges[made, chain[1]]["frees"], "the edge to its release"


def test_dot_shows_the_neighbourhood_of_a_storage(report: Report) -> None:
    (graph,) = report.graphs
    moved, other = graph.plan.offloaded[0].name, graph.plan.offloaded[-1].name
    dot = graph.to_dot(around=moved, hops=1)
    assert dot.startswith("digraph step {") and dot.endswith("}")
    for op in OPS:
        assert f"ssdtrain.{op}.default" in dot
    assert f'"{moved}" [label=' in dot
    assert f'"{other}" [label=' not in dot
    with pytest.raises(SSDTrainError, match="The graph has no node or storage named 'unknown'"):
        graph.to_dot(around="unknown")


@pytest.mark.skipif(shutil.which("dot") is None, reason="the program `dot` of Graphviz is not installed")
def test_graphviz_draws_every_node(report: Report) -> None:
    (graph,) = report.graphs
    root = ElementTree.fromstring(graph.to_svg())
    titles = {element.text for element in root.iter("{http://www.w3.org/2000/svg}title")}
    assert {node.name for node in graph.timeline.after.nodes} <= titles


def test_without_graphviz_the_error_says_what_to_do(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SSDTrainError, match="`dot` is not installed"):
        report.graphs[0].to_svg()
