"""Step time beside torch.distributed.pipelining: the same layers, schedule and backend, on the same four ranks.

    python benchmarks/engine.py [--rounds 15] [--only gpipe zb_v] [--sizes tiny]      about three minutes

Both engines run in turns, so a busy machine is busy for both: read the ratios, ours to torch's. "wall" is the median
over the rounds of the ratio of the two steps of a round, as the clock on rank 0 shows them between two barriers; "CPU"
is that of the processor time that all ranks' processes took, which other programs change little. GPipe, 1F1B,
interleaved 1F1B (two stages a rank) and ZB-V are torch's own classes, whose orders are ours; ZB-H1 goes to torch's
runtime as our CSV file. "tiny" actions are Linear(8, 8) and ReLU; "5 ms" ones are about that long on a quiet core.

The second table has microseconds of the processor that an action of the tiny layers takes on rank 1, and their parts:
layers and autograd, sending, receiving, and the interpreter's loop with the notes it takes. Waiting is not in it.

Where a goal is missed: look at "CPU" first. At most 1.00 there means that ours does no more than torch's, and that the
other programs on the machine decided whose turn was disturbed; a quiet machine and more rounds close that gap. Above
1.00 the table of parts says where. With tiny layers most of sending and receiving is gloo's own, three system calls a
message, which torch's engine pays as well; one call that hands over several messages would close it, and gloo has
none. With 5 ms actions it is the copy of what is sent into its message: without it the sender could not go on to write
into that memory before the receiver has it.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from goals import goal
from torch import Tensor, nn

import pipelab as pl
from pipelab.engine import resident
from pipelab.engine.cut import cut
from pipelab.ranks import local_state

cloudpickle.register_pickle_by_value(sys.modules[__name__])

P, V = 4, {"interleaved": 2, "zb_v": 2}
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v")


class Size(NamedTuple):
    """How much a stage computes, and for how many micro-batches."""

    width: int
    rows: int  # of a micro-batch
    m: int
    turns: int = 1  # how many rounds count as one: short steps need more of them


SIZES = {"tiny": Size(width=8, rows=4, m=32, turns=3), "5 ms": Size(width=640, rows=320, m=8)}


class Seat(NamedTuple):
    """What a rank needs for the duel."""

    key: int  # of our pipeline
    arguments: tuple[Any, ...]  # of our step
    layers: dict[int, nn.Module]  # torch's, by stage
    schedule: pl.Schedule
    plan: str  # the schedule's CSV file
    batch: tuple[Tensor, Tensor]


class Cost(NamedTuple):
    """Seconds of one step: by the clock, of this process's processor time, and of that its main thread's."""

    clock: float
    process: float
    thread: float


def torch_step(seat: Seat) -> Callable[[], None]:
    """On a rank: a step of torch's engine."""
    from torch.distributed.pipelining import PipelineStage, schedules

    plan, last = seat.schedule, seat.schedule.num_stages - 1
    stages = [PipelineStage(layers, s, last + 1, torch.device("cpu")) for s, layers in seat.layers.items()]
    kinds = {
        "gpipe": lambda *given, **named: schedules.ScheduleGPipe(given[0][0], *given[1:], **named),
        "one_f_one_b": lambda *given, **named: schedules.Schedule1F1B(given[0][0], *given[1:], **named),
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb_h1": schedules._PipelineScheduleRuntime,
        "zb_v": schedules.ScheduleZBVZeroBubble,
    }
    runtime: Any = kinds[plan.name](stages, plan.num_microbatches, loss_fn=F.cross_entropy)
    if plan.name == "zb_h1":
        runtime._load_csv(seat.plan)
    given = seat.batch[:1] if 0 in seat.layers else ()
    named: dict[str, Any] = {"target": seat.batch[1], "losses": []} if last in seat.layers else {}

    def step() -> None:
        for layers in seat.layers.values():
            layers.zero_grad()
        runtime.step(*given, **named)

    return step


def duel(seat: Seat, rounds: int) -> list[tuple[Cost, Cost]]:
    """On a rank: steps of torch's engine and of ours, in turns; the first of a round takes turns, too."""
    warnings.simplefilter("ignore")

    def timed(step: Callable[[], None]) -> Cost:
        dist.barrier()
        before = time.perf_counter(), time.process_time(), time.thread_time()
        step()
        process, thread = time.process_time(), time.thread_time()
        dist.barrier()
        return Cost(time.perf_counter() - before[0], process - before[1], thread - before[2])

    theirs, ours = torch_step(seat), partial(resident.call, seat.key, "step", *seat.arguments)
    found = []
    for number in range(rounds + 3):
        if number % 2:
            first = timed(theirs)
            found.append((first, timed(ours)))
        else:
            first = timed(ours)
            found.append((timed(theirs), first))
    return found[3:]


