"""Torch's operations lie inside the actions that called them, on one clock and in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from pipelab.action import Kind
from pipelab.engine import Pipeline
from pipelab.models import mlp
from pipelab.operations import operations, to_chrome
from pipelab.schedules import one_f_one_b

pytestmark = pytest.mark.timeout(120)

TOLERANCE_S = 1e-3


@pytest.fixture
def profiled(ranks_of: Callable[[int], Any]) -> Any:
    ranks = ranks_of(2)
    inputs, targets = torch.rand(512, 64), torch.arange(512) % 10
    with Pipeline(mlp((64, 512, 512, 512, 10)), one_f_one_b(2, 4), loss_fn=cross_entropy, ranks=ranks) as pipe:
        pipe.step(inputs, targets)
        with operations(ranks) as found:
            result = pipe.step(inputs, targets)
    return result, found


def test_operations_lie_inside_their_actions(profiled: Any) -> None:
    result, found = profiled
    assert len(found) == 2
    for spans, row in zip(result.trace.by_rank, found, strict=True):
        forwards = [span for span in spans if span.action.kind is Kind.F]
        products = [one for one in row if one.name == "aten::addmm"]
        assert len(products) == 2 * len(forwards)  # two Linear layers on each rank, four micro-batches
        for number, product in enumerate(products):
            span = forwards[number // 2]
            assert span.start - TOLERANCE_S < product.start - result.began_s
            assert product.end - result.began_s < span.end + TOLERANCE_S


def test_operations_and_actions_are_in_one_file(profiled: Any, tmp_path: Path) -> None:
    result, found = profiled
    to_chrome(tmp_path / "both.json", result, found)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    at = {(event["name"], event["pid"]): event["ts"] for event in reversed(events) if event["ph"] == "X"}
    assert at["1F0", 1] - 1e6 * TOLERANCE_S < at["aten::addmm", 3] < at["1F1", 1]


def test_operations_end_with_their_block(ranks_of: Callable[[int], Any]) -> None:
    ranks = ranks_of(2)
    with pytest.raises(RuntimeError, match="planted"), operations(ranks) as found:
        raise RuntimeError("planted")
    assert [row for row in found if row] == []  # nothing ran, and the profilers have stopped
    with operations(ranks) as found:
        ranks.run(torch.ones, 3)
    assert all("aten::ones" in {one.name for one in row} for row in found)
