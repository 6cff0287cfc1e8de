"""How good and how quick the search is: against the published one, against proved optima, and with growing size.

    python benchmarks/search.py

The first table has the settings of Qi et al. 2023 (arXiv 2401.10241), tables 5 and 9, whose authors' search took 0.1 to
3.1 seconds a setting. The second has the cases that tools/optima.py proved. Times are processor
seconds of one core, one run each.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import mean
from typing import Any

import pipelab as pl
from pipelab.schedules.optima import stored_optima

# hidden size, heads; p, m; F, I, W and delay in ms; the bubble rates of ZB-1p and ZB-2p
PUBLISHED = [
    (2304, 24, 8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (2304, 24, 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    (2304, 24, 8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    (4096, 32, 8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    (4096, 32, 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    (4096, 32, 8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
    (5120, 40, 16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0066),
    (5120, 40, 16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088, 0.0054),
    (5120, 40, 16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576, 0.0028),
]


def timed(ask: Callable[[], pl.Schedule]) -> tuple[pl.Schedule, float]:
    """What `ask` returns, and the processor seconds that it takes."""
    began = time.process_time()
    return ask(), time.process_time() - began


def published() -> None:
    """Bubble rates, (cost - m C) / cost, where the cost is the longest span of one rank."""
    print(f"{'p':>3}{'m':>5}{'limit':>7}{'published':>11}{'ours':>8}{'seconds':>9}")
    total = 0.0
    for h, a, p, m, F, I, W, c, *rates in PUBLISHED:  # noqa: E741
        costs, part = pl.Costs(F=F, I=I, W=W, comm=c), 32 * h / (34 * h + 5 * a * 1024)
        for limit, rate in zip((p, 2 * p), rates, strict=True):
            found, seconds = timed(lambda: pl.search(p, m, costs, memory_limit=limit, weight_part=part))  # noqa: B023
            total += seconds
            cost = pl.simulate(found, costs).longest_rank_span
            print(f"{p:>3}{m:>5}{limit:>7}{rate:>11.4f}{1 - m * (F + I + W) / cost:>8.4f}{seconds:>9.2f}")
    print(f"all eighteen: {total:.1f} s\n")


def optima() -> None:
    """How much longer than proved possible, over all memory limits from p to 2p - 1."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in stored_optima():
        gap, seconds = gap_of(case)
        heavy = ", last stage half as long again" * (case["F"][0] != case["F"][-1])
        times = "/".join(str(case[kind][0]) for kind in "FIW")
        group = f"p={case['num_ranks']} m={case['num_microbatches']} {times} comm={case['comm']}{heavy}"
        groups[group].append((gap, seconds))
    print(f"{'above the optimum':<54}{'cases':>6}{'mean':>8}{'most':>8}{'seconds':>9}")
    for group, rows in groups.items():
        gaps, seconds = zip(*rows, strict=True)
        print(f"{group:<54}{len(rows):>6}{mean(gaps):>8.2%}{max(gaps):>8.2%}{max(seconds):>9.2f}")
    print()


def gap_of(case: dict[str, Any]) -> tuple[float, float]:
    """Found over optimum (or over the bound, where that is all that was proved) minus 1, and seconds."""
    p, m, limit, objective = (case[name] for name in ("num_ranks", "num_microbatches", "memory_limit", "objective"))
    costs = pl.Costs(F=case["F"], I=case["I"], W=case["W"], comm=case["comm"])
    found, seconds = timed(lambda: pl.search(p, m, costs, memory_limit=limit, objective=objective))
    trace = pl.simulate(found, costs)
    return (trace.makespan if objective == "makespan" else trace.longest_rank_span) / case["bound"] - 1, seconds


def growth() -> None:
    """Seconds against actions; a search has a fixed number of actions to try, and at least a hundred schedules."""
    costs = pl.Costs(F=10, I=12, W=8, comm=0.5)
    print(f"{'placement':<10}{'p':>3}{'m':>5}{'actions':>9}{'bubble':>8}{'seconds':>9}")
    sizes = [("one", 4, 8), ("one", 8, 32), ("one", 16, 64), ("one", 32, 128), ("v", 4, 8), ("v", 8, 32), ("v", 16, 64)]
    for placement, p, m in sizes:
        found, seconds = timed(lambda: pl.search(p, m, costs, memory_limit=p, placement=placement))  # noqa: B023
        bubble = pl.simulate(found, costs).bubble_fraction
        print(f"{placement:<10}{p:>3}{m:>5}{found.num_actions:>9}{bubble:>8.1%}{seconds:>9.2f}")


if __name__ == "__main__":
    published()
    optima()
    growth()
