"""The life of one rank: leave the terminal, join the process group, serve calls until the notebook is gone."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import mmap
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from pipelab.ranks import launch, pickling
from pipelab.ranks.failure import Raised

GROUP_TIMEOUT = datetime.timedelta(days=1)  # of every process group: the notebook keeps the time, and knows who is late
_NOTE_BYTES = 256
_state: dict[Any, Any] = {}
_note: Any = bytearray(_NOTE_BYTES)  # in a rank it is a file's memory, which the notebook reads after a death
_inside = False


@dataclass(frozen=True)
class Seat:
    """What a process has to know to become a rank."""

    rank: int
    num_ranks: int
    backend: str
    folder: str  # private to this generation of ranks: rendezvous, output, stacks, notes
    environment: dict[str, str]
    sys_path: list[str]
    directory: str
    dies_with_starter: bool  # the process or thread that started it ends when the notebook does, and not before


def local_state() -> dict[Any, Any]:
    """The dict that lives on this rank from one call to the next, for whoever keeps something there under a key.

    It is empty after every start of the ranks; `Ranks.generation` tells the notebook that they started again.
    """
    return _state


def doing(what: str) -> None:
    """Note what this rank is about to do ("1F2"), in a place that outlives the process: an error will name it.

    Costs about a microsecond. The note is cleared at the beginning and at the end of every call.
    """
    data = what.encode()[: _NOTE_BYTES - 1]
    _note[: len(data) + 1] = data + b"\0"


def noted() -> str:
    """What this rank noted last that it was doing."""
    return bytes(_note).split(b"\0", 1)[0].decode(errors="replace")


def inside_rank() -> bool:
    """Whether this process is a rank that a `Ranks` started."""
    return _inside


def main(seat: Seat, connection: Connection) -> NoReturn:
    """Become a rank and serve. Never returns: the process ends with its connection."""
    global _inside
    _inside = True
    _open_files(seat)
    _leave_the_terminal(seat)
    _end_with_the_notebook(seat)
    try:
        _join_group(seat)
        ready = pickling.dumps((None, os.getpid()))
    except BaseException as error:
        ready = pickling.dumps((Raised.describe(error, "", "could not join the process group:"), None))
    with contextlib.suppress(OSError, EOFError):
        connection.send_bytes(ready)
        while True:  # no name holds a message or an answer while the rank waits for the next call
            connection.send_bytes(answer(connection.recv_bytes())[1])
    os._exit(0)


def answer(message: bytes | memoryview) -> tuple[Raised | None, memoryview]:
    """Do one call: what was raised, if anything, and the answer to send, a pickled (raised, result)."""
    doing("")
    raised: Raised | None = None
    value: object = None
    try:
        headline = "could not load what it was sent:"
        fn, args, kwargs = pickling.loads(message)
        headline = "raised"
        value = fn(*args, **kwargs)
    except BaseException as error:
        raised = Raised.describe(error, noted(), headline)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    doing("")
    if raised is None:
        try:
            return None, pickling.dumps((None, value))
        except Exception as error:
            headline = f"could not send back what {pickling.name_of(fn)} returned, of type {type(value).__qualname__}:"
            raised = Raised.describe(error, "", headline)
    return raised, pickling.dumps((raised, None))


def take_batch_policy() -> None:
    """Ask for SCHED_BATCH where the system has it.

    Some kernels put two ranks that talk on one core and let each wait for a tick, 4 ms; under this policy they do not.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _leave_the_terminal(seat: Seat) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # Stop is a SIGINT to the kernel's group; the kernel decides what becomes of its ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_batch_policy()
    os.chdir(seat.directory)
    sys.path[:] = seat.sys_path
    os.environ.clear()
    os.environ.update(seat.environment, RANK=str(seat.rank), LOCAL_RANK=str(seat.rank), WORLD_SIZE=str(seat.num_ranks))


def _end_with_the_notebook(seat: Seat) -> None:
    """Three ways, because a rank may be idle, blocked in gloo, or holding the interpreter's lock in C."""
    parent: Any = multiprocessing.parent_process()
    launch.leave_fork_server()
    if sys.platform.startswith("linux") and seat.dies_with_starter:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    watched: list[Any] = [parent.sentinel]
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            watched.append(os.pidfd_open(parent.pid))

    def watch() -> None:
        wait(watched)
        shutil.rmtree(seat.folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)  # with whatever this rank has started
        os._exit(1)

    threading.Thread(target=watch, name="end with the notebook", daemon=True).start()


def _open_files(seat: Seat) -> None:
    global _note
    folder = Path(seat.folder)
    output = os.open(folder / f"output.{seat.rank}", os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))
    stack = (folder / f"stack.{seat.rank}").open("w")
    faulthandler.enable(stack, all_threads=False)  # a crash leaves its stack there
    if hasattr(faulthandler, "register"):  # "where are you stuck?" is answered from inside C code too
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    with (folder / f"note.{seat.rank}").open("w+b") as file:
        file.truncate(_NOTE_BYTES)
        _note = mmap.mmap(file.fileno(), _NOTE_BYTES)


def _join_group(seat: Seat) -> None:
    """The process group, met through a file in the private folder: nothing listens anywhere but on the loopback."""
    with contextlib.suppress(OSError, AttributeError, StopIteration):
        loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if seat.backend == "nccl":
        torch.cuda.set_device(seat.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if seat.backend == "nccl" else seat.backend,
        store=dist.FileStore(  # type: ignore[attr-defined]
            str(Path(seat.folder) / "store"), seat.num_ranks
        ),
        rank=seat.rank,
        world_size=seat.num_ranks,
        timeout=GROUP_TIMEOUT,
    )
