"""In a real JupyterLab: widgets are there, follow every control, log no error, and send nothing off the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab_page import browser_page, chromium, open_and_run, running_lab
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium"),
]
PICTURE, WORDS = ".pl-picture svg", ".pl-words"
CURSOR, RANKS = ".pl-cursor svg", ".pl-ranks"
SCREENSHOTS = os.environ.get("PIPELAB_SCREENSHOTS")  # a folder; pictures for people, never kept


def changed(page: Any, selector: str, before: str) -> str:
    page.wait_for_function("([s, b]) => document.querySelector(s)?.innerHTML !== b", arg=[selector, before])
    return str(page.locator(selector).inner_html())


def slider(page: Any, label: str) -> Any:
    return page.locator(".widget-slider", has=page.get_by_text(label, exact=True)).locator(".noUi-handle")


def screenshot(page: Any, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"] if SCREENSHOTS else ["JupyterLab Light"])
def test_widgets_work_in_jupyterlab(tmp_path: Path, theme: str) -> None:
    pytest.importorskip("playwright", reason="pip install pipelab[dev]")
    books, home = tmp_path / "books", tmp_path / "home"
    books.mkdir()
    home.mkdir()
    cells = [
        new_code_cell("import pipelab as pl\npl.explore(num_ranks=4, num_microbatches=8)"),
        new_code_cell("pl.play(pl.simulate(pl.one_f_one_b(4, 8), pl.Costs(comm=0.5)))"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}  # else Lab asks
    nbformat.write(new_notebook(cells=cells, metadata=kernel), books / "widgets.ipynb")
    with running_lab(books, home, theme) as url, browser_page(url) as (page, wrong):
        page.set_default_timeout(20_000)
        open_and_run(page, url, "widgets.ipynb")
        explores(page, theme)
        plays(page, theme)
        assert wrong == []


def explores(page: Any, theme: str) -> None:
    page.locator(PICTURE).wait_for()
    assert page.locator(f"{PICTURE} rect").count() == 2 * 4 * 8
    screenshot(page, f"explore {theme}")

    words = page.locator(WORDS).inner_html()
    slider(page, "ranks").press("ArrowRight")
    assert "5 ranks need" in changed(page, WORDS, words)
    assert page.locator(f"{PICTURE} rect").count() == 2 * 5 * 8

    for _ in range(20):  # faster than a picture is drawn: the last one wins
        slider(page, "micro-batches").press("ArrowRight")
    page.wait_for_function(f"document.querySelectorAll('{PICTURE} rect').length === {2 * 5 * 28}")

    page.get_by_label("schedule").select_option("interleaved")
    page.wait_for_function(f"document.querySelector('{WORDS}').innerText.includes('multiple of its 5 ranks')")
    assert page.locator(PICTURE).count() == 0
    screenshot(page, f"refused {theme}")


def plays(page: Any, theme: str) -> None:
    page.locator(CURSOR).wait_for()
    frame = page.locator(CURSOR).inner_html()
    page.get_by_role("button", name="step forward").click()
    frame = changed(page, CURSOR, frame)
    assert "At 1, " in page.locator(RANKS).inner_text()

    page.locator(".widget-play button").first.click()
    for _ in range(5):
        frame = changed(page, CURSOR, frame)
    screenshot(page, f"play {theme}")
    page.locator(".widget-play button").first.click()

    slider(page, "time").press("End")
    page.wait_for_function(f"document.querySelector('{RANKS}').innerText.includes('everything is done')")
