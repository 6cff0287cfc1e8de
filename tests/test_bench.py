"""The page that `make bench` writes: goals are kept or missed by their medians, and a miss brings its reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from goals import goal

from tools.bench import BENCHMARKS, GOAL, WHY, Found, page

DOCSTRING = f"How quick it is.\n\n    python benchmarks/one.py\n\n{WHY} the wire is slow.\n"


def written(line: str) -> str:
    return page([Found("one", DOCSTRING, f"a table\n{line}", 3.0)], "2 cores", "2026-01-02")


def test_bench_judges_a_goal_by_the_median() -> None:
    assert goal("step", [0.9, 0.95, 7.0], at_most=1.0).endswith("at most 1 | 0.95 (0.9 to 7, 3 runs) | met")
    assert goal("step", [0.9, 1.001, 1.002], at_most=1.0).endswith("| missed")
    assert goal("wait", 1.0, at_most=1.0, unit="ms") == f"{GOAL}wait | at most 1 ms | 1 ms | met"


def test_bench_page_gathers_goals_apart_from_the_table() -> None:
    text = written(goal("step", 0.5, at_most=1.0))
    assert "1 of 1 were met." in text
    assert "| step | at most 1 | 0.5 | met | [one](#one) |" in text
    assert "```text\na table\n```" in text
    assert "    python benchmarks/one.py" in text


def test_bench_page_says_why_where_a_goal_was_missed_and_only_there() -> None:
    assert WHY not in written(goal("step", 1.0, at_most=1.0))
    missed = written(goal("step", 1.5, at_most=1.0))
    assert f"{WHY} the wire is slow." in missed
    assert "| **missed** |" in missed


def test_bench_page_shows_a_benchmark_that_failed() -> None:
    assert "**It failed with exit code 1.**" in page([Found("one", "", "", 1.0, "It failed with exit code 1.")], "", "")


@pytest.mark.parametrize(
    "path", [path for path in sorted(BENCHMARKS.glob("*.py")) if path.stem != "goals"], ids=lambda path: path.stem
)
def test_bench_script_names_its_command(path: Path) -> None:
    assert f"python benchmarks/{path.name}" in path.read_text(encoding="utf-8").split('"""')[1]
