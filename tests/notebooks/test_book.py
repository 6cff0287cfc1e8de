"""The machinery that stores and checks the book: the canonical writer, and nbval as `make test` runs it."""

from __future__ import annotations

import subprocess
import sys
import time
from base64 import b64decode, b64encode
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from tools import book

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)

PROSE = new_markdown_cell("# One chapter\nin small.", id="opening")
SET = new_code_cell("for letter in {'a', 'b', 'c', 'd'}:\n    print(letter)")
FIGURE = new_code_cell("import matplotlib.pyplot as plt\nplt.plot([1, 3, 2]);")
WIDGET = new_code_cell("import ipywidgets\nipywidgets.IntSlider(3)")
RAISES = new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
EMPTY = new_code_cell("")
NUMBER = new_code_cell("print(f'bubble {3 / 11:.4f}')")
ADDRESS = new_code_cell("object()")
HIDDEN = new_code_cell("import os\nos.getpid();")
INSIDE_PYTEST = new_code_cell("import os\n'PYTEST_CURRENT_TEST' in os.environ")
SILENT = new_code_cell("assert 3 / 11 < 1")
CHECK = new_code_cell("assert 3 / 11 < 1", metadata={"nbgrader": {"grade_id": "check", "grade": True, "points": 1}})
DIES_IN_TEST = new_code_cell("import os\nif os.environ.get('PIPELAB_DIE'):\n    os._exit(7)")
AFTER = new_code_cell("print('after the end')")


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    """A notebook as JupyterLab would save it: random ids, one person's metadata, nothing executed."""
    notebook = new_notebook(cells=[nbformat.from_dict(dict(cell)) for cell in cells])
    notebook.metadata = nbformat.from_dict({"kernelspec": {"name": "my-env", "display_name": "mine"}, "toc": {"n": 1}})
    nbformat.write(notebook, path)
    return path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# --- the writer


