"""The command line: `python -m pipelab doctor` looks at the machine, `plan` plans, `run` trains,
`grade` marks an assignment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from pipelab import __version__, plan_command
from pipelab.captions import counted
from pipelab.costs import Costs
from pipelab.errors import PipelabError, SizeError, positive_integer
from pipelab.schedules import SCHEDULES, takes_stages

if TYPE_CHECKING:
    from torch import Tensor

    from pipelab.data import Digits
    from pipelab.schedule import Schedule

_RULES = {"pipedream_2bw": "two_buffered"}  # which version of its weights an action uses, where it is not the usual one
_NAMES = {"1f1b": "one_f_one_b", **{name: name for name in SCHEDULES}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error of pipelab's, or of a file, is printed without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PipelabError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipelab", description="Pipeline parallelism, planned and run.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="doctor | plan | run | grade")

    doctor = commands.add_parser("doctor", help="what this machine has, and whether two ranks can talk")
    doctor.set_defaults(command=_doctor)

    plan_command.add_to(commands)

    run = commands.add_parser(
        "run",
        help="train the digits through a real pipeline and save its picture",
        description="Trains an MLP on the digits. Under torchrun it uses the processes that torchrun started.",
    )
    run.add_argument("--schedule", choices=sorted(_NAMES), default="1f1b")
    run.add_argument("--ranks", type=int, help="processes (default: 4; under torchrun, those that it started)")
    run.add_argument("--microbatches", type=int, default=8)
    run.add_argument("--stages-per-rank", type=int, metavar="V", help="for schedules with virtual stages")
    run.add_argument("--batch", type=int, default=256, help="samples a step (default: 256)")
    run.add_argument("--steps", type=int, default=40)
    run.add_argument(
        "--pace",
        type=float,
        metavar="MS",
        help="emulate accelerators on which F takes MS milliseconds and B twice that",
    )
    run.add_argument(
        "--clock",
        choices=("anchored", "plain"),
        default="anchored",
        help="with --pace: hide what the machine and its network lose (default), or let it show",
    )
    run.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: on GPUs, one for each rank (default: gloo)"
    )
    run.add_argument("--out", type=Path, default=Path(), help="folder for trace.json and gantt.png (default: here)")
    run.set_defaults(command=_run)

    grade = commands.add_parser(
        "grade",
        help="run an assignment that was handed in and print its marks as JSON",
        description="Runs the notebook with the checks of its master, whatever was done to its own.",
    )
    grade.add_argument("notebook", type=Path)
    grade.add_argument("--master", type=Path, help="its master (default: the one of the same name in solutions/)")
    grade.add_argument("--seed", type=int, help="the seed that the notebook was made with, where it is not 0")
    grade.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for one cell (default: 60)")
    grade.set_defaults(command=_grade)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from pipelab.doctor import doctor

    report = doctor()
    print(report)
    return 0 if report.healthy else 1


def _run(options: argparse.Namespace) -> int:
    import torch
    from torch.nn.functional import cross_entropy

    from pipelab import data, models
    from pipelab.engine import Pipeline
    from pipelab.gantt import gantt_compare
    from pipelab.memory import peak_activations
    from pipelab.ranks import Ranks
    from pipelab.simulate import simulate

    digits = data.digits()
    options.out.mkdir(parents=True, exist_ok=True)  # before it trains, for this may not be possible
    num_ranks = _started_by_torchrun() if options.ranks is None else options.ranks
    with Ranks(num_ranks, backend=options.backend) as ranks:
        schedule = _schedule(options, ranks.num_ranks)
        pace = _pace(options.pace, schedule)
        model = models.mlp((64, *[96] * max(3, schedule.num_stages - 1), 10))
        pipe = Pipeline(
            model,
            schedule,
            loss_fn=cross_entropy,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            ranks=ranks,
            pace=pace,
            clock=options.clock,
            weights=_RULES.get(schedule.name, "stashing"),
        )
        print(schedule)
        for step, (inputs, targets) in enumerate(_steps(digits, options.batch, options.steps)):
            result = pipe.step(inputs, targets)
            if step % 10 == 0 or step == options.steps - 1:
                print(f"step {step:3}: loss {result.loss:.4f}")
        right = (pipe.predict(digits.test_inputs).argmax(1) == digits.test_targets).float().mean().item()

    trace = result.trace
    predicted = simulate(schedule, pace or Costs.from_trace(trace))
    print(f"test accuracy {right:.1%}")
    share = f"of makespan x {counted(schedule.num_ranks, 'rank')}"
    print(f"bubble {predicted.bubble_fraction:.1%} predicted, {trace.bubble_fraction:.1%} {trace.source}, {share}")
    if result.too_busy:
        print("this machine was too busy to keep time: some action was late by more than its own time")
    peaks = ", ".join(f"{peak:g}" for peak in peak_activations(trace))
    print(f"peak activations, in micro-batches of a whole rank, from rank 0: {peaks}")
    trace.to_chrome(options.out / "trace.json")
    figure = gantt_compare(predicted, trace)[0].figure
    figure.savefig(options.out / "gantt.png", dpi=120, bbox_inches="tight")  # type: ignore[union-attr]
    print(f"wrote {options.out / 'trace.json'} and {options.out / 'gantt.png'}")
    return 0


def _grade(options: argparse.Namespace) -> int:
    from pipelab.grading import grade

    master = options.master or Path("solutions") / options.notebook.name
    print(grade(options.notebook, master, seed=options.seed, cell_timeout_s=options.timeout))
    return 0


def _started_by_torchrun() -> int | None:
    """How many ranks to start: 4, or None where torchrun has started them already."""
    from pipelab.ranks import torchrun

    return None if torchrun.launched() else 4


def _schedule(options: argparse.Namespace, num_ranks: int) -> Schedule:
    name = _NAMES[options.schedule]
    if options.stages_per_rank is None:
        return SCHEDULES[name](num_ranks, options.microbatches)
    if not takes_stages(name):
        raise SizeError(f"{options.schedule} has a fixed number of stages a rank; leave --stages-per-rank out")
    return SCHEDULES[name](num_ranks, options.microbatches, stages_per_rank=options.stages_per_rank)


def _pace(milliseconds: float | None, schedule: Schedule) -> Costs | None:
    """F takes `milliseconds` on a whole rank, I and W the same; a rank's stages share that evenly."""
    if milliseconds is None:
        return None
    whole = milliseconds / 1000
    return Costs(F=whole, I=whole, W=whole).split(schedule.stages_per_rank)


def _steps(digits: Digits, batch: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` mini-batches, epoch after epoch."""
    from pipelab.data import batches

    epochs = (batches(digits.train_inputs, digits.train_targets, batch, epoch=epoch) for epoch in count())
    return islice(chain.from_iterable(epochs), positive_integer("--steps", steps))
