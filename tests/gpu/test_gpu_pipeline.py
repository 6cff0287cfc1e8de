"""Pipelines on GPUs train as one process on one GPU does: over gloo with a shared GPU, and over NCCL with one each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import pipelab as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(120)

SCHEDULES = [
    pl.gpipe(2, 4),
    pl.one_f_one_b(2, 4),
    pl.interleaved(2, 4, stages_per_rank=2),
    pl.zb_h1(2, 4),
    pl.zb_v(2, 4),
]


@pytest.fixture(scope="module")
def sharing() -> Iterator[pl.Ranks]:
    with pl.Ranks(2, backend="gloo", timeout=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def own() -> Iterator[pl.Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of two ranks, and there is one")
    with pl.Ranks(2, backend="nccl", timeout=60) as ranks:
        yield ranks


@pytest.fixture(params=["gloo", "nccl"])
def ranks(request: pytest.FixtureRequest) -> pl.Ranks:
    found: pl.Ranks = request.getfixturevalue("sharing" if request.param == "gloo" else "own")
    return found


def model() -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(18, 64, generator=generator), torch.randn(18, 64, generator=generator)


def pipeline(ranks: pl.Ranks, schedule: pl.Schedule, **options: Any) -> pl.Pipeline:
    return pl.Pipeline(
        options.pop("model", None) or model(),
        schedule,
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        ranks=ranks,
        device="cuda",
        **options,
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_gpu_training_equals_that_of_one_process(ranks: pl.Ranks, schedule: pl.Schedule, remat: str) -> None:
    inputs, targets = batch()
    alone = model().cuda()
    update = optimizer(alone.parameters())
    pipe = pipeline(ranks, schedule, remat=remat)
    for _ in range(3):
        loss = nn.functional.mse_loss(alone(inputs.cuda()), targets.cuda())
        update.zero_grad()
        loss.backward()
        update.step()
        result = pipe.step(inputs, targets)
        assert result.loss == pytest.approx(loss.item(), rel=1e-4)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name].cpu(), rtol=1e-3, atol=1e-5)
    pipe.close()


def test_gpu_trace_has_times_in_order(ranks: pl.Ranks) -> None:
    pipe = pipeline(ranks, pl.one_f_one_b(2, 4))
    for _ in range(2):
        trace = pipe.step(*batch()).trace
    for row in trace.by_rank:
        assert all(span.start <= span.end for span in row)
        assert all(before.end <= after.start + 1e-5 for before, after in pairwise(row))
    assert all(message.sent <= message.arrived + 1e-3 for message in trace.messages)  # two clocks, to a millisecond
    assert ("hosts' memory" in trace.note) == (ranks.backend == "gloo")
    pipe.close()


def test_gpu_paced_step_takes_its_time(ranks: pl.Ranks) -> None:
    costs = pl.Costs(F=0.02, B=0.04)
    pipe = pipeline(ranks, pl.one_f_one_b(2, 4), pace=costs)
    for _ in range(2):
        trace = pipe.step(*batch()).trace
        assert trace.makespan > 0.99 * pl.simulate(pipe.schedule, costs).makespan
    pipe.close()


def test_gpu_dropout_is_the_same_with_remat(ranks: pl.Ranks) -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Dropout(0.5))]

    def losses(remat: str) -> list[float]:
        torch.manual_seed(7)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        pipe = pipeline(ranks, pl.one_f_one_b(2, 4), model=nn.Sequential(*layers), remat=remat)
        found = [pipe.step(*batch()).loss for _ in range(3)]
        pipe.close()
        return found

    assert losses("none") == pytest.approx(losses("layer"), rel=1e-5)


def test_gpu_ranks_leave_results_on_the_cpu(ranks: pl.Ranks, tmp_path: Any) -> None:
    pipe = pipeline(ranks, pl.gpipe(2, 4))
    inputs, targets = batch()
    pipe.step(inputs, targets)
    found = [pipe.predict(inputs), *pipe.state_dict().values(), *pipe.gradients().values()]
    assert all(tensor is None or tensor.device.type == "cpu" for tensor in found)
    pipe.save(tmp_path / "checkpoint.pt")
    expected = pipe.step(inputs, targets).loss
    pipe.close()
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": optimizer, "device": "cuda"}
    again = pl.Pipeline.load(tmp_path / "checkpoint.pt", model(), pl.one_f_one_b(2, 4), ranks=ranks, **options)
    assert again.step(inputs, targets).loss == pytest.approx(expected, rel=1e-5)
    again.close()


def test_gpu_bf16_is_near_to_fp32(ranks: pl.Ranks) -> None:
    inputs, targets = batch()

    def loss(precision: str) -> float:
        pipe = pipeline(ranks, pl.one_f_one_b(2, 4), precision=precision)
        found = [pipe.step(inputs, targets).loss for _ in range(3)][-1]
        pipe.close()
        return found

    assert loss("bf16") == pytest.approx(loss("fp32"), rel=0.02)


def peak(measure: Callable[[], Any]) -> int:
    """Bytes that `measure` needed at most above what was there, by torch's own allocator."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    measure()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_gpu_live_bytes_equal_those_of_the_allocator() -> None:
    from pipelab.engine.live_bytes import LiveBytes

    layers = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)]).cuda()
    inputs = torch.randn(512, 1024, device="cuda")
    layers(inputs).sum().backward()  # cuBLAS takes its workspace once
    layers.zero_grad()
    with LiveBytes(device="cuda", round_to=512) as memory:
        found = peak(lambda: layers(inputs).sum().backward())
    assert memory.peak == pytest.approx(found, rel=0.02)
