"""What cannot be beaten: small schedules whose shortest time was proved once and stored.

`tools/optima.py` of the repository asks a constraint solver (CP-SAT of OR-tools), which is given the problem as it is
and none of our ideas about good orders: one stage a rank, a split backward, a micro-batch kept whole from F to W.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelab.errors import SizeError

STORE = Path(__file__).with_name("optima.json")


def stored_optima() -> list[dict[str, Any]]:
    """Every stored case: its question, and `value` (the best found) with `bound` (nothing is shorter).

    `status` is "optimal" where the two are one and the case is proved, "bound" elsewhere. Times in the unit of F, I, W.
    """
    cases: list[dict[str, Any]] = json.loads(STORE.read_text(encoding="utf-8"))["cases"]
    return cases


def proved_optima(
    num_ranks: int,
    num_microbatches: int,
    F: int,
    I: int,  # noqa: E741
    W: int,
    *,
    comm: int = 0,
    objective: str = "makespan",
) -> dict[int, int]:
    """The shortest time that any schedule can take, {micro-batches that a rank may keep: time}, where it is proved.

    Every stage takes F, I, W, a hop takes `comm`; `objective` is "makespan" or "span", the longest time from
    first start to last end of one rank. Raises SizeError where nothing of that kind is stored, and names what is.
    """

    def times(case: dict[str, Any]) -> tuple[Any, ...]:
        sizes = case["num_ranks"], case["num_microbatches"]
        return (*sizes, *(tuple(case[kind]) for kind in "FIW"), case["comm"], case["objective"])

    asked = (num_ranks, num_microbatches, *((time,) * num_ranks for time in (F, I, W)), comm, objective)
    proved = [case for case in stored_optima() if case["status"] == "optimal"]
    found = {case["memory_limit"]: case["value"] for case in proved if times(case) == asked}
    if not found:
        sizes = sorted({(case["num_ranks"], case["num_microbatches"]) for case in proved})
        raise SizeError(
            f"no proved optimum for p = {num_ranks}, m = {num_microbatches}, F, I, W = {F}, {I}, {W}, comm = {comm}, "
            f"{objective!r}: stored are (p, m) = {', '.join(map(str, sizes))}; tools/optima.py proves new ones"
        )
    return found
