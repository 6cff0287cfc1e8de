"""A part of the store for the ranks of this attempt alone.

torchrun starts failed processes again and keeps its store, with all that the dead ones wrote into it. Its count of
restarts does not tell one attempt from the next: where several hosts meet anew, each counts only failures of its own.
So the ranks that are alive find each other by names that nobody can have written before:

    rank r                                  rank 0
    r's question is <asks>    [1] ────────►
                              ◄──────────── the answer to <asks> is <name>    [2]
    r knows <name>            [3] ────────► until all of them do
"""

from __future__ import annotations

import os
import time
from typing import Any

from pipelab.errors import EngineError

_POLL_S = 0.01


def name_attempt(store: Any, rank: int, num_ranks: int) -> str:
    """A name that the living ranks agree on, as a prefix of their keys in `store`. All of them must call it.

    Raises `EngineError` for a rank that has not come within the store's timeout.
    """
    mine = os.urandom(8).hex()
    if rank != 0:
        store.set(f"pipelab/asks/{rank}", mine)  # [1]
        name = bytes(store.get(f"pipelab/{mine}")).decode()
        store.set(f"pipelab/{name}/{rank}", "known")  # [3]
        return name
    patience_s = store.timeout.total_seconds()
    deadline = time.monotonic() + patience_s
    for other in range(1, num_ranks):
        while not store.check([f"pipelab/{mine}/{other}"]):
            if time.monotonic() > deadline:
                raise EngineError(f"rank {other} has not come to rank 0 within {patience_s:g} s: does its process run?")
            if store.check([f"pipelab/asks/{other}"]):  # perhaps the dead one's question: so look again
                asks = bytes(store.get(f"pipelab/asks/{other}")).decode()
                store.set(f"pipelab/{asks}", mine)  # [2]
            time.sleep(_POLL_S)
    return mine
