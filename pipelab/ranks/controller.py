"""Ranks: what a user holds. It chooses the backend, sends the calls, and starts new processes after a failure."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from pipelab.errors import EngineError, SizeError, positive_integer
from pipelab.ranks import launch, process, torchrun
from pipelab.ranks.pickling import dump_call
from pipelab.ranks.pool import Pool


class Ranks:
    """`num_ranks` processes that wait for calls, each with torch, one thread and a place in a process group.

    `run` does the same call on every rank, `run_each` gives each rank its own arguments; both return the results in
    rank order and print what the ranks printed, with the rank in front (`live=True`: while they run). A call may take
    `timeout` seconds, an attribute that can be set; `math.inf` is no limit.

    A rank that raises, dies or gives no answer in time ends all of them and raises `RankError`; the next call starts
    new ones, whose `local_state()` is empty, and counts `generation` up. The same holds after Stop in a notebook.

    The backend is "gloo", for the CPU, or for GPUs that ranks share; "nccl" takes a GPU for every rank, and pipelines
    compute there. The processes are forked from a server that has torch already where that is safe, and spawned
    elsewhere; `start_method`, or PIPELAB_START_METHOD in the environment, chooses.

    In a process that torchrun has started, `Ranks()` takes the processes that are there: rank 0 goes on as caller and
    rank at once, the others serve inside this constructor until rank 0 closes its Ranks, and then exit.

    Raises `SizeError` for a number of ranks that is none, `EngineError` for a backend or start method that this machine
    does not have, both before any process starts.
    """

    def __init__(
        self,
        num_ranks: int | None = None,
        *,
        timeout: float = 60.0,
        backend: str | None = None,
        live: bool = False,
        start_method: str | None = None,
    ) -> None:
        if process.inside_rank():
            raise EngineError("Ranks were asked for inside a rank; start them from the notebook or the script")
        self.timeout = _seconds(timeout)
        self._live = live
        self.generation = 0
        self._busy = threading.Lock()
        self._closed = False
        self._adopted = torchrun.launched()
        self._crew: list[Pool | torchrun.Crew] = []  # the processes of now, in a list that the finalizer can empty
        self._finalizer = weakref.finalize(self, _end, self._crew, os.getpid())
        if self._adopted:
            self.num_ranks = torchrun.world_size()
            if num_ranks is not None and positive_integer("num_ranks", num_ranks) != self.num_ranks:
                raise SizeError(
                    f"Ranks({num_ranks}) was asked for, but by WORLD_SIZE in the environment torchrun started "
                    f"{self.num_ranks} processes: say Ranks(), or torchrun --nproc-per-node {num_ranks}"
                )
            self.backend = _choose_backend(torchrun.local_world_size(), backend)
            self._crew.append(torchrun.Crew(self.backend))
            self.generation = 1
        else:
            if num_ranks is None:
                raise SizeError("num_ranks is missing: Ranks(4) starts four; only under torchrun it is known")
            self.num_ranks = positive_integer("num_ranks", num_ranks)
            self._method = launch.choose_method(start_method)
            self.backend = _choose_backend(self.num_ranks, backend)
            self._ensure_started()

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank at once; the results in rank order.

        Raises `RankError` that names the rank that is the cause, or what could not be pickled.
        """
        __tracebackhide__ = True  # IPython and pytest leave such frames out
        return self._call([dump_call(fn, args, kwargs)] * self.num_ranks, self.timeout)

    def run_each(
        self, fn: Callable[..., Any], args_per_rank: Sequence[Sequence[Any]], *, timeout: float | None = None
    ) -> list[Any]:
        """`fn(*args_per_rank[rank])` on each rank; the results in rank order.

        Each rank is sent its own arguments only. `timeout`, in seconds, holds for this call. Raises `SizeError` where
        there is not one sequence of arguments for each rank, else as `run` does.
        """
        __tracebackhide__ = True
        if len(args_per_rank) != self.num_ranks:
            raise SizeError(
                f"run_each needs arguments for each of {self.num_ranks} ranks, got them for {len(args_per_rank)}"
            )
        for rank, args in enumerate(args_per_rank):
            if not isinstance(args, (tuple, list)):
                raise SizeError(f"run_each needs a tuple of arguments for rank {rank}, got {type(args).__qualname__}")
        messages = [dump_call(fn, args, {}) for args in args_per_rank]
        return self._call(messages, self.timeout if timeout is None else timeout)

    def restart(self) -> None:
        """End all processes and start new ones, for instance after a module was edited that they have imported."""
        with self._alone():
            if self._adopted:
                raise EngineError("only torchrun can start its processes again")
            _end(self._crew, os.getpid())
            self._ensure_started()

    def close(self) -> None:
        """End all processes, with their files. Can be called twice; no call is possible after it.

        The fork server, which makes the next `Ranks` start in a fraction of a second, ends with the notebook.
        """
        self._closed = True
        self._finalizer()

    @property
    def alive(self) -> bool:
        """Whether all processes are there, so that `local_state()` is what the last call left."""
        return bool(self._crew) and self._crew[0].alive

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "to be started at the next call"
        return f"Ranks({self.num_ranks}, backend={self.backend!r}): {state}, generation {self.generation}"

    def __reduce__(self) -> Any:
        raise TypeError("Ranks are processes of this machine; a function for them must not use the Ranks object itself")

    def _call(self, messages: Sequence[memoryview], timeout_s: float) -> list[Any]:
        __tracebackhide__ = True
        with self._alone():
            return self._ensure_started().call(messages, _seconds(timeout_s))

    def _ensure_started(self) -> Pool | torchrun.Crew:
        if self._closed:
            raise EngineError(f"these Ranks are closed; make new ones: Ranks({self.num_ranks})")
        if not self.alive:
            if self._adopted:
                raise EngineError("a call failed, and only torchrun can start its processes again")
            _end(self._crew, os.getpid())
            self._crew.append(Pool(self.num_ranks, self.backend, self._method, live=self._live))
            self.generation += 1
        return self._crew[0]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise EngineError("these Ranks are at work on another call, of another thread; wait until it has returned")
        try:
            yield
        finally:
            self._busy.release()


def _end(crew: list[Pool | torchrun.Crew], owner: int) -> None:
    while crew and os.getpid() == owner:  # a fork of the notebook must not end the notebook's ranks
        crew.pop().kill()


def _seconds(timeout: float) -> float:
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise EngineError(f"timeout must be a positive number of seconds (math.inf for no limit), got {timeout!r}")
    return seconds


def _choose_backend(num_ranks: int, asked: str | None) -> str:
    """The backend for so many ranks on this machine. Importing torch counts GPUs without waking them."""
    if asked not in (None, "gloo", "nccl"):
        raise EngineError(f"backend must be 'gloo' or 'nccl', got {asked!r}")
    if asked != "nccl":
        return "gloo"
    import torch

    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    if gpus < num_ranks:
        raise EngineError(
            f"backend='nccl' needs a GPU for each of {num_ranks} ranks, and torch finds {gpus}: "
            "take fewer ranks, or backend='gloo', which runs on the CPU"
        )
    return "nccl"
