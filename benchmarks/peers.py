"""Our orders beside those of other packages: build time, and the bubble rate in one simulator, ours.

    pip install --no-deps elf-pipeline zbpp-light     (elsewhere than in .venv, then PYTHONPATH=that folder)
    python benchmarks/peers.py

Settings and rates are those of Qi et al. 2023 (arXiv 2401.10241), tables 5 and 9: (cost - m C) / cost, where cost is
the makespan, or for ZB-H2 the longest span of one rank. "kept" is the most micro-batches on a rank, from F to W; the
two searches may keep what ZB-H1 and ZB-H2 keep. A package that is not installed is named and left out. Times are in
milliseconds, the least of three.
"""

from __future__ import annotations

import contextlib
import io
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pipelab as pl
from pipelab.action import Action, Kind

# model, p, m, F, I, W and delay in milliseconds
SETTINGS = [
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577),
    ("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379),
]
Build = Callable[[int, int], pl.Schedule]


def of_elf(generate: str) -> Build:
    """A builder of elf-pipeline, as one of ours."""
    from elf.scheduling import schedulers

    letters = {"forward": "F", "backward_inputs": "I", "backward_params": "W", "backward": "B"}

    def build(p: int, m: int) -> pl.Schedule:
        ranks: list[list[Action]] = [[] for _ in range(p)]
        for op in getattr(schedulers, generate)(list(range(p)), m):
            if str(op.op) in letters:  # the losses are no actions of ours
                ranks[op.rank].append(Action(op.block_id, Kind(letters[str(op.op)]), op.mb_id))
        return pl.Schedule(f"elf {generate}", tuple(map(tuple, ranks)))

    return build


def of_zbpp_light() -> Build:
    """The order of zbpp-light, which calls the input half B."""
    from zbpp_light.auto_schedule import auto_schedule

    letters = {"F": Kind.F, "B": Kind.I, "W": Kind.W}

    def build(p: int, m: int) -> pl.Schedule:
        with contextlib.redirect_stdout(io.StringIO()):
            nodes = auto_schedule(p, m)
        order = [[Action(n.stage, letters[n.type], n.minibatch) for n in row if n.type in letters] for row in nodes]
        return pl.Schedule("zbpp-light", tuple(map(tuple, order)))

    return build


def builders() -> Iterable[tuple[str, Build]]:
    """Names and builders, theirs behind ours; what is not installed is said and left out."""
    yield "pipelab zb_h1", pl.zb_h1
    yield "pipelab zb_h2", pl.zb_h2
    theirs: dict[str, Callable[[], Build]] = {
        "elf zbh1": lambda: of_elf("generate_zbh1_schedule"),
        "elf zbh2": lambda: of_elf("generate_zbh2_schedule"),
        "zbpp-light": of_zbpp_light,
    }
    for name, make in theirs.items():
        try:
            yield name, make()
        except ImportError as error:
            print(f"{name}: left out, {error}")


def least(run: Callable[[], Any]) -> float:
    """Milliseconds of the quickest of three runs."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def rate(trace: pl.Trace, work: float, *, span: bool) -> float:
    """The zero-bubble papers' bubble rate."""
    cost = trace.longest_rank_span if span else trace.makespan
    return (cost - work) / cost


def main() -> None:
    """Print one row an order and setting."""
    print(f"{platform.machine()}, Python {platform.python_version()}; rates: makespan, longest span of one rank")
    for model, p, m, f, i, w, delay in SETTINGS:
        costs = pl.Costs(F=f, I=i, W=w, comm=delay)
        work = m * (f + i + w)
        print(f"\n{model}: p = {p}, m = {m}{'':22}{'makespan':>9}{'span':>8}{'kept':>6}{'build ms':>10}")
        for name, build in builders():
            try:
                trace = pl.simulate(build(p, m), costs)
            except pl.PipelabError as error:
                print(f"  {name:<34}cannot run: {str(error).splitlines()[0]}")
                continue
            kept = max(pl.peak_activations(trace))
            print(
                f"  {name:<34}{rate(trace, work, span=False):9.4f}{rate(trace, work, span=True):8.4f}"
                f"{kept:6g}{least(partial(build, p, m)):10.1f}"
            )
        for limit in (p, 2 * p - 1):
            began = time.perf_counter()
            trace = pl.simulate(pl.search(p, m, costs, memory_limit=float(limit)), costs)
            took = 1e3 * (time.perf_counter() - began)
            print(
                f"  {f'pipelab search, limit {limit}':<34}{rate(trace, work, span=False):9.4f}"
                f"{rate(trace, work, span=True):8.4f}{max(pl.peak_activations(trace)):6g}{took:10.1f}"
            )


if __name__ == "__main__":
    main()
