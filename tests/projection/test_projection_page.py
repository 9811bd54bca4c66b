"""The page of a sweep in a real browser: tests open the saved file in headless Chromium and move its sliders."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import OpenedFile, launched, needs_chromium

from ssdtrain_fx.projection.catalog import find_drive
from ssdtrain_fx.projection.page import render_page
from ssdtrain_fx.projection.project import Projection
from ssdtrain_fx.projection.sweep import Sweep
from ssdtrain_fx.report.endurance import format_lifetime
from ssdtrain_fx.units import format_bytes, format_seconds

SLIDERS = ("drives", "slowdown", "data")
START = (1, 1, 2)
"""One drive, 2 %, and the 3 data-parallel GPUs of the workload."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


class Opened(OpenedFile):
    """The page of a sweep."""

    def __init__(self, browser: Any, sweep: Sweep, directory: Path, **options: Any) -> None:
        path = directory / "sweep.html"
        path.write_text(render_page(sweep), encoding="utf-8")
        super().__init__(browser, path, **options)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def cell(self, way: str, key: str) -> str:
        return self.text(f"#rows [data-way={way}][data-key={key}]")

    def move(self, slider: str, position: int) -> None:
        self.page.locator(f"#{slider}").fill(str(position))

    def shows(self, projection: Projection) -> None:
        """Check every number against the projection."""
        gpu = projection.cluster.gpu
        for way, outcome in (("keep", projection.keep), ("offload", projection.offload)):
            memory = self.text(f"#{way}")
            assert memory.startswith(f"{way}: {format_bytes(outcome.memory_bytes)}\n")
            room = gpu.memory_bytes - outcome.memory_bytes
            said = f"fits\n{format_bytes(room)} free" if outcome.fits else f"does not fit\n{format_bytes(-room)} too"
            assert said in memory
            assert f"states {format_bytes(projection.state_bytes)} · " in memory
            assert f"activations {format_bytes(outcome.activation_bytes)} · context 2.00 GiB" in memory
            assert self.cell(way, "step") == format_seconds(outcome.step_s)
            exposed = format_seconds(outcome.exposed_s) if outcome.exposed_s > 1e-7 else "none"
            assert self.cell(way, "exposed") == exposed
            assert self.cell(way, "bubble") == f"{100 * projection.parallelism.bubble:.3g} %"
            assert self.cell(way, "tokens") == f"{outcome.tokens_per_s:,.0f}"
            assert self.cell(way, "share") == f"{100 * outcome.model_flops_share:.3g} %"
            self._widths(way, projection)
        daily = projection.offload.written_bytes_per_day / 1e12
        assert self.cell("offload", "written") == (f"{daily:,.0f} TB" if daily >= 100 else f"{daily:.3g} TB")
        assert self.cell("offload", "lifetime") == format_lifetime(projection.lifetime_s)
        cost = projection.drive_cost_usd
        assert self.cell("offload", "cost") == ("no price is known" if cost is None else f"${cost:,.0f}")
        assert [self.cell("keep", key) for key in ("written", "lifetime", "cost")] == ["nothing", "no drives", "none"]
        assert f" on {projection.parallelism.gpus:,} {gpu.name}" in self.text("h1")
        assert f"data {projection.parallelism.data} x " in self.text("#schedule")
        spot = self.page.locator("#chart .here title").inner_html()
        assert spot.endswith(f": {format_bytes(projection.offload.activation_bytes)}")
        assert spot.startswith(f"{projection.cluster.drives_per_gpu:g} ")

    def _widths(self, way: str, projection: Projection) -> None:
        """The parts of a bar are as long as their sizes, on the scale of the line at the memory of the GPU."""
        box = self.page.locator(f"#{way} .track").bounding_box()
        line = self.page.locator(f"#{way} .at-limit").bounding_box()
        scale = projection.cluster.gpu.memory_bytes / (line["x"] + line["width"] / 2 - box["x"])
        outcome = projection.keep if way == "keep" else projection.offload
        for part, size in (("states", projection.state_bytes), ("activations", outcome.activation_bytes)):
            width = self.page.locator(f"#{way} [data-part={part}]").bounding_box()["width"]
            assert width * scale == pytest.approx(size, rel=0.02, abs=2 * scale)


