"""How long planning takes and how that grows: build, validate, simulate; and reading and lowering beside torch's own.

    python benchmarks/planning.py            up to p = 64, m = 512, in some seconds
    python benchmarks/planning.py --large    up to p = 256, m = 4096, three million actions, in about half a minute

Every row is a process of its own, so that the peak memory is its own. Times are processor seconds, the least of a few
runs: other programs on the machine hardly change them. Planning is linear where "us/action" stays level down the table;
the smallest plans are quicker because they fit into the processor's caches.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pipelab as pl

PLANS = [("one_f_one_b", 8, 64), ("one_f_one_b", 64, 512), ("zb_h1", 16, 128), ("zb_h1", 32, 256), ("zb_h1", 64, 512)]
LARGE = [("zb_h1", 128, 1024), ("zb_h1", 128, 2048), ("zb_h1", 256, 4096)]
READ = [("interleaved", 4, 16), ("interleaved", 8, 64), ("interleaved", 16, 128)]


def plan_once(name: str, p: int, m: int) -> list[float]:
    """Processor seconds to build, validate and simulate one plan."""
    clock = [time.process_time()]
    plan = pl.SCHEDULES[name](p, m)
    clock.append(time.process_time())
    pl.validate(plan)
    clock.append(time.process_time())
    trace = pl.simulate(plan, pl.Costs(F=1, I=1, W=1))
    clock.append(time.process_time())
    assert trace.makespan == pl.theory.makespan(name, p=p, m=m, F=1, I=1, W=1)
    return [after - before for before, after in pairwise(clock)]


def plan_row(name: str, p: int, m: int) -> str:
    """One row of the first table; the quickest of a few runs, and the peak memory of this process."""
    runs = [plan_once(name, p, m) for _ in range(1 if p * m > 100_000 else 5)]
    times = [min(column) for column in zip(*runs, strict=True)]
    actions = (3 if name == "zb_h1" else 2) * p * m
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = "".join(f"{number:>12.4f}" for number in (*times, sum(times)))
    return f"{f'{name}({p}, {m})':<24}{actions:>12}{seconds}{1e6 * sum(times) / actions:>12.2f}{peak_mib:>12.0f}"


def read_row(name: str, p: int, m: int) -> str:
    """One row of the second table: a compute-only CSV, read and lowered to sends and receives, by us and by torch."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    plan = pl.SCHEDULES[name](p, m)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.csv"
        plan.to_csv(path)

        def theirs() -> None:
            sizes = {"num_stages": plan.num_stages, "group_size": p, "group_rank": 0, "submod": None}
            stages = [SimpleNamespace(stage_index=stage, **sizes) for stage in plan.stages_on(0)]
            _PipelineScheduleRuntime(stages, m)._load_csv(str(path))

        ours_s, theirs_s = quickest(lambda: pl.lower(pl.Schedule.from_csv(path))), quickest(theirs)
    return f"{f'{name}({p}, {m})':<24}{plan.num_actions:>12}{ours_s:>12.4f}{theirs_s:>12.4f}{theirs_s / ours_s:>12.1f}"


def quickest(work: Callable[[], object], repeat: int = 3) -> float:
    """Processor seconds that `work` takes, the least of `repeat` runs."""
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def table(kind: str, columns: tuple[str, ...], rows: list[tuple[str, int, int]]) -> None:
    """Print one table, every row measured in a new process."""
    print(f"{'plan':<24}" + "".join(f"{column:>12}" for column in columns))
    for name, p, m in rows:
        command = [sys.executable, __file__, "--row", kind, name, str(p), str(m)]
        print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)


def main() -> None:
    """Print both tables, or with --row one row of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also three million actions")
    parser.add_argument("--row", nargs=4, metavar=("KIND", "NAME", "P", "M"), help="measure one row in this process")
    given = parser.parse_args()
    if given.row:
        kind, name, p, m = given.row
        print({"plan": plan_row, "read": read_row}[kind](name, int(p), int(m)))
        return
    columns = ("actions", "build s", "validate s", "simulate s", "all s", "us/action", "peak MiB")
    table("plan", columns, PLANS + (LARGE if given.large else []))
    print(
        "\nA compute-only CSV, read and lowered; torch's private loader, so only for the version it was read in (2.13)"
    )
    table("read", ("actions", "pipelab s", "torch s", "times"), READ)


if __name__ == "__main__":
    main()
