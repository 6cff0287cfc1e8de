"""Prove how quick small schedules can be, and store it beside the schedules: `pipelab.search` is held to it.

    python tools/optima.py                    every case that is not proved yet, 60 seconds each: some minutes in all
    python tools/optima.py --seconds 600      the same with more patience

One stage a rank, a split backward, and a micro-batch counted whole from its F to its W (weight_part 1). A constraint
solver (CP-SAT of OR-tools, in the extra `dev`) gets the problem as it is, and none of our ideas about good orders:

    variables    when every F, I and W starts
    order        F after the F of the rank before and I after the I of the rank behind, one hop later; W after its I
    ranks        one thing at a time
    memory       F number k + limit starts after W number k has ended
    objective    makespan: the last end; span: the longest time from first start to last end of one rank

Micro-batches are equal, so they may be renamed until F, I and W each run in their order on every rank. The first F of a
rank starts as soon as it can, as in `simulate`. Others may start late, which gains nothing.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate, product
from time import perf_counter
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from pipelab.schedules.optima import STORE


class Case(NamedTuple):
    """One question to the solver; F, I and W have a whole number for each stage."""

    num_ranks: int
    num_microbatches: int
    F: tuple[int, ...]
    I: tuple[int, ...]  # noqa: E741
    W: tuple[int, ...]
    comm: int
    memory_limit: int
    objective: str


def cases() -> list[Case]:
    """Two sizes, three sets of times, free and slow links, both objectives, every limit from p to 2p - 1."""
    sizes, times = ((4, 8), (8, 16)), ((1, 1, 1, 1.0), (10, 12, 8, 1.0), (10, 12, 8, 1.5))

    def per_stage(p: int, usual: int, last: float) -> tuple[int, ...]:
        return (usual,) * (p - 1) + (round(usual * last),)

    return [
        Case(p, m, per_stage(p, f, last), per_stage(p, i, last), per_stage(p, w, last), comm, limit, objective)
        for (p, m), (f, i, w, last), comm, objective in product(sizes, times, (0, 1), ("span", "makespan"))
        for limit in range(p, 2 * p)
    ]


def solve(case: Case, seconds: float, workers: int) -> dict[str, Any]:
    """Ask the solver: the best value found, the bound proved, and whether the two have met."""
    p, m, comm, limit = case.num_ranks, case.num_microbatches, case.comm, case.memory_limit
    whole = [sum(times) for times in zip(case.F, case.I, case.W, strict=True)]
    horizon = 2 * (m + p) * (max(whole) + 2 * comm)  # twice what 1F1B takes: with less air the solver is far slower
    model = cp_model.CpModel()
    first_start = list(accumulate((forward + comm for forward in case.F[:-1]), initial=0))

    def actions(kind: str, times: tuple[int, ...]) -> tuple[list[list[Any]], list[list[Any]]]:
        """The starts, and the times that they keep their rank busy, for every rank and micro-batch."""
        starts = [[model.new_int_var(0, horizon, f"{rank}{kind}{k}") for k in range(m)] for rank in range(p)]
        spans = [
            [model.new_fixed_size_interval_var(start, time, str(start)) for start in row]
            for row, time in zip(starts, times, strict=True)
        ]
        return starts, spans

    (F, F_spans), (I, I_spans), (W, W_spans) = actions("F", case.F), actions("I", case.I), actions("W", case.W)  # noqa: E741
    since = first_start if case.objective == "makespan" else [0] * p
    shortest = max(start + m * time for start, time in zip(since, whole, strict=True))  # known beforehand
    value = model.new_int_var(shortest, horizon, case.objective)
    for rank in range(p):
        model.add_no_overlap([*F_spans[rank], *I_spans[rank], *W_spans[rank]])
        model.add(F[rank][0] == first_start[rank])
        for k in range(m):
            if rank > 0:
                model.add(F[rank][k] >= F[rank - 1][k] + case.F[rank - 1] + comm)
            if rank < p - 1:
                model.add(I[rank][k] >= I[rank + 1][k] + case.I[rank + 1] + comm)
            else:
                model.add(I[rank][k] >= F[rank][k] + case.F[rank])
            model.add(W[rank][k] >= I[rank][k] + case.I[rank])
            for starts, times in ((F, case.F), (I, case.I), (W, case.W)) if k > 0 else ():
                model.add(starts[rank][k] >= starts[rank][k - 1] + times[rank])
            if k >= limit:
                model.add(F[rank][k] >= W[rank][k - limit] + case.W[rank])
        model.add(value >= W[rank][m - 1] + case.W[rank] - first_start[rank] + since[rank])
    model.minimize(value)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    began = perf_counter()
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise SystemExit(f"{case}: {solver.status_name(status)} after {seconds:g} s; give --seconds more")
    return {
        **case._asdict(),
        "status": "optimal" if status == cp_model.OPTIMAL else "bound",
        "value": round(solver.objective_value),
        "bound": round(solver.best_objective_bound),
        "seconds": round(perf_counter() - began, 1),
    }


def main() -> None:
    """Solve what is open and store it after every case, so that a run may be broken off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a case")
    parser.add_argument("--workers", type=int, default=1, help="threads of the solver")
    options = parser.parse_args()

    stored = json.loads(STORE.read_text())["cases"] if STORE.exists() else []
    answers = {key(entry): entry for entry in stored}
    for case in cases():
        known = answers.get(key(case._asdict()))
        if known and known["status"] == "optimal":
            continue
        answer = solve(case, options.seconds, options.workers)
        answers[key(case._asdict())] = answer
        print(json.dumps(answer), flush=True)
        rows = ",\n".join(json.dumps(answers[key(c._asdict())]) for c in cases() if key(c._asdict()) in answers)
        STORE.write_text(f'{{"script": "tools/optima.py", "solver": "OR-tools CP-SAT", "cases": [\n{rows}\n]}}\n')


def key(entry: dict[str, Any]) -> str:
    """What tells one case from another, the same for a case and for its stored answer."""
    return json.dumps([entry[field] for field in Case._fields])


if __name__ == "__main__":
    main()
