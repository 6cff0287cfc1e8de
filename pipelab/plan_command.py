"""`python -m pipelab plan`: the planner's table, or why nothing is feasible, in a terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelab.errors import SizeError, positive_integer

if TYPE_CHECKING:
    from pipelab.planner import Plan, Transformer

_NUMBERS = ("layers", "hidden", "heads", "sequence", "vocabulary")
_COUNTS = ("dp", "tp", "pp", "microbatch", "rounds", "stages_per_rank")
_WORDS = ("schedule", "remat", "sharding")


def add_to(commands: Any) -> None:
    """Add the command to argparse's `commands`."""
    plan = commands.add_parser(
        "plan",
        help="every way to lay a model out over GPUs, best first, and why others are none",
        description="A preset of a paper (--list), or a model's numbers; an axis that is not given is tried out.",
    )
    plan.add_argument("model", nargs="?", help="a preset, such as gpt3-175b; leave it out and give the numbers")
    plan.add_argument("--list", action="store_true", help="list the presets and their sources")
    plan.add_argument("--gpus", type=int, default=8)
    plan.add_argument("--batch", type=int, default=512, help="samples a step, of all replicas (default: 512)")
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    plan.add_argument("--memory", type=float, default=80.0, metavar="GB", help="of a GPU (default: 80)")
    plan.add_argument("--teraflops", type=float, default=312.0, metavar="T", help="a GPU's peak (default: 312)")
    plan.add_argument("--efficiency", type=float, default=0.5, help="part of the peak that is reached (default: 0.5)")
    plan.add_argument("--max-bubble", type=float, default=1.0, metavar="PART", help="of the makespan, from 0 to 1")
    for name in _NUMBERS:
        plan.add_argument(f"--{name}", type=int)
    for name in _COUNTS:
        plan.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="+", metavar="N", default=())
    plan.set_defaults(rounds=(1,))
    for name in _WORDS:
        plan.add_argument(f"--{name}", nargs="+", metavar="WORD", default=())
    plan.add_argument("--top", type=int, default=10, help="rows of the table (default: 10)")
    plan.add_argument("--why", action="store_true", help="list every rejected candidate with its reason")
    plan.add_argument("--picture", type=Path, metavar="PNG", help="save memory against throughput as a picture")
    plan.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan; 0 where something is feasible, else 1."""
    from pipelab.planner import PRESETS, Hardware, plan

    if options.list:
        for name, model in PRESETS.items():
            print(f"{name:<14} {model.parameters / 1e9:8.3f} billion parameters  [{model.source}]")
        return 0
    hardware = Hardware(
        options.gpus,
        gpus_per_node=options.gpus_per_node,
        memory_bytes=options.memory * 1e9,
        flops_per_s=options.teraflops * 1e12,
        efficiency=options.efficiency,
    )
    axes: dict[str, Any] = {name: getattr(options, name) or None for name in (*_COUNTS, *_WORDS)}
    found = plan(_model(options), hardware, batch=options.batch, max_bubble=options.max_bubble, **axes)
    print(found.report(positive_integer("--top", options.top)))
    if options.why:
        print(*found.rejected, sep="\n")
    if options.picture and len(found):
        _save(found, options.picture)
    return 0 if len(found) else 1


def _model(options: argparse.Namespace) -> str | Transformer:
    from pipelab.planner import Transformer

    numbers = {name: getattr(options, name) for name in _NUMBERS}
    missing = [name for name, number in numbers.items() if number is None]
    if options.model:
        if len(missing) < len(_NUMBERS):
            raise SizeError(f"give a preset or a model's numbers, not both: {options.model} has its own")
        return str(options.model)
    if missing:
        raise SizeError(f"give a preset (--list shows them), or also {', '.join('--' + name for name in missing)}")
    return Transformer(**numbers)


def _save(found: Plan, picture: Path) -> None:
    from pipelab.plots import pareto_plot

    pareto_plot(found).figure.savefig(picture, dpi=120, bbox_inches="tight")  # type: ignore[union-attr]
    print(f"wrote {picture}")
