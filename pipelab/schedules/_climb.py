"""Climb: take a building block, squeeze its repetition, and keep every change of it that helps.

A draft is a block, the way of one micro-batch that all others follow, and the rules for squeezing it. There are a few
simple first blocks; the best of them are changed, one thing at a time, until no change makes them better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, inf
from typing import Any, NamedTuple

from pipelab.schedules._block import Block, repeat, tight_block
from pipelab.schedules._squeeze import Overtaking, Weights, squeeze
from pipelab.schedules._task import Squeezed, Task

_EFFORT = 700_000  # actions squeezed, about: tries, not seconds, so that a search repeats itself
_FEWEST_TRIES = 120
_CLIMBS = 5

_OVERTAKING: tuple[Overtaking, ...] = ("never", "backward", "ramps", "always")
_WEIGHTS: tuple[Weights, ...] = ("fair", "fit", "soon")
_LEADS = (1, 2, 1.25, 1.5, 1.75, 2.5, 3, 2 / 3)  # by how many micro-batches a rank is ahead of the next; 1F1B's is 1
_STEPS = ((1, 1), (3, 2), (2, 1), (1, 2), (2, 2), (3, 1), (3, 3), (4, 2), (5, 1), (6, 6))  # slots to the next, and back


class Draft(NamedTuple):
    """A block and how to squeeze its repetition: what is changed."""

    block: Block
    overtaking: Overtaking
    weights: Weights


Change = Callable[[Draft], Draft]


def climb(task: Task) -> list[Squeezed]:
    """The tops that are reached from the best few first drafts."""
    return _Climb(task).run()


class _Climb:
    """One task, what may be changed about a draft, and how many tries are left."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.ranks, self.stages, self.microbatches = len(task.work), task.num_stages, task.num_microbatches
        self.period = 3 * self.stages // self.ranks  # a slot for F, I and W of each stage of a rank
        self.weights = _WEIGHTS if task.split else _WEIGHTS[1:2]  # without W, there is nothing to choose
        self.tries_left = max(_FEWEST_TRIES, _EFFORT // (3 * self.stages * self.microbatches))
        self.changes = [*self.other_rules(), *self.other_blocks()]

    def run(self) -> list[Squeezed]:
        best, first = inf, list[tuple[Squeezed, Draft]]()
        for slots in self.first_blocks():
            # of all rules for a block only the best are kept, so that climbs begin in different places
            tried = [(self.squeeze(draft, give_up_at=1.1 * best), draft) for draft in self.with_rules(slots)]
            found = [(result, draft) for result, draft in tried if result is not None]
            if found:
                first.append(min(found, key=_cost))
                best = min(best, first[-1][0].cost)
        first.sort(key=_cost)
        return [self.top(draft, result) for result, draft in first[:_CLIMBS]]

    def top(self, draft: Draft, result: Squeezed) -> Squeezed:
        """Change after change, keeping those that help, until none does."""
        helped = True
        while helped:
            helped = False
            for change in self.changes:
                if self.tries_left <= 0:
                    return result
                better = self.squeeze(change(draft), give_up_at=result.cost)
                if better is not None:
                    draft, result, helped = change(draft), better, True
        return result

    def squeeze(self, draft: Draft, give_up_at: float) -> Squeezed | None:
        self.tries_left -= 1
        wish = repeat(draft.block, self.task.placement, self.microbatches, self.period)
        return squeeze(self.task, wish, overtaking=draft.overtaking, weights=draft.weights, give_up_at=give_up_at)

    # --- where to begin -----------------------------------------------------------------------------------------------

    def with_rules(self, slots: Block) -> Iterator[Draft]:
        for weights in self.weights:
            for overtaking in _OVERTAKING[:3]:
                yield Draft(slots, overtaking, weights)

    def first_blocks(self) -> Iterator[Block]:
        """Short ones keep little, long ones wait little."""
        if self.stages == self.ranks:
            yield from map(self.ahead, self.first_leads())
        else:
            for down, up in _STEPS:
                yield tight_block(self.task.placement, down=down, up=up, period=self.period)
        count = 2 * self.stages
        yield tuple(self.period * station / count for station in range(count))  # one micro-batch at a time

    def ahead(self, leads: Sequence[float]) -> Block:
        """The block in which stage s does the F of `leads[s]` micro-batches, rounded, before its first I."""
        first_backward = [self.period * max(1, round(lead)) - 1.0 for lead in reversed(leads)]
        return (*(0.0 for _ in leads), *first_backward)

    def first_leads(self) -> Iterator[Sequence[float]]:
        """As many as there is time for until the first gradient is back, and by equal steps from rank to rank."""
        ranks_behind = range(self.ranks - 1, -1, -1)
        wait, fit = 0.0, list[float]()
        for rank in ranks_behind:
            forward, backward = self.task.duration[rank], self.task.duration[2 * self.stages - 1 - rank]
            wait += forward
            fit.insert(0, min(wait / forward, self.microbatches) if forward else 1.0)
            wait += backward + 2 * (self.task.hop[rank - 1] if rank else 0.0)
        yield list(map(floor, fit))
        yield list(map(ceil, fit))
        for step in _LEADS:
            yield [1 + step * behind for behind in ranks_behind]
        yield [self.microbatches] * self.ranks

    # --- what to change -----------------------------------------------------------------------------------------------

    def other_rules(self) -> Iterator[Change]:
        for overtaking in _OVERTAKING:
            yield _set(overtaking=overtaking)
        for weights in self.weights:
            yield _set(weights=weights)

    def other_blocks(self) -> Iterator[Change]:
        """A station and all after it, a period later or sooner; in a loop or V also a slot, else also it alone."""
        count = 2 * self.stages
        for station in range(1, count):
            for later in (1, -1):
                yield _shift(slice(station, count), later * self.period)
                if self.stages == self.ranks:
                    yield _shift(slice(station, station + 1), later * self.period)
                else:
                    yield _shift(slice(station, count), later)


def _cost(tried: tuple[Squeezed, Draft]) -> float:
    return tried[0].cost


def _set(**rules: Any) -> Change:
    return lambda draft: draft._replace(**rules)


def _shift(stations: slice, slots: int) -> Change:
    def change(draft: Draft) -> Draft:
        later = list(draft.block)
        later[stations] = [slot + slots for slot in later[stations]]
        return draft._replace(block=tuple(later))

    return change
