"""The same calls in processes that torchrun has started: rank 0 is caller and rank at once, the others serve.

Calls and results travel through a gloo group of their own. Whoever fails first leaves a mark in the store, and a
thread of every process watches for it, because a process that waits in gloo cannot be told otherwise. The one that
failed stays until it has spoken, so that its neighbours do not complain of its silence first.

torchrun speaks for the processes of its own host. What happens on another one, one process of each host says: that a
rank there raised, died, lost its torchrun, or fell silent (see line.py).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from pipelab.errors import EngineError
from pipelab.ranks import failure, hosts, pickling, process
from pipelab.ranks.attempt import name_attempt
from pipelab.ranks.line import Line

_FOREVER = datetime.timedelta(days=365)
_MARK = "pipelab/over"
_CLOSED, _LATE, _GONE = b"closed", b"late", b"gone"  # any other mark is a pickled (rank, Raised, host)
_POLL_S = 0.2
_SPEAK_S = 1.0  # if the failure is only that another process died, torchrun ends us before that
_YIELD_S = 0.3  # who complains of another's death must not be the first to speak
_FOLLOW_S = 2.0  # the others go after the one that failed, so that torchrun names that one


def launched() -> bool:
    """Whether torchrun, or a launcher with the same variables, started this process."""
    return not process.inside_rank() and all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def world_size() -> int:
    """How many processes were started."""
    return int(os.environ["WORLD_SIZE"])


def local_world_size() -> int:
    """How many processes were started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


