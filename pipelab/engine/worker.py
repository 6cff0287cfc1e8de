"""The interpreter: one rank goes through its part of a Program, one instruction after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipelab.action import Action, Kind
from pipelab.engine.channel import Channel
from pipelab.engine.device import CPU, Device, Mark
from pipelab.engine.live_bytes import LiveBytes
from pipelab.engine.loss import Loss
from pipelab.engine.message import Value, copied, unwrap, wrap
from pipelab.engine.pace import Pace
from pipelab.engine.stage import Stage
from pipelab.engine.stashing import Stash
from pipelab.lower import Instruction, Receive, Send
from pipelab.ranks import doing

_text = lru_cache(maxsize=4096)(str)  # of an action: the same in every step


class Timing(NamedTuple):
    """When an action ran: marks of its device, and after the step seconds of the ranks' common clock."""

    action: Action
    start: Mark
    end: Mark
    recompute: bool = False
    late: float = 0.0  # behind the deadline of an emulated accelerator
    version: int | None = None  # of the weights that it used, or that an update made, where they are updated on the way


class Arrival(NamedTuple):
    """When the message came that an action reads, times as in Timing."""

    reader: Action
    sent: float
    arrived: Mark
    bytes: int


def posting_early(program: Iterable[Instruction]) -> list[Instruction]:
    """`program`, with every receive moved up behind the last send to the same rank, unless one from there is between.

    A neighbour's gloo thread wakes up for what is sent to it and for what it is asked for: once, when both come at the
    same time. Asking waits for nobody, so asking earlier cannot hang.
    """
    early: list[Instruction] = []
    for instruction in program:
        place = len(early)
        if isinstance(instruction, Receive):
            talks = (n for n in reversed(range(place)) if getattr(early[n], "peer", None) == instruction.peer)
            last = next(talks, None)
            if last is not None and isinstance(early[last], Send):
                place = last + 1
        early.insert(place, instruction)
    return early


class Worker:
    """One rank's stages, and its end of the channel.

    `sources` tells for an action which action of a neighbouring stage makes what it reads. The first stage's forward
    reads the model's input instead, and the last stage's backward the gradient of the loss.
    """

    def __init__(
        self, stages: Mapping[int, Stage], sources: Mapping[Action, Action], channel: Channel, loss: Loss | None = None
    ) -> None:
        self.stages = stages
        self.channel = channel
        self.loss = loss
        self.inputs: Sequence[Value] = ()
        self.training = True
        self.pace: Pace | None = None
        self.device: Device = CPU
        self.weights: Stash | None = None  # where they are updated on the way
        self.memory: LiveBytes | None = None
        self.timings: list[Timing] = []
        self.held: list[int] = []
        self.arrivals: list[Arrival] = []
        self._sources = sources

    def run(self, program: Iterable[Instruction]) -> dict[Action, Value]:
        """Do all of `program`; what is left is what it made and nobody read: the outputs of the last stage."""
        self.timings, self.held, self.arrivals = [], [], []
        made: dict[Action, Value] = {}
        self.device.begin(paced=self.pace is not None)
        for instruction in program:
            action = instruction.action
            if isinstance(instruction, Receive):
                self.channel.post(action, instruction.peer)
            elif isinstance(instruction, Send):
                stamp = self.pace.stamp(action, instruction.peer) if self.pace else 0.0
                self.channel.send(action, made.pop(action), instruction.peer, stamp)
            else:
                doing(_text(action))
                if self.memory:
                    self._weigh(made)
                if self.weights and action.kind is not Kind.U:
                    self.weights.take(action)
                if action.kind in (Kind.B, Kind.I) and self.stages[action.stage].remat:
                    self._recompute(action)
                    if self.memory:
                        self._weigh(made)
                self._do(action, made)
        if self.memory:
            self._weigh(made)
        self.channel.finish()
        self._read_the_clock()
        return made

    def _do(self, action: Action, made: dict[Action, Value]) -> None:
        result = self._timed(action, self._read(action, made))
        if result is not None:
            made[action] = result  # and nowhere else: once it is sent, its memory is free
        if self.weights and action.kind is not Kind.U:
            self.weights.done(action)

    def _weigh(self, made: dict[Action, Value]) -> None:
        """Note what the stages hold after the last action, whose result has been sent.

        That is all that lives but for the weights' gradients, messages, and results that wait for their reader.
        """
        if self.memory and len(self.held) < len(self.timings):
            gradients = [p.grad for stage in self.stages.values() for p in stage.parameters if p.grad is not None]
            waiting = [tensor for value in made.values() for tensor in value.tensors]
            self.held.append(self.memory.without([*gradients, *self.channel.blocks, *waiting]))

    def _read(self, action: Action, made: dict[Action, Value]) -> Value | None:
        """What `action` reads: from another rank, from another stage of this rank, or from no stage at all."""
        source = self._sources.get(action)
        if source is None:
            return self.inputs[action.microbatch] if action.kind is Kind.F else None
        if source in made:
            return copied(made.pop(source))
        delivery = self.channel.take(source)
        arrived = delivery.arrived
        if self.pace:
            self.pace.value_comes(delivery.stamp)
            arrived = self.pace.arrival(delivery.sent, arrived, delivery.stamp)
        self.arrivals.append(Arrival(action, delivery.sent, arrived, delivery.bytes))
        return delivery.value

    def _recompute(self, action: Action) -> None:
        """The second forward, as soon as the rank is free, whether or not the gradient has come."""
        stage = self.stages[action.stage]
        if stage.in_one_piece or self.pace:  # otherwise it is part of the backward
            again = action._replace(kind=Kind.F)
            self._timed(again, None, recompute=True)

    def _timed(self, action: Action, value: Value | None, recompute: bool = False) -> Value | None:
        """Do it and note the time; on an emulated accelerator it ends no earlier than its deadline."""
        if self.pace:
            self.pace.begin()
        start = self.device.mark()
        result = self._compute(action, value, recompute)
        if self.pace:
            self.device.wait_for_layers()
        deadline = self.pace.end(action) if self.pace else None
        end = self.device.mark()
        late = 0.0 if deadline is None else end - deadline
        version = self.weights.loaded if self.weights else None
        self.timings.append(Timing(action, start, end, recompute, late, version))
        return result

    def _read_the_clock(self) -> None:
        """Make times of the marks; the CPU's are times already."""
        if self.device is CPU:
            return
        seconds = self.device.seconds
        self.timings = [one._replace(start=seconds(one.start), end=seconds(one.end)) for one in self.timings]
        self.arrivals = [one._replace(arrived=seconds(one.arrived)) for one in self.arrivals]

    def _compute(self, action: Action, value: Value | None, recompute: bool) -> Value | None:
        if action.kind is Kind.U:
            assert self.weights is not None
            self.weights.make(action)
            return None
        stage, microbatch = self.stages[action.stage], action.microbatch
        if recompute:
            stage.recompute(microbatch)
            return None
        if action.kind is Kind.F:
            assert value is not None
            return stage.forward(microbatch, value) if self.training else wrap(stage.predict(microbatch, unwrap(value)))
        if action.kind is Kind.W:
            stage.backward_weight(microbatch)
            return None
        if value is None:
            assert self.loss is not None
            gradients = [self.loss.gradient(microbatch)]
        else:
            gradients = unwrap(value)
        backward = stage.backward if action.kind is Kind.B else stage.backward_input
        return wrap(list(backward(microbatch, gradients)))
