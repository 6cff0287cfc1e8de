"""Tuning the number of micro-batches: the right choice under a pace whose law is known, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pipelab import models
from pipelab.costs import Costs
from pipelab.engine import Pipeline
from pipelab.engine.tuning import Tried, Tuning, tune_microbatches
from pipelab.errors import EngineError, SizeError
from pipelab.schedules import gpipe, one_f_one_b

pytestmark = pytest.mark.timeout(120)

# (M + p - 1)(T / M + o) at p = 2, T = 80 ms, o = 5 ms: 170, 125, 170, 406 ms for M = 1, 4, 16, 64; the optimum is
# sqrt((p - 1) T / o) = 4
WORK_S, OVERHEAD_S = 0.080, 0.005


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch_of(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 8, generator=generator), torch.randint(3, (samples,), generator=generator)


def builder(ranks: Any, **options: Any) -> Callable[[int], Pipeline]:
    model = models.mlp((8, 16, 16, 3))
    return lambda m: Pipeline(model, one_f_one_b(2, m), loss_fn=F.cross_entropy, optimizer=_sgd, ranks=ranks, **options)


def test_tuning_finds_the_optimum_of_the_law_and_stops_behind_it(ranks_of: Callable[[int], Any]) -> None:
    model, ranks = models.mlp((8, 16, 16, 3)), ranks_of(2)

    def build(m: int) -> Pipeline:
        each = WORK_S / m + OVERHEAD_S
        pace = Costs(F=each / 3, B=2 * each / 3)
        return Pipeline(model, gpipe(2, m), loss_fn=F.cross_entropy, ranks=ranks, pace=pace)

    found = tune_microbatches(build, *batch_of(64), candidates=(64, 1, 4, 16), repeat=2)
    assert found.best == 4
    assert [trial.num_microbatches for trial in found.trials] == [1, 4, 16]
    assert found.untried == (64,)
    assert found.sentence.startswith("4 micro-batches are best: ")
    assert "it got worse, so 64 were not tried" in found.sentence


def test_tuning_trains_nothing(ranks_of: Callable[[int], Any]) -> None:
    ranks = ranks_of(2)
    build = builder(ranks)
    inputs, targets = batch_of(8)

    def losses(tune: bool) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(3)
        with build(2) as pipe:
            got = [pipe.step(inputs, targets).loss]
            if tune:
                tune_microbatches(build, inputs, targets, candidates=(1, 2), repeat=1)
            got += [pipe.step(inputs, targets).loss for _ in range(2)]
            return got, {**pipe.state_dict(), "random": torch.rand(3)}

    (plain, state), (tuned, after) = losses(False), losses(True)
    assert plain == tuned
    assert all(torch.equal(value, after[name]) for name, value in state.items())


def test_tuning_keeps_to_the_memory_limit(ranks_of: Callable[[int], Any]) -> None:
    build = builder(ranks_of(2), measure_memory=True)
    free = tune_microbatches(build, *batch_of(64), candidates=(1, 16), repeat=1, tolerance=1e9)
    whole, small = (trial.peak_bytes for trial in free.trials)
    assert small < whole
    tight = tune_microbatches(
        build, *batch_of(64), candidates=(1, 16), repeat=1, memory_limit=(small + whole) // 2, tolerance=1e9
    )
    assert tight.best == 16
    assert "needs more than" in tight.trials[0].note
    none = tune_microbatches(build, *batch_of(64), candidates=(1, 16), repeat=1, memory_limit=1, tolerance=1e9)
    with pytest.raises(SizeError, match="none of 1, 16 micro-batches fits into memory_limit"):
        _ = none.best


def test_tuning_tries_powers_of_two_up_to_the_samples(ranks_of: Callable[[int], Any]) -> None:
    found = tune_microbatches(builder(ranks_of(2)), *batch_of(5), repeat=1, tolerance=1e9)
    assert [trial.num_microbatches for trial in found.trials] == [1, 2, 4]


def test_tuning_prints_a_table() -> None:
    found = Tuning((Tried(1, 0.2), Tried(2, 0.1), Tried(4, 0.15)), (8,))
    assert repr(found).splitlines() == [
        "micro-batches  ms a step  peak bytes",
        "            1      200.0",
        "            2      100.0              best",
        "            4      150.0",
        "2 micro-batches are best: 100.0 ms a step, next 4 with 150.0 ms; it got worse, so 8 were not tried",
    ]
    assert found._repr_html_().count("<tr>") == 4


def test_tuning_says_what_does_not_fit(ranks_of: Callable[[int], Any]) -> None:
    build = builder(ranks_of(2))
    with pytest.raises(SizeError, match=r"numbers from 1 to the 4 samples of the batch, got \[2, 8\]"):
        tune_microbatches(build, *batch_of(4), candidates=(2, 8))
    with pytest.raises(EngineError, match=r"build\(1\) must make a Pipeline, got 3"):
        tune_microbatches(lambda m: 3, *batch_of(4))
    with pytest.raises(SizeError, match=r"build\(1\) made a pipeline with 2 micro-batches"):
        tune_microbatches(lambda m: build(2), *batch_of(4))
    with build(2) as pipe, pytest.raises(EngineError, match="a Pipeline has one schedule, so it cannot try others"):
        tune_microbatches(pipe, *batch_of(4))
    with pytest.raises(EngineError, match="measure_memory=True"):
        tune_microbatches(build, *batch_of(4), candidates=(2,), memory_limit=10)
