"""What a plan is asked for: the model, the machine, the batch, the limits, and which candidates are of interest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from pipelab.errors import SizeError, amount, positive_integer
from pipelab.planner.candidate import REMATS, SHARDINGS, traits
from pipelab.planner.hardware import Hardware
from pipelab.planner.model import Model
from pipelab.schedules import SCHEDULES

DEFAULT_SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
MICROBATCHES = (1, 2, 4, 8, 16)
VIRTUAL = (2, 4)


@dataclass(frozen=True)
class Choices:
    """For each axis the values of interest, or None for all that the planner tries.

    All of: `tp` the divisors of the number of GPUs, `pp` those up to the number of layers, `dp` what is left; of
    `microbatch` 1, 2, 4, 8, 16; of `rounds` the divisors of what a replica works on; of `schedule` GPipe, 1F1B,
    interleaved and ZB-H1; of `stages_per_rank`, where a schedule has it, 2 and 4.
    """

    dp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    rounds: tuple[int, ...] | None = (1,)
    schedule: tuple[str, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None
    remat: tuple[str, ...] | None = None
    sharding: tuple[str, ...] | None = None

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Choices:
        """From one value an axis, several, or None; SizeError for a count that is none and a word that is unknown."""
        return cls(**{name: _values(name, value) for name, value in given.items()})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Question:
    """All that a plan depends on. `max_bubble` is a part of the makespan, from 0 to 1."""

    model: Model
    hardware: Hardware
    batch: int
    max_bubble: float
    choices: Choices

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", positive_integer("batch", self.batch))
        amount("max_bubble", self.max_bubble, most=1)

    def shapes(self) -> Iterator[tuple[int, int, int]]:
        """(dp, tp, pp) of all GPUs, TP growing slower; pp beyond the number of layers only where the others ask it."""
        gpus, asked = self.hardware.gpus, self.choices
        divisors = divisors_of(gpus)
        deepest = gpus if asked.dp and asked.tp else len(self.model.weights)
        for tp in asked.tp or divisors:
            for pp in asked.pp or [pp for pp in divisors if pp <= deepest]:
                dp, rest = divmod(gpus, tp * pp)
                if rest == 0 and (asked.dp is None or dp in asked.dp):
                    yield dp, tp, pp

    def microbatches(self, dp: int) -> Iterable[int]:
        """Sizes of a micro-batch to try with `dp` replicas."""
        fitting = [size for size in MICROBATCHES if size * dp <= self.batch]
        return self.choices.microbatch or fitting or MICROBATCHES[:1]

    def rounds(self, dp: int, microbatch: int) -> Iterable[int]:
        """How many pipelines one after another to try."""
        return self.choices.rounds or divisors_of(max(1, self.batch // (dp * microbatch)))

    def schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """(schedule, stages per rank) to try; without a pipeline all schedules are one."""
        names = self.choices.schedule or (DEFAULT_SCHEDULES if pp > 1 else ("one_f_one_b",))
        for name in names:
            if traits(name).any_stages:
                for stages_per_rank in self.choices.stages_per_rank or VIRTUAL:
                    yield name, stages_per_rank
            else:
                yield name, traits(name).stages_per_rank

    def keeping(self, dp: int) -> Iterator[tuple[str, str]]:
        """(remat, sharding) to try; a single replica has nothing to divide."""
        shardings = self.choices.sharding or (SHARDINGS if dp > 1 else SHARDINGS[:1])
        for sharding in shardings:
            for remat in self.choices.remat or REMATS:
                yield remat, sharding


def divisors_of(number: int) -> list[int]:
    """All divisors of a positive number, rising."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _words(axis: str) -> tuple[str, ...]:
    """The words of an axis, or none where it counts."""
    if axis == "schedule":
        return tuple(name for name in SCHEDULES if not traits(name).updates)  # without a flush, no step to plan
    return {"remat": REMATS, "sharding": SHARDINGS}.get(axis, ())


_AXES = tuple(field.name for field in fields(Choices))


def _values(name: str, given: object) -> tuple[object, ...] | None:
    if name not in _AXES:
        raise SizeError(f"plan has no axis {name!r}; it has {', '.join(_AXES)}")
    if given is None:
        return None
    entries = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not entries:
        raise SizeError(f"{name} has no value to try; leave it out to try all")
    words = _words(name)
    if not words:
        return tuple(positive_integer(name, entry) for entry in entries)
    if unknown := [entry for entry in entries if entry not in words]:
        raise SizeError(f"{name} is one of {', '.join(words)}; got {', '.join(map(repr, unknown))}")
    return entries
