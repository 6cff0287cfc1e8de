"""Ranks on two hosts: network namespaces with a slow cable between them, or two launchers on the loopback.

The second host's monotonic clock is an hour ahead, as those of real hosts differ by what they have been up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import pipelab as pl
from pipelab import two_hosts
from pipelab.ranks import line
from pipelab.two_hosts import OneHost, TwoHosts

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]
exhaustive = pytest.mark.exhaustive

BYTES_PER_S = 12.5e6
WIDTH = 10_240
ROWS = 64
MICROBATCHES = 8
BOUNDARY_BYTES = ROWS // MICROBATCHES * WIDTH * 4
REPORTED_S = 2.0
SILENT_S = 10.0

SCRIPT = f"""
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import pipelab as pl
from pipelab.ranks import doing

def listening():
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    inodes = {{link[8:-1] for link in links if link.startswith("socket:[")}}
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{{name}}").read_text().splitlines()[1:]]
    rows = [line.split() for line in lines]
    return sorted({{row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}})

def train(build, ranks):
    model = nn.Sequential(*(nn.LayerNorm({WIDTH}) for _ in range(4)))
    pipe = pl.Pipeline(model, build(4, {MICROBATCHES}), loss_fn=nn.functional.mse_loss, ranks=ranks, partition=[1] * 4,
                       pace=pl.Costs(F=0.04, B=0.08), clock="plain")
    inputs = torch.linspace(-1, 1, {ROWS * WIDTH}).reshape({ROWS}, {WIDTH})
    pipe.step(inputs, inputs)
    result = pipe.step(inputs, inputs)
    starts = {{str(span.action): span.start for span in result.trace.spans}}
    return {{
        "loss": result.loss,
        "messages": [
            [m.sender, m.receiver, m.bytes, m.sent, m.arrived, starts[str(m.reader)]] for m in result.trace.messages
        ],
    }}

def fail(how):
    doing("1F2")
    if dist.get_rank() == 0:
        print("at it", flush=True)
    if how == "raise" and dist.get_rank() == 2:
        raise ValueError("planted fault, très grave")
    dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % 4)

how = sys.argv[1]
with pl.Ranks() as ranks:
    if how == "train":
        found = {{build.__name__: train(build, ranks) for build in (pl.gpipe, pl.one_f_one_b)}}
        print(json.dumps({{"listening": ranks.run(listening), **found}}), flush=True)
    else:
        ranks.run(fail, how)
"""

Start = Callable[[str], list["subprocess.Popen[str]"]]


@pytest.fixture(scope="module")
def two() -> None:
    """Skips where this machine has no namespaces."""
    if reason := two_hosts.missing():
        pytest.skip(f"no two hosts here: {reason}")


@pytest.fixture(
    params=["best", pytest.param("one host", marks=exhaustive), pytest.param("two hosts", marks=exhaustive)]
)
def hosts(request: pytest.FixtureRequest) -> Iterator[OneHost]:
    """Two hosts, or one in their place; "best": two where they can be had."""
    if request.param == "two hosts":
        request.getfixturevalue("two")
    one = request.param == "one host" or (request.param == "best" and two_hosts.missing())
    with OneHost() if one else TwoHosts(bytes_per_s=BYTES_PER_S, ahead_s=3600) as hosts:
        yield hosts


def start(hosts: OneHost, folder: Path, how: str) -> list[subprocess.Popen[str]]:
    """Two launchers with two ranks each, on the script; unless it trains, it is in the call that fails."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    commands = [two_hosts.launcher(hosts.address, port, host, 2, str(script), how) for host in (0, 1)]
    started = [hosts.start(host, command, two_hosts.environment()) for host, command in enumerate(commands)]
    if how == "wait":
        until(lambda: "at it" in hosts.stdout(started[0]), 60, lambda: hosts.stderr(started[0]))
        time.sleep(0.5)  # the others are in it too
    return started


