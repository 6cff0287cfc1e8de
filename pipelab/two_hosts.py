"""Two hosts on one machine: network namespaces of their own, joined by one cable that can be slow or pulled out.

    with TwoHosts(bytes_per_s=12.5e6) as hosts:
        for host in (0, 1):
            hosts.start(host, launcher(hosts.address, 29500, host, 1, "train.py"), environment())

Needs Linux, root, and the programs ip and tc of iproute2; `missing()` says in a sentence what is not there.
Where it cannot be had, `OneHost` has the same methods for two launchers on the loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

BURST_BYTES = 32 * 1024  # what the cable lets through at once


def missing() -> str:
    """Why two hosts cannot be had here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    for program, package in {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing: install {package}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with TwoHosts(bytes_per_s=1e6):
            return ""
    except subprocess.CalledProcessError as error:
        return f"this system refuses {' '.join(error.cmd)}: {error.stderr.strip()}"


class OneHost:
    """Two launchers that believe to be on two hosts, on the loopback of this one."""

    address = "127.0.0.1"
    other_address = "127.0.0.1"

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._mark = f"PIPELAB_TWO_HOSTS={uuid.uuid4().hex}"

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on host 0 or 1; what it prints is in `stdout(process)` and `stderr(process)`."""
        number = len(self._started)
        with self._path(number, "out").open("w") as out, self._path(number, "err").open("w") as err:
            process = subprocess.Popen(
                [*self._inside(host), *command],
                env={**environment, **dict([self._mark.split("=")])},
                stdout=out,
                stderr=err,
                text=True,
            )
        self._started.append(process)
        return process

    def stdout(self, process: subprocess.Popen[str]) -> str:
        """What the process, and what it started, has printed by now."""
        return self._path(self._started.index(process), "out").read_text()

    def stderr(self, process: subprocess.Popen[str]) -> str:
        """The same of its errors."""
        return self._path(self._started.index(process), "err").read_text()

    def left(self) -> list[int]:
        """The process ids of all that was started and runs, whoever its parent is by now."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def close(self) -> None:
        """End everything that was started."""
        for process in self._started:  # by its number: it may not have come so far that it bears the mark
            process.kill()
            process.wait()
        deadline = time.monotonic() + 10
        while (left := self.left()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._folder.cleanup()

    def __enter__(self) -> OneHost:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _inside(self, host: int) -> list[str]:
        return []

    def _path(self, number: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{number}.{kind}"


class TwoHosts(OneHost):
    """Two namespaces and the cable between them, which carries `bytes_per_s` in each direction.

    What a launcher on host 1 starts finds its monotonic clock so many seconds ahead, as on a host that booted earlier.
    """

    address = "192.0.2.1"
    other_address = "192.0.2.2"

    def __init__(self, *, bytes_per_s: float | None = None, ahead_s: int = 0) -> None:
        super().__init__()
        self._ahead_s = ahead_s
        self.names = [f"pipelab-{os.getpid()}-{host}" for host in (0, 1)]
        self._cable = [f"pl{os.getpid()}h{host}" for host in (0, 1)]
        try:
            self._make(bytes_per_s)
        except BaseException:
            self.close()
            raise

    def _make(self, bytes_per_s: float | None) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self._cable[0], "type", "veth", "peer", "name", self._cable[1])
        for name, end, address in zip(self.names, self._cable, (self.address, self.other_address), strict=True):
            _run("ip", "link", "set", end, "netns", name)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                _run("ip", "-n", name, "link", "set", device, "up")
            if bytes_per_s is not None:
                rate, burst = f"{round(8 * bytes_per_s)}bit", str(BURST_BYTES)
                shape = ("tbf", "rate", rate, "burst", burst, "limit", "16000000")
                _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", *shape)

    def pull_the_cable(self) -> None:
        """From now on nothing that is sent arrives, and nobody is told."""
        _run("ip", "-n", self.names[1], "link", "set", self._cable[1], "down")

    def processes(self, host: int) -> list[int]:
        """The process ids of all that runs on that host."""
        done = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def close(self) -> None:
        """End everything on both hosts, and the hosts."""
        super().close()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # and its end of the cable
        subprocess.run(["ip", "link", "delete", self._cable[0]], capture_output=True)  # where it was not moved yet

    def _inside(self, host: int) -> list[str]:
        clock = ["unshare", "--time", "--monotonic", str(self._ahead_s)] if host == 1 and self._ahead_s else []
        return ["ip", "netns", "exec", self.names[host], *clock]  # each becomes the next, so the process id stays


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    try:
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in map(int, own) for one in (child, *children(child))]


def launcher(address: str, port: int, host: int, ranks_per_host: int, *script: str) -> list[str]:
    """The command that a user would type on `host` of two."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks_per_host)),
        *("--node-rank", str(host), "--master-addr", address, "--master-port", str(port), *script),
    ]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with this tree on the import path and without another torchrun's variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    tree = str(Path(__file__).parents[1])
    return {**clean, "PYTHONPATH": os.pathsep.join([tree, clean.get("PYTHONPATH", "")]), **more}


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
