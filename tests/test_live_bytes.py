"""Live and peak bytes equal what is counted by hand, and what torch's allocator reports."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipelab.engine.live_bytes import LiveBytes
from pipelab.errors import SizeError

MIB = 2**20


def test_live_bytes_follow_a_tensor_from_birth_to_death():
    with LiveBytes() as memory:
        first = torch.empty(100)
        assert (memory.live, memory.peak) == (400, 400)
        second = first * 2
        assert (memory.live, memory.peak) == (800, 800)
        del first
        assert (memory.live, memory.peak) == (400, 800)
    del second
    assert (memory.live, memory.peak) == (0, 800)


def test_live_bytes_count_a_storage_once_and_keep_it_for_its_last_view():
    with LiveBytes() as memory:
        whole = torch.zeros(10, 10)
        row, turned = whole[3], whole.t()
        whole.add_(1)
        assert memory.live == 400
        del whole, turned
        assert memory.live == 400
        del row
        assert memory.live == 0


def test_live_bytes_leave_out_what_was_there_before():
    before = torch.zeros(10, 10)
    with LiveBytes() as memory:
        view = before.t()
        before.add_(1)
        torch.mul(before, 2, out=before)
        torch.split(before, 3)
        assert memory.live == memory.peak == 0
        assert view.sum() == 200


@pytest.mark.parametrize("make", [lambda: torch.tensor([1.0, 2.0]), lambda: torch.arange(2.0), lambda: torch.rand(2)])
def test_live_bytes_see_every_way_to_make_a_tensor(make):
    with LiveBytes() as memory:
        made = make()
        assert memory.live == made.nbytes == 8


def test_live_bytes_follow_a_resized_tensor():
    with LiveBytes() as memory:
        tensor = torch.empty(0)
        tensor.resize_(50)
        assert memory.live == 200
        del tensor
        assert memory.live == 0


def test_live_bytes_of_a_step_are_activations_then_gradients():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    inputs, targets = torch.rand(8, 64), torch.arange(8)
    with LiveBytes() as memory:
        scores = model(inputs)
        assert memory.live == 8 * 96 * 4 + 8 * 10 * 4  # autograd keeps the ReLU's output; the first Linear's is freed
        loss = F.cross_entropy(scores, targets)
        del scores
        loss.backward()
        del loss
        assert memory.live == sum(parameter.nbytes for parameter in model.parameters())
        model.zero_grad(set_to_none=True)
        assert memory.live == 0


def test_live_bytes_peak_restarts_from_what_is_alive():
    with LiveBytes() as memory:
        kept = torch.empty(10)
        torch.empty(1000)
        assert memory.peak == 4040
        memory.reset_peak()
        assert memory.peak == kept.nbytes


def test_live_bytes_round_each_storage_up():
    with LiveBytes(round_to=512) as memory:
        kept = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]
        assert memory.live == 512 + 512 + 1024 + 0
        kept.clear()
        assert memory.live == 0


def test_live_bytes_of_one_device_leave_out_the_others():
    with LiveBytes(device="meta") as memory:
        kept = [torch.empty(100), torch.empty(25, device="meta")]
        assert memory.live == 100
        kept.pop()
        assert memory.live == 0


def test_live_bytes_notice_a_tensor_freed_by_another_thread():
    with LiveBytes() as memory:
        box = [torch.empty(100)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert memory.live == 0


def test_live_bytes_count_the_parts_of_a_distributed_tensor():
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        before = DTensor.from_local(torch.ones(100), mesh, [Replicate()])
        with LiveBytes() as memory:
            doubled = before * 2
            assert memory.live == 400
            doubled.add_(1)
            assert memory.live == 400
            del doubled
            assert memory.live == 0
    finally:
        dist.destroy_process_group()


def deep_loss(remat):
    """A function of no argument: the loss of 8 layers of two 256 x 256 products each; an activation is 0.5 MiB."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
    inputs = torch.rand(512, 256)

    def loss():
        value = inputs
        for layer in layers:
            value = checkpoint(layer, value, use_reentrant=False) if remat else layer(value)
        return value.sum()

    return loss


@pytest.mark.parametrize(("remat", "activations"), [(False, 16), (True, 7)])
def test_live_bytes_show_what_recomputation_saves(remat, activations):
    # Autograd keeps the output of each of the 16 Tanh; a recomputed layer keeps only its input, and the input of the
    # first of the 8 layers was there before.
    loss = deep_loss(remat)
    with LiveBytes() as memory:
        value = loss()
        assert memory.live == activations * MIB // 2 + value.nbytes


@pytest.mark.parametrize("remat", [False, True])
def test_live_bytes_peak_is_the_same_in_every_run(remat):
    peaks = set()
    for _ in range(3):
        loss = deep_loss(remat)
        with LiveBytes() as memory:
            loss().backward()
        peaks.add(memory.peak)
    assert len(peaks) == 1


def allocator_peak(step):
    """Peak bytes above the start according to torch's CPU allocator, from the profiler's allocation events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("remat", [False, True])
def test_live_bytes_peak_is_the_allocators(remat):
    loss, other = deep_loss(remat), deep_loss(remat)
    with LiveBytes() as memory:
        loss().backward()
    assert memory.peak > MIB
    assert memory.peak == pytest.approx(allocator_peak(lambda: other().backward()), rel=0.01)


@pytest.mark.parametrize("round_to", [0, -1, 1.5])
def test_live_bytes_refuse_a_block_size_that_is_no_size(round_to):
    with pytest.raises(SizeError, match="round_to must be"):
        LiveBytes(round_to=round_to)
