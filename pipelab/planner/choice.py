"""A candidate that satisfies every constraint, with what is predicted for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipelab.costs import Costs
from pipelab.planner.candidate import Candidate
from pipelab.planner.duration import Duration, costs_of, estimate, simulated, trace_of
from pipelab.planner.footprint import Footprint, footprints
from pipelab.planner.question import Question
from pipelab.planner.rejected import Rejected, too_idle, too_large
from pipelab.schedule import Schedule
from pipelab.trace import Trace


@dataclass(frozen=True)
class Choice:
    """A feasible candidate and its prediction.

    step_s      seconds from one update to the next
    bubble      part of the makespan in which the busiest rank is idle
    source      of the two: "closed form", "bound" or "simulated" (pipelab.planner.duration)
    ranks       what each rank of the pipeline keeps, on each of its GPUs
    """

    candidate: Candidate
    step_s: float
    bubble: float
    source: str
    ranks: tuple[Footprint, ...] = field(repr=False)
    question: Question = field(repr=False)

    @property
    def memory_bytes(self) -> float:
        """What the fullest rank needs."""
        return max(rank.total for rank in self.ranks)

    @property
    def samples_per_s(self) -> float:
        """Throughput of all replicas together."""
        return self.question.batch / self.step_s

    @property
    def flops_per_gpu_s(self) -> float:
        """Useful operations a second and GPU, forward and backward; recomputation does not count."""
        return 3 * self.question.model.forward_flops * self.samples_per_s / self.question.hardware.gpus

    def schedule(self) -> Schedule:
        """The Schedule of one pipeline and one round."""
        return self.candidate.build()

    def costs(self) -> Costs:
        """Seconds of every stage for one micro-batch, and the link between ranks: what `pl.simulate` and pace take."""
        return costs_of(self.candidate, self.question.model, self.question.hardware)

    def simulate(self) -> Trace:
        """One round of it as a Trace, to draw: seconds."""
        return trace_of(self.candidate, self.question.model, self.question.hardware)

    def simulated(self) -> Choice:
        """The same, predicted by the simulator."""
        found = simulated(self.candidate, self.question.model, self.question.hardware)
        return replace(self, **found._asdict())

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 1e9:.1f} GB"
        return f"{self.candidate}: {self.step_s:.4g} s a step, bubble {100 * self.bubble:.1f} %, {memory}"


def judge(candidate: Candidate, question: Question) -> Choice | Rejected:
    """What is predicted for a candidate, or why it is none: memory first, then the bubble."""
    model, hardware = question.model, question.hardware
    ranks = footprints(candidate, model, hardware)
    if rejected := too_large(candidate, ranks, hardware.memory_bytes):
        return rejected
    found: Duration = estimate(candidate, model, hardware)
    if rejected := too_idle(candidate, found.bubble, question.max_bubble):
        return rejected
    return Choice(candidate, *found, ranks, question)


def size(candidate: Candidate) -> int:
    """Actions of its schedule: what a simulation costs."""
    return 2 * candidate.num_stages * candidate.num_microbatches
