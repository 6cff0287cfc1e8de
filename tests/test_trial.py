"""A trial runs what it is given, lays a prediction beside it, and would see a wrong gradient."""

from __future__ import annotations

from typing import Any

import pytest

from pipelab.costs import Costs
from pipelab.engine.pipeline import Pipeline
from pipelab.engine.trial import trial
from pipelab.errors import EngineError, SizeError
from pipelab.schedules import gpipe, interleaved, pipedream, zb_h1

pytestmark = pytest.mark.timeout(60)


def test_trial_of_a_paced_schedule_is_as_predicted_and_trains_as_plain_training_does() -> None:
    costs = Costs(F=1, I=1, W=0.5, comm=0.2)
    tried = trial(zb_h1(3, 4), costs, remat=True)
    assert tried.gradients_equal
    assert tried.result.trace.source == "paced"
    assert tried.result.trace.schedule == tried.predicted.schedule == zb_h1(3, 4)
    assert sum(span.recompute for span in tried.result.trace.spans) == 12
    assert tried.predicted.makespan == pytest.approx(1.5)
    assert tried.result.trace.makespan == pytest.approx(1.5, rel=0.2)


def test_trial_of_a_schedule_at_full_speed_is_predicted_from_its_own_times() -> None:
    tried = trial(gpipe(2, 3), paced=False)
    assert tried.gradients_equal
    assert tried.result.trace.source == "measured"
    assert 0 < tried.predicted.makespan <= tried.result.trace.makespan


def test_trial_sends_an_activation_and_a_gradient_over_every_boundary() -> None:
    tried = trial(interleaved(2, 2, stages_per_rank=2), layers_per_stage=3, width=32, samples=5)
    # three boundaries of four stages, both ways, two micro-batches, float32
    assert sum(tried.result.sent_bytes) == 3 * 2 * 2 * 5 * 32 * 4


def test_trial_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Pipeline.gradients

    def one_wrong_entry(pipe: Pipeline) -> dict[str, Any]:
        gradients = right(pipe)
        name, gradient = next((name, g) for name, g in gradients.items() if g is not None)
        gradient.view(-1)[0] += 1e-3 * gradient.abs().max()
        return {**gradients, name: gradient}

    monkeypatch.setattr(Pipeline, "gradients", one_wrong_entry)
    tried = trial(gpipe(2, 2), paced=False)
    assert not tried.gradients_equal
    assert tried.largest_difference == pytest.approx(1e-3, rel=0.1)


def test_trial_refuses_what_would_not_run_or_take_too_long() -> None:
    with pytest.raises(SizeError, match="16 at most; this schedule has 17 ranks"):
        trial(gpipe(17, 1))
    with pytest.raises(SizeError, match="F, I and W are all 0"):
        trial(gpipe(2, 1), Costs(F=0, I=0, W=0, comm=1))
    with pytest.raises(SizeError, match="take fewer micro-batches"):
        trial(gpipe(2, 3000))
    with pytest.raises(EngineError, match="has weight updates among its actions"):
        trial(pipedream(2, 2))
