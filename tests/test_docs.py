"""The code in docs/ runs, and prints what the page says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text()]


def test_docs_have_code_to_run():
    assert [page.name for page in PAGES if page.name == "add-a-schedule.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_code_runs_and_prints_what_stands_below_it(page):
    namespace: dict[str, object] = {}
    printed = ""
    for language, block in FENCE.findall(page.read_text()):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, str(page), "exec"), namespace)
            printed = out.getvalue()
        elif language == "text" and namespace:
            assert printed.rstrip() == block.rstrip()


def test_docs_architecture_names_every_room():
    package, text = DOCS.parent / "pipelab", (DOCS / "architecture.md").read_text()
    rooms = [f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()]
    rooms += [path.name for folder in (package, package / "engine") for path in folder.glob("[!_]*.py")]
    assert [room for room in rooms if f"`{room}`" not in text] == []
