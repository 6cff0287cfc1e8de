"""Squeeze a wish: every rank works as early as it can, in the order that it wished for, with W in its waits.

A wish (see _block) says in which order every rank would like to do its F and I. Squeezing makes a schedule of it, for
given times and a memory limit. Whenever a rank is free, it

    [1] starts the next station of its wish, if what that needs is there (and, for an F, room to keep its output),
    [2] else lets another station overtake, if `overtaking` allows that,
    [3] else does a W, if one is due and the rule for `weights` lets it begin, or if an F waits for room,
    [4] else waits until a message comes.

A rank knows when a message will come as soon as its sender has begun. Nothing is random and nothing is taken back, so
the time is linear in the number of actions, and `search` can afford hundreds of wishes.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import Literal

from pipelab.schedules._block import Wish
from pipelab.schedules._task import Squeezed, Task

Overtaking = Literal["never", "backward", "ramps", "always"]
Weights = Literal["fit", "fair", "soon"]
_HAIR = 1e-10  # relative; sums of times and of shares are at least that exact


def squeeze(
    task: Task,
    wish: Wish,
    *,
    overtaking: Overtaking = "never",
    weights: Weights = "fit",
    give_up_at: float = inf,
) -> Squeezed | None:
    """The schedule that `wish` becomes; None where it gets stuck, or as soon as it must cost `give_up_at` or more.

    `overtaking`: "never" keeps to the wish; "backward" lets an I pass; "ramps" lets F and I pass, but only before a
    rank's first I and after its last F, where a repeated block has holes; "always" lets both pass anywhere. An F passes
    others only if there is room for them, too. Where an F finds no room and no W is due, an I may pass it in any case.
    `weights`: a due W begins under "fit" where it fits into the wait, so that it delays nobody, under "soon" in any
    wait, under "fair" where it fits or where its rank, by waiting, would become the one that has waited longest. (The
    idea is that of Qi et al. 2023, section 3.1: a wait matters only if no other rank has a longer one.)
    """
    return _Squeeze(task, wish, overtaking, weights, give_up_at).run()


class _Squeeze:
    """The ranks, while time goes on."""

    def __init__(self, task: Task, wish: Wish, overtaking: Overtaking, weights: Weights, give_up_at: float) -> None:
        ranks, m = len(wish), task.num_microbatches
        self.task, self.wish, self.overtaking, self.weights = task, wish, overtaking, weights
        self.first_back = task.num_stages  # stations below are F, from here on I
        self.arrival = [[inf] * m for _ in range(2 * task.num_stages)]  # when a micro-batch is at a station
        self.arrival[0] = [0.0] * m
        self.passed = [0] * (2 * task.num_stages)  # how many micro-batches have passed each station
        self.places: list[list[int]] = [[] for _ in self.passed]  # where each of them stands in its rank's wish
        for row in wish:
            for place, station in enumerate(row):
                self.places[station].append(place)
        for places in self.places:
            places.append(sys.maxsize)  # after the last micro-batch: nowhere
        self.head = [0] * ranks  # the first place in the wish that is left
        self.forwards_left = [len(row) // 2 for row in wish]
        self.backwards_begun = [False] * ranks
        self.room = [task.room + _HAIR] * ranks
        self.due: list[list[int]] = [[] for _ in wish]  # stages whose W may run, first come first served
        self.done = [0] * ranks  # how many of them have run
        self.orders: list[list[int]] = [[] for _ in wish]
        self.free = [0.0] * ranks  # when a rank ends what it does
        self.idle = [0.0] * ranks  # how long it has waited since its first start
        self.first_start = [0.0] * ranks
        self.spare = [give_up_at * (1 - _HAIR) - work for work in task.work]
        self.agenda = [(0.0, rank) for rank in range(ranks)]  # when which rank looks for something to do

    def run(self) -> Squeezed | None:
        left = sum(map(len, self.wish)) * (3 if self.task.split else 2) // 2
        while left and self.agenda:
            now, rank = heappop(self.agenda)
            if now < self.free[rank]:
                continue
            station, soonest, full = self.look(rank, now)
            if station is not None:
                self.begin(rank, now, station)
            elif self.w_fits(rank, soonest - now, full):
                self.begin_w(rank, now)
            else:
                if soonest < inf:
                    heappush(self.agenda, (soonest, rank))  # [4]
                continue
            left -= 1
            if self.idle[rank] >= self.spare[rank]:
                return None
        if left:
            return None
        waits = self.idle if not self.task.makespan else map(sum, zip(self.idle, self.first_start, strict=True))
        cost = max(work + wait for work, wait in zip(self.task.work, waits, strict=True))
        return Squeezed(self.task, cost, tuple(map(tuple, self.orders)))

    def look(self, rank: int, now: float) -> tuple[int | None, float, bool]:
        """The station to begin with, if there is one now; else when one will be there, and whether room is missing."""
        wish, place, places, passed = self.wish[rank], self.head[rank], self.places, self.passed
        while place < len(wish):
            station = wish[place]
            if places[station][passed[station]] <= place:
                break
            place += 1  # this one has overtaken
        self.head[rank] = place
        if place == len(wish):
            return None, inf, False
        full = station < self.first_back and self.room[rank] < 1
        soonest = inf if full else self.arrival[station][passed[station]]
        if soonest <= now:
            return station, now, False  # [1]
        for other in self.overtakers(rank, full):  # [2]
            arrival = self.arrival[other][passed[other]]
            if arrival <= now:
                return other, now, False
            soonest = min(soonest, arrival)
        return None, soonest, full

    def overtakers(self, rank: int, full: bool) -> Iterator[int]:
        """The stations that may pass the head of the wish, in the order of the wish."""
        on_ramp = not self.backwards_begun[rank] or not self.forwards_left[rank]
        anything = self.overtaking == "always" or (self.overtaking == "ramps" and on_ramp)
        stuck = full and self.done[rank] == len(self.due[rank])
        if not (anything or stuck or self.overtaking == "backward"):
            return
        mine = [s for s in self.task.stations_of[rank] if self.passed[s] < self.task.num_microbatches]
        mine.sort(key=lambda s: self.places[s][self.passed[s]])
        for station in mine[1:]:
            if station >= self.first_back or (anything and self.room_for(rank, station)):
                yield station

    def room_for(self, rank: int, station: int) -> bool:
        """Whether this F finds room, and after it every F that it passes."""
        place = self.places[station][self.passed[station]]
        passes = sum(
            max(0, bisect_left(self.places[s], place) - self.passed[s])
            for s in self.task.stations_of[rank]
            if s < self.first_back and s != station
        )
        return self.room[rank] >= 1 + passes

    def w_fits(self, rank: int, wait: float, full: bool) -> bool:
        """[3] Whether a W is due and should run now."""
        due, done = self.due[rank], self.done[rank]
        if done == len(due):
            return False
        if full or self.weights == "soon" or wait >= self.task.W[due[done]] * (1 - _HAIR):
            return True
        return self.weights == "fair" and self.idle[rank] + wait > max(self.idle)

    def begin(self, rank: int, now: float, station: int) -> None:
        task, k = self.task, self.passed[station]
        self.passed[station] += 1
        if station < self.first_back:
            self.room[rank] -= 1
            self.forwards_left[rank] -= 1
        else:
            self.backwards_begun[rank] = True
            self.room[rank] += 1 - task.weight_part if task.split else 1
            if task.split:
                self.due[rank].append(2 * task.num_stages - 1 - station)
        end = self.occupy(rank, now, task.duration[station], station)
        if station + 1 < len(self.passed):
            self.arrival[station + 1][k] = arrival = end + task.delay[station]
            heappush(self.agenda, (arrival, self.rank_of(station + 1)))

    def begin_w(self, rank: int, now: float) -> None:
        stage = self.due[rank][self.done[rank]]
        self.done[rank] += 1
        self.room[rank] += self.task.weight_part
        self.occupy(rank, now, self.task.W[stage], 2 * self.task.num_stages + stage)

    def occupy(self, rank: int, now: float, duration: float, code: int) -> float:
        """Keep `rank` busy from now on; returns until when."""
        if self.orders[rank]:
            self.idle[rank] += now - self.free[rank]
        else:
            self.first_start[rank] = now
            self.spare[rank] -= now if self.task.makespan else 0.0
        self.orders[rank].append(code)
        self.free[rank] = end = now + duration
        heappush(self.agenda, (end, rank))
        return end

    def rank_of(self, station: int) -> int:
        return self.task.placement[min(station, len(self.passed) - 1 - station)]
