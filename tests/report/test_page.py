"""The page in a real browser: tests open the saved file in headless Chromium, hover, click and type."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from chromium import OpenedFile, launched, needs_chromium

from ssdtrain_fx import OffloadConfig, Report, explain
from ssdtrain_fx.passes.analysis.node_calls import CostSources, Unmeasured
from ssdtrain_fx.passes.planning.plan import Keep, PlannedDecision
from ssdtrain_fx.report.decisions import STYLES
from ssdtrain_fx.report.page import render_page
from ssdtrain_fx.studies.zoo import build


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


class Opened(OpenedFile):
    """The page of a report."""

    def __init__(self, browser: Any, report: Report, directory: Path, **options: Any) -> None:
        super().__init__(browser, report.save(directory / "report.html"), **options)

    def names(self) -> list[str]:
        """The name of the first storage of every visible row."""
        return [text.split(" ")[0] for text in self.page.locator("#rows tr td:nth-child(2) button").all_inner_texts()]


@pytest.fixture
def mixed(report: Report) -> Report:
    """Like `report`, but the last storage is kept: two decisions in one table."""
    (graph,) = report.graphs
    *others, last = (saved for saved in graph.plan.storages if not saved.is_input)
    kept = dataclasses.replace(last, decision=Keep("because of the test"))
    return Report((dataclasses.replace(graph, plan=dataclasses.replace(graph.plan, storages=(*others, kept))),))


@needs_chromium
def test_it_shows_the_figures_of_the_plan(browser: Any, report: Report, tmp_path: Path) -> None:
    opened = Opened(browser, report, tmp_path)
    plan = report.plan
    tiles = opened.page.locator("#tiles").inner_text()
    assert f"{plan.peak_after_bytes / 1024:.1f} KiB" in tiles and f"{plan.peak_before_bytes / 1024:.1f} KiB" in tiles
    assert "48.0 KiB" in tiles, "six storages of 8 KiB are offloaded"
    assert "6 of 6 storages leave memory" in tiles
    assert "rated for 600 TB written" in tiles
    peaks = opened.page.locator("#peaks").inner_text()
    assert plan.peak_before.node in peaks and plan.peak_after.node in peaks
    for name, _ in plan.peak_before.largest:
        assert name in peaks
    opened.close()


@needs_chromium
def test_it_tells_where_the_seconds_come_from(browser: Any, report: Report, tmp_path: Path) -> None:
    (graph,) = report.graphs
    costs = CostSources(
        measured=3, roofline=4, unmeasured=(Unmeasured("aten.<sort>", "a size that depends on data", 2),)
    )
    for one in (graph, dataclasses.replace(graph, costs=costs)):
        opened = Opened(browser, Report((one,)), tmp_path)
        assert f"planned for a machine for tests; {one.costs}. " in opened.page.locator("#footer").inner_text()
        opened.close()
    assert re.fullmatch(r"seconds per node: 0 measured, \d+ by roofline", str(graph.costs))


@needs_chromium
def test_the_host_tier_has_a_separate_lane(browser: Any, report: Report, tiered_report: Report, tmp_path: Path) -> None:
    opened = Opened(browser, tiered_report, tmp_path)
    assert "6 of 6 storages leave memory, up to 4.00 MiB in host memory" in opened.page.locator("#tiles").inner_text()
    lanes = opened.page.locator("#chart text", has_text=re.compile("^(write|read|host)$"))
    assert lanes.all_text_contents() == ["write", "read", "host"]
    legend = opened.page.locator("#legend").inner_text()
    assert "copy_out" in legend and "copy_in" in legend
    opened.page.locator("#rows button").nth(1).click()
    details = opened.page.locator("#details")
    assert "copy_out from" in details.locator("[data-step=offload]").inner_text()
    assert "copy_in from" in details.locator("[data-step=reload]").inner_text()
    opened.close()
    plain = Opened(browser, report, tmp_path)
    assert plain.page.locator("#chart text", has_text=re.compile("^(write|read|host)$")).count() == 2
    plain.close()


@needs_chromium
def test_hovering_tells_about_a_tensor(browser: Any, report: Report, tmp_path: Path) -> None:
    opened = Opened(browser, report, tmp_path)
    tip = opened.page.locator("#tip")
    assert tip.is_hidden()
    name = report.plan.offloaded[2].name
    bars = opened.page.locator("#chart g.bar", has=opened.page.locator("line")).all()
    assert len(bars) == 6
    bars[2].hover()
    assert tip.is_visible()
    assert name in tip.inner_text() and "8.00 KiB · [64, 32] float32" in tip.inner_text()
    box = opened.page.locator("#chart").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 100)
    assert "in memory: " in tip.inner_text() and "backward" in tip.inner_text()
    opened.page.mouse.move(box["x"] + 10, box["y"] - 60)
    assert tip.is_hidden()
    opened.close()


@needs_chromium
def test_clicking_shows_the_four_nodes_and_the_code_around_them(browser: Any, report: Report, tmp_path: Path) -> None:
    opened = Opened(browser, report, tmp_path)
    page = opened.page
    page.locator("#rows button").first.click()
    details = page.locator("#details")
    assert details.is_visible()
    moved, other = report.plan.offloaded[0].name, report.plan.offloaded[1].name
    assert page.locator("#details-title").inner_text() == moved
    nodes = report.graphs[0].timeline.after.nodes
    for op in ("offload", "release", "reload", "wait"):
        step = details.locator(f"[data-step={op}]")
        (position,) = (idx for idx, node in enumerate(nodes) if node.storage == moved and f".{op}." in node.op)
        assert f"position {position} of {len(nodes)}" in step.inner_text()
        here = step.locator(".here").inner_text()
        assert here.strip().startswith(f"{nodes[position].name}:") and f"ssdtrain.{op}.default(" in here
        assert step.locator("pre span").count() == 7, "three lines before and three after"
    assert "write from" in details.locator("[data-step=offload]").inner_text()
    page.locator("#member").select_option(label=f"{other}  ")
    assert page.locator("#details-title").inner_text() == other
    page.keyboard.press("Escape")
    assert details.is_hidden()
    opened.close()


@needs_chromium
def test_a_bar_can_be_clicked(browser: Any, report: Report, tmp_path: Path) -> None:
    opened = Opened(browser, report, tmp_path)
    opened.page.locator("#chart g.bar", has=opened.page.locator("line")).nth(3).click()
    assert opened.page.locator("#details-title").inner_text() == report.plan.offloaded[3].name
    opened.close()


@needs_chromium
def test_decisions_filter_table_and_picture(browser: Any, mixed: Report, tmp_path: Path) -> None:
    opened = Opened(browser, mixed, tmp_path)
    page = opened.page
    *moved, kept = (saved.name for saved in mixed.plan.storages)
    lives = page.locator("#chart g.bar", has=page.locator("line"))
    assert opened.names() == [moved[0], kept]
    assert lives.count() == 6
    page.get_by_text("offload 5").click()
    assert opened.names() == [kept]
    assert lives.count() == 1
    page.get_by_text("keep 1").click()
    assert opened.names() == []
    page.get_by_text("offload 5").click()
    assert opened.names() == [moved[0]]
    opened.close()


@needs_chromium
def test_search_and_sort(browser: Any, mixed: Report, tmp_path: Path) -> None:
    opened = Opened(browser, mixed, tmp_path)
    *moved, kept = (saved.name for saved in mixed.plan.storages)
    opened.page.get_by_role("button", name="decision").click()
    assert opened.names() == [kept, moved[0]]
    opened.page.get_by_role("button", name="decision").click()
    assert opened.names() == [moved[0], kept]
    opened.page.get_by_role("button", name="size").click()
    assert opened.page.locator("th[aria-sort=descending]").inner_text() == "size"
    assert opened.names() == [moved[0], kept], "one of 5 x 8 KiB before one of 8 KiB"
    opened.page.get_by_label("Search storages").fill(kept)
    assert opened.names() == [kept]
    opened.close()


@needs_chromium
def test_the_keyboard_does_it_all(browser: Any, report: Report, tmp_path: Path) -> None:
    opened = Opened(browser, report, tmp_path)
    page = opened.page
    page.locator("#chart").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "node 3 of " in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#rows') !== null"):
            break
    page.keyboard.press("Enter")
    assert page.locator("#details").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    assert page.evaluate("document.activeElement.closest('#rows') !== null"), "focus returns to the table"
    opened.close()


@needs_chromium
def test_the_diff_opens(browser: Any, report: Report, tmp_path: Path) -> None:
    opened = Opened(browser, report, tmp_path)
    opened.page.locator("#graph summary").click()
    opened.page.wait_for_selector("#diff .add")
    added = "\n".join(opened.page.locator("#diff .add").all_inner_texts())
    assert added.count("ssdtrain.wait.default(") == 6
    opened.close()


LONG_TEXTS = """() => {
  const write = (cells, text) => document.querySelectorAll(cells).forEach(cell => cell.textContent = text);
  write("#rows .cut", "model.transformer.h.0..11.attn.c_attn".repeat(2));
  write("#rows td:last-child", "below min_tensor_bytes=1048576");
}"""


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 1010, 760, 360])
def test_it_fits_any_screen_in_both_schemes(
    browser: Any, report: Report, tmp_path: Path, scheme: str, width: int
) -> None:
    opened = Opened(browser, report, tmp_path, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.evaluate(LONG_TEXTS)
    assert opened.page.evaluate("(table => table.scrollWidth <= table.clientWidth)(document.querySelector('.scroll'))")
    red, _, _ = map(int, re.findall(r"\d+", opened.page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert (red < 60) == (scheme == "dark")
    opened.page.locator("#rows button").first.click()
    assert opened.page.locator("#sheet").bounding_box()["width"] < width + 1
    opened.close()


@needs_chromium
def test_several_graphs_have_a_tab_each(browser: Any, report: Report, mixed: Report, tmp_path: Path) -> None:
    opened = Opened(browser, Report(report.graphs + mixed.graphs), tmp_path)
    assert len(opened.names()) == 1
    opened.page.get_by_role("tab", name="graph 1").click()
    assert len(opened.names()) == 2
    opened.close()


@needs_chromium
def test_a_report_without_graphs_says_so(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, Report(()), tmp_path)
    assert "No graph of this call saves anything" in opened.page.locator("main").inner_text()
    assert opened.page.locator("#tiles").is_hidden()
    opened.close()


@needs_chromium
def test_what_a_model_is_called_is_shown_and_not_run(browser: Any, report: Report, tmp_path: Path) -> None:
    evil = "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">"
    (graph,) = report.graphs
    saved = [dataclasses.replace(one, source=evil, op=evil) for one in graph.plan.storages]
    plan = dataclasses.replace(graph.plan, storages=tuple(saved))
    opened = Opened(browser, Report((dataclasses.replace(graph, plan=plan),)), tmp_path)
    assert "<script>" in opened.page.locator("#rows").inner_text()
    opened.page.locator("#rows button").first.click()
    assert opened.page.title() != "run"
    opened.close()


def _page(report: Report) -> str:
    return render_page(report.graphs, rated_endurance_bytes=report.rated_endurance_bytes)


def test_the_page_names_no_other_file_and_forbids_the_network(report: Report) -> None:
    page = _page(report)
    assert "default-src 'none'" in page
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page.split('<script type="application/json"')[0])
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)


def test_equal_reports_give_equal_pages(report: Report) -> None:
    assert _page(report) == _page(Report.from_json(report.to_json()))


def test_every_decision_of_a_plan_has_a_distinct_style() -> None:
    assert set(STYLES) == {kind.__name__ for kind in get_args(PlannedDecision)}
    for look in ("color", "name", "meaning"):
        assert len({getattr(style, look) for style in STYLES.values()}) == len(STYLES)


@pytest.mark.slow
def test_twelve_layers_stay_small() -> None:
    model, make_batch = build("gpt2", layers=12, hidden=384, batch=8, sequence=512, vocab=2048)
    inputs = make_batch(torch.Generator().manual_seed(0))
    page = _page(explain(model, *inputs, config=OffloadConfig(max_slowdown=0.15)))
    assert len(page.encode()) < 2_000_000
    data = re.search(r'id="report">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert len(json.loads(data[1])["graphs"]) == 1
