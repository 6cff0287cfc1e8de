"""The channel between two ranks: what arrives, when, and what is kept for how long. Traps 11 to 13, 17, 18, 20."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import pipelab as pl
from pipelab.action import Action
from pipelab.engine.channel import Channel
from pipelab.engine.live_bytes import LiveBytes
from pipelab.engine.message import unwrap, wrap
from pipelab.engine.worker import posting_early
from pipelab.lower import Receive, Send, lower

# As in a notebook: the ranks get these functions by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)


def action(text: str) -> Action:
    return Action.from_text(text)


@pytest.fixture
def both(ranks_of: Callable[[int], pl.Ranks]) -> Callable[..., list[Any]]:
    """Runs fn(rank, channel) on two ranks, each with a new channel."""

    def run(fn: Callable[[int, Channel], Any]) -> list[Any]:
        return ranks_of(2).run(lambda: fn(dist.get_rank(), Channel(num_microbatches=8)))

    return run


def exchange(rank: int, channel: Channel, contents: list[Any]) -> list[Any]:
    """Rank 0 sends, rank 1 receives, one micro-batch each, all posted before anything is taken."""
    actions = [action(f"0F{number}") for number in range(len(contents))]
    if rank == 0:
        for each, content in zip(actions, contents, strict=True):
            channel.send(each, wrap(content), 1)
        received = []
    else:
        for each in actions:
            channel.post(each, 0)
        received = [unwrap(channel.take(each).value) for each in actions]
    channel.finish()
    return received


def test_channel_brings_values_of_every_kind_and_size(both: Callable[..., list[Any]]) -> None:
    """A first message of more than 4 kB does not fit into the buffer posted for it, and follows behind its head."""

    def work(rank: int, channel: Channel) -> Any:
        small = {"mask": torch.tensor([True, False]), "hidden": (torch.arange(5.0), None), "length": 3}
        return exchange(rank, channel, [torch.arange(3.0), torch.arange(1e6), small, torch.empty(0, 4), "text", None])

    three, million, small, empty, text, none = both(work)[1]
    assert torch.equal(three, torch.arange(3.0))
    assert torch.equal(million, torch.arange(1e6))
    assert small["length"] == 3
    assert small["mask"].tolist() == [True, False]
    assert small["hidden"][1] is None
    assert empty.shape == (0, 4)
    assert (text, none) == ("text", None)


def test_channel_follows_shapes_from_step_to_step(both: Callable[..., list[Any]]) -> None:
    sizes = [[10, 2000], [12, 3000], [5, 100_000], [7, 100_000], [5000, 20], [1, 60_000], [9, 10]]

    def work(rank: int, channel: Channel) -> list[list[int]]:
        steps = [[torch.full((size,), float(step)) for size in row] for step, row in enumerate(sizes)]
        received = [exchange(rank, channel, tensors) for tensors in steps]
        for step, tensors in enumerate(received):
            assert all((tensor == step).all() for tensor in tensors)
        return [[len(tensor) for tensor in tensors] for tensors in received]

    assert both(work)[1] == sizes


def test_channel_brings_the_right_value_in_any_order(both: Callable[..., list[Any]]) -> None:
    """Every action has a tag of its own, so values may be taken in another order than they were sent."""

    def work(rank: int, channel: Channel) -> list[float]:
        actions = [action(text) for text in ("0F0", "2F0", "0F1", "0B0", "0I0", "2F1")]
        if rank == 0:
            for number, each in enumerate(actions):
                channel.send(each, wrap(torch.tensor(float(number))), 1)
        else:
            for each in sorted(actions):
                channel.post(each, 0)
        order = reversed(actions) if rank == 1 else ()
        taken = [unwrap(channel.take(each).value).item() for each in order]
        channel.finish()
        return taken

    assert both(work)[1] == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def test_channel_lets_both_ends_send_first(both: Callable[..., list[Any]]) -> None:
    """gloo's sends wait for the receiver, so two ranks that both send first would hang if a send waited."""

    def work(rank: int, channel: Channel) -> float:
        mine, theirs = action(f"{rank}F0"), action(f"{1 - rank}F0")
        channel.send(mine, wrap(torch.full((300_000,), float(rank))), 1 - rank)
        channel.post(theirs, 1 - rank)
        value = unwrap(channel.take(theirs).value)[-1].item()
        channel.finish()
        return value

    assert both(work) == [1.0, 0.0]


def test_channel_send_does_not_wait_for_the_receiver(both: Callable[..., list[Any]]) -> None:
    def work(rank: int, channel: Channel) -> float:
        dist.barrier()
        began = time.monotonic()
        if rank == 0:
            channel.send(action("0F0"), wrap(torch.ones(10)), 1)
            took = time.monotonic() - began
        else:
            time.sleep(0.5)
            channel.post(action("0F0"), 0)
            channel.take(action("0F0"))
            took = 0.0
        channel.finish()
        return took

    assert both(work)[0] < 0.25


def test_channel_sends_what_was_there_at_the_send(both: Callable[..., list[Any]]) -> None:
    """gloo reads a tensor when the receiver comes, so what is written into it before that would arrive."""

    def work(rank: int, channel: Channel) -> list[float]:
        values = []
        for microbatch, size in enumerate((4, 100_000)):
            each = action(f"0F{microbatch}")
            if rank == 0:
                tensor = torch.ones(size)
                channel.send(each, wrap(tensor), 1)
                tensor.fill_(7)
            dist.barrier()
            if rank == 1:
                channel.post(each, 0)
                values.append(unwrap(channel.take(each).value).max().item())
        channel.finish()
        return values

    assert both(work)[1] == [1.0, 1.0]


