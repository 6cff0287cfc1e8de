"""Ranks in processes that torchrun has started: really started, each time, on one small script."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(100)

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import pipelab as pl
from pipelab.ranks import doing, local_state

def work(x):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    local_state()["calls"] = local_state().get("calls", 0) + 1
    return total.item() + x, local_state()["calls"]

def patience():
    return str(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout)

def fail(how, culprit):
    doing("1F2")
    if dist.get_rank() == culprit:
        if how == "raise": raise ValueError("planted fault")
        if how == "exit": os._exit(7)
        time.sleep(1000)
    dist.recv(torch.zeros(1), src=culprit if dist.get_rank() == (culprit + 1) % 3 else (culprit + 1) % 3)

how = sys.argv[1]
ranks = pl.Ranks(4) if how == "too many" else pl.Ranks(timeout=2 if how == "hang" else 60)
print("rank", dist.get_rank(), "goes on with", ranks)
if how == "fine":
    print(ranks.run(work, 1), ranks.run_each(work, [(10,), (20,), (30,)]), ranks.generation)
    print(ranks.run(patience))
    for again in ranks.restart, pl.Ranks:
        try: again()
        except pl.EngineError as error: print(error)
else:
    ranks.run(fail, how, int(sys.argv[2]))
"""  # and no close(): the end of the script is enough


def torchrun(folder: Path, *arguments: str) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and seconds of three processes that run the script."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    start = time.monotonic()
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=90)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def test_ranks_adopt_the_processes_of_torchrun(tmp_path: Path) -> None:
    code, out, err, _ = torchrun(tmp_path, "fine")
    assert code == 0, err
    assert out.splitlines() == [
        "rank 0 goes on with Ranks(3, backend='gloo'): alive, generation 1",  # and no other rank does
        "[(4.0, 1), (4.0, 1), (4.0, 1)] [(13.0, 2), (23.0, 2), (33.0, 2)] 1",
        "['1 day, 0:00:00', '1 day, 0:00:00', '1 day, 0:00:00']",  # not gloo but `timeout` ends a long call
        "only torchrun can start its processes again",
        "under torchrun there is one Ranks() for the whole script: keep the first one open",
    ]


def test_ranks_refuse_another_number_than_torchrun_started(tmp_path: Path) -> None:
    code, _, err, _ = torchrun(tmp_path, "too many")
    assert code != 0
    assert "Ranks(4) was asked for, but by WORLD_SIZE in the environment torchrun started 3 processes" in err


@pytest.mark.parametrize("culprit", [0, 2])
def test_ranks_an_exception_under_torchrun_ends_all_with_its_name(tmp_path: Path, culprit: int) -> None:
    code, _, err, _ = torchrun(tmp_path, "raise", str(culprit))
    assert code != 0
    assert f"RankError: rank {culprit} raised ValueError in 1F2: planted fault" in err
    assert "by peer" not in err  # nobody complains of the consequences
    assert f"rank      : {culprit} (local_rank: {culprit})" in err.split("Root Cause")[1]


def test_ranks_a_death_under_torchrun_ends_all_with_its_name(tmp_path: Path) -> None:
    code, _, err, _ = torchrun(tmp_path, "exit", "1")
    assert code != 0
    assert "by peer" not in err
    cause = err.split("Root Cause")[1]
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "exitcode  : 7" in cause


def test_ranks_a_hang_under_torchrun_shows_every_stack(tmp_path: Path) -> None:
    code, _, err, seconds = torchrun(tmp_path, "hang", "1")
    assert code != 0
    assert seconds < 60
    assert "RankError: not all ranks have answered within 2 s" in err
    for rank, call in [(0, "dist.recv"), (1, "time.sleep(1000)"), (2, "dist.recv")]:
        assert call in err.split(f"rank {rank}, in 1F2:\n")[1].split("rank ")[0]
