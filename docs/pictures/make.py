"""Makes the manual's pictures from a run on this machine: `make pictures`.

Starts the embedded stack in TRAINWRIGHT_HOME (default: build/pictures), trains the job digits in a
terminal, and takes pictures of what trainwright and Airflow show. Stops the stack if it started it.
`queue.png` is not made here: it shows a Slurm cluster of three nodes, two of them busy
(`tests/slurm_lab.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import terminal
import yaml
from PIL import Image
from playwright.sync_api import sync_playwright

from trainwright.infra import local
from trainwright.infra.airflow import USER, airflow_address, airflow_answers, password_file
from trainwright.tasks.runs.run import list_runs
from trainwright.tasks.settings import Settings, dags_folder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JOB = "dags/jobs/digits.yaml"
WIDTH = 1200
TRAINWRIGHT = str(Path(sys.executable).parent / "trainwright")
# The plan that is drawn: the job for longer, for which one device is enough, with prices.
PRICES = {"currency": "EUR", "prices": {"cpu": "0.04/h", "energy": "0.25/kWh"}}
PLANNED = ("train.epochs=1000", "devices.min_count=1")


def main() -> None:
    """Make all pictures."""
    home = Path(os.environ.get("TRAINWRIGHT_HOME", ROOT / "build" / "pictures")).resolve()
    os.environ["TRAINWRIGHT_HOME"] = str(home)
    settings = Settings.from_environment()
    started = not airflow_answers(home) if (home / "airflow").exists() else True
    plan = ROOT / "build" / "plan.html"
    plan.parent.mkdir(exist_ok=True)
    try:
        write_plan(plan)
        picture_terminal()
        run = max(list_runs(settings.store, settings, "digits"), key=lambda one: one.id)
        local.up(home, dags_folder())
        dag_run = run.status().holder.rpartition(" ")[2]
        with tempfile.TemporaryDirectory() as folder, chromium() as browser:
            report = Path(folder) / "report.html"
            command("show", run.uri, "--report", str(report))
            picture_file(browser, plan, "plan", width=1100)
            picture_file(browser, report, "report", last=".chart >> nth=0")
            for theme, name, charts in (("light", "run", 2), ("dark", "page-dark", 6)):
                with logged_in(browser, home, theme) as page:
                    address = f"/trainwright/page/#/run/{run.job_name}/{run.id}"
                    page.goto(airflow_address(home) + address)
                    page.locator(f"h1 >> text={run.id}").wait_for()
                    page.locator("figure[data-last]").first.wait_for()
                    page.wait_for_timeout(3000)
                    save(page, name, last=f"figure.card >> nth={charts - 1}")
            picture_airflow(browser, home, dag_run)
    finally:
        if started:
            local.down(home)


def command(*arguments: str) -> None:
    """Run a command of trainwright."""
    subprocess.run([TRAINWRIGHT, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def picture_terminal() -> None:
    """Train the job; the screen in the middle of the training."""

    def middle(screen: str) -> bool:
        found = re.search(r"step +(\d+)/(\d+) ", screen)
        return found is not None and int(found[1]) > 0.6 * int(found[2])

    kept = terminal.screens(
        [TRAINWRIGHT, "run", str(ROOT / JOB), "--new"], dict(os.environ), middle
    )
    terminal.save_svg(
        f"$ trainwright run {JOB}\n{kept[0]}", "trainwright run", HERE / "terminal.svg"
    )


def write_plan(path: Path) -> None:
    """Plan the job, in its pool with prices."""
    pool = yaml.safe_load((ROOT / "dags" / "pools" / "two-cpus.yaml").read_text())
    priced = path.with_name("pool.yaml")
    priced.write_text(json.dumps(pool | PRICES))
    changes = [word for one in PLANNED for word in ("--set", one)]
    asked = ("plan", JOB, "--pool", str(priced), *changes)
    free = [TRAINWRIGHT, *asked, "--set", "objective.deadline=30d", "--json"]
    found = subprocess.run(free, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    # A deadline that the plan meets on this machine, whatever its speed.
    minutes = 10 * math.ceil(json.loads(found.stdout)["predicted"]["duration_s"]["high"] / 400)
    command(*asked, "--set", f"objective.deadline={minutes}m", "--plot", str(path))


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser: Debian's Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@contextmanager
def logged_in(
    browser: Any, home: Path, theme: str, size: tuple[int, int] = (WIDTH, 1000)
) -> Iterator[Any]:
    """A tab of the browser in which the admin has logged in to Airflow."""
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, color_scheme=theme)
    context.add_init_script(
        f"if (location.protocol !== 'about:') localStorage.setItem('theme', '{theme}')"
    )
    page = context.new_page()
    page.set_default_timeout(300_000)  # Airflow's UI takes long on a busy machine
    page.goto(airflow_address(home))
    page.fill("input[name=username]", USER)
    page.fill("input[name=password]", json.loads(password_file(home).read_text())[USER])
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "/auth/login" not in url)
    try:
        yield page
    finally:
        context.close()


def picture_file(browser: Any, path: Path, name: str, width: int = WIDTH, last: str = "") -> None:
    """A picture of a page in a file."""
    page = browser.new_page(viewport={"width": width, "height": 600})
    page.goto(path.as_uri())
    page.wait_for_timeout(3000)
    save(page, name, last or "body")
    page.close()


def picture_airflow(browser: Any, home: Path, dag_run: str) -> None:
    """The graph of the DAG run, and beside it our tab with the run."""
    with logged_in(browser, home, "light", (1500, 1000)) as page:
        page.evaluate("localStorage.setItem('default_dag_view', '\"graph\"')")
        page.evaluate("localStorage.setItem('direction-retrain', '\"DOWN\"')")
        run = f"/dags/retrain/runs/{urllib.parse.quote(dag_run, safe='')}"
        page.goto(airflow_address(home) + run)
        page.locator('a[href$="/plugin/trainwright-dag-run"]').first.click()
        inside = page.frame_locator('iframe[src*="trainwright/page"]')
        inside.locator("figure[data-last]").first.wait_for()
        handle = page.locator("[data-panel-resize-handle-id], [data-resize-handle]").first
        box = handle.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, 700)
        page.mouse.down()
        page.mouse.move(620, 700, steps=5)
        page.mouse.up()
        page.locator('button[title="Fit View"]').first.click()
        page.add_style_tag(content=".react-flow__minimap { display: none }")  # it covers tasks
        page.mouse.move(300, 990)
        page.wait_for_timeout(5000)
        save(page, "airflow")


def save(page: Any, name: str, last: str = "") -> None:
    """Save a picture, at most WIDTH wide, with 256 colours: enough for text and charts.

    It ends below the element `last`, or with the window.
    """
    path = HERE / f"{name}.png"
    width, height = page.viewport_size["width"], page.viewport_size["height"]
    if last:
        box = page.locator(last).first.bounding_box()
        height = round(box["y"] + box["height"]) + 16
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    page.screenshot(path=str(path), full_page=True, clip=clip)
    picture = Image.open(path).convert("RGB")
    if picture.width > WIDTH:
        size = (WIDTH, round(picture.height * WIDTH / picture.width))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    picture.quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main()
