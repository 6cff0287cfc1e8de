"""An independent witness: torch runs our plans with an engine of its own, and its gradients are ours.

Each plan goes over as the CSV file that `to_csv` writes. torch's runtime lowers it to sends and receives, cuts the
batch and adds up by itself, on the same ranks. It sums each weight's gradients in the plan's order and divides by the
number of micro-batches at the end, where ours weights each micro-batch as it comes. To divide by a power of two loses
nothing, so with 4 or 8 micro-batches all gradients are equal to the bit; with 6 they are up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from plain_training import largest_difference, same_to_the_bit
from schedule_sizes import FLUSHED
from torch import Tensor, nn

import pipelab as pl
from pipelab.engine.cut import cut

try:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # noqa: F401, private
except ImportError:
    pytest.skip(f"torch {torch.__version__} has no _PipelineScheduleRuntime to ask", allow_module_level=True)

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
RanksOf = Callable[[int], pl.Ranks]
WIDTH = 12


def by_torch(
    stages: dict[int, nn.Sequential], plan: str, sizes: tuple[int, int], batch: tuple[Tensor, Tensor], loss_fn: Any
) -> tuple[list[float], dict[str, Any]]:
    """On a rank: one step of torch's runtime; the losses where the last stage is, and the gradients."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    num_stages, num_microbatches = sizes
    theirs = [PipelineStage(layers, stage, num_stages, torch.device("cpu")) for stage, layers in stages.items()]
    runtime = _PipelineScheduleRuntime(theirs, num_microbatches, loss_fn=loss_fn)
    runtime._load_csv(plan)
    losses: list[Tensor] = []
    last = {"target": batch[1], "losses": losses} if num_stages - 1 in stages else {}
    runtime.step(*batch[:1] if 0 in stages else (), **last)
    gradients = {name: p.grad for layers in stages.values() for name, p in layers.named_parameters()}
    return [loss.item() for loss in losses], gradients


class Case(NamedTuple):
    """What both engines are given."""

    model: nn.Sequential
    schedule: pl.Schedule
    batch: tuple[Tensor, Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy


def ours(case: Case, ranks: pl.Ranks) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a step with our engine."""
    with pl.Pipeline(case.model, case.schedule, loss_fn=case.loss_fn, ranks=ranks) as pipe:
        return pipe.step(*case.batch).loss, pipe.gradients()


def theirs(case: Case, ranks: pl.Ranks, path: Path) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a step that torch has run from the schedule's file."""
    model, schedule = case.model, case.schedule
    schedule.to_csv(path)
    pieces = cut(model, schedule.num_stages)
    on_rank = [{stage: pieces[stage].layers for stage in schedule.stages_on(r)} for r in range(schedule.num_ranks)]
    rest = str(path), (schedule.num_stages, schedule.num_microbatches), case.batch, case.loss_fn
    found = ranks.run_each(by_torch, [(stages, *rest) for stages in on_rank])
    losses, _ = found[schedule.placement[-1]]
    gradients = {name: gradient for _, part in found for name, gradient in part.items()}
    return sum(losses) / len(losses), {name: gradients[name] for name, _ in model.named_parameters()}


def network(num_layers: int) -> nn.Sequential:
    """Layers of several kinds, with weights and without."""
    torch.manual_seed(7)
    kinds: Sequence[Callable[[], nn.Module]] = (
        *(lambda: nn.Linear(WIDTH, WIDTH), nn.GELU, lambda: nn.LayerNorm(WIDTH)),
        *(lambda: nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh, lambda: nn.Linear(WIDTH, WIDTH)),
    )
    return nn.Sequential(*[kinds[number % len(kinds)]() for number in range(num_layers)], nn.Linear(WIDTH, 5))


def batch(size: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(size, WIDTH, generator=random), torch.randint(0, 5, (size,), generator=random)


PLANS: dict[str, Callable[[int, int], pl.Schedule]] = {
    **{name: pl.SCHEDULES[name] for name in FLUSHED},  # torch does not know updates
    "search": lambda p, m: pl.search(p, m, memory_limit=p),
    "search, in a V": lambda p, m: pl.search(p, m, memory_limit=p, placement="v"),
    "by hand": lambda p, m: by_hand(p, m),
}


def by_hand(p: int, m: int) -> pl.Schedule:
    """No builder's: stages in a zigzag, the weights' gradients last and backwards, but for a full B here and there."""
    placement = tuple(stage % p if stage < p else p - 1 - (stage - p) % p for stage in range(3 * p))
    rows: list[list[str]] = [[] for _ in range(p)]
    for stage, rank in enumerate(placement):
        rows[rank] += [f"{stage}F{k}" for k in range(m)]
    for stage, rank in reversed(list(enumerate(placement))):
        rows[rank] += [f"{stage}{'B' if k % 3 == 1 else 'I'}{k}" for k in range(m)]
    for stage, rank in enumerate(placement):
        rows[rank] += [f"{stage}W{k}" for k in reversed(range(m)) if k % 3 != 1]
    return pl.Schedule.from_text("\n".join(" ".join(row) for row in rows))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", PLANS)
def test_torch_finds_our_gradients_to_the_bit(name: str, p: int, m: int, tmp_path: Path, ranks_of: RanksOf) -> None:
    schedule = PLANS[name](p, m)
    case = Case(network(schedule.num_stages + 2), schedule, batch(4 * m))
    loss, gradients = ours(case, ranks_of(p))
    their_loss, wanted = theirs(case, ranks_of(p), tmp_path / "plan.csv")
    assert loss == pytest.approx(their_loss, rel=1e-15)
    assert all(gradient.abs().max() > 1e-6 for gradient in wanted.values())
    assert same_to_the_bit(gradients, wanted)


@pytest.mark.parametrize("name", PLANS)
def test_torch_finds_our_gradients_with_six_micro_batches(name: str, tmp_path: Path, ranks_of: RanksOf) -> None:
    """Up to rounding, for a sixth is no number of float32."""
    schedule = PLANS[name](2, 6)
    case = Case(network(schedule.num_stages + 2), schedule, batch(18))
    _, gradients = ours(case, ranks_of(2))
    _, wanted = theirs(case, ranks_of(2), tmp_path / "plan.csv")
    assert largest_difference(gradients, wanted) < 1e-6


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_v"])
def test_torch_finds_our_gradients_of_a_transformer(name: str, tmp_path: Path, ranks_of: RanksOf) -> None:
    """Embedding, attention, residual streams and the head: to the bit."""
    tokens = torch.randint(20, (8, 7), generator=torch.Generator().manual_seed(0))
    case = Case(
        pl.models.gpt(20, width=16, depth=2, heads=2, context=6),
        pl.SCHEDULES[name](2, 4),
        (tokens[:, :-1], tokens[:, 1:]),
        pl.models.next_token_loss,
    )
    loss, gradients = ours(case, ranks_of(2))
    their_loss, wanted = theirs(case, ranks_of(2), tmp_path / "plan.csv")
    assert loss == pytest.approx(their_loss, rel=1e-15)
    assert same_to_the_bit(gradients, wanted)
