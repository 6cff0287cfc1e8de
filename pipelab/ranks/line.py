"""An open line from every rank to rank 0, on which nothing is said but "I am here".

    rank r                      rank 0
    my clock says a ──────────►            every second                                   [1]
                    ◄────────── a, mine says t
    goodbye         ──────────►            before an end that is meant                    [2]

A process that dies closes its line at once [3]. A host that is stopped, or whose cable is out, closes nothing: it is
missed when it has said nothing ten times [4]. Turns are counted and not seconds, so that a laptop that slept, or a
process that was stopped itself, accuses nobody when it wakes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipelab.errors import EngineError
from pipelab.ranks import clock, hosts

BEAT_S = 1.0
SILENT_AFTER = 10  # beats
_MEETING_S = 60.0
_FIRST_BEATS = 8
_FRAME = struct.Struct("<dd")
_GOODBYE = _FRAME.pack(math.nan, math.nan)
_KEY = "pipelab/line"

Lost = Callable[[Sequence[int], str, str, str], None]  # which ranks, what happened, how that shows, where they are


class Line:
    """This rank's line, or in rank 0 everybody's. It calls `lost`, on a thread of its own, for ranks that are gone."""

    def __init__(self, rank: int, num_ranks: int, store: Any, lost: Lost) -> None:
        self._rank, self._lost = rank, lost
        self._peers: dict[int, socket.socket] = {}
        self._where: dict[int, str] = {}
        self._heard: dict[int, bytes] = {}
        self._missed: dict[int, int] = {}
        self._clock: clock.Follower | None = None
        self._closed = threading.Event()
        if rank == 0:
            self._invite(num_ranks, store)
        else:
            self._call(store)
        self._selector = selectors.DefaultSelector()
        for peer, line in self._peers.items():
            line.setblocking(False)
            self._heard[peer], self._missed[peer] = b"", 0
            self._selector.register(line, selectors.EVENT_READ, peer)
        threading.Thread(target=self._listen, name="who is there", daemon=True).start()

    def close(self) -> None:
        """Say goodbye: whatever happens to this process from now on is meant."""  # [2]
        self._closed.set()
        for line in list(self._peers.values()):
            with contextlib.suppress(OSError):
                line.send(_GOODBYE)

    def _invite(self, num_ranks: int, store: Any) -> None:
        token = os.urandom(16).hex()
        family = socket.AF_INET6 if ":" in hosts.address() else socket.AF_INET
        with socket.create_server((hosts.address(), 0), family=family, backlog=num_ranks) as server:
            server.settimeout(_MEETING_S)
            at = [*server.getsockname()[:2], token, hosts.name(), hosts.node()]
            store.set(_KEY, json.dumps(at))
            while len(self._peers) < num_ranks - 1:
                try:
                    line, _ = server.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, num_ranks)) - set(self._peers))
                    raise EngineError(
                        f"ranks {missing} have not reached rank 0 at {at[0]}:{at[1]} within {_MEETING_S:g} s: "
                        "does a firewall between the hosts close their ports?"
                    ) from error
                line.settimeout(_MEETING_S)
                self._meet(line, token)

    def _meet(self, line: socket.socket, token: str) -> None:
        """Note who has the token and gets through its first beats; hang up on all others."""
        with contextlib.suppress(OSError, ValueError, TypeError, struct.error):  # no rank, or one that died
            given, peer, where = json.loads(line.makefile("rb", 0).readline(1000))
            if given == token:
                for _ in range(_FIRST_BEATS):
                    asked, _there = _FRAME.unpack(line.recv(_FRAME.size, socket.MSG_WAITALL))
                    line.sendall(_FRAME.pack(asked, clock.now()))
                self._peers[peer], self._where[peer] = line, where
                return
        line.close()

    def _call(self, store: Any) -> None:
        host, port, token, where, node = json.loads(store.get(_KEY))
        try:
            line = socket.create_connection((host, port), timeout=_MEETING_S)
        except OSError as error:
            raise EngineError(
                f"rank {self._rank} cannot reach rank 0 at {host}:{port}: {error}. Is MASTER_ADDR, which is "
                f"{os.environ['MASTER_ADDR']}, on rank 0's own host an address that the others can reach?"
            ) from error
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(_MEETING_S)
        line.sendall((json.dumps([token, self._rank, hosts.name()]) + "\n").encode())
        self._peers[0], self._where[0] = line, where
        if node != hosts.node():
            self._clock = clock.Follower()
        for _ in range(_FIRST_BEATS):
            line.sendall(_FRAME.pack(time.monotonic(), 0.0))
            self._understand(0, line.recv(_FRAME.size, socket.MSG_WAITALL))

    def _listen(self) -> None:
        beat = time.monotonic()
        while self._peers and not self._closed.is_set():
            for key, _ in self._selector.select(max(0.0, beat - time.monotonic())):
                self._hear(key.data)
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT_S
                self._beat()

    def _beat(self) -> None:
        for peer, line in self._peers.items():
            self._missed[peer] += 1
            if self._rank != 0:
                with contextlib.suppress(OSError):
                    line.send(_FRAME.pack(time.monotonic(), 0.0))  # [1]
        if any(missed > SILENT_AFTER for missed in self._missed.values()):  # [4]
            silent = [peer for peer, missed in self._missed.items() if missed > SILENT_AFTER - 2]
            self._part(silent, "fell silent", f"nothing was heard for {SILENT_AFTER * BEAT_S:g} s")

    def _hear(self, peer: int) -> None:
        try:
            data = self._peers[peer].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._part([peer], "died", "its connection was closed")  # [3]
            return
        self._missed[peer] = 0
        data = self._heard[peer] + data
        whole = len(data) - len(data) % _FRAME.size
        self._heard[peer] = data[whole:]
        for start in range(0, whole, _FRAME.size):
            self._understand(peer, data[start : start + _FRAME.size])

    def _understand(self, peer: int, frame: bytes) -> None:
        asked, there = _FRAME.unpack(frame)
        if math.isnan(asked):
            self._forget(peer)
        elif self._rank == 0:
            with contextlib.suppress(OSError, KeyError):
                self._peers[peer].send(_FRAME.pack(asked, clock.now()))
        elif self._clock:
            self._clock.heard(asked, there, time.monotonic())

    def _part(self, peers: Sequence[int], what: str, how: str) -> None:
        where = ", ".join(dict.fromkeys(self._where[peer] for peer in peers))
        for peer in peers:
            self._forget(peer)
        if not self._closed.is_set():
            self._lost(peers, what, how, where)

    def _forget(self, peer: int) -> None:
        self._missed.pop(peer, None)
        line = self._peers.pop(peer, None)
        if line is not None:
            self._selector.unregister(line)
            line.close()
