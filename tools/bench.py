"""Run the benchmarks and write benchmarks/README.md: what was measured, with its command, its goal, machine and date.

    python -m tools.bench [--quick] [--only engine pace] [--out benchmarks/README.md]

A benchmark is a script that prints what it finds; a line that begins with "goal:" is gathered into the first table (see
benchmarks/goals.py). Its docstring says what is measured and how. A paragraph there that begins with "Where a goal is
missed:" says why, and what would close it: it is shown where that happened, and only there. --quick is a trial with few
rounds, whose numbers mean little.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
GOAL, WHY = "goal: ", "Where a goal is missed:"
QUICK = {name: ["--rounds", "2"] for name in ("engine", "pace", "speedup")} | {"hosts": ["--runs", "1"]}
LIMIT_S = 600


@dataclass(frozen=True)
class Found:
    """What one benchmark printed. `docstring` is the script's own, which begins with its purpose in one line."""

    name: str
    docstring: str
    printed: str
    seconds: float
    failure: str = ""

    @property
    def goals(self) -> list[list[str]]:
        """For each goal its name, limit, what was found, and "met" or "missed"."""
        lines = self.printed.splitlines()
        return [line.removeprefix(GOAL).split(" | ") for line in lines if line.startswith(GOAL)]

    @property
    def missed(self) -> bool:
        """Whether some goal was."""
        return any(goal[-1] == "missed" for goal in self.goals)


def run(path: Path, options: Sequence[str]) -> Found:
    """Run one benchmark; what it says on stderr goes to the terminal."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    failure = ""
    try:
        done = subprocess.run(
            [sys.executable, str(path), *options], env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
        printed = done.stdout
        if done.returncode:
            failure = f"It failed with exit code {done.returncode}."
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")
        failure = f"It was stopped after {LIMIT_S} s."
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return Found(path.stem, docstring, printed.rstrip(), time.monotonic() - began, failure)


def page(results: Sequence[Found], machine: str, when: str) -> str:
    """benchmarks/README.md."""
    goals = [(one, goal) for one in results for goal in one.goals]
    met = sum(goal[-1] == "met" for _, goal in goals)
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {when}, not by hand. The machine: {machine}.",
        "Each number is a median of its runs, with their range. Compare ratios: times are this machine's.",
        "",
        "## Goals",
        "",
        f"{met} of {len(goals)} were met.",
        "",
        "| goal | limit | found | | from |",
        "|---|---|---|---|---|",
    ]
    for one, (what, limit, found, verdict) in goals:
        seen = verdict if verdict == "met" else f"**{verdict}**"
        lines.append(f"| {what} | {limit} | {found} | {seen} | [{one.name}](#{one.name}) |")
    for one in results:
        lines += ["", *section(one)]
    return "\n".join(lines) + "\n"


def section(one: Found) -> list[str]:
    """A benchmark's heading, its docstring, and what it printed besides goals."""
    paragraphs = one.docstring.split("\n\n")
    shown = [text for text in paragraphs if one.missed or not text.startswith(WHY)]
    said = "\n".join(line for line in one.printed.splitlines() if not line.startswith(GOAL)).strip()
    lines = [f"## {one.name}", "", *"\n\n".join(shown).splitlines(), "", f"It took {one.seconds:.0f} s."]
    if one.failure:
        lines += ["", f"**{one.failure}**"]
    return [*lines, "", "```text", said or "(nothing)", "```"]


def machine() -> str:
    """Processor, system and versions, and how busy it is."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        entries = [line.split(":", 1) for line in info.read_text(encoding="utf-8").splitlines() if ":" in line]
        model = next((text.strip() for name, text in entries if name.strip() == "model name"), model)
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, {versions}, {load}"


def main() -> int:
    """Run them one after the other, then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "README.md")
    options = parser.parse_args()
    paths = [path for path in sorted(BENCHMARKS.glob("*.py")) if path.stem != "goals"]
    if unknown := set(options.only or ()) - {path.stem for path in paths}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(path.stem for path in paths)}")
    when, where = datetime.date.today().isoformat(), machine()
    results = []
    for path in paths:
        if options.only and path.stem not in options.only:
            continue
        print(f"== {path.stem}", flush=True)
        results.append(run(path, QUICK.get(path.stem, []) if options.quick else []))
        print(f"{results[-1].printed}\n({results[-1].seconds:.0f} s) {results[-1].failure}\n", flush=True)
    options.out.write_text(page(results, where, when), encoding="utf-8")
    print(f"written: {options.out}")
    return int(any(one.failure for one in results))


if __name__ == "__main__":
    sys.exit(main())
