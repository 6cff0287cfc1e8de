"""The same calls in processes that torchrun has started: rank 0 is caller and rank at once, the others serve.

Calls and results travel through a gloo group of their own. Whoever fails says so on stderr and leaves a mark in the
store; a thread of every other process watches the mark, because a process that waits in gloo cannot be told otherwise.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from . import failure, pickling, process

_FOREVER = datetime.timedelta(days=365)
_MARK = "pipelab/over"  # "closed": leave quietly; "failed": leave as a failure; "late": show the stacks before that
_POLL_S = 0.2


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
    """The processes of a torchrun, one of which is this one. Only rank 0 comes back from the constructor."""

    def __init__(self, backend: str) -> None:
        import torch
        import torch.distributed as dist

        process.take_batch_policy()
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._made_group = not dist.is_initialized()
        if self._made_group:
            dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=_FOREVER)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._calls = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        self._deadline = float("inf")
        self._failed = False
        self._over = threading.Event()
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
                raise failure.raised_error(0, raised)
            answers = [ours, *(self._receive(rank) for rank in range(1, self._size))]
            return [pickling.loads(data)[1] for data in answers]
        except BaseException:
            self._failed = True
            raise
        finally:
            self._deadline = float("inf")

    def kill(self) -> None:
        """Let the other processes go: by the usual way, or out of the call in which they are stuck."""
        if self._over.is_set():
            return
        self._over.set()
        if self._failed:
            self._store.set(_MARK, "closed")
            return
        for rank in range(1, self._size):
            self._send(memoryview(b""), rank)
        self._leave_group()

    def _serve(self) -> NoReturn:
        while message := self._receive(0):
            raised, data = process.answer(message)
            if raised is not None:
                error = failure.raised_error(self._rank, raised)
                self._fail(f"{error}\n\nTraceback on rank {self._rank}:\n{raised.traceback}", "failed")
            self._send(data, 0)
        self._over.set()
        self._leave_group()
        sys.exit(0)

    def _fail(self, text: str, mark: str) -> NoReturn:
        print(f"RankError: {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            self._store.set(_MARK, mark)
        os._exit(1)

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            if time.monotonic() > self._deadline:
                with contextlib.suppress(RuntimeError):
                    self._store.set(_MARK, "late")
                print(f"RankError: no answer of all ranks within {self._timeout_s:g} s", file=sys.stderr, flush=True)
                self._deadline = float("inf")
            try:
                mark = self._store.get(_MARK).decode() if self._store.check([_MARK]) else ""
            except RuntimeError:  # the store went with rank 0 or with the launcher
                mark = "failed"
            if mark == "late":
                print(f"rank {self._rank}, {process.noted() or 'in'}:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
            if mark and not self._over.is_set():
                time.sleep(0 if mark == "closed" else 1)  # so that the launcher sees the cause before its consequences
                os._exit(0 if mark == "closed" else 1)

    def _leave_group(self) -> None:
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
