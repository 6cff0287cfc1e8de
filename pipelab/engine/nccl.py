"""Messages between GPUs: the head travels from host to host by gloo, the tensors from GPU to GPU by NCCL.

    rank r                                           rank r + 1
    send 1F0: head ────────── gloo ────────────────► take 1F0: waits for the head, which says the shapes     [1]
              tensors, on a stream of their own ───► tensors, on a stream of their own                       [2]
                                                     for which the layers wait, but not this process         [3]

NCCL has no tags: the messages from one rank to another arrive in the order in which they are sent, so they are received
in that order, whichever is needed first [4]. lower() gives both sides the same order. A send occupies its stream until
it is received; so each direction has a group, and hence a stream, of its own, and two ranks that send to each other at
the same time do not wait for each other [5].

Nothing waits in a circle: during a step no process and no layer waits for a send, but for an update on the way (see
`pipelab.engine.groups`); and a receive is ordered when the head is there, that is, for a send that waits only for
layers before it and for earlier messages, received before. This needs connections. torch makes one in the first message
of a pair, where both processes wait, so that is done when the channel is opened [6].
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.action import Action
from pipelab.engine.channel import Channel, Delivery
from pipelab.engine.device import Device
from pipelab.engine.groups import Groups
from pipelab.engine.message import Head, Value, payload_bytes, unpack

Works = list[tuple[Any, Tensor]]


class NcclChannel(Channel):
    """A channel whose tensors stay on their devices: `ways` are groups of the same ranks as `group`.

    With groups of gloo it does the same on CPUs, where nothing is gained by it.
    """

    def __init__(self, num_microbatches: int, group: Any, ways: tuple[Any, Any], *, device: Device) -> None:
        super().__init__(num_microbatches, group, device=device)
        self._upward, self._downward = ways  # [5]
        self._rank = dist.get_rank(group)
        self._streams: defaultdict[tuple[int, int], Any] = defaultdict(device.new_stream)  # by sender and receiver
        self._coming: defaultdict[int, deque[Action]] = defaultdict(deque)  # by rank, in the order in which it sends
        self._peer: dict[Action, int] = {}
        self._here: dict[Action, tuple[Head, Value]] = {}
        self._leaving: defaultdict[int, deque[Works]] = defaultdict(deque)

    def connect(self, peers: Iterable[int]) -> None:
        """Exchange a number with each of `peers`, on both ways. They must do it too, before the first step."""  # [6]
        number = torch.zeros(1, device=self._device.where)
        for peer in sorted(peers):  # every rank goes through its pairs in one order of all pairs
            pair = sorted((self._rank, peer))
            for sender, receiver in (pair, pair[::-1]):
                way = self._way(sender, receiver)
                work = (way.send if sender == self._rank else way.recv)([number], peer, 0)
                work.wait()

    def post(self, action: Action, peer: int) -> None:
        super().post(action, peer)
        self._coming[peer].append(action)
        self._peer[action] = peer

    def send(self, action: Action, value: Value, peer: int, stamp: float = 0.0) -> None:
        tensors = [tensor.detach().contiguous() for tensor in value.tensors]
        kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        head = pickle.dumps((value.structure, kinds, tuple(value.wants_gradient)))
        super().send(action, Value(head, (), ()), peer, stamp)
        self._sent_bytes += payload_bytes(value)
        stream = self._streams[self._rank, peer]
        self._device.hand_over(tensors, to=stream)
        with self._device.inside(stream):  # [2]
            way = self._way(self._rank, peer)
            self._leaving[peer].append([(way.send([t], peer, 0), t) for t in tensors if t.numel()])

    def take(self, action: Action) -> Delivery:
        peer = self._peer.pop(action)
        while action not in self._here:
            first = self._coming[peer].popleft()  # [4]
            self._here[first] = self._receive(first, peer)
        head, value = self._here.pop(action)
        self._device.hand_over(value.tensors, out_of=self._streams[peer, self._rank])  # [3]
        return Delivery(value, head.stamp, head.sent, self._device.mark(), payload_bytes(value))

    def _receive(self, action: Action, peer: int) -> tuple[Head, Value]:
        head, block = self._message(action)  # [1]
        structure, kinds, wants = pickle.loads(unpack(block, head).structure)
        with self._device.inside(self._streams[peer, self._rank]):  # [2]
            tensors = [torch.empty(shape, dtype=dtype, device=self._device.where) for dtype, shape in kinds]
            for tensor in tensors:
                if tensor.numel():
                    self._way(peer, self._rank).recv([tensor], peer, 0).wait()  # with NCCL it is the stream that waits
        return head, Value(structure, tensors, wants)

    def _way(self, sender: int, receiver: int) -> Any:
        return self._upward if sender < receiver else self._downward

    def _let_go(self, peer: int, still_sending: int) -> None:
        super()._let_go(peer, still_sending)
        with self._device.inside(self._streams[self._rank, peer]):
            while len(self._leaving[peer]) > still_sending:
                for work, _ in self._leaving[peer].popleft():
                    work.wait()


def open_channel(num_microbatches: int, groups: Groups, device: Device, peers: Iterable[int]) -> Channel:
    """The channel of a rank to `peers`: by NCCL between GPUs where the ranks have it, else by gloo."""
    if groups.ways:
        channel = NcclChannel(num_microbatches, groups.pipeline, groups.ways, device=device)
        channel.connect(peers)
        return channel
    return Channel(num_microbatches, groups.pipeline, device=device)
