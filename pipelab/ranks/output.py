"""What the ranks print: each writes to a file of its own, and the notebook prints the lines in rank order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO


class Output:
    """The new lines of every rank's file, printed with the rank in front.

    A file and not a pipe: nothing has to read along, C code writes into it too, and a rank never waits for a reader.
    The order is the ranks' and not that of arrival, so that the same run prints the same text.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        paths = [folder / f"output.{rank}" for rank in range(num_ranks)]
        for path in paths:
            path.touch()
        self._files: list[BinaryIO] = [path.open("rb") for path in paths]
        self._rests = [b""] * num_ranks

    def show(self, *, complete: bool = True) -> None:
        """Print what has come since; a last line without its end waits for it unless the output is complete."""
        shown = False
        for rank, file in enumerate(self._files):
            *lines, rest = (self._rests[rank] + file.read()).split(b"\n")
            self._rests[rank] = b"" if complete else rest
            for line in [*lines, rest] if complete and rest else lines:
                print(f"[{rank}] {line.decode(errors='replace')}")
                shown = True
        if shown:
            sys.stdout.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
