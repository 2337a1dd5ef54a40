"""Debian's Chromium for tests of the page, and a folder for pictures of its screens."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"


@contextmanager
def browser() -> Iterator[Any]:
    """A headless browser. Skips the test if none is installed."""
    if CHROMIUM is None:
        pytest.skip("chromium is missing: `make setup-system` installs it")
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing: `make setup` installs it"
    )
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )  # CI runs as root
        try:
            yield found
        finally:
            found.close()


class Watched:
    """A page of the browser, with the errors of its console. It can reach no other host."""

    def __init__(self, browser: Any, address: str, token: str | None, **options: Any) -> None:
        options = {"viewport": {"width": 1280, "height": 900}} | options
        self.context = browser.new_context(**options)
        self.address = address
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        if token is not None:
            script = (
                "if (location.protocol !== 'about:') "
                f"sessionStorage.setItem('trainwright-token', '{token}')"
            )
            self.context.add_init_script(script)
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._note)

    def open(self, screen: str) -> Any:
        """Load a screen."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/page/#/{screen}")
        return self.page

    def picture(self, name: str) -> None:
        """Save a picture of the whole page."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=True)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} ({message.location['url']})")

    def _note(self, request: Any) -> None:
        if not request.url.startswith((self.address, "about:", "data:", "blob:")):
            self.elsewhere.append(request.url)


def values(page: Any, region: str) -> list[list[str | None]]:
    """The figures of a table with this label: `data-value` of each cell, else its text."""
    found: list[list[str | None]] = page.eval_on_selector_all(
        f'table[aria-label="{region}"] tbody tr',
        "rows => rows.map(row => [...row.cells].map(cell => "
        "cell.dataset.value ?? cell.textContent))",
    )
    return found


def tile(page: Any, name: str) -> str | None:
    """The exact value in a tile."""
    found: str | None = page.get_attribute(f'[data-tile="{name}"] .value', "data-value")
    return found


def until(page: Any, expression: str, seconds: float = 120.0) -> None:
    """Wait until an expression is true. The page's policy forbids Playwright's own wait."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(100)


def refused_by_axe(page: Any) -> list[str]:
    """What axe-core finds against WCAG 2.2 AA in a page: each rule with the elements."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="`make setup` installs it"
    )
    found = axe.Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]})
    return [
        f"{rule['id']}: {[node['html'][:120] for node in rule['nodes'][:5]]}"
        for rule in found.response["violations"]
    ]


UNLABELLED = """() => {
  const named = (one) =>
    one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim();
  const all = (selector) => [...document.querySelectorAll(selector)];
  const missing = all("a, button, input, select, table, section, figure, [role=region]")
    .filter((one) => !named(one)).map((one) => one.outerHTML.slice(0, 200));
  if (!document.documentElement.lang) missing.push("lang");
  if (all("main").length !== 1 || all("h1").length !== 1) missing.push("main, h1");
  if (all("figure").some((chart) => !chart.querySelector("figcaption"))) missing.push("figcaption");
  return missing;
}"""
