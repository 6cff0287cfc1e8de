"""What a slow cable between two hosts costs GPipe and 1F1B, beside what `simulate` predicts.

    python benchmarks/hosts.py [--megabytes-per-s 12.5] [--runs 3]     as root, on Linux with ip and tc

Two hosts are network namespaces of this machine, with two ranks each, started by torchrun; the cable between them is
capped by tc tbf. Clocks are plain: F takes 80 ms and B twice that, and what the cable takes comes on top. Each
message is ten bursts of the cable or more, and crosses in less than F. The prediction has the cable's Link on that hop
alone. Printed are makespans with and without the cable: GPipe pays for it once, 1F1B at every micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import torch
from goals import goal
from torch import nn

import pipelab as pl

sys.path.insert(0, str(Path(__file__).parents[1]))
from pipelab import two_hosts

BUILDERS = {"gpipe": pl.gpipe, "one_f_one_b": pl.one_f_one_b}
F_S, B_S = 0.08, 0.16
WIDTH, ROWS, MICROBATCHES = 10_240, 64, 8
BOUNDARY_BYTES = ROWS // MICROBATCHES * WIDTH * 4


def main() -> None:
    """Start the two hosts, train on them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes-per-s", type=float, default=12.5)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if reason := two_hosts.missing():
        print(f"Two hosts cannot be had here: {reason}.")
        return
    bytes_per_s = 1e6 * options.megabytes_per_s
    assert BOUNDARY_BYTES >= 10 * two_hosts.BURST_BYTES
    print(
        f"{BOUNDARY_BYTES / 1000:.0f} kB a message, {1000 * BOUNDARY_BYTES / bytes_per_s:.0f} ms on the cable, ", end=""
    )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    measured = run_on_two_hosts(bytes_per_s, options.runs)
    goals = []
    print(f"{'schedule':<14}{'no cable':>10}{'predicted':>11}{'measured':>10}{'ratio':>8}")
    for name in BUILDERS:
        makespan_s = statistics.median(measured[name])
        free_s, predicted_s = predict(name, None), predict(name, bytes_per_s)
        print(f"{name:<14}{free_s:>8.3f} s{predicted_s:>9.3f} s{makespan_s:>8.3f} s{makespan_s / predicted_s:>8.3f}")
        ratios = [each_s / predicted_s for each_s in measured[name]]
        goals.append(goal(f"two hosts with a slow cable to the simulator's, {name}", ratios, at_most=1.10))
    print("\n".join(goals))


def predict(name: str, bytes_per_s: float | None) -> float:
    """Seconds by `simulate`: the link has no latency, and only the messages between ranks 1 and 2 have bytes."""
    link = pl.Link(0.0, bytes_per_s or 1e18)
    costs = pl.Costs(F=F_S, B=B_S, comm=link, boundary_bytes=[0, BOUNDARY_BYTES, 0, 0])
    return pl.simulate(BUILDERS[name](4, MICROBATCHES), costs).makespan


def run_on_two_hosts(bytes_per_s: float, runs: int) -> dict[str, list[float]]:
    """Makespans in seconds, by schedule."""
    with two_hosts.TwoHosts(bytes_per_s=bytes_per_s) as hosts:
        script = [__file__, str(runs)]
        commands = [two_hosts.launcher(hosts.address, 29500, host, 2, *script) for host in (0, 1)]
        started = [hosts.start(host, command, two_hosts.environment()) for host, command in enumerate(commands)]
        for process in started:
            if process.wait(300) != 0:
                raise SystemExit(hosts.stderr(process))
        return dict(json.loads(hosts.stdout(started[0])))


def train(runs: int) -> None:
    """In torchrun's processes: several steps with each schedule, the first of which is not counted."""
    found = {}
    inputs = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    with pl.Ranks() as ranks:
        for name, build in BUILDERS.items():
            pipe = pl.Pipeline(
                nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(4))),
                build(4, MICROBATCHES),
                loss_fn=nn.functional.mse_loss,
                ranks=ranks,
                partition=[1] * 4,
                pace=pl.Costs(F=F_S, B=B_S),
                clock="plain",
            )
            found[name] = [pipe.step(inputs, inputs).trace.makespan for _ in range(runs + 1)][1:]
    print(json.dumps(found))


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train(int(sys.argv[1]))
    else:
        main()
