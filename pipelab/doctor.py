"""What this machine has, what a pipeline will use on it, and whether two ranks can talk."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pipelab.errors import RankError

_PACKAGES = (
    "torch",
    "matplotlib",
    "ipywidgets",
    "sympy",
    "numpy",
    "cloudpickle",
    "scikit-learn",
    "jupyterlab",
    "nbval",
)
_CAN_BE_MISSING = {"jupyterlab": "make lab needs it, another Jupyter does not", "nbval": "only make test needs it"}


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, whether the book can be worked through with it."""

    subject: str
    found: str
    good: bool = True


@dataclass(frozen=True)
class Report:
    """All findings; prints as a table, `healthy` where nothing stands in the way."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether every finding is good."""
        return all(finding.good for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.subject) for finding in self.findings)
        lines = [f"{'ok ' if f.good else 'NO '} {f.subject:<{width}}  {f.found}" for f in self.findings]
        verdict = "This machine can run every chapter." if self.healthy else "Mend the lines that begin with NO first."
        return "\n".join([*lines, verdict])

    __repr__ = __str__


def doctor() -> Report:
    """Look at Python, packages, cores and GPUs, then send a message between two ranks; takes a few seconds."""
    return Report((_python(), *_packages(), _cores(), _gpus(), _backend(), _two_ranks()))


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info >= (3, 10)
    return Finding("Python", found if good else f"{found}; 3.10 or newer is needed", good)


def _packages() -> list[Finding]:
    findings = []
    for name in _PACKAGES:
        try:
            findings.append(Finding(name, version(name)))
        except PackageNotFoundError:
            why = _CAN_BE_MISSING.get(name)
            found = f"not installed; {why}" if why else f"not installed: pip install {name}"
            findings.append(Finding(name, found, good=why is not None))
    return findings


def _cores() -> Finding:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if available >= 8:
        return Finding("cores", f"{available}")
    return Finding("cores", f"{available}: ranks beyond that share them, so the book paces its runs of more ranks")


def _gpus() -> Finding:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("GPUs", ", ".join(names) if names else "none; none is needed")


def _backend() -> Finding:
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return Finding("backend", "gloo on the CPU: no GPU")
    found = 'gloo on the CPU; Pipeline(..., device="cuda") lets ranks share a GPU, with messages through host memory'
    if count >= 2 and torch.distributed.is_nccl_available():
        found = f'{found}; Ranks(n, backend="nccl") gives up to {count} ranks a GPU each, with messages between GPUs'
    return Finding("backend", found)


def _two_ranks() -> Finding:
    from pipelab.ranks import Ranks

    began = time.perf_counter()
    try:
        with Ranks(2, timeout=30) as ranks:
            started = time.perf_counter() - began
            one_way = ranks.run(_ping_pong)[0]
    except RankError as error:
        return Finding("two ranks", f"could not talk: {error}", good=False)
    how = f"started in {started:.1f} s, 4 kB go one way in {one_way * 1e6:.0f} microseconds"
    if one_way > 1e-3:
        how += "; that is slow, so other programs keep the cores busy"
    return Finding("two ranks", how)


def _ping_pong(rounds: int = 50) -> float:
    """Median seconds that 4 kB take from one of two ranks to the other."""
    import torch
    import torch.distributed as dist

    rank, message = dist.get_rank(), torch.zeros(1024)
    if dist.get_backend() == "nccl":
        message = message.cuda()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times)
