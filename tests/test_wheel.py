"""What pip installs: a wheel, made from the sdist, that runs where nothing but its dependencies is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import nbformat
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOOK = """\
from importlib.util import find_spec

import pipelab as pl
from pipelab.schedules.optima import stored_optima

print(pl.__file__)
print(pl.__version__)
print([name for name in ("jupyterlab", "nbval", "nbclient", "pytest") if find_spec(name)])
print(len(pl.data.text()))
print(len(stored_optima()))
"""
pytestmark = pytest.mark.timeout(300)


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What the command prints; fails with all that it said where it failed."""
    hidden = ("PYTHONPATH", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that is built from it as an index would build it."""
    folder = tmp_path_factory.mktemp("built")
    hatch = (sys.executable, "-m", "hatchling", "build", "-d", folder)
    run(*hatch, "-t", "sdist", cwd=ROOT)
    (sdist,) = folder.glob("pipelab-*.tar.gz")
    run("tar", "-xzf", sdist, cwd=folder)
    run(*hatch, "-t", "wheel", cwd=folder / sdist.name.removesuffix(".tar.gz"))
    return folder


def needed(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """The distribution and all that it requires, without any extra, as they are installed here."""
    distribution = metadata.distribution(name)
    if distribution.name in seen:
        return
    seen.add(distribution.name)
    yield distribution
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from needed(requirement.name, seen)


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel, its dependencies and scikit-learn; no network is used.

    The dependencies are links to what is installed here. Nothing of the extra `lab` is there: no JupyterLab, no nbval.
    """
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=environment).strip())
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=built)
    (pipelab,) = metadata.distributions(name="pipelab", path=[str(site)])
    for name in (*(r.name for r in map(Requirement, pipelab.requires or ()) if r.marker is None), "scikit-learn"):
        for distribution in needed(name, set()):
            tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
            for top in tops - {"__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(distribution.locate_file(top))
    return python


def test_wheel_holds_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = (path for path in (ROOT / "pipelab").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert files == {path.relative_to(ROOT).as_posix() for path in package}
    assert {"pipelab/prose.txt", "pipelab/schedules/optima.json", "pipelab/py.typed"} <= files


def test_sdist_holds_the_book_and_no_environment(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "LICENSE", "LICENSE-TEXT.md", "constraints.txt", "tests/test_wheel.py"} <= files
    chapters = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("notebooks/*.ipynb")}
    assert len(chapters) > 9
    assert chapters <= files
    assert {name.partition("/")[0] for name in files} & {".ci", ".git", ".venv", ".venv-colab", "build"} == set()


def test_wheel_imports_and_finds_its_data_without_the_lab(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    where, version, lab, characters, cases = run(python, script, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(python.parents[1])
    assert version == metadata.version("pipelab")
    assert lab == "[]"
    assert characters == str(len((ROOT / "pipelab" / "prose.txt").read_text(encoding="utf-8")))
    assert int(cases) > 10


def test_wheel_doctor_is_content_without_the_lab(python: Path, tmp_path: Path) -> None:
    report = run(python, "-m", "pipelab", "doctor", cwd=tmp_path)
    assert "ok  jupyterlab" in report
    assert "not installed" in report
    assert report.rstrip().endswith("This machine can run every chapter.")


@pytest.mark.exhaustive  # half a minute
def test_wheel_runs_chapter_03_as_a_script_without_the_lab(python: Path, tmp_path: Path) -> None:
    chapter = nbformat.read(ROOT / "notebooks" / "03_microbatches.ipynb", as_version=4)
    script = tmp_path / "chapter.py"
    script.write_text("\n\n".join(cell.source for cell in chapter.cells if cell.cell_type == "code"))
    said = run(python, script, cwd=tmp_path, MPLBACKEND="Agg")
    assert "all 77 gradients alike" in said
