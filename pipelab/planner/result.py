"""What a plan found: the feasible choices as a table, best first, and the rejected candidates with their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from pipelab.errors import PlanError
from pipelab.planner.choice import Choice
from pipelab.planner.question import Question
from pipelab.planner.rejected import CONSTRAINTS, Rejected

_SHOWN = 10
_HEAD = (
    *("step s", "samples/s", "TFLOP/s", "bubble", "GB", "dp", "tp", "pp", "schedule", "v", "micro-batches", "rounds"),
    *("remat", "sharding", "by"),
)


@dataclass(frozen=True, repr=False)
class Plan:
    """The answer of `pl.plan`: iterate over it, or take `.best`; printed, it is a table of the first ten.

    choices        feasible, fastest first; the same speed, then least memory
    rejected       the others, each with the constraint that it violates and a sentence
    relaxations    where nothing is feasible: the nearest changes after which something is
    """

    question: Question
    choices: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    relaxations: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the model."""
        return str(getattr(self.question.model, "name", "model"))

    @property
    def best(self) -> Choice:
        """The fastest choice; raises PlanError, with what to relax, where there is none."""
        if not self.choices:
            raise PlanError(self._nothing())
        return self.choices[0]

    @property
    def pareto(self) -> tuple[Choice, ...]:
        """The choices that no other beats in both memory and throughput, from least memory to fastest."""
        front: list[Choice] = []
        for choice in sorted(self.choices, key=lambda c: (c.memory_bytes, c.step_s)):
            if not front or choice.step_s < front[-1].step_s:
                front.append(choice)
        return tuple(front)

    @property
    def reasons(self) -> dict[str, int]:
        """How many candidates each constraint rejected."""
        return dict(Counter(rejected.constraint for rejected in self.rejected).most_common())

    def __len__(self) -> int:
        return len(self.choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def __getitem__(self, place: int) -> Choice:
        return self.choices[place]

    def table(self, rows: int = _SHOWN) -> str:
        """The first `rows` choices as text."""
        cells = [_HEAD, *map(_row, self.choices[:rows])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        )

    def report(self, rows: int = _SHOWN) -> str:
        """The question, the table of the first `rows`, and what was rejected for which reason; or why all were."""
        if not self.choices:
            return self._nothing()
        return "\n".join([self._headline(), self.table(rows), *self._rest(rows)])

    def __repr__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        if not self.choices:
            return "<br>".join(escape(line) for line in self._nothing().splitlines())
        rows = ["".join(f"<th>{escape(cell)}</th>" for cell in _HEAD)]
        rows += ["".join(f"<td>{escape(cell)}</td>" for cell in _row(choice)) for choice in self.choices[:_SHOWN]]
        table = "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
        below = "".join(f"<p>{escape(line)}</p>" for line in self._rest())
        return f"<p>{escape(self._headline())}</p>{table}{below}"

    def _headline(self) -> str:
        asked, hardware = self.question, self.question.hardware
        limits = f"{hardware.memory_bytes / 1e9:g} GB a GPU"
        if asked.max_bubble < 1:
            limits += f", bubble at most {100 * asked.max_bubble:g} %"
        return f"{self.name} on {hardware.gpus} GPUs, batch {asked.batch}, {limits}"

    def _rest(self, rows: int = _SHOWN) -> list[str]:
        lines = []
        if len(self) > rows:
            lines.append(f"and {len(self) - rows:,} more choices")
        if self.rejected:
            counts = ", ".join(f"{count:,} because of {name}" for name, count in self.reasons.items())
            lines.append(f"rejected {len(self.rejected):,}: {counts}")
        return lines

    def _nothing(self) -> str:
        lines = [f"nothing is feasible for {self._headline()}"]
        for name in self.reasons:
            nearest = min((r for r in self.rejected if r.constraint == name), key=lambda r: abs(r.found - r.limit))
            lines.append(f"  {CONSTRAINTS[name]}: {nearest}")
        if self.relaxations:
            lines.append("nearest relaxations: " + ", or ".join(self.relaxations))
        else:
            lines.append("no change of one number that was tried makes it feasible: change several, or take more GPUs")
        return "\n".join(lines)


def _row(choice: Choice) -> tuple[str, ...]:
    c = choice.candidate
    return (
        *(f"{choice.step_s:.4g}", f"{choice.samples_per_s:.4g}", f"{choice.flops_per_gpu_s / 1e12:.3g}"),
        *(f"{100 * choice.bubble:.2f} %", f"{choice.memory_bytes / 1e9:.1f}", str(c.dp), str(c.tp), str(c.pp)),
        *(c.schedule, str(c.stages_per_rank), f"{c.num_microbatches} × {c.microbatch}", str(c.rounds)),
        *(c.remat, c.sharding, choice.source),
    )
