"""Ranks in a real notebook kernel: cells, Stop, restart and the death of the kernel, after which no process is left."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

LEFT_AFTER_S = 5.0  # no process may be left so long after its kernel


class Kernel:
    """An IPython kernel as JupyterLab runs it; what came from it is known by a mark in its environment."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"PIPELAB_TEST_{uuid.uuid4().hex}=1"
        name, value = self.mark.split("=")
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, name: value, "PYTHONPATH": path})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=30)

    def run(self, code: str, timeout_s: float = 60) -> str:
        """Run a cell; what it printed and, after "!", the error that it ended with."""
        return self.wait_for(self.begin(code), timeout_s)

    def begin(self, code: str) -> str:
        return str(self.client.execute(code))

    def wait_for(self, cell: str, timeout_s: float = 60) -> str:
        text, deadline = "", time.monotonic() + timeout_s
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] == "error":
                text += f"!{content['ename']}: {content['evalue']}\n" + "\n".join(content["traceback"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return text

    def processes(self) -> list[int]:
        """The process ids of the kernel and of all that it has started, directly or not."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:  # ended while we looked
                continue
        return found

    def left_after(self, seconds: float) -> list[int]:
        """The processes that are left when none was for a moment, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        for pid in self.left_after(1):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


WORK = """
import os, time, ctypes, torch, torch.distributed as dist
import pipelab as pl

class Scale:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, x):
        if x < 0:
            raise ValueError("planted fault")
        return self.factor * x

def work(x):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return Scale(total.item())(x)

def stuck():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)   # nobody sends
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(1000)     # in C, with the interpreter's lock held
    while True:
        pass

ranks = pl.Ranks(3, timeout=1000)
print(ranks.run(work, 2))
"""


def line_of(text: str) -> int:
    """The number of the line of the cell that has this text."""
    return next(number for number, line in enumerate(WORK.strip().splitlines(), 1) if text in line)


def test_ranks_survive_in_a_kernel_errors_stop_and_restart(kernel: Kernel) -> None:
    assert kernel.run(WORK) == "[6.0, 6.0, 6.0]\n"  # function and class of a cell

    error = kernel.run("ranks.run(work, -1)")
    assert error.startswith("!RankError: rank 0 raised ValueError: planted fault")
    assert f'File "<notebook cell>", line {line_of("raise ValueError")}, in __call__' in error
    assert 'raise ValueError("planted fault")' in error  # the line of the cell, from a process that never saw the cell
    assert "controller.py" not in error  # most of the way through this package is left out
    assert kernel.run("print(ranks.run(work, 3))") == "[9.0, 9.0, 9.0]\n"

    cell = kernel.begin("ranks.run(stuck)")
    time.sleep(1.5)
    start = time.monotonic()
    kernel.manager.interrupt_kernel()  # what Stop does: SIGINT to the kernel's process group
    stopped = kernel.wait_for(cell)
    assert time.monotonic() - start < 2
    assert "!KeyboardInterrupt" in stopped
    assert f'rank 0, in:\n  File "<notebook cell>", line {line_of("nobody sends")}, in stuck' in stopped
    assert "ctypes.PyDLL(None).sleep(1000)" in stopped
    assert kernel.run("print(ranks.run(work, 4), ranks.generation)") == "[12.0, 12.0, 12.0] 3\n"

    kernel.run("import os; print(ranks.run(os.getpid))")
    before = set(kernel.processes())
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=30)
    deadline = time.monotonic() + LEFT_AFTER_S
    while before & set(kernel.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert before & set(kernel.processes()) == set()
    assert kernel.run(WORK) == "[6.0, 6.0, 6.0]\n"


def test_ranks_survive_a_stop_while_they_start(kernel: Kernel) -> None:
    cell = kernel.begin(WORK)
    deadline = time.monotonic() + 20
    while len(kernel.processes()) < 3 and time.monotonic() < deadline:  # the fork server is there and imports torch
        time.sleep(0.02)
    before = set(kernel.processes())
    time.sleep(0.3)
    kernel.manager.interrupt_kernel()
    assert "!KeyboardInterrupt" in kernel.wait_for(cell)
    assert kernel.run(WORK) == "[6.0, 6.0, 6.0]\n"
    assert before <= set(kernel.processes())  # the fork server did not hear it and went on with its import
    assert len(kernel.processes()) == 6  # kernel, fork server, resource tracker, three ranks


@pytest.mark.parametrize("call", ["ranks.run(stuck)", "ranks.run(work, 5); time.sleep(1000)"])
def test_ranks_do_not_outlive_a_killed_kernel(kernel: Kernel, call: str) -> None:
    kernel.run(WORK)
    kernel.begin(call)
    time.sleep(1)
    assert len(kernel.processes()) == 6
    assert kernel.manager.provisioner is not None
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert kernel.left_after(LEFT_AFTER_S) == []
