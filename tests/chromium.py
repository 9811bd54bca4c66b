"""Pages in headless Chromium, for tests that open a saved file, move, click and type."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no program chromium, chromium-browser or google-chrome")


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """One browser, for all tests of a file. Every test opens its own pages."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=[*SWITCHES])
        yield browser
        browser.close()


class OpenedFile:
    """An open page, with its console messages, errors and requests."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.as_uri()
        self.page.goto(self.url)

    def close(self) -> None:
        """Check that the page logged nothing and loaded nothing, and close it."""
        assert self.complaints == []
        assert [url for url in self.requests if url != self.url and not url.startswith("data:")] == []
        self.page.close()
