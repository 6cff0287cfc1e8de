"""What actions and messages cost: seconds, or any unit of time that is used throughout."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pipelab.action import Kind
from pipelab.errors import CostError, amount, positive_integer
from pipelab.schedule import placed
from pipelab.trace import Trace, timed

Time = float | Sequence[float]  # one for all stages, or one a stage


@dataclass(frozen=True)
class Link:
    """A wire from one rank to another: a message of n bytes takes `latency_s + n / bytes_per_s`.

    Messages of one direction queue first-in first-out for the bandwidth; latencies overlap.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency_s", amount("latency_s", self.latency_s))
        if self.bytes_per_s != math.inf:
            object.__setattr__(self, "bytes_per_s", amount("bytes_per_s", self.bytes_per_s))
        if self.bytes_per_s == 0:
            raise CostError("bytes_per_s must be positive, got 0")

    def seconds(self, num_bytes: float) -> float:
        """How long a message of so many bytes takes, on a wire that is free."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Wire:
    """One direction of a Link, with the messages that are under way on it."""

    def __init__(self, link: Link) -> None:
        self._latency_s, self._bytes_per_s = link.latency_s, link.bytes_per_s
        self._free = -math.inf

    def send(self, now: float, num_bytes: float) -> float:
        """When a message that is ready at `now` arrives; those before it go first."""
        self._free = max(now, self._free) + num_bytes / self._bytes_per_s
        return self._free + self._latency_s


@dataclass(frozen=True, init=False)
class Costs:
    """The time of one stage's actions, and of one hop between ranks.

    A number holds for every stage; a sequence has one entry a stage. A full backward B takes I + W; `Costs(F=1, B=2)`
    splits B evenly. `comm` is the one-way delay of a hop, or a Link, which then needs `boundary_bytes`: what a stage's
    output (and the gradient that comes back for it) weighs, one number or one a stage.
    Raises CostError for anything negative, infinite or not a number.
    """

    F: float | tuple[float, ...]
    I: float | tuple[float, ...]  # noqa: E741
    W: float | tuple[float, ...]
    comm: float | Link
    U: float | tuple[float, ...]
    boundary_bytes: float | tuple[float, ...]

    def __init__(
        self,
        F: Time = 1.0,
        I: Time | None = None,  # noqa: E741
        W: Time | None = None,
        comm: float | Link = 0.0,
        *,
        B: Time | None = None,
        U: Time = 0.0,
        boundary_bytes: Time = 0.0,
    ) -> None:
        if B is not None and (I is not None or W is not None):
            raise CostError("give B, or I and W, not both: B is I + W")
        if B is not None:
            whole = _times("B", B)
            I = W = tuple(b / 2 for b in whole) if isinstance(whole, tuple) else whole / 2  # noqa: E741
        object.__setattr__(self, "F", _times("F", F))
        object.__setattr__(self, "I", _times("I", 1.0 if I is None else I))
        object.__setattr__(self, "W", _times("W", 1.0 if W is None else W))
        object.__setattr__(self, "U", _times("U", U))
        object.__setattr__(self, "comm", comm if isinstance(comm, Link) else amount("comm", comm))
        object.__setattr__(self, "boundary_bytes", _times("boundary_bytes", boundary_bytes))

    @property
    def B(self) -> float | tuple[float, ...]:  # noqa: N802  the field's letter
        """The full backward: I + W, a number or one a stage."""
        stages = [len(times) for times in (self.I, self.W) if isinstance(times, tuple)]
        return self.per_stage(stages[0])[Kind.B] if stages else self.I + self.W  # type: ignore[operator]

    def per_stage(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """The time of every kind of action on every stage; CostError where a sequence has another length."""
        f, i, w, u = (_spread(name, getattr(self, name), num_stages) for name in "FIWU")
        b = tuple(x + y for x, y in zip(i, w, strict=True))
        return {Kind.F: f, Kind.B: b, Kind.I: i, Kind.W: w, Kind.U: u}

    def bytes_per_stage(self, num_stages: int) -> tuple[float, ...]:
        """Bytes of each stage's output; the last stage's never travels, so a sequence may leave it out."""
        given = self.boundary_bytes
        if isinstance(given, tuple) and len(given) == num_stages - 1:
            given = (*given, 0.0)
        return _spread("boundary_bytes", given, num_stages)

    def message_bytes(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """What each stage sends: a forward its output, a backward the gradient of its input, the output before it."""
        outputs = self.bytes_per_stage(num_stages)
        gradients = (0.0, *outputs[:-1])
        return {Kind.F: outputs, Kind.B: gradients, Kind.I: gradients}

    @property
    def link(self) -> Link:
        """`comm` as a Link, over which a plain delay is the same for all bytes."""
        return self.comm if isinstance(self.comm, Link) else Link(self.comm, math.inf)

    @classmethod
    def from_trace(cls, trace: Trace) -> Costs:
        """What the actions of `trace` took: the median over micro-batches for every kind and stage, in its unit.

        A full backward counts half as I, half as W; messages count as free. Simulating with these costs tells how much
        of a run's time its order explains.
        """
        seen: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
        for span in timed(trace).spans:
            if not span.recompute:
                seen[span.action.kind, span.action.stage].append(span.duration)

        def took(kind: Kind) -> list[float]:
            return [median(seen[kind, stage] or [0.0]) for stage in range(trace.schedule.num_stages)]

        halves = [whole / 2 for whole in took(Kind.B)]
        i, w = ([own or half for own, half in zip(took(kind), halves, strict=True)] for kind in (Kind.I, Kind.W))
        return cls(F=took(Kind.F), I=i, W=w, U=took(Kind.U))

    def split(self, stages_per_rank: int, placement: Literal["loop", "v"] = "loop") -> Costs:
        """These costs, given for whole ranks, divided over `stages_per_rank` equal stages a rank.

        A sequence (one entry a rank) is laid out by `placement`, as `pipelab.schedule.placed` does it. Boundary bytes
        stay as they are: a boundary does not shrink because there are more of them.
        """
        v = positive_integer("stages_per_rank", stages_per_rank)

        def share(times: float | tuple[float, ...]) -> float | tuple[float, ...]:
            if not isinstance(times, tuple):
                return times / v
            return tuple(times[rank] / v for rank in placed(len(times), v, placement))

        return Costs(
            F=share(self.F),
            I=share(self.I),
            W=share(self.W),
            U=share(self.U),
            comm=self.comm,
            boundary_bytes=self.boundary_bytes,
        )


def or_unit(costs: Costs | None) -> Costs:
    """`costs`, or F = I = W = 1 and free messages where none are given; raises CostError for anything else."""
    if not isinstance(costs, Costs | None):
        raise CostError(f"costs must be Costs, as in Costs(F=1, B=2), got {costs!r}")
    return Costs() if costs is None else costs


def one_per_stage(name: str, value: object, num_stages: int) -> tuple[float, ...]:
    """`value`, one number or one a stage, as one a stage; raises CostError where one is negative or lacking."""
    return _spread(name, _times(name, value), num_stages)


def _times(name: str, value: object) -> float | tuple[float, ...]:
    entries = value.tolist() if hasattr(value, "tolist") else value  # numpy arrays and torch tensors too
    if isinstance(entries, (str, bytes)) or not isinstance(entries, Sequence):
        return amount(name, entries)
    if not entries:
        raise CostError(f"{name} is an empty sequence; give one number, or one a stage")
    return tuple(amount(f"{name}[{stage}]", entry) for stage, entry in enumerate(entries))


def _spread(name: str, times: float | tuple[float, ...], num_stages: int) -> tuple[float, ...]:
    if not isinstance(times, tuple):
        return (times,) * num_stages
    if len(times) != num_stages:
        raise CostError(
            f"{name} has {len(times)} entries, but there are {num_stages} stages: give one number, or one a stage"
        )
    return times