def test_channel_survives_garbage_collection_of_what_it_sends(both: Callable[..., list[Any]]) -> None:
    """gloo takes back a send whose Work is dropped before it is waited for."""

    def work(rank: int, channel: Channel) -> int:
        if rank == 0:
            for microbatch in range(3):
                channel.send(action(f"0F{microbatch}"), wrap(torch.ones(1000)), 1)
                gc.collect()
        dist.barrier()
        taken = 0
        for microbatch in range(3 if rank == 1 else 0):
            channel.post(action(f"0F{microbatch}"), 0)
            taken += unwrap(channel.take(action(f"0F{microbatch}")).value).numel()
        channel.finish()
        return taken

    assert both(work)[1] == 3000


def test_channel_frees_what_it_sent_when_an_answer_shows_that_it_arrived(both: Callable[..., list[Any]]) -> None:
    def work(rank: int, channel: Channel) -> list[int]:
        live = []
        with LiveBytes() as memory:
            for microbatch in range(3):
                there, back = action(f"0F{microbatch}"), action(f"1B{microbatch}")
                if rank == 0:
                    channel.send(there, wrap(torch.ones(250_000)), 1)
                    live.append(memory.live)
                    channel.post(back, 1)
                    channel.take(back)
                    live.append(memory.live)
                else:
                    channel.post(there, 0)
                    channel.take(there)
                    channel.send(back, wrap(None), 0)
        channel.finish()
        return live

    live = both(work)[0]
    sent = live[0]
    assert sent >= 1_000_000
    assert max(live) < 1.1 * sent  # never two of them
    assert max(live[1::2]) < 20_000


def test_channel_lets_nothing_go_that_has_not_arrived(both: Callable[..., list[Any]]) -> None:
    """The second of two large messages is taken first, and the first one only after an answer to that.

    ZB-V with 4 ranks hung so: the answer said that one message had been taken, and the sender waited for its oldest.
    """

    def work(rank: int, channel: Channel) -> int:
        first, second, reply, last = (action(text) for text in ("0F0", "0F1", "1B1", "0F2"))
        if rank == 0:
            channel.send(first, wrap(torch.ones(5000)), 1)
            channel.send(second, wrap(torch.ones(5000)), 1)
            channel.post(reply, 1)
            channel.take(reply)
            channel.send(last, wrap(None), 1)
            taken = 0
        else:
            for each in (first, second, last):
                channel.post(each, 0)
            channel.take(second)
            channel.send(reply, wrap(None), 0)
            channel.take(last)
            taken = unwrap(channel.take(first).value).numel()
        channel.finish()
        return taken

    assert both(work)[1] == 5000


def test_channel_refuses_a_value_of_another_step(both: Callable[..., list[Any]]) -> None:
    def work(rank: int, channel: Channel) -> None:
        if rank == 0:
            channel.step = 4
            channel.send(action("0F0"), wrap(torch.ones(2)), 1)
        else:
            channel.post(action("0F0"), 0)
            channel.take(action("0F0"))
        channel.finish()

    with pytest.raises(pl.RankError, match=r"expected 0F0 of step 0 from rank 0, received the value .* of step 4"):
        both(work)


def test_channel_counts_the_bytes_of_tensors(both: Callable[..., list[Any]]) -> None:
    def work(rank: int, channel: Channel) -> tuple[int, int, int]:
        received = 0
        if rank == 0:
            channel.send(action("0F0"), wrap((torch.ones(10), torch.ones(3).bool())), 1)
        else:
            channel.post(action("0F0"), 0)
            received = channel.take(action("0F0")).bytes
        channel.finish()
        return received, channel.take_sent_bytes(), channel.take_sent_bytes()

    assert both(work) == [(0, 43, 0), (43, 0, 0)]


# --- when a receive is posted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pl.SCHEDULES)
def test_receives_are_posted_early_and_nothing_else_moves(name: str) -> None:
    for order in lower(pl.SCHEDULES[name](4, 8)).ranks:
        early = posting_early(order)
        assert [i for i in early if not isinstance(i, Receive)] == [i for i in order if not isinstance(i, Receive)]
        for peer in range(4):  # what comes from one rank is asked for in the order in which it is sent
            asked, due = ([i for i in one if isinstance(i, Receive) and i.peer == peer] for one in (early, order))
            assert asked == due
        for receive in (i for i in order if isinstance(i, Receive)):
            done, later = (
                {i for i in one[: one.index(receive)] if not isinstance(i, Receive)} for one in (early, order)
            )
            assert done <= later


def test_under_1f1b_a_send_and_the_next_receive_travel_together() -> None:
    early = posting_early(lower(pl.one_f_one_b(4, 8)).ranks[1])
    after_warmup = early[early.index(Receive(action("2B1"), 2)) :]
    partners = [before for before, i in pairwise(after_warmup) if isinstance(i, Receive)]
    assert len(partners) == 10  # 2B2 to 2B7 from rank 2 and 0F4 to 0F7 from rank 0
    assert all(isinstance(before, Send) for before in partners)
