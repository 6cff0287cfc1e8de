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
PICTURE, WORDS, PANEL, RAN = ".pl-explore .pl-picture svg", ".pl-words", ".pl-panel", ".pl-explore .pl-ran"
CURSOR, RANKS = ".pl-play .pl-cursor svg", ".pl-ranks"
BOARD, SAYS, SCORE, BUILT_RAN = ".pl-board svg", ".pl-says", ".pl-score", ".pl-build .pl-ran"
SCREENSHOTS = os.environ.get("PIPELAB_SCREENSHOTS")  # a folder; pictures for people, never kept


def changed(page: Any, selector: str, before: str) -> str:
    page.wait_for_function("([s, b]) => document.querySelector(s)?.innerHTML !== b", arg=[selector, before])
    return str(page.locator(selector).inner_html())


def says(page: Any, selector: str, text: str) -> None:
    page.wait_for_function(
        "([s, t]) => document.querySelector(s)?.textContent.includes(t)", arg=[selector, text], timeout=60_000
    )


def counts(page: Any, selector: str, number: int) -> None:
    page.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[selector, number])


def types(page: Any, moves: str) -> None:
    field = page.get_by_label("move", exact=True)
    field.fill(moves)
    field.press("Enter")
    page.wait_for_function("field => field.value === ''", arg=field.element_handle())  # the kernel has taken it


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
        new_code_cell("pl.build(level=1)"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}  # else Lab asks
    nbformat.write(new_notebook(cells=cells, metadata=kernel), books / "widgets.ipynb")
    with running_lab(books, home, theme) as url, browser_page(url) as (page, wrong):
        page.set_default_timeout(20_000)
        open_and_run(page, url, "widgets.ipynb")
        explores(page, theme)
        plays(page, theme)
        builds(page, theme)
        stays_readable(page)
        assert wrong == []


def stays_readable(page: Any) -> None:
    """On a narrow page pictures scroll instead of shrinking to nothing, and sentences wrap."""
    page.set_viewport_size({"width": 700, "height": 900})
    for picture in (PICTURE, f"{RANKS} svg"):
        assert page.locator(picture).first.bounding_box()["width"] >= 640
    assert page.locator(f"{RANKS} p").first.bounding_box()["width"] < 640


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
    counts(page, f"{PICTURE} rect", 2 * 5 * 28)

    page.get_by_label("schedule", exact=True).select_option("interleaved")
    says(page, WORDS, "multiple of its 5 ranks")
    assert page.locator(PICTURE).count() == 0
    screenshot(page, f"refused {theme}")

    slider(page, "ranks").press("ArrowLeft")
    says(page, WORDS, "4 ranks need")
    page.get_by_label("compare with other schedules").check()
    says(page, PANEL, "one_f_one_b")
    screenshot(page, f"compare {theme}")
    for mode, selector, text in [
        ("architecture", PICTURE, "layers 0–5"),
        ("data", WORDS, "Of 28 micro-batches"),
        ("state", PANEL, "gradients summed, of 28"),
    ]:
        page.get_by_role("button", name=mode).click()
        says(page, selector, text)
        screenshot(page, f"{mode} {theme}")
    before = page.locator(PANEL).inner_html()
    slider(page, "time").first.press("End")
    changed(page, PANEL, before)
    says(page, WORDS, "its weights are of version 1")

    page.get_by_label("schedule", exact=True).select_option("gpipe")
    for _ in range(20):
        slider(page, "micro-batches").press("ArrowLeft")
    says(page, PANEL, "8 for stage 0")
    page.get_by_role("button", name="performance").click()
    page.get_by_role("button", name="run it").first.click()
    says(page, RAN, "every gradient equals plain training's")
    counts(page, f"{RAN} svg", 2)
    screenshot(page, f"ran {theme}")


def plays(page: Any, theme: str) -> None:
    page.locator(CURSOR).wait_for()
    frame = page.locator(CURSOR).inner_html()
    page.get_by_role("button", name="step forward").click()
    frame = changed(page, CURSOR, frame)
    says(page, RANKS, "At 1, ")  # it comes in a message of its own

    page.locator(".widget-play button").first.click()
    lines = {seen_line(page)}
    while len(lines) < 9:  # more than one reel of pictures
        lines.add(seen_line(page))
    screenshot(page, f"play {theme}")
    page.locator(".widget-play button").first.click()
    counts(page, f"{CURSOR}", 1)

    slider(page, "time").last.press("End")
    says(page, RANKS, "everything is done")


def seen_line(page: Any) -> str:
    """Where the player's line is: of the pictures that wait for their turn nothing is seen."""
    found: str = page.wait_for_function(
        """selector => [...document.querySelectorAll(selector + ' path')]
            .find(path => getComputedStyle(path).visibility === 'visible')?.getAttribute('d')""",
        arg=CURSOR,
    ).json_value()
    return found


def builds(page: Any, theme: str) -> None:
    page.get_by_role("button", name="0F0", exact=True).click()
    says(page, SAYS, "0F0 runs on rank 0 from 0 to 1.")
    counts(page, f"{BOARD} rect", 1)

    types(page, "1B0")
    says(page, SAYS, "1B0 needs its own forward 1F0 on rank 1, which is not placed yet; 1F0 can be next")
    types(page, "1F0 1B0")
    says(page, SAYS, "1B0 runs on rank 1 from 2 to 4.")
    screenshot(page, f"build {theme}")
    page.get_by_role("button", name="undo").click()
    says(page, SAYS, "1F0 runs on rank 1")
    counts(page, f"{BOARD} rect", 2)

    page.get_by_role("button", name="finish for me").click()
    says(page, SCORE, "The goal is reached, but a rule has placed some of it")
    says(page, SCORE, "You built gpipe")
    page.get_by_role("button", name="run it for real").click()
    says(page, BUILT_RAN, "every gradient equals plain training's")
    counts(page, f"{BUILT_RAN} svg", 2)
    screenshot(page, f"built {theme}")

    page.get_by_label("level", exact=True).select_option("9: Zero bubble")
    page.get_by_role("button", name="3W0", exact=True).click()
    says(page, SAYS, "3W0 needs its own input gradient 3I0 on rank 3")
    screenshot(page, f"level 9 {theme}")