def until(true: Callable[[], object], seconds: float, show: Callable[[], str]) -> float:
    """Wait until something is true; how many seconds that took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {show()}"
        time.sleep(0.05)
    return time.monotonic() - began


def test_hosts_train_and_a_slow_cable_shows_in_the_trace(hosts: OneHost, tmp_path: Path) -> None:
    """Every message between the hosts takes at least what the cable needs for it, and is read after it came."""
    started = start(hosts, tmp_path, "train")
    for process in started:
        assert process.wait(100) == 0, hosts.stderr(process)
    found: dict[str, Any] = json.loads(hosts.stdout(started[0]))
    addresses = [hosts.address] * 2 + [hosts.other_address] * 2
    assert found["listening"] == [[socket.inet_aton(address)[::-1].hex().upper()] for address in addresses]
    assert found["gpipe"]["loss"] == pytest.approx(found["one_f_one_b"]["loss"], rel=1e-6)
    least_s = (BOUNDARY_BYTES - two_hosts.BURST_BYTES) / BYTES_PER_S if isinstance(hosts, TwoHosts) else -0.1
    for schedule in ("gpipe", "one_f_one_b"):
        between = [message for message in found[schedule]["messages"] if {message[0], message[1]} == {1, 2}]
        assert len(between) == 2 * MICROBATCHES
        for _, _, size, sent, arrived, read in between:
            assert size == BOUNDARY_BYTES
            assert least_s <= arrived - sent < 30
            assert read >= arrived


@pytest.mark.parametrize("hosts", ["one host", pytest.param("two hosts", marks=exhaustive)], indirect=True)
def test_hosts_a_killed_launcher_is_reported_on_the_other_host(hosts: OneHost, tmp_path: Path) -> None:
    started = start(hosts, tmp_path, "wait")
    os.kill(started[1].pid, signal.SIGKILL)
    where = f"node 1 ({socket.gethostname()})"
    seconds = until(lambda: where in hosts.stderr(started[0]), 10, lambda: hosts.stderr(started[0]))
    assert seconds < REPORTED_S
    error = hosts.stderr(started[0])
    assert "RankError: rank 2 lost its launcher" in error or "RankError: rank 3 lost its launcher" in error
    assert started[0].wait(30) != 0
    until(lambda: not hosts.left(), 10, lambda: str(hosts.left()))


@exhaustive
@pytest.mark.parametrize("hosts", ["one host", "two hosts"], indirect=True)
def test_hosts_an_exception_is_reported_on_every_host(hosts: OneHost, tmp_path: Path) -> None:
    started = start(hosts, tmp_path, "raise")
    for process in started:
        assert process.wait(60) != 0
        error = hosts.stderr(process)
        assert "RankError: rank 2 raised ValueError in 1F2: planted fault, très grave" in error
        assert "by peer" not in error


@exhaustive
@pytest.mark.parametrize("hosts", ["one host", "two hosts"], indirect=True)
def test_hosts_a_killed_rank_is_reported_on_the_other_host(hosts: OneHost, tmp_path: Path) -> None:
    started = start(hosts, tmp_path, "wait")
    workers = two_hosts.children(started[1].pid)
    os.kill(workers[0], signal.SIGKILL)
    text = "died: its connection was closed; it ran on node 1"
    assert until(lambda: text in hosts.stderr(started[0]), 10, lambda: hosts.stderr(started[0])) < REPORTED_S
    for process in started:
        assert process.wait(30) != 0


@exhaustive
@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("way", ["stopped", "cable"])
def test_hosts_a_silent_host_is_reported_at_the_limit(way: str, silent: int, tmp_path: Path, two: None) -> None:
    """All processes of a host are stopped, or nothing that is sent arrives: no connection is closed by that."""
    with TwoHosts() as hosts:
        started = start(hosts, tmp_path, "wait")
        if way == "cable":
            hosts.pull_the_cable()
        else:
            for pid in hosts.processes(silent):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        other = started[1 - silent]
        text = f"fell silent: nothing was heard for {SILENT_S:g} s"
        seconds = until(lambda: text in hosts.stderr(other), 20, lambda: hosts.stderr(other))
        assert SILENT_S - 1.5 < seconds < SILENT_S + 3
        assert f"it ran on node {silent}" in hosts.stderr(other)
        assert other.wait(40) != 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Where two processes of a torchrun on this host would meet."""
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "there"}.items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory() as folder:
        yield torch.distributed.FileStore(f"{folder}/store", 2)


def test_hosts_a_rank_that_does_not_come_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "_MEETING_S", 0.1)
    with pytest.raises(pl.EngineError, match=r"ranks \[1\] have not reached rank 0 at 127.0.0.1:\d+ within 0.1 s"):
        line.Line(0, 2, store, pytest.fail)


@pytest.mark.parametrize("said", ["1", "{}", '["a", "b"]', "[TOKEN, 1, 'hung up']", "no JSON"])
def test_hosts_a_caller_that_is_no_rank_is_not_noted(store: Any, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Whoever says something else, or has the token and hangs up, is missed like one that does not come."""
    monkeypatch.setattr(line, "_MEETING_S", 0.5)

    def call() -> None:
        host, port, token, *_ = json.loads(store.get("pipelab/line"))
        with socket.create_connection((host, port)) as caller:
            caller.sendall(f"{said}\n".replace("TOKEN", f'"{token}"').replace("'", '"').encode())

    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(call)
        with pytest.raises(pl.EngineError, match=r"ranks \[1\] have not reached rank 0"):
            line.Line(0, 2, store, pytest.fail)
        calling.result()


def test_hosts_a_rank_that_nobody_can_reach_is_named(store: Any) -> None:
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        store.set("pipelab/line", json.dumps(["127.0.0.1", closed.getsockname()[1], "", "node 0", 0]))
        with pytest.raises(pl.EngineError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:.* MASTER_ADDR, which is"):
            line.Line(1, 2, store, pytest.fail)


def test_hosts_leave_nothing_behind(two: None) -> None:
    with pytest.raises(RuntimeError, match="planted"), TwoHosts() as hosts:  # noqa: PT012
        process = hosts.start(1, ["sleep", "1000"], os.environ)
        raise RuntimeError("planted")
    assert process.poll() is not None
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not any(name in left for name in hosts.names)  # those of another run may be there
