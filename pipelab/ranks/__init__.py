"""Persistent processes for a notebook: one per rank, each with torch and a process group, all gone when the kernel is.

Functions, classes and tensors of a cell travel there and back, and a failure on a rank is an exception in the cell:

    controller.py  Ranks, what a user holds: sizes, backend, restarts
    pool.py        one generation of processes: start, one call, kill
    launch.py      how a process is started: from a fork server that has torch already, or by spawn
    server.py      how the fork server ends
    process.py     the life of one rank: leave the terminal, join the group, serve calls
    pickling.py    what travels: cloudpickle with the cells' source, tensors as plain bytes
    failure.py     from what happened on the ranks to the one error that the cell sees
    output.py      what the ranks print, in rank order
    torchrun.py    the same calls, in processes that torchrun has started
    attempt.py     what the ranks of a restarted torchrun share, and the dead ones do not
    hosts.py       on which host this process is, and by which address the others reach it
    line.py        who is still there, on hosts that torchrun does not see
    clock.py       one clock for the ranks of several hosts
"""

from pipelab.ranks.clock import now
from pipelab.ranks.controller import Ranks
from pipelab.ranks.process import GROUP_TIMEOUT, doing, local_state

__all__ = ["GROUP_TIMEOUT", "Ranks", "doing", "local_state", "now"]
