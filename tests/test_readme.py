"""The README's code runs, its picture's words are true, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

import pipelab as pl
from tools.pictures import PICTURE, code_blocks

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.timeout(60)
def test_the_code_runs_as_one_cell():
    names = {}
    for block in code_blocks(README):
        exec(block, names)
    assert names["predicted"].makespan == pytest.approx(0.33)  # (8 + 4 - 1)(0.01 + 0.02)
    assert names["result"].trace.source == "paced"
    assert names["result"].trace.schedule == names["schedule"]


def test_the_picture_is_there_and_its_words_are_computed():
    words = re.search(r"!\[(.*?)\]\((.*?)\)", README)
    assert (ROOT / words[2]).read_bytes()[:4] == b"\x89PNG"
    assert ROOT / words[2] == PICTURE
    trace = pl.simulate(pl.one_f_one_b(4, 8), pl.Costs(F=0.01, B=0.02))
    assert f"makespan {1000 * trace.makespan:g} ms, bubble {100 * trace.bubble_fraction:.1f} %" in words[1]


def test_links_lead_somewhere():
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)]+)\)", README) if "://" not in t]
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_chapter_table_lists_the_notebooks_that_are_there():
    listed = re.findall(r"\(notebooks/(\w+\.ipynb)\)", README)
    assert listed == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_chapter_table_gives_the_minutes_that_the_chapters_give():
    rows = re.findall(r"\(notebooks/(\w+\.ipynb)\) \|[^|]*\| (\d+) min \| \d+ s \|", README)
    assert len(rows) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    for name, minutes in rows:
        assert f"**It takes** about {minutes} minutes" in (ROOT / "notebooks" / name).read_text(), name
