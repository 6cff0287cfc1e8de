"""Writes the README's picture from the README's own code: `python tools/pictures.py`."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "one_f_one_b.png"


def code_blocks(markdown: str) -> list[str]:
    """The Python blocks of a markdown text, in order."""
    return re.findall(r"^```python\n(.*?)^```", markdown, flags=re.DOTALL | re.MULTILINE)


def draw() -> None:
    """Run the README's first block and save the figure that it makes."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    exec(code_blocks((ROOT / "README.md").read_text())[0], {})
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    pyplot.gcf().savefig(PICTURE, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    draw()