def parts(seat: Seat, rounds: int) -> dict[str, float]:
    """On a rank: median microseconds of the main thread's processor time an action, by what they went to."""
    worker = local_state()[resident._place(seat.key)]._worker
    spent: Counter[str] = Counter()
    clock = time.thread_time

    def watched(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*given: Any, **named: Any) -> Any:
            began = clock()
            try:
                return call(*given, **named)
            finally:
                spent[part] += clock() - began

        return watching

    for part, owner, names in (
        ("send", worker.channel, ["send"]),
        ("receive", worker.channel, ["post", "take"]),
        *(("layers", s, ["forward", "backward", "backward_input", "backward_weight"]) for s in worker.stages.values()),
        ("the rest", worker, ["run"]),
    ):
        for name in names:
            setattr(owner, name, watched(part, getattr(owner, name)))
    found = []
    for _ in range(rounds + 1):
        spent.clear()
        dist.barrier()
        resident.call(seat.key, "step", *seat.arguments)
        spent["the rest"] -= spent["send"] + spent["receive"] + spent["layers"]
        found.append({part: 1e6 * spent[part] / len(worker.timings) for part in spent})
    return {part: statistics.median(one[part] for one in found[1:]) for part in found[0]}


def seats(pipe: pl.Pipeline, model: nn.Sequential, batch: tuple[Tensor, Tensor], plan: str) -> list[Seat]:
    """One for each rank. Torch's layers are copies of ours."""
    schedule = pipe.schedule
    pieces = cut(copy.deepcopy(model), schedule.num_stages, [2] * schedule.num_stages)
    return [
        Seat(
            pipe._remote.key,
            (*arguments, True),
            {stage: pieces[stage].layers for stage in schedule.stages_on(rank)},
            schedule,
            plan,
            batch,
        )
        for rank, arguments in enumerate(pipe._deal(*batch, None))
    ]


def measure(ranks: pl.Ranks, name: str, size: Size, rounds: int, *, with_parts: bool) -> tuple[Any, Any]:
    """The duels' costs by round and rank, and on rank 1 the parts of our thread's time."""
    schedule = pl.SCHEDULES[name](P, size.m)
    layers = [layer for _ in range(schedule.num_stages) for layer in (nn.Linear(size.width, size.width), nn.ReLU())]
    model, rows = nn.Sequential(*layers), size.rows * size.m
    batch = torch.randn(rows, size.width), torch.randint(0, size.width, (rows,))
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.csv")
        schedule.to_csv(plan)
        given = {"loss_fn": F.cross_entropy, "ranks": ranks, "partition": [2] * schedule.num_stages}
        with pl.Pipeline(model, schedule, **given) as pipe:
            on_ranks = seats(pipe, model, batch, plan)
            duels = ranks.run_each(duel, [(seat, rounds) for seat in on_ranks])
            split = ranks.run_each(parts, [(seat, rounds) for seat in on_ranks])[1] if with_parts else {}
    return list(zip(*duels, strict=True)), split


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    options = parser.parse_args(arguments)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print(f"{'schedule':<14}{'actions':>9}{'torch ms':>10}{'ours ms':>9}{'wall':>7}{'CPU':>7}{'thread':>8}")
    goals, found_parts = [], {}
    with pl.Ranks(P) as ranks:
        for kind in options.sizes:
            for name in options.only:
                size = SIZES[kind]
                duels, split = measure(ranks, name, size, size.turns * options.rounds, with_parts=kind == "tiny")
                walls = [ours.clock / theirs.clock for (theirs, ours), *_ in duels]
                cpus = [sum(o.process for _, o in each) / sum(t.process for t, _ in each) for each in duels]
                threads = [sum(o.thread for _, o in each) / sum(t.thread for t, _ in each) for each in duels]
                times = [1e3 * statistics.median(each[0][side].clock for each in duels) for side in (0, 1)]
                row = f"{name:<14}{kind:>9}{times[0]:>10.1f}{times[1]:>9.1f}"
                print(
                    row + "".join(f"{statistics.median(r):>{n}.2f}" for r, n in ((walls, 7), (cpus, 7), (threads, 8)))
                )
                goals.append(goal(f"step time to torch's, {name}, {kind} actions", walls, at_most=1.0))
                found_parts |= {name: split} if split else {}
    if found_parts:
        columns = ["layers", "send", "receive", "the rest"]
        print(f"\n{'us an action':<14}" + "".join(f"{column:>10}" for column in [*columns, "together"]))
        for name, split in found_parts.items():
            numbers = [*(split[column] for column in columns), sum(split.values())]
            print(f"{name:<14}" + "".join(f"{number:>10.0f}" for number in numbers))
    print("\n" + "\n".join(goals))


if __name__ == "__main__":
    main()
