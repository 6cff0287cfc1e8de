"""What a reader waits for in JupyterLab: from a key on a slider to the new picture, and the player's pictures a second.

    python benchmarks/browser.py      needs Chromium; about half a minute

Headless Chromium draws on the processor that the kernel also needs, so a desktop is quicker. Goals: a picture of 8
ranks and 32 micro-batches in 100 ms (median), 30 pictures a second.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
from goals import goal
from nbformat.v4 import new_code_cell, new_notebook

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))
from lab_page import browser_page, chromium, open_and_run, running_lab

CELLS = [
    "import pipelab as pl\npl.explore(num_ranks=8, num_microbatches=31)",
    "pl.play(pl.simulate(pl.one_f_one_b(8, 32)))",
]
# from a key that goes down to the next change below an element, seen from inside the page
WATCH = """selector => {
    const times = window.times = [];
    addEventListener('keydown', () => { window.pressed = performance.now(); }, true);
    new MutationObserver(() => times.push(performance.now()))
        .observe(document.querySelector(selector), {childList: true, subtree: true, characterData: true});
}"""


def slider_to_picture(page: Any, moves: int = 20) -> list[float]:
    """Milliseconds from the key to the new picture, one move at a time."""
    page.evaluate(WATCH, ".pl-explore .pl-picture")
    handle = page.locator(".pl-explore .widget-slider").filter(has_text="micro-batches").locator(".noUi-handle")
    waits = []
    for number in range(moves):
        before = page.evaluate("document.querySelector('.pl-explore .pl-picture').innerHTML.length")
        page.evaluate("window.times.length = 0")
        handle.press("ArrowRight" if number % 2 == 0 else "ArrowLeft")
        page.wait_for_function(
            "n => document.querySelector('.pl-explore .pl-picture').innerHTML.length !== n", arg=before
        )
        waits.append(page.evaluate("window.times.find(t => t > window.pressed) - window.pressed"))
        page.wait_for_timeout(150)
    return waits


# where the player's line is seen, whenever the browser paints; what waits for its turn is hidden
FOLLOW = """() => {
    const seen = window.seen = [];
    const line = () => [...document.querySelectorAll('.pl-play .pl-cursor path')]
        .find(path => getComputedStyle(path).visibility === 'visible')?.getAttribute('d');
    const look = () => { seen.push([performance.now(), line()]); requestAnimationFrame(look); };
    look();
}"""


def pictures_a_second(page: Any, seconds: float = 4.0) -> tuple[float, float]:
    """How often the player's line moves while it plays, and the longest time in milliseconds that it stood still."""
    page.evaluate(FOLLOW)
    page.locator(".pl-play .widget-play button").first.click()
    page.wait_for_timeout(1000)
    page.evaluate("window.seen.length = 0")
    page.wait_for_timeout(1000 * seconds)
    seen = page.evaluate("window.seen")
    moved = [now for (_, before), (now, line) in pairwise(seen) if line != before]
    return len(moved) / seconds, max(b - a for a, b in pairwise(moved))


def main() -> None:
    """Print both, with the machine."""
    if chromium() is None:
        print("no Chromium here: apt-get install chromium")
        return
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    with tempfile.TemporaryDirectory() as folder:
        books, home = Path(folder, "books"), Path(folder, "home")
        books.mkdir()
        home.mkdir()
        nbformat.write(new_notebook(cells=[new_code_cell(c) for c in CELLS], metadata=kernel), books / "wait.ipynb")
        with running_lab(books, home) as url, browser_page(url) as (page, wrong):
            page.set_default_timeout(20_000)
            open_and_run(page, url, "wait.ipynb")
            waits = slider_to_picture(page)
            rate, longest = pictures_a_second(page)
    print(f"{platform.machine()}, headless Chromium; {'; '.join(wrong) or 'no error in the console'}")
    spread = f"from {min(waits):.0f} to {max(waits):.0f}"
    print(f"slider to picture, 8 x 32: median {statistics.median(waits):.0f} ms, {spread}")
    print(f"player, 8 x 32: {rate:.0f} pictures a second, the longest for {longest:.0f} ms")
    print(goal("slider to picture in the browser", waits, at_most=100, unit="ms"))
    print(goal("time of a player's picture in the browser", 1000 / rate, at_most=34, unit="ms"))


if __name__ == "__main__":
    main()
