"""The law of directions: imports inside pipelab point one way, and a heavy library stays in its room."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pipelab"

# A room may import rooms of earlier lines, and itself.
LAW = (
    ("errors",),
    ("action",),
    ("schedule",),
    ("palette",),
    ("trace",),
    ("captions",),
    ("dependencies",),
    ("validate",),
    ("costs",),
    ("simulate",),
    ("memory",),
    ("schedules", "versions"),
    ("partition", "mesh", "lower", "theory", "models", "layers", "data", "profiling", "published"),
    ("planner",),
    ("ranks",),
    ("engine",),
    ("replay",),
    ("axes",),
    ("gantt",),
    ("plots", "mesh_plot", "version_plot"),
    ("stacked",),
    ("book", "widgets", "operations", "two_hosts"),
    ("doctor", "grading"),
    ("plan_command",),
    ("cli",),
    ("__main__",),
)
LINE = {room: line for line, rooms in enumerate(LAW) for room in rooms}

# Where a heavy library may be imported, and where only inside a function.
HEAVY = {
    "torch": ({"engine", "replay", "ranks", "models", "layers", "data", "profiling"}, {"doctor", "cli", "operations"}),
    "matplotlib": ({"axes", "gantt"}, set()),
    "ipywidgets": ({"widgets"}, set()),
    "sympy": ({"theory"}, set()),
    "sklearn": (set(), {"data"}),  # an extra, not a dependency
    "nbclient": (set(), {"grading"}),  # the same, like what follows
    "nbformat": (set(), {"grading"}),
}


@dataclass(frozen=True)
class Import:
    """`room` imports `target` at `line`, at the top of its file (function "") or inside `function`."""

    room: str
    target: str
    function: str
    line: int


def imports(file: Path, package: Path) -> Iterator[Import]:
    """Every import statement of a file that runs; what stands under TYPE_CHECKING does not."""
    parts = file.relative_to(package).with_suffix("").parts
    here = [package.name, *parts[:-1]]

    def visit(node: ast.AST, function: str) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            # `from pipelab import gantt` names a room, `from pipelab.gantt import show` stands in one
            names = [".".join([*module, alias.name]) for alias in node.names]
        for name in names:
            yield Import(parts[0], name, function, node.lineno)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = function or node.name
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), "")


def violations(package: Path) -> list[str]:
    """What in `package` breaks the law, a sentence each."""
    found = []
    for file in sorted(package.rglob("*.py")):
        room = file.relative_to(package).with_suffix("").parts[0]
        if room == "__init__":
            continue  # the front door names every room, and imports none: a test below
        if room not in LINE:
            found.append(f"{file.name}: the room {room!r} stands in no line of the law")
            continue
        for one in imports(file, package):
            top, _, rest = one.target.partition(".")
            where = f"{file.relative_to(package.parent)}:{one.line}: {one.room} imports {one.target}"
            if top == package.name:
                target = rest.partition(".")[0]
                is_later = target in LINE and target != room and LINE[target] >= LINE[room]
                draws_itself = one.function.startswith("_repr_")
                if is_later and not draws_itself:
                    found.append(f"{where}, a room that does not come before it")
            elif top in HEAVY:
                anywhere, in_functions = HEAVY[top]
                if room not in anywhere and not (room in in_functions and one.function):
                    found.append(f"{where}, which belongs to {', '.join(sorted(anywhere | in_functions))}")
    return found


def test_imports_point_one_way_and_heavy_libraries_stay_in_their_rooms() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "sentence"),
    [
        ("action.py", "from pipelab.schedule import Schedule", "action imports pipelab.schedule.Schedule"),
        ("action.py", "from pipelab import schedule", "action imports pipelab.schedule"),
        ("action.py", "from .schedule import Schedule", "action imports pipelab.schedule.Schedule"),
        ("ranks/pool.py", "from ..engine import Pipeline", "ranks imports pipelab.engine.Pipeline"),
        ("simulate.py", "def f():\n    import pipelab.lower", "simulate imports pipelab.lower"),
        ("lower.py", "import pipelab.partition", "lower imports pipelab.partition"),
        ("schedule.py", "try:\n    import torch.nn\nexcept ImportError:\n    pass", "schedule imports torch.nn"),
        ("schedule.py", "def f():\n    import torch", "schedule imports torch"),
        ("cli.py", "import torch", "cli imports torch"),
        ("data.py", "from sklearn import datasets", "data imports sklearn.datasets"),
        ("trace.py", "def _repr_png_(self):\n    import matplotlib", "trace imports matplotlib"),
        ("utils.py", "", "the room 'utils' stands in no line of the law"),
    ],
)
def test_imports_law_sees(file: str, source: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "pipelab" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (violation,) = violations(tmp_path / "pipelab")
    assert sentence in violation


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("trace.py", "def _repr_html_(self):\n    from pipelab.gantt import gantt"),
        ("trace.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("cli.py", "def run():\n    import torch\n    from pipelab.engine import Pipeline"),
        ("engine/worker.py", "import torch\nfrom . import channel\nfrom pipelab.ranks import Ranks"),
    ],
)
def test_imports_law_lets_pass(file: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "pipelab" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path / "pipelab") == []


def heavy_after(statement: str) -> set[str]:
    """The heavy libraries that a new process holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*({set(HEAVY)!r} & set(sys.modules)))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_imports_front_door_is_light() -> None:
    assert heavy_after("import pipelab; dir(pipelab)") == set()


def test_imports_a_plan_and_its_prediction_need_no_heavy_library() -> None:
    plan = "import pipelab as pl; pl.lower(pl.gpipe(4, 8)); pl.simulate(pl.gpipe(4, 8), pl.Costs(F=1, I=1, W=1))"
    assert heavy_after(plan) == set()


def test_imports_a_heavy_library_comes_with_the_name_that_needs_it() -> None:
    assert heavy_after("import pipelab; pipelab.theory.bubble_fraction") == {"sympy"}


def test_imports_front_door_opens_at_once() -> None:
    code = "import time; begin = time.perf_counter(); import pipelab; print(time.perf_counter() - begin)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    seconds = statistics.median(float(run.stdout) for run in runs)
    print(f"import pipelab: {seconds:.3f} s, median of {len(runs)}")
    assert seconds < 1  # 0.01 s on a quiet machine; the modules above are the claim, a time on a busy machine is not
