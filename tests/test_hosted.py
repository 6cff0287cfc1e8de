"""Badge and first cell follow the address in pyproject.toml, in every notebook; without one neither is there."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import hosted
from tools.book import to_text
from tools.exercises import complaints, made_from

ROOT = Path(__file__).parents[1]
GITHUB = "https://github.com/example/pipelab"
CHAPTER, EXERCISE = Path("notebooks/00_small.ipynb"), Path("exercises/part/00_small.ipynb")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository without an address, with one chapter, which was executed, and one exercise, which was not."""
    for path, counts in ((CHAPTER, (1, 2)), (EXERCISE, (None, None))):
        sources = zip(("seed", "sum"), ("SEED = 0", "total = SEED + 1"), counts, strict=True)
        code = [new_code_cell(source, id=id_, execution_count=count) for id_, source, count in sources]
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(to_text(new_notebook(cells=[new_markdown_cell("# Small", id="title"), *code])))
    name(tmp_path, None)
    return tmp_path


def name(root: Path, address: str | None) -> None:
    """Write a pyproject.toml with this address of the repository."""
    urls = "" if address is None else f'[project.urls]\nRepository = "{address}"\n'
    (root / "pyproject.toml").write_text(f'[project]\nname = "pipelab"\n{urls}')


def run(root: Path, *arguments: str) -> int:
    return hosted.main(["--root", str(root), *arguments])


def cells(path: Path) -> dict[str, nbformat.NotebookNode]:
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


def test_hosted_writes_both_cells_where_an_address_is_set_and_takes_them_out_again(root: Path) -> None:
    before = {path: (root / path).read_bytes() for path in (CHAPTER, EXERCISE)}
    assert run(root, "--check") == 0

    name(root, GITHUB)
    assert run(root, "--check") == 1
    assert run(root) == 0
    assert run(root, "--check") == 0
    for path in (CHAPTER, EXERCISE):
        written = cells(root / path)
        assert list(written) == ["title", "hosted-badge", "hosted-install", "seed", "sum"]
        assert f"(https://colab.research.google.com/github/example/pipelab/blob/main/{path})" in (
            written["hosted-badge"].source
        )
        assert f"git+{GITHUB}" in written["hosted-install"].source
        assert to_text(nbformat.read(root / path, as_version=4)) == (root / path).read_text()  # canonical
    counts = [cells(root / path)["hosted-install"].execution_count for path in (CHAPTER, EXERCISE)]
    assert counts == [1, None]
    assert cells(root / CHAPTER)["sum"].execution_count == 3

    name(root, None)
    assert run(root, "--check") == 1
    assert run(root) == 0
    assert {path: (root / path).read_bytes() for path in (CHAPTER, EXERCISE)} == before


def test_hosted_replaces_the_cells_of_another_address(root: Path) -> None:
    for address in (GITHUB, "https://github.com/example/fork"):
        name(root, address)
        assert run(root) == 0
    text = (root / CHAPTER).read_text()
    assert text.count("example/fork") == 2
    assert "example/pipelab" not in text


def test_hosted_puts_back_what_somebody_changed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name(root, GITHUB)
    assert run(root) == 0
    right = (root / CHAPTER).read_text()
    (root / CHAPTER).write_text(right.replace("--quiet", "--verbose"))
    assert run(root, "--check") == 1
    assert f"{root / CHAPTER}: other cells for hosts" in capsys.readouterr().out
    assert run(root) == 0
    assert (root / CHAPTER).read_text() == right


def test_hosted_elsewhere_than_on_github_has_no_badge_for_colab(root: Path) -> None:
    name(root, "https://git.example.org/pipelab.git/")
    assert run(root) == 0
    assert list(cells(root / CHAPTER)) == ["title", "hosted-install", "seed", "sum"]
    assert '"pipelab @ git+https://git.example.org/pipelab"' in cells(root / CHAPTER)["hosted-install"].source


@pytest.mark.parametrize(("installed", "magics"), [(True, []), (False, ["pip"])])
def test_hosted_cell_installs_where_pipelab_is_missing_and_does_nothing_elsewhere(
    installed: bool, magics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    class Shell:
        def run_line_magic(self, name: str, line: str) -> None:
            asked.append((name, line))

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real(name) if installed else None)
    code = TransformerManager().transform_cell(hosted.INSTALL.format(address=GITHUB))
    exec(code, {"get_ipython": Shell})
    assert [name for name, _ in asked] == magics
    assert all(line == f'install --quiet "pipelab @ git+{GITHUB}" scikit-learn' for _, line in asked)


def test_hosted_exercises_have_the_cells_that_their_masters_do_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name(root, GITHUB)
    monkeypatch.setattr("tools.exercises.ROOT", root)
    (root / "solutions").mkdir()
    shutil.copy(ROOT / "solutions" / "01_partitioning.ipynb", root / "solutions")
    ((path, text),) = made_from(root / "solutions").items()
    badge, install = nbformat.reads(text, as_version=4).cells[1:3]
    assert f"blob/main/exercises/{path}" in badge.source
    assert install.id == "hosted-install"

    (other_numbers,) = made_from(root / "solutions", seed=7).values()
    assert "hosted-install" in other_numbers
    assert "hosted-badge" not in other_numbers  # it would open the exercise with the old ones

    (root / EXERCISE).unlink()
    (root / "exercises" / path).write_text(text)
    assert run(root) == 0  # make links and make exercises agree on every byte
    assert complaints({path: text}, root / "exercises") == []


def test_hosted_cells_pass_the_linter(root: Path) -> None:
    name(root, GITHUB)
    assert run(root) == 0
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*ruff, str(root / EXERCISE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
