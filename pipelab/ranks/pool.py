"""One generation of rank processes: start them, send one call to each, gather the answers, kill them all."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipelab.errors import RankError
from pipelab.ranks import failure, launch, pickling
from pipelab.ranks.output import Output
from pipelab.ranks.process import Seat, main

START_TIMEOUT_S = 120.0
GRACE_S = 0.4  # after a first failure: long enough for the death that explains it to be seen
_STACK_S = 1.0  # how long to wait for the stack of a stuck rank
_SMALL_BYTES = 8_192  # what a pipe takes at once on every system, so that sending cannot wait for a rank


class Pool:
    """The processes of `num_ranks` ranks, ready for calls, until the first failure or `kill`."""

    def __init__(self, num_ranks: int, backend: str, start_method: str, *, live: bool) -> None:
        self._live = live
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._sender: threading.Thread | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="pipelab-"))  # readable by its owner only
        self._output = Output(self._folder, num_ranks)
        seat = Seat(
            rank=0,
            num_ranks=num_ranks,
            backend=backend,
            folder=str(self._folder),
            environment=dict(os.environ),
            sys_path=list(sys.path),
            directory=str(Path.cwd()),
            dies_with_starter=launch.starter_lives_as_long(start_method),
        )
        try:
            context: Any = launch.prepare(start_method)
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                process = context.Process(target=main, args=(replace(seat, rank=rank), theirs), daemon=True)
                with theirs, launch.starting(start_method):
                    process.start()
                self._processes.append(process)
            self._gather(START_TIMEOUT_S)
        except BaseException:
            with contextlib.suppress(OSError):
                self._output.show()
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether every process is there, and its connection open: the fork server tells of a death a little later."""
        if not self._processes or any(connection.closed for connection in self._connections):
            return False
        ended = any(connection.poll() for connection in self._connections)  # between calls a rank says nothing
        return not ended and all(process.is_alive() for process in self._processes)

    def call(self, messages: Sequence[memoryview], timeout_s: float) -> list[Any]:
        """Send each rank its message; the answers in rank order. After an exception no process is left."""
        __tracebackhide__ = True
        try:
            self._send(messages)
            return self._gather(timeout_s)
        except BaseException as error:
            try:
                self._output.show()
                if isinstance(error, KeyboardInterrupt):
                    for rank, stack in self._stacks(range(len(self._processes))).items():
                        print(f"rank {rank}, {stack}")
            finally:
                self.kill()
            raise

    def kill(self) -> None:
        """End every process with whatever it started, and remove all that belonged to it. Can be called twice."""
        for process in self._processes:
            _kill(process)
        for process in self._processes:
            process.join(5)
        if self._sender is not None:
            self._sender.join(5)
        for connection in self._connections:
            connection.close()
        while self._processes:
            with contextlib.suppress(ValueError):  # one that not even SIGKILL has ended, stuck in a device's driver
                self._processes.pop().close()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, messages: Sequence[memoryview]) -> None:
        def send() -> None:
            for connection, message in zip(self._connections, messages, strict=True):
                with contextlib.suppress(OSError):  # its rank is dead, which gathering will find
                    connection.send_bytes(message)

        if max(len(message) for message in messages) <= _SMALL_BYTES:
            send()
        else:  # a rank that does not read must not keep the notebook from its time limit
            self._sender = threading.Thread(target=send, name="send to ranks", daemon=True)
            self._sender.start()

    def _gather(self, timeout_s: float) -> list[Any]:
        """One answer of each rank, in rank order, or the error of the rank that is the cause of there being none."""
        __tracebackhide__ = True
        everyone = range(len(self._processes))
        answers: dict[int, Any] = {}
        raised: dict[int, failure.Raised] = {}
        died: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in everyone if not (rank in answers or rank in raised or rank in died)]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            for rank in self._ready(missing, [r for r in everyone if r not in died], left_s):
                try:
                    message = self._connections[rank].recv_bytes() if rank in missing else b""
                except (EOFError, OSError):
                    message = b""
                if not message:
                    died[rank] = self._how_it_died(rank)
                    continue
                what, value = _read(rank, message)
                if what is None:
                    answers[rank] = value
                else:
                    raised[rank] = what
            if raised or died:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        unfinished = {rank for rank in everyone if rank not in answers}
        if died:  # a death explains the broken connections of its neighbours, whoever spoke first
            stack = failure.readable_stack(self._read_text(f"stack.{next(iter(died))}"))
            raise failure.died_error(died, stack, stopped=unfinished - set(died))
        if raised:
            rank = failure.first_cause(raised)
            raise failure.raised_error(rank, raised[rank], stopped=unfinished - {rank})
        if missing:
            raise failure.hung_error(self._stacks(missing), timeout_s, len(everyone))
        self._output.show()
        return [answers[rank] for rank in everyone]

    def _ready(self, missing: Iterable[int], living: Iterable[int], left_s: float) -> list[int]:
        """Ranks that have something to read, or whose process has ended; after `left_s` seconds, none."""
        sources: dict[Any, int] = {self._processes[rank].sentinel: rank for rank in living}
        sources |= {self._connections[rank]: rank for rank in missing}
        if self._live:
            self._output.show(complete=False)
            left_s = min(left_s, 0.05)
        return sorted({sources[source] for source in wait(list(sources), min(left_s, 3600.0))})

    def _how_it_died(self, rank: int) -> str:
        self._processes[rank].join(1)
        return failure.how_it_died(self._processes[rank].exitcode, self._note(rank))

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where each of the ranks is, as text: what it noted that it was doing, then its stack."""
        if hasattr(signal, "SIGUSR1"):
            for rank in ranks:
                with contextlib.suppress(OSError):
                    os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        return {rank: f"in {self._note(rank)}".rstrip() + f":\n{self._stack(rank)}" for rank in ranks}

    def _stack(self, rank: int) -> str:
        deadline = time.monotonic() + _STACK_S
        dump, before = "", None
        while time.monotonic() < deadline and (not dump or dump != before):  # until it has come and grows no more
            time.sleep(0.02)
            dump, before = self._read_text(f"stack.{rank}"), dump
        return failure.readable_stack(dump) or "  (it did not answer with its stack)"

    def _note(self, rank: int) -> str:
        return self._read_text(f"note.{rank}").split("\0", 1)[0]

    def _read_text(self, name: str) -> str:
        path = self._folder / name  # not there where a rank did not come so far
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _read(rank: int, message: bytes) -> Any:
    try:
        return pickling.loads(message)
    except Exception as error:
        text = f"what rank {rank} returned cannot be loaded here: {type(error).__qualname__}: {error}"
        raise RankError(text, rank=rank, exception_type=type(error).__qualname__) from error


def _kill(process: BaseProcess) -> None:
    if process.exitcode is not None or process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)  # a rank leads a group of its own, with what it has started
    except (AttributeError, OSError):
        process.kill()
