"""Writes the README's picture from the README's own code: `python -m tools.pictures`, on a machine that is quiet."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path

import matplotlib

from tools.book import small_png

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
    file = BytesIO()
    pyplot.gcf().savefig(file, dpi=200, bbox_inches="tight")
    PICTURE.write_bytes(b64decode(small_png(b64encode(file.getvalue()).decode())))


if __name__ == "__main__":
    draw()
