"""Ranks in processes that torchrun has started: really started, each time, on one small script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pipelab.errors import EngineError
from pipelab.ranks.attempt import name_attempt

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

def fail_once(mark):
    if dist.get_rank() == 1 and not os.path.exists(mark):
        open(mark, "w").close()
        raise ValueError("planted fault")

how = sys.argv[1]
ranks = pl.Ranks(4) if how == "too many" else pl.Ranks(timeout=2 if how == "hang" else 60)
print("rank", dist.get_rank(), "goes on with", ranks)
if how == "fine":
    print(ranks.run(work, 1), ranks.run_each(work, [(10,), (20,), (30,)]), ranks.generation)
    print(ranks.run(patience))
    for again in ranks.restart, pl.Ranks:
        try: again()
        except pl.EngineError as error: print(error)
elif how == "restart":
    try: ranks.run(fail_once, sys.argv[2])
    except RuntimeError:
        time.sleep(9)  # so torchrun ends this rank, and does not see it fail
        raise
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    schedule = pl.gpipe(ranks.num_ranks, 2)
    pipe = pl.Pipeline(model, schedule, loss_fn=torch.nn.functional.mse_loss, ranks=ranks)
    print("trained:", pipe.step(torch.ones(4, 2), torch.ones(4, 2)).loss > 0)
else:
    ranks.run(fail, how, int(sys.argv[2]))
"""  # and no close(): the end of the script is enough


def launch(folder: Path, arguments: tuple[str, ...], options: tuple[str, ...]) -> subprocess.Popen[str]:
    """torchrun, started on the script with these arguments."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torchrun(folder: Path, *arguments: str, restarts: int = 0) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and seconds of three processes that run the script."""
    options = ("--standalone", "--nproc-per-node", "3", "--max-restarts", str(restarts))
    start = time.monotonic()
    with launch(folder, arguments, options) as process:
        try:
            out, err = process.communicate(timeout=90)
        finally:
            process.terminate()
    return process.returncode, out, err, time.monotonic() - start


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


def test_ranks_of_a_restart_do_not_meet_the_dead(tmp_path: Path) -> None:
    """Story: torchrun's store outlives an attempt, and the next one read there that all is over."""
    code, out, err, _ = torchrun(tmp_path, "restart", str(tmp_path / "mark"), restarts=1)
    assert code == 0, err
    assert "RankError: rank 1 raised ValueError: planted fault" in err
    assert out.splitlines()[-1] == "trained: True"


@pytest.mark.exhaustive
def test_ranks_of_a_restart_on_two_hosts_meet_where_only_one_counts_it(tmp_path: Path) -> None:
    """The host whose rank failed counts a restart; the other one, which only joins again, does not."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--local-addr", "127.0.0.1")
    options = (*options, "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "two")
    launchers = [launch(tmp_path, ("restart", str(tmp_path / "mark")), options) for _ in range(2)]
    try:
        outs = [process.communicate(timeout=60) for process in launchers]
    finally:
        for process in launchers:
            process.terminate()
    assert [process.returncode for process in launchers] == [0, 0], outs
    said = "".join(out for out, _ in outs)
    assert [said.count("rank 0 goes on"), said.count("trained: True")] == [2, 1]  # not by a further restart


def test_ranks_name_their_attempt_over_the_keys_of_a_dead_one() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))
    names = []
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            answers = [threads.submit(name_attempt, store, rank, 3) for rank in range(3)]
            names.append({answer.result() for answer in answers})
    assert [len(attempt) for attempt in names] == [1, 1]
    assert names[0] != names[1]


def test_ranks_that_do_not_come_to_an_attempt_are_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(EngineError, match=r"rank 1 has not come to rank 0 within 0.1 s"):
        name_attempt(store, 0, 2)


def test_ranks_a_hang_under_torchrun_shows_every_stack(tmp_path: Path) -> None:
    code, _, err, seconds = torchrun(tmp_path, "hang", "1")
    assert code != 0
    assert seconds < 60
    assert "RankError: not all ranks have answered within 2 s" in err
    for rank, call in [(0, "dist.recv"), (1, "time.sleep(1000)"), (2, "dist.recv")]:
        assert call in err.split(f"rank {rank}, in 1F2:\n")[1].split("rank ")[0]