@needs_chromium
def test_it_starts_at_what_was_asked_for(browser: Any, pipeline_sweep: Sweep, tmp_path: Path) -> None:
    opened = Opened(browser, pipeline_sweep, tmp_path)
    opened.shows(pipeline_sweep.at(*START))
    assert opened.text("#drives-value") == "1"
    assert opened.text("#slowdown-value") == "2 %"
    assert opened.text("#data-value") == "6 GPUs"
    assert opened.text("h1") == "llama, 4 layers of 4096 on 6 H100 SXM"
    opened.close()


@needs_chromium
@pytest.mark.parametrize("name", ["pipeline_sweep", "alone_sweep"])
def test_each_slider_shows_other_numbers(
    browser: Any, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    sweep: Sweep = request.getfixturevalue(name)
    opened = Opened(browser, sweep, tmp_path)
    last = [len(axis) - 1 for axis in (sweep.drives_per_gpu, sweep.max_slowdowns, sweep.data)]
    for point in [(0, 0, 0), (last[0], 0, 0), (last[0], last[1], 0), (last[0], last[1], last[2]), (2, 1, 1)]:
        for slider, position in zip(SLIDERS, point, strict=True):
            opened.move(slider, position)
        opened.shows(sweep.at(*point))
    opened.close()


@needs_chromium
@pytest.mark.parametrize("axis", range(3), ids=SLIDERS)
def test_the_keyboard_moves_each_slider(browser: Any, pipeline_sweep: Sweep, tmp_path: Path, axis: int) -> None:
    opened = Opened(browser, pipeline_sweep, tmp_path)
    page = opened.page
    for _ in range(axis + 1):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == SLIDERS[axis]
    point = list(START)
    for key, step in (("ArrowRight", 1), ("ArrowLeft", -1), ("ArrowLeft", -1)):
        page.keyboard.press(key)
        point[axis] += step
        opened.shows(pipeline_sweep.at(*point))
    label = opened.text(f"#{SLIDERS[axis]}-value")
    assert page.locator(f"#{SLIDERS[axis]}").get_attribute("aria-valuetext") == label
    page.keyboard.press("Home")
    point[axis] = 0
    opened.shows(pipeline_sweep.at(*point))
    assert page.locator("#drives").get_attribute("aria-valuetext") == ("0.5 (one for 2 GPUs)" if axis == 0 else "1")
    opened.close()


@needs_chromium
def test_a_point_of_the_chart_can_be_chosen(browser: Any, pipeline_sweep: Sweep, tmp_path: Path) -> None:
    opened = Opened(browser, pipeline_sweep, tmp_path)
    page = opened.page
    assert page.locator("#chart path.slowdown").count() == 3
    assert page.locator("#chart .spot").count() == 3 * 4
    lowest = page.locator("#chart .spot", has=page.locator("title", has_text="8 drives per GPU, 10 %"))
    lowest.click()
    opened.shows(pipeline_sweep.at(3, 2, START[2]))
    assert page.locator("#drives").input_value() == "3" and page.locator("#slowdown").input_value() == "2"
    opened.close()


@needs_chromium
def test_the_chart_orders_points_by_their_memory(browser: Any, pipeline_sweep: Sweep, tmp_path: Path) -> None:
    opened = Opened(browser, pipeline_sweep, tmp_path)
    # Slowdowns by rising distance from the shown one, which is drawn last.
    heights = opened.page.eval_on_selector_all("#chart .spot", "all => all.map(one => Number(one.getAttribute('cy')))")
    order = (0, 2, 1)
    sizes = [
        pipeline_sweep.at(drives, slowdown, 0).offload.activation_bytes for slowdown in order for drives in range(4)
    ]
    by_size = [height for _, height in sorted(zip(sizes, heights, strict=True))]
    assert by_size == sorted(by_size, reverse=True), "y grows downwards"
    opened.close()


@needs_chromium
def test_what_does_not_fit_is_said(browser: Any, pipeline_sweep: Sweep, tmp_path: Path) -> None:
    tight = (pipeline_sweep.at(*START).keep.memory_bytes + pipeline_sweep.at(*START).offload.memory_bytes) // 2
    gpu = dataclasses.replace(pipeline_sweep.cluster.gpu, memory_bytes=tight)

    def on_smaller(projection: Projection) -> Projection:
        outcomes = [
            dataclasses.replace(one, fits=one.memory_bytes <= tight) for one in (projection.keep, projection.offload)
        ]
        cluster = dataclasses.replace(projection.cluster, gpu=gpu)
        return dataclasses.replace(projection, cluster=cluster, keep=outcomes[0], offload=outcomes[1])

    cluster = dataclasses.replace(pipeline_sweep.cluster, gpu=gpu)
    sweep = dataclasses.replace(
        pipeline_sweep, cluster=cluster, projections=tuple(map(on_smaller, pipeline_sweep.projections))
    )
    opened = Opened(browser, sweep, tmp_path)
    opened.shows(sweep.at(*START))
    assert opened.text("#keep .badge") == "does not fit" and opened.text("#offload .badge") == "fits"
    assert "which this GPU has not" in opened.text("#table-note")
    assert opened.page.locator("#rows .unreachable").count() == opened.page.locator("#rows [data-way=keep]").count()
    opened.move("data", 8)
    opened.shows(sweep.at(1, 1, 8))
    opened.close()


@needs_chromium
def test_a_drive_without_a_price_and_one_that_is_not_written_to(
    browser: Any, pipeline_sweep: Sweep, tmp_path: Path
) -> None:
    def without(projection: Projection) -> Projection:
        cluster = dataclasses.replace(projection.cluster, drive=find_drive("Samsung 980 PRO 2TB"))
        idle = dataclasses.replace(projection.offload, written_bytes=0)
        return dataclasses.replace(projection, cluster=cluster, offload=idle)

    sweep = dataclasses.replace(pipeline_sweep, projections=tuple(map(without, pipeline_sweep.projections)))
    opened = Opened(browser, sweep, tmp_path)
    assert opened.cell("offload", "cost") == "no price is known"
    assert opened.cell("offload", "lifetime") == "forever"
    assert opened.cell("offload", "written") == "nothing"
    opened.close()


@needs_chromium
def test_the_footer_names_sources_and_assumptions(browser: Any, pipeline_sweep: Sweep, tmp_path: Path) -> None:
    opened = Opened(browser, pipeline_sweep, tmp_path)
    footer = opened.text("footer")
    cluster = pipeline_sweep.cluster
    assert "These are projections, not measurements" in footer
    for source in (*cluster.gpu.sources, *cluster.drive.sources):
        assert source in footer
    assert "products 60 %, memory 80 %, host 86 %, drives 90 %, network 80 %" in footer
    assert opened.page.locator("a").count() == 0, "addresses are text"
    opened.close()


@needs_chromium
def test_a_grid_of_one_point_has_sliders_that_do_not_move(browser: Any, pipeline_sweep: Sweep, tmp_path: Path) -> None:
    point = pipeline_sweep.at(0, 1, 2)
    sweep = dataclasses.replace(
        pipeline_sweep, drives_per_gpu=(0.5,), max_slowdowns=(0.02,), data=(3,), projections=(point,)
    )
    opened = Opened(browser, sweep, tmp_path)
    opened.shows(point)
    assert opened.page.locator("input:disabled").count() == 3
    opened.close()


@needs_chromium
def test_what_a_model_is_called_is_shown_and_not_run(browser: Any, pipeline_sweep: Sweep, tmp_path: Path) -> None:
    evil = "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">"
    opened = Opened(browser, dataclasses.replace(pipeline_sweep, model=evil), tmp_path)
    assert opened.text("h1").startswith("</script><script>") and "<script>" in opened.text("footer")
    assert opened.page.title().startswith("ssdtrain_fx: </script>")
    opened.shows(pipeline_sweep.at(*START))
    opened.close()


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 760, 375])
def test_it_fits_any_screen_in_both_schemes(
    browser: Any, pipeline_sweep: Sweep, tmp_path: Path, scheme: str, width: int
) -> None:
    opened = Opened(browser, pipeline_sweep, tmp_path, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    red, _, _ = map(int, re.findall(r"\d+", opened.page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert (red < 60) == (scheme == "dark")
    for label in opened.page.locator("#chart text").all():
        box = label.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    opened.shows(pipeline_sweep.at(*START))
    opened.close()


def test_the_page_names_no_other_file_and_forbids_the_network(pipeline_sweep: Sweep) -> None:
    page = render_page(pipeline_sweep)
    assert "default-src 'none'" in page
    script = page[: page.index('<script type="application/json"')] + page[page.index('"use strict"') :]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", script)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)


def test_equal_sweeps_give_equal_pages(pipeline_sweep: Sweep) -> None:
    assert render_page(pipeline_sweep) == render_page(dataclasses.replace(pipeline_sweep))