class Crew:
    """The processes of a torchrun, one of which is this one. Only rank 0 comes back from the constructor.

    Raises `EngineError` for a second one, whose other ranks have gone with the first.
    """

    _taken = False

    def __init__(self, backend: str) -> None:
        if Crew._taken:
            raise EngineError("under torchrun there is one Ranks() for the whole script: keep the first one open")
        Crew._taken = True
        import torch
        import torch.distributed as dist

        process.take_batch_policy()
        hosts.listen_there_only()
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._made_group = not dist.is_initialized()
        if self._made_group:  # rank 0 is the store's master, unless torchrun is
            meeting, self._rank, self._size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        else:
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=dist.default_pg_timeout,
        )  # a line of our own: who waits for a key holds up all on the same line
        attempt = name_attempt(store, self._rank, self._size)
        self._store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        if self._made_group:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
                store=dist.PrefixStore(f"{attempt}/group", meeting),  # type: ignore[attr-defined]
                rank=self._rank,
                world_size=self._size,
                timeout=process.GROUP_TIMEOUT,
            )
        self._calls = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._deadline = float("inf")
        self._failed = False
        self._told = False
        self._cause: tuple[int, failure.Raised] | None = None  # in rank 0, what has failed here
        self._over = threading.Event()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._line = Line(self._rank, self._size, self._store, self._lost)
        threading.Thread(target=self._watch, name="watch the other ranks", daemon=True).start()
        if self._rank != 0:
            self._serve()

    @property
    def alive(self) -> bool:
        """Whether no call has failed yet."""
        return not self._failed and not self._over.is_set()

    def call(self, messages: Sequence[memoryview], timeout_s: float) -> list[Any]:
        """Send each rank its message, do our own, gather the answers in rank order.

        An exception of our own part is raised here; one of another rank ends this process too.
        """
        self._deadline, self._timeout_s = time.monotonic() + timeout_s, timeout_s
        try:
            for rank in range(1, self._size):
                self._send(messages[rank], rank)
            raised, ours = process.answer(messages[0])
            if raised is not None:
                self._cause = self._claim(raised)
                raise failure.raised_error(*self._cause)
            answers = [ours, *(self._receive(rank) for rank in range(1, self._size))]
            return [pickling.loads(data)[1] for data in answers]
        except BaseException:
            self._failed = True
            raise
        finally:
            self._deadline = float("inf")

    def kill(self) -> None:
        """Let the other processes go: by the usual way, or out of the call in which they are stuck."""
        self._over.set()
        self._line.close()
        if self._failed:
            with contextlib.suppress(RuntimeError):
                if hosts.several() and self._cause:
                    self._leave_mark(self._cause[1])
                self._store.compare_set(_MARK, "", _CLOSED.decode())
            return
        for rank in range(1, self._size):
            self._send(memoryview(b""), rank)
        self._leave_group()

    def _serve(self) -> NoReturn:
        while message := self._receive(0):
            raised, data = process.answer(message)
            if raised is not None:
                cause, _ = self._claim(raised)
                time.sleep(_SPEAK_S)
                if cause == self._rank:
                    error = failure.raised_error(self._rank, raised)
                    print(f"RankError: {error}\n{raised.traceback}", file=sys.stderr, flush=True)
                    os._exit(1)
                time.sleep(_FOLLOW_S)
                os._exit(1)
            self._send(data, 0)
        self._over.set()
        self._line.close()
        self._leave_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # not sys.exit: torch's own threads abort some interpreters that end with gloo pairs still open

    def _claim(self, raised: failure.Raised) -> tuple[int, failure.Raised]:
        """Which rank failed first and how: this one, or the one whose mark is there already.

        Rank 0 leaves no mark: its exception goes its way through the script, and the others go when that ends.
        """
        deadline = time.monotonic() + (_SPEAK_S if self._rank == 0 else _YIELD_S)
        first = b""
        try:
            while not first and time.monotonic() < deadline:
                time.sleep(_YIELD_S / 4)
                first = self._store.get(_MARK) if self._store.check([_MARK]) else b""
            if not first and self._rank != 0:
                first = self._leave_mark(raised)
        except RuntimeError:  # the store has gone with its process
            first = b""
        return (self._rank, raised) if first in (b"", _CLOSED, _LATE) else _read(first)[:2]

    def _leave_mark(self, raised: failure.Raised, rank: int | None = None, where: str | None = None) -> bytes:
        """Say who has failed, if nobody has before; what stands there then."""
        failed = self._rank if rank is None else rank, raised, where or hosts.name()
        return bytes(self._store.compare_set(_MARK, "", pickle.dumps(failed).hex()))

    def _lost(self, ranks: Sequence[int], what: str, how: str, where: str) -> None:
        """The line to these ranks is dead: rank 0 tells all the others, and without rank 0 all is over."""
        others = f", nor from rank {', '.join(map(str, ranks[1:]))}" if len(ranks) > 1 else ""
        raised = failure.Raised(what, "ConnectionError", f"{how}{others}; it ran on {where}", "", "", time.monotonic())
        if self._rank == 0:
            with contextlib.suppress(RuntimeError):
                self._leave_mark(raised, ranks[0], where)
        else:
            self._end(ranks[0], raised, where)

    def _end(self, rank: int, raised: failure.Raised, where: str) -> None:
        """Say what happened on another host, once on each, and leave after the one that failed."""
        if where != hosts.name() and hosts.speaks():
            if self._rank == 0:
                time.sleep(_SPEAK_S)  # the script speaks, if it was waiting for that rank itself
            if not (self._told or self._failed or self._over.is_set()):
                self._told = True
                error = failure.raised_error(rank, raised)
                print(f"RankError: {error}\n{raised.traceback}", file=sys.stderr, flush=True)
        time.sleep(_FOLLOW_S)
        if not (self._failed or self._over.is_set()):
            os._exit(1)

    def _watch(self) -> None:
        """Leave when a mark says that it is over, whatever the main thread waits for."""
        while not self._over.wait(_POLL_S):
            try:
                if time.monotonic() > self._deadline:
                    self._deadline = float("inf")
                    print(f"RankError: not all ranks have answered within {self._timeout_s:g} s", file=sys.stderr)
                    self._store.compare_set(_MARK, "", _LATE.decode())
                if self._launcher not in (None, os.getppid()):
                    self._leave_without_launcher()
                mark = self._store.get(_MARK) if self._store.check([_MARK]) else b""
            except RuntimeError:  # the store went with rank 0, or with the launcher
                mark = _GONE
            if mark == _LATE:
                print(f"rank {self._rank}, {self._where()}", file=sys.stderr, flush=True)
            if mark in (_LATE, _GONE):
                time.sleep(_FOLLOW_S)
            elif mark not in (b"", _CLOSED):
                self._end(*_read(mark))
            if mark and not (self._failed or self._over.is_set()):
                os._exit(0 if mark == _CLOSED else 1)

    def _leave_without_launcher(self) -> NoReturn:
        """Without torchrun nobody would ever end this process."""
        raised = failure.Raised(
            "lost its launcher", "ProcessLookupError", f"torchrun on {hosts.name()} has ended", "", "", time.monotonic()
        )
        with contextlib.suppress(RuntimeError):
            self._leave_mark(raised)
        with contextlib.suppress(OSError):
            print(f"RankError: {failure.raised_error(self._rank, raised)}", file=sys.stderr, flush=True)
        os._exit(1)

    def _where(self) -> str:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = traceback.extract_stack(frame)
        inner = max((i for i, line in enumerate(stack) if line.filename == process.__file__), default=-1)
        return f"in {process.noted()}".rstrip() + ":\n" + "".join(traceback.format_list(stack[inner + 1 :]))

    def _leave_group(self) -> None:
        process.local_state().clear()  # what lives here may hold the group, and a group that outlives this aborts
        if self._made_group:
            import torch.distributed as dist

            dist.destroy_process_group()

    def _send(self, data: memoryview, to: int) -> None:
        import torch
        import torch.distributed as dist

        dist.send(torch.tensor([len(data)]), to, group=self._calls)
        if len(data):
            dist.send(torch.frombuffer(data, dtype=torch.uint8), to, group=self._calls)

    def _receive(self, source: int) -> memoryview:
        import torch
        import torch.distributed as dist

        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._calls)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            dist.recv(data, source, group=self._calls)
        return memoryview(data.numpy())  # type: ignore[arg-type]


def _read(mark: bytes) -> tuple[int, failure.Raised, str]:
    rank, raised, where = pickle.loads(bytes.fromhex(mark.decode()))
    return rank, raised, where
