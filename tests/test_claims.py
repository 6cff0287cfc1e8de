"""docs/claims.md names cells that exist and that can fail."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = re.split(r"^## (\d\d) .*$", (ROOT / "docs" / "claims.md").read_text(), flags=re.MULTILINE)[1:]


def claims():
    for number, section in zip(CHAPTERS[::2], CHAPTERS[1::2], strict=True):
        for row in re.findall(r"^\|(.+)\|(.+)\|(.+)\|$", section, flags=re.MULTILINE)[2:]:
            yield pytest.param(
                number, row[0].strip(), re.findall(r"`([\w-]+)`", row[1]), id=f"{number}-{row[1].strip()}"
            )


@pytest.mark.parametrize(("number", "claim", "cells"), list(claims()))
def test_claim_names_a_cell_that_asserts(number, claim, cells):
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    sources = {c["id"]: "".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"}
    assert cells, f"{claim}: the row names no cell"
    assert [c for c in cells if c not in sources] == [], f"{claim}: no such cell in {path.name}"
    assert any("assert" in sources[c] for c in cells), f"{claim}: none of {cells} asserts anything"


def test_every_chapter_has_its_claims():
    assert sorted(CHAPTERS[::2]) == sorted(path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb"))
