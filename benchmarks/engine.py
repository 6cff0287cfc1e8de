"""What the engine costs: its own time an action beside torch.distributed.pipelining, its clocks, what two cores gain.

    python benchmarks/engine.py              all parts, about a minute
    python benchmarks/engine.py overhead     one of: overhead, pace, speedup

Both engines run in turns on the same ranks, so a busy machine is busy for both: read the ratios, not the times.
"""

from __future__ import annotations

import copy
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pipelab as pl
from pipelab.engine import batch, resident

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# ---- overhead: both engines on one model whose layers take next to no time


class Seat(NamedTuple):
    """What a rank needs for the duel."""

    key: int  # of our pipeline
    arguments: tuple[Any, ...]  # of our step
    layers: nn.Module  # of torch's stage
    x: Tensor
    y: Tensor


class Cost(NamedTuple):
    """Seconds of one step: by the clock, and of this rank's main thread alone."""

    clock: float
    thread: float


def duel(seat: Seat, name: str, m: int, rounds: int) -> list[tuple[Cost, Cost]]:
    """On a rank: steps of torch's engine and of ours, in turns."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    warnings.simplefilter("ignore")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = PipelineStage(seat.layers, rank, last + 1, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "one_f_one_b": Schedule1F1B}[name](stage, m, loss_fn=F.cross_entropy)

    def theirs() -> None:
        seat.layers.zero_grad()
        if rank == 0:
            schedule.step(seat.x)
        elif rank == last:
            schedule.step(target=seat.y, losses=[])
        else:
            schedule.step()

    def ours() -> None:
        resident.call(seat.key, "step", *seat.arguments)

    def timed(step: Callable[[], None]) -> Cost:
        dist.barrier()
        began, thread = time.perf_counter(), time.thread_time()
        step()
        thread = time.thread_time() - thread
        dist.barrier()
        return Cost(time.perf_counter() - began, thread)

    return [(timed(theirs), timed(ours)) for _ in range(rounds + 3)][3:]


def overhead(p: int = 4, m: int = 32, width: int = 8, rounds: int = 25) -> None:
    """Print microseconds an action on rank 1, whose every action receives and sends."""
    print(f"overhead: {p} ranks, {m} micro-batches, Linear({width}, {width}) and ReLU a stage; microseconds an action")
    print(f"{'':14}{'torch':>8}{'pipelab':>9}{'ratio':>7}   of the thread alone: torch, pipelab")
    x, y = torch.randn(4 * m, width), torch.randint(0, width, (4 * m,))
    inputs, targets = batch.split(x, m, "inputs"), batch.split(y, m, "targets")
    with pl.Ranks(p) as ranks:
        for name in ("gpipe", "one_f_one_b"):
            stages = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(p)]
            model = nn.Sequential(*(layer for stage in stages for layer in copy.deepcopy(stage)))
            pipe = pl.Pipeline(model, pl.SCHEDULES[name](p, m), loss_fn=F.cross_entropy, ranks=ranks)
            seats = [
                Seat(pipe._key, (*pipe._ends(rank, inputs, targets), (), [1 / m] * m, True), stages[rank], x, y)
                for rank in range(p)
            ]
            runs = ranks.run_each(duel, [(seat, name, m, rounds) for seat in seats])[1]
            ratio = statistics.median(ours.clock / theirs.clock for theirs, ours in runs)
            theirs, ours = (
                Cost(*(1e6 / (2 * m) * statistics.median(column) for column in zip(*side, strict=True)))
                for side in zip(*runs, strict=True)
            )
            print(f"{name:14}{theirs.clock:8.0f}{ours.clock:9.0f}{ratio:7.2f}   {theirs.thread:.0f}, {ours.thread:.0f}")


# ---- pace: emulated accelerators against the simulator


def pace(p: int = 8, m: int = 16, rounds: int = 3) -> None:
    """Print how much longer a paced run takes than the simulator says, and how late its latest action was."""
    print(f"\npace: {p} emulated accelerators, {m} micro-batches, anchored clocks; makespan over the simulator's")
    print(f"{'':14}{'5 ms an action':>18}{'10 ms an action':>18}")
    x, y = torch.randn(4 * m, 64), torch.randint(0, 64, (4 * m,))
    with pl.Ranks(p) as ranks:
        for name in ("gpipe", "one_f_one_b", "zb_h1"):
            line = f"{name:14}"
            for each in (0.005, 0.010):
                costs = pl.Costs(F=each, I=each, W=each)
                schedule = pl.SCHEDULES[name](p, m)
                model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(p)))
                pipe = pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, ranks=ranks, pace=costs)
                traces = [pipe.step(x, y).trace for _ in range(rounds + 1)][1:]
                ratio = statistics.median(t.makespan for t in traces) / pl.simulate(schedule, costs).makespan
                late = statistics.median(max(span.late for span in t.spans) for t in traces)
                line += f"{ratio:.4f}, {1e3 * late:.1f} late".rjust(18)
            print(line)


# ---- speed-up: two ranks on two cores, the same micro-batches in one process with one thread


class Block(nn.Module):
    """Two wide Linear layers on a normalised copy: what a transformer block does besides attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inside = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.layers = nn.Sequential(*inside)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def speedup(m: int = 8, width: int = 256, rounds: int = 7) -> None:
    """Print how many times as fast two ranks are as one process with one thread."""
    ideal = 2 * m / (m + 1)
    print(f"\nspeed-up: 2 ranks, {m} micro-batches, against the same in one process with one thread; ideal {ideal:.2f}")
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block(width) for _ in range(8)))
    x, y = torch.randn(16 * m, 32, width), torch.randn(16 * m, 32, width)

    def alone() -> float:
        began = time.perf_counter()
        model.zero_grad()
        for xs, ys in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            (F.mse_loss(model(xs), ys) / m).backward()
        return time.perf_counter() - began

    with pl.Ranks(2) as ranks:
        for name in ("gpipe", "one_f_one_b"):
            pipe = pl.Pipeline(model, pl.SCHEDULES[name](2, m), loss_fn=F.mse_loss, ranks=ranks)
            found = [alone() / pipe.step(x, y).trace.makespan for _ in range(rounds)]
            print(f"{name:14}{statistics.median(found):8.2f}   (from {min(found):.2f} to {max(found):.2f})")


def main() -> None:
    """Print the machine, then the parts that were asked for."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    parts = {"overhead": overhead, "pace": pace, "speedup": speedup}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
