"""Emulated accelerators beside the simulator: how much longer a paced run takes than its schedule says.

    python benchmarks/pace.py [--rounds 5]      about a minute

Eight ranks, sixteen micro-batches, anchored clocks, actions of 5 and of 10 ms. Shown is the median makespan over the
simulator's, and how late the latest action of a run ended, which the next ones do not inherit.

Where a goal is missed: eight ranks on few cores need the processor for about 0.2 ms an action each. A run is longer
than its plan only by how late its last action ends, so on a busy machine what is missed is that one deadline. A quiet
machine, or longer actions, close the gap.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch
import torch.nn.functional as F
from goals import goal
from torch import nn

import pipelab as pl

P, M = 8, 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'schedule':<14}{'action':>8}{'simulated s':>13}{'measured s':>12}{'ratio':>9}{'late ms':>9}")
    x, y = torch.randn(4 * M, 64), torch.randint(0, 64, (4 * M,))
    goals = []
    with pl.Ranks(P) as ranks:
        for name in ("gpipe", "one_f_one_b", "zb_h1"):
            for each_ms in (5, 10):
                costs = pl.Costs(F=each_ms / 1000, I=each_ms / 1000, W=each_ms / 1000)
                schedule = pl.SCHEDULES[name](P, M)
                model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(P)))
                with pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, ranks=ranks, pace=costs) as pipe:
                    traces = [pipe.step(x, y).trace for _ in range(rounds + 1)][1:]
                simulated_s = pl.simulate(schedule, costs).makespan
                measured_s = statistics.median(trace.makespan for trace in traces)
                late_ms = 1e3 * statistics.median(max(span.late for span in trace.spans) for trace in traces)
                row = f"{name:<14}{each_ms:>5} ms{simulated_s:>13.3f}{measured_s:>12.3f}"
                print(f"{row}{measured_s / simulated_s:>9.4f}{late_ms:>9.1f}")
                ratios = [trace.makespan / simulated_s for trace in traces]
                goals.append(goal(f"paced run to the simulator's, {name}, {each_ms} ms actions", ratios, at_most=1.01))
    print("\n" + "\n".join(goals))


if __name__ == "__main__":
    main()
