"""What actions and messages cost: seconds, or any unit of time that is used throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pipelab.action import Kind
from pipelab.errors import CostError, positive_integer
from pipelab.trace import Trace

Time = float | Sequence[float]  # one for all stages, or one a stage


@dataclass(frozen=True)
class Link:
    """A wire from one rank to another: a message of n bytes takes `latency_s + n / bytes_per_s`.

    Messages of one direction queue first-in first-out for the bandwidth; latencies overlap.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _number("latency_s", self.latency_s)
        if not self.bytes_per_s > 0:
            raise CostError(f"bytes_per_s must be positive, got {self.bytes_per_s!r}")


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
        object.__setattr__(self, "comm", comm if isinstance(comm, Link) else _number("comm", comm))
        object.__setattr__(self, "boundary_bytes", _times("boundary_bytes", boundary_bytes))

    @property
    def B(self) -> float | tuple[float, ...]:  # noqa: N802  the field's letter
        """The full backward: I + W, a number or one a stage."""
        if isinstance(self.I, tuple) or isinstance(self.W, tuple):
            length = len(self.I) if isinstance(self.I, tuple) else len(self.W)  # type: ignore[arg-type]
            return tuple(i + w for i, w in zip(_spread("I", self.I, length), _spread("W", self.W, length), strict=True))
        return self.I + self.W

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

    @classmethod
    def from_trace(cls, trace: Trace) -> Costs:
        """What the actions of `trace` took: the median over micro-batches for every kind and stage, in its unit.

        A full backward counts half as I, half as W; messages count as free. Simulating with these costs tells how much
        of a run's time its order explains.
        """
        seen: dict[tuple[Kind, int], list[float]] = {}
        for span in trace.spans:
            if not span.recompute:
                seen.setdefault((span.action.kind, span.action.stage), []).append(span.duration)

        def times(kind: Kind) -> list[float]:
            halves = [(median(seen.get((Kind.B, stage), [0.0])) / 2) for stage in range(trace.schedule.num_stages)]
            return [median(seen.get((kind, stage), [half])) for stage, half in enumerate(halves)]

        forward = [median(seen.get((Kind.F, stage), [0.0])) for stage in range(trace.schedule.num_stages)]
        updates = [median(seen.get((Kind.U, stage), [0.0])) for stage in range(trace.schedule.num_stages)]
        return cls(F=forward, I=times(Kind.I), W=times(Kind.W), U=updates)

    def split(self, stages_per_rank: int, placement: Literal["loop", "v"] = "loop") -> Costs:
        """These costs, given for whole ranks, divided over `stages_per_rank` equal stages a rank.

        A sequence (one entry a rank) is laid out by `placement`: in a loop stage s is on rank s % p; in a V every other
        pass runs backwards. Boundary bytes stay as they are: a boundary does not shrink because there are more of them.
        """
        v = positive_integer("stages_per_rank", stages_per_rank)

        def share(times: float | tuple[float, ...]) -> float | tuple[float, ...]:
            if not isinstance(times, tuple):
                return times / v
            passes = [times if placement == "loop" or n % 2 == 0 else times[::-1] for n in range(v)]
            return tuple(t / v for one in passes for t in one)

        return Costs(
            F=share(self.F),
            I=share(self.I),
            W=share(self.W),
            U=share(self.U),
            comm=self.comm,
            boundary_bytes=self.boundary_bytes,
        )


def one_per_stage(name: str, value: object, num_stages: int) -> tuple[float, ...]:
    """`value`, one number or one a stage, as one a stage; raises CostError where one is negative or lacking."""
    return _spread(name, _times(name, value), num_stages)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool):
        raise CostError(f"{name} must be a time, got {value!r}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise CostError(f"{name} must be a number, or one a stage, got {value!r}") from None
    if not math.isfinite(number) or number < 0:
        raise CostError(f"{name} must be finite and not negative, got {number}")
    return number


def _times(name: str, value: object) -> float | tuple[float, ...]:
    entries = value.tolist() if hasattr(value, "tolist") else value  # numpy arrays and torch tensors too
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        return _number(name, entries)
    if not entries:
        raise CostError(f"{name} is an empty sequence; give one number, or one a stage")
    return tuple(_number(f"{name}[{stage}]", entry) for stage, entry in enumerate(entries))


def _spread(name: str, times: float | tuple[float, ...], num_stages: int) -> tuple[float, ...]:
    if not isinstance(times, tuple):
        return (times,) * num_stages
    if len(times) != num_stages:
        raise CostError(
            f"{name} has {len(times)} entries, but there are {num_stages} stages: give one number, or one a stage"
        )
    return times
