"""What a rank really holds after every action is what `memory_curve` says, to the byte.

The curve is given what one stage, alone in this process, leaves of one micro-batch. The ranks then run whole schedules,
and count what is alive after each of their actions.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipelab as pl
from pipelab.engine import message
from pipelab.engine.deferred import Deferral
from pipelab.engine.live_bytes import LiveBytes
from pipelab.engine.loss import Loss
from pipelab.engine.message import Value, wrap
from pipelab.engine.stage import Stage

pytestmark = pytest.mark.timeout(120)
ROWS, WIDTH = 32, 64  # of a micro-batch's boundary tensor: 8 kB
PLANS = ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2"]


def stack(num_stages: int) -> nn.Sequential:
    """Two Linear layers with a GELU behind each, on every stage."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[layer for _ in range(2 * num_stages) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())],
    )


class Alone(NamedTuple):
    """Bytes that one micro-batch leaves on a stage; `work` is what its hungriest action needs besides for a while."""

    after_forward: int
    recomputed: int
    after_input: int
    work: int


def arrived(value: Value) -> Value:
    """The value as it comes out of a message: it lies in the message's own block."""
    block = message.pack(value, 0, 0, 0, 0.0, 0.0)
    return message.unpack(block, message.read_head(block))


def alone(model: nn.Sequential, stage: int, num_stages: int, split: bool, remat: str) -> Alone:
    """F, and its second run where there is one, B or I and W of one micro-batch on one stage, weighed after each."""
    layers = model[4 * stage : 4 * stage + 4]
    loss = Loss(F.mse_loss) if stage == num_stages - 1 else None
    one = Stage(list(layers), remat=remat, finish=loss, deferral=Deferral(layers) if split else None)
    x, gradient = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    held, work = [0], 0

    def weigh(*elsewhere: Tensor) -> None:
        nonlocal work
        held.append(memory.without(elsewhere))
        work = max(work, memory.peak - max(held[-2:]))
        memory.reset_peak()

    for microbatch in range(2):  # the first one makes the gradients, and decides whether to defer
        if loss:
            loss.begin([torch.zeros(ROWS, WIDTH)] * 2, [0.5, 0.5])
        with LiveBytes() as memory:
            held, work = [0], 0
            value = Value(b"tensor", [x], [False]) if stage == 0 else arrived(Value(b"tensor", [x], [True]))
            made = one.forward(microbatch, value)
            del value
            weigh(*made.tensors)
            kept = made.tensors if loss else []  # the loss of a micro-batch stays until the end of the step
            del made
            one.recompute(microbatch)
            weigh(*kept)
            gradients = [loss.gradient(microbatch)] if loss else arrived(wrap([gradient])).tensors
            made = wrap(list((one.backward_input if split else one.backward)(microbatch, gradients)))
            del gradients
            weigh(*made.tensors, *kept)
            del made
            if split:
                one.backward_weight(microbatch)
                weigh(*kept)
            assert one.empty
            assert held[-1] == 0 or microbatch == 0
            del kept
    return Alone(held[1], held[2], held[3], work)


@pytest.mark.parametrize("remat", ["none", "stage"])
@pytest.mark.parametrize("name", PLANS)
def test_held_bytes_are_those_of_the_memory_curve(name: str, remat: str, ranks_of: Callable[[int], pl.Ranks]) -> None:
    """And the peak is the curve's, with one action's work and the messages under way on top.

    Those are at most the input and the output of every micro-batch in flight, and one more in either direction.
    """
    schedule = pl.SCHEDULES[name](4, 8)
    num_stages, split = schedule.num_stages, name.startswith("zb")
    model = stack(num_stages)
    x = torch.randn(8 * ROWS, WIDTH)
    with pl.Pipeline(
        model,
        schedule,
        loss_fn=F.mse_loss,
        ranks=ranks_of(4),
        partition=[4] * num_stages,
        remat=remat,
        measure_memory=True,
        nan="ignore",  # otherwise waiting gradients are kept beside new ones, in case those are no numbers
    ) as pipe:
        pipe.step(x, x, update=False)
        result = pipe.step(x, x, update=False)  # the weights' gradients were there before it
    block = arrived(wrap(x[:ROWS])).tensors[0].untyped_storage().nbytes()
    stages = [alone(model, stage, num_stages, split, remat) for stage in range(num_stages)]
    inputs = [each.after_forward if remat == "stage" else 0 for each in stages]
    whole = [each.recomputed - kept for each, kept in zip(stages, inputs, strict=True)]
    for rank, held in enumerate(result.held_bytes):
        last = schedule.stages_on(rank)[-1]
        part = stages[last].after_input / whole[last]  # of a schedule with W there is one stage a rank
        curve = pl.memory_curve(result.trace, whole, part, inputs, remat=remat == "stage")
        ends = [span.end for span in result.trace.by_rank[rank]]
        predicted = [round(curve.total[rank][bisect.bisect(curve.times[rank], end) - 1]) for end in ends]
        assert list(held) == predicted
        in_flight = pl.peak_activations(result.trace)[rank] * schedule.stages_per_rank
        boundary = (2 * in_flight + 2) * block
        work = max(stages[stage].work for stage in schedule.stages_on(rank))
        assert curve.peak[rank] <= result.peak_bytes[rank] <= curve.peak[rank] + boundary + work
