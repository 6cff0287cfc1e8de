"""How the process of a rank is started: forked from a server that has imported torch already, or spawned anew."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

from pipelab.errors import EngineError

_METHODS = ("forkserver", "spawn")
# What every rank needs. torch's optimizers pull in torch._dynamo at their first use, a second that each rank would pay.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "cloudpickle",
    "pipelab.ranks.process",
    "pipelab.ranks.server",
]


def choose_method(asked: str | None) -> str:
    """The start method: what was asked for, else PIPELAB_START_METHOD, else a fork server where it is safe (Linux).

    Raises `EngineError` for any other.
    """
    safe = _METHODS if sys.platform.startswith("linux") else ("spawn",)
    method = asked or os.environ.get("PIPELAB_START_METHOD") or safe[0]
    if method not in safe:
        raise EngineError(f"start_method must be one of {', '.join(safe)} on this system, got {method!r}")
    return method


def prepare(method: str) -> BaseContext:
    """The context to start processes with; its fork server, if any, begins to import torch and is not waited for."""
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # which unblocks SIGINT when it has to start, so it must not have to later
    if method == "forkserver":
        forkserver.set_forkserver_preload(_PRELOAD)
        with _interrupts_blocked(), _server_environment():
            forkserver.ensure_running()
    return multiprocessing.get_context(method)


@contextlib.contextmanager
def starting(method: str) -> Iterator[None]:
    """Around `Process.start`: the new process neither runs the user's main file again nor hears the notebook's Stop."""
    main = sys.modules.get("__main__")
    hidden: dict[str, Any] = {
        name: vars(main)[name] for name in ("__file__", "__spec__") if main is not None and name in vars(main)
    }
    try:
        if main is not None:
            vars(main).pop("__file__", None)
            vars(main)["__spec__"] = None
        # The fork server's children have SIGINT blocked as it has; waiting for it here can be interrupted.
        with _interrupts_blocked() if method == "spawn" else contextlib.nullcontext():
            yield
    finally:
        if main is not None:
            del vars(main)["__spec__"]
            vars(main).update(hidden)


def starter_lives_as_long(method: str) -> bool:
    """Whether what starts a process now ends with this one: the fork server or the main thread, but no other thread."""
    return method == "forkserver" or threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """SIGINT blocked in this thread, hence in what it starts: Stop is sent to all processes of the kernel's group."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """The fork server's environment: our import path, and no threads of numpy or OpenMP, which a fork would lose."""
    changes = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    changes["PYTHONPATH"] = os.pathsep.join(sys.path)
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def leave_fork_server() -> None:
    """In a rank: let go of the pipe that keeps the fork server alive, so that it ends with the notebook.

    multiprocessing has no public name for that descriptor; without it the ranks still end, by their watching thread.
    """
    server: Any = forkserver._forkserver
    with contextlib.suppress(AttributeError, TypeError, OSError):
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
