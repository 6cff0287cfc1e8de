"""tools/exercises.py: the students' folder is what the masters say, and holds no solution."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tools import exercises

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A copy of two masters, with what is made from them, as arguments of the command line."""
    masters, out = tmp_path / "solutions", tmp_path / "exercises"
    masters.mkdir()
    for path in sorted((ROOT / "solutions").glob("*.ipynb"))[:2]:
        shutil.copy(path, masters)
    arguments = ["--masters", str(masters), "--out", str(out)]
    assert exercises.main(arguments) == 0
    return arguments


def out(folders: list[str]) -> Path:
    return Path(folders[-1]) / "01_partitioning.ipynb"


def master(folders: list[str]) -> Path:
    return Path(folders[1]) / "01_partitioning.ipynb"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


def test_exercises_agree_with_their_masters() -> None:
    assert exercises.main(["--check"]) == 0


def test_exercises_are_made_of_assignments_alone(folders: list[str]) -> None:
    shutil.copy(ROOT / "solutions" / "self_tests.ipynb", folders[1])
    assert exercises.main([*folders, "--check"]) == 0
    assert exercises.main(folders) == 0
    assert not out(folders).with_name("self_tests.ipynb").exists()


def test_exercises_are_the_same_bytes_each_time(folders: list[str]) -> None:
    first = out(folders).read_bytes()
    assert exercises.main(folders) == 0
    assert out(folders).read_bytes() == first == (ROOT / "exercises" / out(folders).name).read_bytes()


def test_exercises_have_no_outputs_and_no_solution(folders: list[str]) -> None:
    text = out(folders).read_text()
    for cell in json.loads(text)["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        if cell["metadata"].get("nbgrader", {}).get("solution"):
            assert "NotImplementedError" in "".join(cell["source"])
    assert not any(marker in text for marker in exercises.MARKERS)


def test_exercises_fold_the_checks_in_jupyterlab_and_in_colab_and_nothing_else(folders: list[str]) -> None:
    for cell in json.loads(out(folders).read_text())["cells"]:
        metadata = cell["metadata"]
        folded = metadata.get("jupyter", {}).get("source_hidden", False), metadata.get("cellView") == "form"
        assert folded == (metadata.get("nbgrader", {}).get("grade", False),) * 2, cell["id"]
    assert not any("jupyter" in cell["metadata"] for cell in json.loads(master(folders).read_text())["cells"])


def test_exercises_run_to_their_end_where_nothing_is_solved(folders: list[str]) -> None:
    cells = [cell for cell in json.loads(out(folders).read_text())["cells"] if cell["cell_type"] == "code"]
    may_fail = {cell["id"] for cell in cells if "raises-exception" in cell["metadata"].get("tags", ())}
    given = {cell["id"] for cell in cells if cell["id"] == "setup" or cell["id"].startswith("given_")}
    assert may_fail == {cell["id"] for cell in cells} - given


def test_exercises_do_not_depend_on_how_a_solution_is_written(folders: list[str]) -> None:
    change(Path(folders[1]) / "01_partitioning.ipynb", "return -(-16", "return 0 - (-16")
    assert exercises.main([*folders, "--check"]) == 0


@pytest.mark.parametrize(
    ("folder", "old", "new", "sentence"),
    [
        (1, "The first stage is open before", "A stage is open before", "01_partitioning.ipynb differs"),
        (3, "# YOUR CODE HERE", "# here", "01_partitioning.ipynb differs"),
        (3, "# YOUR CODE HERE", "# BEGIN SOLUTION", "01_partitioning.ipynb shows 'BEGIN SOLUTION'"),
    ],
)
def test_exercises_check_sees_a_change(
    folders: list[str], folder: int, old: str, new: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(Path(folders[folder]) / "01_partitioning.ipynb", old, new)
    assert exercises.main([*folders, "--check"]) == 1
    assert sentence in capsys.readouterr().out


def test_exercises_check_sees_missing_and_stray_files(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out(folders).rename(out(folders).with_name("09_stray.ipynb"))
    assert exercises.main([*folders, "--check"]) == 1
    said = capsys.readouterr().out
    assert "01_partitioning.ipynb is missing" in said
    assert "09_stray.ipynb has no master in solutions/" in said


def test_exercises_name_the_master_that_is_wrong(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    change(Path(folders[1]) / "01_partitioning.ipynb", "### END SOLUTION", "### end")
    assert exercises.main(folders) == 1
    assert (
        "01_partitioning.ipynb: cell 'stages_needed' has BEGIN SOLUTION without END SOLUTION" in capsys.readouterr().out
    )


def test_exercises_with_a_seed_differ_in_one_line(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.exercises.repository", lambda root: None)  # badges: tests/test_hosted.py
    assert exercises.main(folders) == 0
    plain = out(folders).read_text().splitlines()
    assert exercises.main([*folders, "--seed", "7"]) == 0
    differing = [(a, b) for a, b in zip(plain, out(folders).read_text().splitlines(), strict=True) if a != b]
    assert any("SEED = 7" in b for _, b in differing)
    assert all("SEED = 7" in b or '"checksum"' in b for _, b in differing)
