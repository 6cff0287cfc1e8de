"""Messages between ranks: posted early, sent without waiting, and nothing let go before it has arrived.

    rank r                                   rank r + 1
    send 1F0 ───────── 1F0, tag 8 ─────────► post 1F0   (asks for the bytes, goes on)         [1]
    ...                                      take 1F0   (waits until they are there)          [2]
    take 2B0 ◄──────── 2B0, tag 31 ───────── send 2B0   (says: I have had 1 of your messages)
    the bytes of 1F0 may go                                                                   [3]

Every action has a tag of its own, so messages may overtake each other. gloo wants the receiver's buffer before it moves
a byte, and that buffer must be large enough. So both ends remember how large the last message of this action was: one
that fits goes in one piece, one that does not is announced by its head and follows behind it [4].

gloo does not say by itself that a message has arrived, so its bytes stay until one comes back [3]. Under 1F1B those are
a warmup's messages at the most; under GPipe a rank keeps all that it sent until the first gradient comes.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.action import Action, Kind
from pipelab.engine import message
from pipelab.engine.device import CPU, Device, Mark
from pipelab.engine.message import HEAD_BYTES, Head, Value
from pipelab.errors import EngineError
from pipelab.ranks import now

_FIRST_CAPACITY = 4096  # bytes of the buffer before anything is known about an action's messages
_PLACE = {kind: place for place, kind in enumerate(Kind)}


class Delivery(NamedTuple):
    """A received value, and what its message said."""

    value: Value
    stamp: float
    sent: float  # seconds of the ranks' common clock
    arrived: Mark  # when the receiver had it in hand: a message may have been there earlier
    bytes: int


class Channel:
    """One rank's end of all its connections."""

    def __init__(self, num_microbatches: int, group: Any = None, *, device: Device = CPU) -> None:
        self._device = device
        # gloo itself, in which peers have their numbers as in the group: the way through torch's dispatcher is longer
        everyone: Any = dist.group.WORLD
        self._gloo = (group or everyone)._get_backend(torch.device("cpu"))
        self._num_microbatches = num_microbatches
        self._capacity: dict[Action, int] = {}
        self._posted: dict[Action, tuple[Any, Tensor, int, int]] = {}
        # by rank: gloo's works, which must not be dropped before they are waited for, and the bytes that they send
        self._on_the_way: defaultdict[int, deque[tuple[list[Any], Tensor]]] = defaultdict(deque)
        self._sent: Counter[int] = Counter()
        self._asked: defaultdict[int, deque[Action]] = defaultdict(deque)  # in the order in which they are sent
        self._received: Counter[int] = Counter()  # how many of the first ones are there, whatever came besides
        self.step = 0
        self._sent_bytes = 0

    def post(self, action: Action, peer: int) -> None:
        """Ask rank `peer` for what `action` makes there, without waiting for it."""  # [1]
        tag, buffer = self._tag(action), torch.empty(self._capacity.get(action, _FIRST_CAPACITY), dtype=torch.uint8)
        self._posted[action] = self._gloo.recv([buffer], peer, tag), buffer, peer, tag
        self._asked[peer].append(action)

    def send(self, action: Action, value: Value, peer: int, stamp: float = 0.0) -> None:
        """Start sending what `action` made to rank `peer`."""
        tag = self._tag(action)
        block = message.pack(value, tag, self.step, self._received[peer], stamp, now())
        if self._fits(action, block.numel()):
            works = [self._gloo.send([block], peer, tag)]
        else:
            works = [self._gloo.send([block[:HEAD_BYTES]], peer, tag), self._gloo.send([block], peer, tag + 1)]  # [4]
        self._on_the_way[peer].append((works, block))
        self._sent[peer] += 1
        self._sent_bytes += message.payload_bytes(value)

    def take(self, action: Action) -> Delivery:
        """Wait for what was posted as `action`. Raises EngineError where something else arrived."""
        head, block = self._message(action)
        arrived = self._device.mark()
        value: Value = self._device.put(message.unpack(block, head))
        return Delivery(value, head.stamp, head.sent, arrived, message.payload_bytes(value))

    def finish(self) -> None:
        """Wait until all that was sent has arrived; the next message belongs to the next step."""
        for peer in self._on_the_way:
            self._let_go(peer, 0)
        self.step += 1

    def _message(self, action: Action) -> tuple[Head, Tensor]:
        """The bytes of what was posted as `action`, once they are there, and their head."""
        work, block, peer, tag = self._posted.pop(action)
        work.wait()  # [2]
        head = message.read_head(block)
        if head.tag != tag or head.step != self.step:
            raise EngineError(
                f"expected {action} of step {self.step} from rank {peer}, "
                f"received the value with tag {head.tag} of step {head.step}"
            )
        if not self._fits(action, head.size):
            block = torch.empty(head.size, dtype=torch.uint8)
            self._gloo.recv([block], peer, tag + 1).wait()
        while self._asked[peer] and self._asked[peer][0] not in self._posted:
            self._asked[peer].popleft()
            self._received[peer] += 1
        self._let_go(peer, self._sent[peer] - head.acknowledged)
        return head, block

    @property
    def blocks(self) -> list[Tensor]:
        """The memory of the messages that are under way, in both directions."""
        sending = [block for queue in self._on_the_way.values() for _, block in queue]
        return sending + [buffer for _, buffer, _, _ in self._posted.values()]

    def take_sent_bytes(self) -> int:
        """Bytes of the tensors sent since this was asked last."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def _tag(self, action: Action) -> int:
        """An even number of this action alone; the odd one behind it is for what did not fit."""
        stage, kind, microbatch = action
        return 2 * ((stage * len(_PLACE) + _PLACE[kind]) * self._num_microbatches + microbatch)

    def _fits(self, action: Action, size: int) -> bool:
        """Whether a message fits into its action's buffer. Both ends ask once a message, so both remember the same."""
        capacity = self._capacity.get(action, _FIRST_CAPACITY)
        if size > capacity or 2 * size < capacity:
            self._capacity[action] = max(size, _FIRST_CAPACITY)
        return size <= capacity

    def _let_go(self, peer: int, still_sending: int) -> None:
        """Drop what `peer` has, all but the last `still_sending` messages."""  # [3]
        queue = self._on_the_way[peer]
        while len(queue) > still_sending:
            works, _ = queue.popleft()
            for work in works:
                work.wait()