@pytest.fixture(scope="module")
def chapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook with something for every rule of canonical form, executed and written once."""
    path = write(tmp_path_factory.mktemp("book") / "chapter.ipynb", PROSE, SET, FIGURE, WIDGET, RAISES, EMPTY)
    assert book.main([str(path)]) == 0
    return path


def test_book_executing_twice_gives_identical_bytes(chapter: Path) -> None:
    first = chapter.read_bytes()
    assert book.main([str(chapter)]) == 0
    assert chapter.read_bytes() == first


def test_book_keeps_text_and_pictures_but_no_live_widget(chapter: Path) -> None:
    figure, widget, error = (cell.outputs[0] for cell in nbformat.read(chapter, as_version=4).cells[2:])
    assert set(figure.data) == {"image/png", "text/plain"}
    assert widget.data == {"text/plain": "IntSlider(value=3)"}
    assert error.ename == "ZeroDivisionError"
    assert "\x1b" not in "".join(error.traceback)


def test_book_keeps_the_colour_of_a_thin_line() -> None:
    # the palette followed the number of pixels, and a dashed line in magenta was stored brown
    picture = Image.linear_gradient("L").convert("RGB").resize((900, 400))
    pixels = picture.load()
    for y in range(0, 400, 3):
        for x in range(0, 900, 11):
            pixels[x, y] = (2 * x // 8, y // 2, 255 - y // 2)  # anti-aliased edges, as text has them
    for y in range(0, 400, 6):
        pixels[450, y] = (209, 0, 108)
    raw = BytesIO()
    picture.save(raw, "PNG")
    small = Image.open(BytesIO(b64decode(book.small_png(b64encode(raw.getvalue()).decode()))))
    stored = small.convert("RGB").getpixel((450, 6))
    assert max(abs(a - b) for a, b in zip(stored, (209, 0, 108), strict=True)) <= 16


def test_book_keeps_the_colours_of_pale_areas_apart() -> None:
    # the palette held colours far apart, and a pale pink band of a spread was stored in the orange of its neighbour
    pink, orange = (247, 235, 241), (248, 231, 217)
    picture = Image.radial_gradient("L").convert("RGB").resize((900, 400))
    pixels = picture.load()
    for y in range(200):
        for x in range(0, 900, 2):
            pixels[x, y] = (x // 4, y, 255 - y)  # many other colours
    picture.paste(pink, (300, 200, 600, 300))
    picture.paste(orange, (300, 300, 600, 400))
    raw = BytesIO()
    picture.save(raw, "PNG")
    small = Image.open(BytesIO(b64decode(book.small_png(b64encode(raw.getvalue()).decode())))).convert("RGB")
    for area, y in ((pink, 250), (orange, 350)):
        assert max(abs(a - b) for a, b in zip(small.getpixel((450, y)), area, strict=True)) <= 5


def test_book_keeps_an_authors_id_and_replaces_random_ones(chapter: Path) -> None:
    ids = [cell.id for cell in nbformat.read(chapter, as_version=4).cells]
    assert ids[:2] == ["opening", "code-for-letter-in-a"]
    assert len(ids) == 5  # the empty cell at the end is gone


def test_book_gives_two_equal_cells_different_ids() -> None:
    cells = book.canonical(new_notebook(cells=[new_code_cell("x"), new_code_cell("x")])).cells
    assert [cell.id for cell in cells] == ["code-x", "code-x-2"]


def test_book_joins_a_stream_that_arrived_in_pieces() -> None:
    cell = new_code_cell("print(1, 2)", execution_count=5)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=piece) for piece in ("1 ", "2\n")]
    (joined,) = book.canonical(new_notebook(cells=[cell])).cells
    assert [output.text for output in joined.outputs] == ["1 2\n"]
    assert joined.execution_count == 1


def test_book_lint_passes_what_the_writer_wrote(chapter: Path) -> None:
    assert book.lint(chapter) is None


def test_book_lint_names_the_line_that_jupyterlab_changed(chapter: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ipynb"
    saved.write_text(chapter.read_text())
    change(saved, '"id": "opening"', '"id": "0f8fad5b-d9cb-469f-a165-70867728950e"')
    complaint = book.lint(saved)
    assert complaint is not None
    assert "saved.ipynb:5: not canonical" in complaint
    assert book.main(["--lint", str(saved)]) == 1


def test_book_leaves_a_notebook_that_fails_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "fails.ipynb", new_code_cell("print(undefined_name)"))
    before = path.read_bytes()
    assert book.main([str(path)]) == 1
    assert path.read_bytes() == before
    assert "NameError: name 'undefined_name' is not defined" in capsys.readouterr().out


# --- nbval, with the plugin and the settings of `make test`


@dataclass(frozen=True)
class Nbval:
    """What one pytest run said: its exit code, its seconds, and outcome and message of each test."""

    exit_code: int
    seconds: float
    results: dict[tuple[str, str], tuple[str, str]]  # (notebook, test) -> (outcome, message)

    def outcomes(self, notebook: str) -> list[str]:
        return [outcome for (name, _), (outcome, _) in self.results.items() if name == notebook]

    def message(self, notebook: str, test: str) -> str:
        return self.results[notebook, test][1]


def nbval(folder: Path, **environment: str) -> Nbval:
    """Test the notebooks in `folder` in a process of its own, with the settings of `make test`."""
    report = folder / "report.xml"
    strict = ["-c", "tests/notebooks/strict.ini", f"--rootdir={folder}", f"--junitxml={report}"]
    begin = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *strict, str(folder)],
        cwd=ROOT,
        env=dict(book.kernel_environment(), **environment),
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begin
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        notebook = case.get("classname", "").removesuffix(".ipynb")
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else bad.tag
        results[notebook, case.get("name", "")] = (outcome, "" if bad is None else f"{bad.get('message')}\n{bad.text}")
    assert results, run.stdout + run.stderr
    return Nbval(run.returncode, seconds, results)


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Nbval:
    """One nbval run over sound notebooks and some that must not pass."""
    folder = tmp_path_factory.mktemp("nbval")
    sound = write(folder / "sound.ipynb", PROSE, NUMBER, FIGURE, WIDGET, RAISES, ADDRESS, HIDDEN, INSIDE_PYTEST)
    changed = write(folder / "changed.ipynb", NUMBER)
    dead = write(folder / "dead.ipynb", NUMBER, DIES_IN_TEST, AFTER)
    silent, master = write(folder / "silent.ipynb", SILENT), write(folder / "master.ipynb", CHECK)
    assert book.main([str(sound), str(changed), str(dead), str(silent), str(master)]) == 0
    change(changed, "bubble 0.2727", "bubble 0.2728")
    write(folder / "unexecuted.ipynb", NUMBER)
    (folder / "exercises").mkdir()
    write(folder / "exercises" / "assignment.ipynb", NUMBER)
    return nbval(folder, PIPELAB_DIE="yes")


def test_nbval_passes_what_the_writer_wrote(verdict: Nbval) -> None:
    assert verdict.outcomes("sound") == ["passed"] * 8  # the stored outputs, then seven cells


def test_nbval_fails_when_one_stored_number_is_changed(verdict: Nbval) -> None:
    assert verdict.exit_code == 1
    assert verdict.outcomes("changed") == ["passed", "failure"]
    message = verdict.message("changed", "Cell 0")
    assert "bubble 0.2728" in message
    assert "bubble 0.2727" in message


def test_nbval_names_a_dead_kernel_and_skips_the_rest(verdict: Nbval) -> None:
    assert verdict.outcomes("dead") == ["passed", "passed", "failure", "skipped"]
    assert "the kernel died while this cell ran (exit code 7)" in verdict.message("dead", "Cell 1")
    assert verdict.seconds < 150  # nbval alone waits 180 for this one cell


def test_nbval_fails_a_notebook_that_was_never_executed(verdict: Nbval) -> None:
    assert verdict.outcomes("unexecuted")[0] == "failure"
    message = verdict.message("unexecuted", "stored outputs")
    assert "execution count None, expected 1" in message
    assert "no cell has a stored output" in message


def test_nbval_fails_a_notebook_without_an_output_unless_its_checks_are_an_assignments(verdict: Nbval) -> None:
    assert verdict.outcomes("silent") == ["failure", "passed"]
    assert "execution count" not in verdict.message("silent", "stored outputs")
    assert verdict.outcomes("master") == ["passed", "passed"]


def test_nbval_lets_an_exercise_have_no_outputs(verdict: Nbval) -> None:
    assert verdict.outcomes("exercises.assignment") == ["passed"]
