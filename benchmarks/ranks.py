"""How long Ranks take to start, to start again and to be called, on this machine.

    python benchmarks/ranks.py [--ranks 4] [--spawn]

The first start includes the fork server's import of torch. Each figure is a median with the range of its runs: times on
a busy machine say little, so the load is printed too.

Where a goal is missed: the first start is one import of torch, more than two seconds of one core, which no later start
pays. Only a core that has nothing else to do, or a smaller torch, closes that gap.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from goals import goal

import pipelab as pl

GOALS_S = {"first start": 3.0, "next start": 0.3, "warm call": 0.002}

FIRST_START = """
import time, pipelab as pl
start = time.perf_counter()
with pl.Ranks({ranks}, start_method={method!r}):
    print(time.perf_counter() - start)
"""


def seconds(action: Callable[[], object]) -> float:
    """Wall-clock seconds of one call of `action`."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def first_start(ranks: int, method: str) -> float:
    """Seconds of the first `Ranks(...)` of a new interpreter, which has not imported torch either."""
    code = FIRST_START.format(ranks=ranks, method=method)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def all_reduce() -> None:
    """What most calls end with: a message around all ranks."""
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def show(name: str, times_s: list[float]) -> None:
    """A line with median and range, and one for the goal where there is one."""
    low, median, high = (1e3 * f(times_s) for f in (min, statistics.median, max))
    print(f"{name:<28}{median:>10.2f} ms   ({low:.2f} to {high:.2f}, {len(times_s)} runs)")
    if name in GOALS_S:
        print(goal(f"{name} of ranks", [1e3 * time_s for time_s in times_s], at_most=1e3 * GOALS_S[name], unit="ms"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spawn", action="store_true", help="start by spawn, as where there is no safe fork server")
    options = parser.parse_args()
    method = "spawn" if options.spawn or not sys.platform.startswith("linux") else "forkserver"
    print(f"{options.ranks} ranks by {method} on {platform.system()}, {platform.machine()}, {os.cpu_count()} cores,")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    show("first start", [first_start(options.ranks, method) for _ in range(3)])
    with pl.Ranks(options.ranks, start_method=method) as ranks:
        show("next start", [seconds(ranks.restart) for _ in range(2 if options.spawn else 10)])
        ranks.run(all_reduce)
        show("warm call", [seconds(lambda: ranks.run(abs, -1)) for _ in range(300)])
        show("warm call with all_reduce", [seconds(lambda: ranks.run(all_reduce)) for _ in range(300)])
        batch = torch.zeros(1_000_000)
        show("4 MB to each rank", [seconds(lambda: ranks.run(len, batch)) for _ in range(20)])


if __name__ == "__main__":
    main()
