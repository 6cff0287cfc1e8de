"""Pipeline, as a user sees it: what a step returns, what stays on the ranks, what evaluation leaves as it was."""

from __future__ import annotations

import copy
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import plain_training
import pytest
import torch
import torch.nn.functional as F
from plain_training import largest_difference, same_to_the_bit
from torch import Tensor, nn

import pipelab as pl
from pipelab.engine.cut import cut
from pipelab.ranks import local_state

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]
RanksOf = Callable[[int], pl.Ranks]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch(size: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=random), torch.randint(0, 4, (size,), generator=random)


def mlp(depth: int = 3) -> nn.Sequential:
    return pl.models.mlp((8, *[16] * (depth - 1), 4), seed=1)


# ---- what a step returns


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
def test_pipeline_step_tells_what_ran_and_when(name: str, ranks_of: RanksOf) -> None:
    schedule = pl.SCHEDULES[name](2, 4)
    with pl.Pipeline(mlp(5), schedule, loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        trace = pipe.step(*batch()).trace
    assert trace.source == "measured"
    assert trace.schedule is schedule
    assert [tuple(span.action for span in row) for row in trace.by_rank] == list(schedule.ranks)
    assert trace.start == 0.0
    for row in trace.by_rank:
        assert all(span.start <= span.end for span in row)
        assert all(before.end <= after.start for before, after in pairwise(row))
    span_of = {span.action: span for span in trace.spans}
    crossing = {(m.action, m.reader, m.sender, m.receiver) for m in pl.simulate(schedule).messages}
    assert {(m.action, m.reader, m.sender, m.receiver) for m in trace.messages} == crossing
    for message in trace.messages:
        assert span_of[message.action].end <= message.sent <= message.arrived <= span_of[message.reader].start


def test_pipeline_step_counts_the_bytes_that_were_sent(ranks_of: RanksOf) -> None:
    """12 samples, 16 numbers of 4 bytes each cross the one boundary in each direction."""
    with pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        result = pipe.step(*batch(12))
    assert result.sent_bytes == (12 * 16 * 4, 12 * 16 * 4)
    assert {message.bytes for message in result.trace.messages} == {3 * 16 * 4}


def test_pipeline_measures_memory_where_asked(ranks_of: RanksOf) -> None:
    """GPipe keeps the activations of all eight micro-batches, 1F1B those of two at most on rank 0."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x, y = torch.randn(512, 64), torch.randn(512, 64)
    peaks = {}
    for schedule in (pl.gpipe(2, 8), pl.one_f_one_b(2, 8)):
        with pl.Pipeline(
            copy.deepcopy(model), schedule, loss_fn=F.mse_loss, ranks=ranks_of(2), measure_memory=True
        ) as pipe:
            pipe.step(x, y)  # in the first step the channels learn how large their messages are
            peaks[schedule.name] = pipe.step(x, y).peak_bytes
    with pl.Pipeline(model, pl.gpipe(2, 8), loss_fn=F.mse_loss, ranks=ranks_of(2)) as pipe:
        assert pipe.step(x, y).peak_bytes is None
    microbatch = 64 * 64 * 4  # the output of one layer
    layers = 2 * 2  # of rank 0
    assert peaks["gpipe"][0] >= 8 * (layers - 1) * microbatch
    assert peaks["one_f_one_b"][0] < 0.5 * peaks["gpipe"][0]


def test_pipeline_keeps_nothing_of_a_micro_batch_but_its_loss(ranks_of: RanksOf) -> None:
    """torch's mse_loss returns a scalar in memory for a number a sample: kept until the end, it grew with every one."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(1024, 64)
    peaks = []
    for count in (4, 8):
        with pl.Pipeline(
            model, pl.one_f_one_b(1, count), loss_fn=F.mse_loss, ranks=ranks_of(1), measure_memory=True
        ) as pipe:
            peaks.append(pipe.step(x[: 128 * count], x[: 128 * count]).peak_bytes)
    assert abs(peaks[1][0] - peaks[0][0]) < 128 * 64 * 4


def test_pipeline_result_shows_itself(ranks_of: RanksOf) -> None:
    with pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        assert repr(pipe) == "<Pipeline of 2 stages on 2 ranks, gpipe: ready>"
        assert repr(pipe.step(*batch())).startswith("<StepResult: loss 1.")
    assert repr(pipe) == "<Pipeline of 2 stages on 2 ranks, gpipe: over, because it was closed>"


# ---- exact numbers


def test_pipeline_adds_up_gradients_until_an_update(ranks_of: RanksOf) -> None:
    """Two steps without an update give the sum of their gradients, no part of it twice."""
    model = mlp()
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, pl.one_f_one_b(2, 4), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2)) as pipe:
        pipe.step(*batch(12, seed=0), update=False)
        pipe.step(*batch(12, seed=0), update=False)
        plain_training.step(reference, *batch(12, seed=0), F.cross_entropy, pipe.schedule)
        once = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert largest_difference(pipe.gradients(), {name: 2 * gradient for name, gradient in once.items()}) < 1e-6
        assert same_to_the_bit(pipe.state_dict(), reference.state_dict())  # nothing updated yet
        pipe.step(*batch(10, seed=1))
        plain_training.step(reference, *batch(12, seed=0), F.cross_entropy, pipe.schedule)
        plain_training.step(reference, *batch(10, seed=1), F.cross_entropy, pipe.schedule)
        sgd(reference.parameters()).step()
        assert largest_difference(pipe.state_dict(), reference.state_dict()) < 1e-6
        pipe.step(*batch(12, seed=2))  # and begins anew
        reference.zero_grad()
        plain_training.step(reference, *batch(12, seed=2), F.cross_entropy, pipe.schedule)
        assert largest_difference(pipe.gradients(), {n: p.grad for n, p in reference.named_parameters()}) < 1e-5


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the targets that count: those that are not 0."""
    return F.cross_entropy(output, target, ignore_index=0, reduction="sum"), (target != 0).sum()


def meant(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1"])
def test_pipeline_weighs_by_what_the_loss_counts(name: str, ranks_of: RanksOf) -> None:
    """Micro-batches in which 3, 0, 1 and 2 targets count: the mean over all that count, not the mean of means."""
    model = mlp()
    reference = copy.deepcopy(model)
    inputs, _ = batch(12)
    targets = torch.tensor([1, 2, 3, 0, 0, 0, 0, 1, 0, 2, 0, 3])
    schedule = pl.SCHEDULES[name](2, 4)
    with pl.Pipeline(model, schedule, loss_fn=summed, optimizer=sgd, ranks=ranks_of(2)) as pipe:
        loss = meant(reference(inputs), targets)
        loss.backward()
        result = pipe.step(inputs, targets, update=False)
        whole = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert largest_difference(pipe.gradients(), whole) < 1e-6
        pipe.step(inputs[:7], targets[:7])  # another count, added to what is there
        meant(reference(inputs[:7]), targets[:7]).backward()
        whole = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert largest_difference(pipe.gradients(), whole) < 1e-6
        assert pipe.evaluate(inputs, targets) == pytest.approx(pipe_loss(pipe, inputs, targets), rel=1e-6)


def pipe_loss(pipe: pl.Pipeline, inputs: Tensor, targets: Tensor) -> float:
    return meant(pipe.predict(inputs), targets).item()


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_pipeline_clips_by_one_norm_of_all_ranks(max_norm: float, ranks_of: RanksOf) -> None:
    model = mlp(5)
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    with pl.Pipeline(
        model, pl.gpipe(3, 4), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(3), max_norm=max_norm
    ) as pipe:
        for seed in range(3):
            result = pipe.step(*batch(12, seed))
            optimizer.zero_grad()
            plain_training.step(reference, *batch(12, seed), F.cross_entropy, pipe.schedule)
            norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            optimizer.step()
            assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-6)
        assert largest_difference(pipe.state_dict(), reference.state_dict()) < 1e-6


class Bag(nn.Module):
    """The mean of the vectors of three words; and a weight of nothing."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words, self.nothing = nn.Embedding(9, 8, sparse=sparse), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).mean(1) + self.nothing.sum()


@pytest.mark.parametrize(("name", "max_norm"), [("one_f_one_b", None), ("one_f_one_b", 0.1), ("pipedream", None)])
def test_pipeline_updates_from_sparse_gradients(name: str, max_norm: float | None, ranks_of: RanksOf) -> None:
    states = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Bag(sparse=sparse), nn.Linear(8, 4))
        plan = pl.SCHEDULES[name](2, 4)
        pipe = pl.Pipeline(model, plan, loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2), max_norm=max_norm)
        for _ in range(2):
            pipe.step(torch.randint(0, 9, (12, 3)), batch()[1])
        states.append(pipe.state_dict())
    torch.testing.assert_close(*states)


def test_pipeline_shows_every_rank_a_gradient_that_is_no_number(ranks_of: RanksOf) -> None:
    """One rank's NaN is in the norm of all, so no rank goes on as if nothing had happened."""
    model = mlp()
    with pl.Pipeline(
        model, pl.gpipe(2, 2), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2), max_norm=1.0, nan="ignore"
    ) as pipe:
        inputs, targets = batch(4)
        inputs[3] = float("nan")
        result = pipe.step(inputs, targets)
        assert result.gradient_norm is not None
        assert torch.tensor(result.gradient_norm).isnan()
        assert all(value.isnan().any() for value in pipe.state_dict().values())


class Skipping(nn.Module):
    """Reads and makes a value of several parts; its own input travels along as a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value: Any) -> Any:
        x = value["x"] if isinstance(value, dict) else value
        skip = value["skip"] if isinstance(value, dict) else x
        return {"x": torch.tanh(self.layer(x)) + skip, "skip": x, "mask": x > 0, "count": len(x), "none": None}


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, value: dict[str, Any]) -> Tensor:
        assert value["none"] is None
        assert value["count"] == len(value["x"])
        return self.layer(torch.where(value["mask"], value["x"], value["skip"]))


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "interleaved"])
def test_pipeline_passes_on_values_of_several_parts(name: str, ranks_of: RanksOf) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Skipping() for _ in range(5)], Joining())
    reference = copy.deepcopy(model)
    schedule = pl.SCHEDULES[name](2, 4)
    with pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2)) as pipe:
        pipe.step(*batch(11))
        plain_training.step(reference, *batch(11), F.cross_entropy, schedule)
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert same_to_the_bit(pipe.gradients(), gradients)


class Attend(nn.Module):
    """Takes tokens and a mask, and a number that every micro-batch gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(10, 8)

    def forward(self, value: dict[str, Any]) -> Tensor:
        return (self.layer(value["tokens"]) * value["mask"].unsqueeze(-1)).sum(1) * value["scale"]


def test_pipeline_takes_inputs_and_targets_of_several_parts(ranks_of: RanksOf) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attend(), nn.Linear(8, 4))
    reference = copy.deepcopy(model)
    inputs = {"tokens": torch.randint(0, 10, (9, 5)), "mask": torch.rand(9, 5) > 0.3, "scale": 0.5}
    targets = (torch.randint(0, 4, (9,)), torch.rand(9))

    def weighted(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return (F.cross_entropy(output, target[0], reduction="none") * target[1]).mean()

    with pl.Pipeline(model, pl.one_f_one_b(2, 4), loss_fn=weighted, ranks=ranks_of(2)) as pipe:
        result = pipe.step(inputs, targets)
        loss = weighted(reference(inputs), targets)
        loss.backward()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert largest_difference(pipe.gradients(), gradients) < 1e-6


def test_pipeline_needs_no_targets_where_the_loss_needs_none(ranks_of: RanksOf) -> None:
    model, (x, _) = mlp(), batch()
    reference = copy.deepcopy(model)

    def energy(output: Tensor, target: None) -> Tensor:
        assert target is None
        return output.square().mean()

    with pl.Pipeline(model, pl.one_f_one_b(2, 4), loss_fn=energy, ranks=ranks_of(2)) as pipe:
        result = pipe.step(x, None)
        assert pipe.evaluate(x, None) == pytest.approx(result.loss)
        loss = energy(reference(x), None)
        loss.backward()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert largest_difference(pipe.gradients(), gradients) < 1e-6


def test_pipeline_runs_a_schedule_made_by_hand(ranks_of: RanksOf) -> None:
    """Two ranks are each other's previous and next; the second rank hands a value to itself."""
    schedule = pl.Schedule.from_text(
        """
        rank 0: 0F0 0F1 3F0 3I0 3F1 3B1 3W0 0B0 0I1 0W1
        rank 1: 1F0 2F0 1F1 2F1 2B0 2I1 1I0 1B1 2W1 1W0
        """
    )
    model = mlp(5)
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        result = pipe.step(*batch(7))
        plain_training.step(reference, *batch(7), F.cross_entropy, schedule)
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert same_to_the_bit(pipe.gradients(), gradients)
        assert len(result.trace.messages) == 8  # of the two forwards and backwards between stages 1 and 2 none


def test_pipeline_shares_a_weight_within_a_rank(ranks_of: RanksOf) -> None:
    """Stages 0 and 2 are both on rank 0, and their layers are one and the same."""
    torch.manual_seed(0)
    tied = nn.Linear(8, 8)
    model = nn.Sequential(tied, nn.Tanh(), tied, nn.Linear(8, 4))
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    with pl.Pipeline(
        model, pl.interleaved(2, 4), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2), partition=[1, 1, 1, 1]
    ) as pipe:
        for seed in range(3):
            pipe.step(*batch(9, seed))
            optimizer.zero_grad()
            F.cross_entropy(reference(batch(9, seed)[0]), batch(9, seed)[1]).backward()
            optimizer.step()
        state = pipe.state_dict()
        assert torch.equal(state["0.weight"], state["2.weight"])
        assert largest_difference(state, reference.state_dict()) < 1e-6


# ---- evaluation


def with_statistics() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("size", [1, 3, 4, 13])
def test_pipeline_predicts_for_any_number_of_samples(size: int, ranks_of: RanksOf) -> None:
    """Also for fewer than there are micro-batches."""
    model = with_statistics()
    with pl.Pipeline(model, pl.one_f_one_b(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        inputs, targets = batch(size)
        outputs, loss = pipe.predict(inputs), pipe.evaluate(inputs, targets)
    model.eval()
    assert torch.allclose(outputs, model(inputs), atol=1e-6)
    assert not outputs.requires_grad
    assert loss == pytest.approx(F.cross_entropy(model(inputs), targets).item(), rel=1e-6)


def test_pipeline_evaluation_leaves_all_as_it_was(ranks_of: RanksOf) -> None:
    """In any order with steps, before the first, between two that accumulate: training goes the same way."""
    states = []
    for evaluates in (False, True):
        model = with_statistics()
        model[1].eval()  # a part that was in eval mode stays so
        with pl.Pipeline(
            model, pl.one_f_one_b(2, 4), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2)
        ) as pipe:
            for seed, update in enumerate([True, False, True]):
                if evaluates:
                    first = pipe.evaluate(*batch(30, seed=9))
                    assert pipe.evaluate(*batch(30, seed=9)) == first  # no dropout
                    pipe.predict(batch(2)[0])
                pipe.step(*batch(12, seed), update=update)
            states.append((pipe.state_dict(), pipe.gradients()))
    for without, between in zip(*states, strict=True):
        assert same_to_the_bit(between, without)


def test_pipeline_predicts_values_of_several_parts(ranks_of: RanksOf) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Skipping(), Skipping())
    with pl.Pipeline(model, pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        found = pipe.predict(batch(6)[0])
    wanted = model(batch(6)[0])
    assert list(found) == list(wanted)
    assert torch.allclose(found["x"], wanted["x"], atol=1e-6)
    assert torch.equal(found["mask"], wanted["mask"])
    assert found["none"] is None


# ---- state


def test_pipeline_state_has_the_names_and_values_of_the_model(ranks_of: RanksOf) -> None:
    model = nn.Sequential(
        OrderedDict(
            first=nn.Linear(8, 6),
            norm=nn.BatchNorm1d(6),
            block=nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
            last=nn.Linear(6, 4),
        )
    )
    with pl.Pipeline(model, pl.gpipe(2, 2), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        assert same_to_the_bit(pipe.state_dict(), model.state_dict())
        assert list(pipe.gradients()) == [name for name, _ in model.named_parameters()]
        assert set(pipe.gradients().values()) == {None}
        other = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
        pipe.load_state_dict(other)
        assert same_to_the_bit(pipe.state_dict(), other)
        model.load_state_dict(pipe.state_dict())


def test_pipeline_trains_a_copy_of_the_model(ranks_of: RanksOf) -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pl.Pipeline(model, pl.gpipe(2, 2), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2)) as pipe:
        pipe.step(*batch())
        assert same_to_the_bit(model.state_dict(), before)
        assert not same_to_the_bit(pipe.state_dict(), before)


def test_pipeline_leaves_the_random_numbers_of_the_ranks_alone(ranks_of: RanksOf) -> None:
    def state() -> Tensor:
        return torch.get_rng_state()

    ranks = ranks_of(2)
    before = ranks.run(state)
    for remat in ("none", "stage"):
        with pl.Pipeline(with_statistics(), pl.gpipe(2, 2), loss_fn=F.cross_entropy, ranks=ranks, remat=remat) as pipe:
            pipe.step(*batch())
            pipe.evaluate(*batch())
    assert all(torch.equal(a, b) for a, b in zip(before, ranks.run(state), strict=True))


# ---- partition


@pytest.mark.parametrize("partition", [[1, 4], [slice(0, 1), slice(1, 5)], (slice(None, 1), slice(1, None))])
def test_pipeline_cuts_where_it_is_told(partition: Any, ranks_of: RanksOf) -> None:
    def layers() -> list[int]:
        (resident,) = [value for key, value in local_state().items() if key[0] == "pipelab.engine"]
        return [len(stage) for stage in resident._modules]

    with pl.Pipeline(mlp(), pl.gpipe(2, 2), loss_fn=F.cross_entropy, ranks=ranks_of(2), partition=partition) as pipe:
        assert pipe.ranks.run(layers) == [[1], [4]]


def test_pipeline_balances_by_parameters_and_spreads_what_has_none(ranks_of: RanksOf) -> None:
    heavy_first = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10), nn.ReLU(), nn.Linear(10, 10))
    assert [len(piece.layers) for piece in cut(heavy_first, 2)] == [1, 4]
    assert [len(piece.layers) for piece in cut(nn.Sequential(*[nn.ReLU() for _ in range(8)]), 4)] == [2, 2, 2, 2]
    assert [piece.first for piece in cut(heavy_first, 2)] == [0, 1]


# ---- life on the ranks


def pipelines_there() -> int:
    return sum(key[0] == "pipelab.engine" for key in local_state() if isinstance(key, tuple))


def test_pipeline_lives_beside_others(ranks_of: RanksOf) -> None:
    ranks = ranks_of(2)
    one = pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks)
    two = pl.Pipeline(mlp(), pl.one_f_one_b(2, 3), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks)
    for seed in range(3):
        one.step(*batch(12, seed))
        two.step(*batch(12, seed))
    assert largest_difference(one.state_dict(), two.state_dict()) < 1e-6
    assert ranks.run(pipelines_there) == [2, 2]
    one.close()
    one.close()
    two.step(*batch())
    two.close()
    assert ranks.run(pipelines_there) == [0, 0]


def test_pipeline_is_forgotten_with_its_last_reference(ranks_of: RanksOf) -> None:
    """Fifty, one after the other, none closed: as a notebook's cell does that is run again and again."""
    ranks = ranks_of(2)

    def open_files() -> tuple[int, int]:
        return pipelines_there(), len(list(Path("/proc/self/fd").iterdir()))

    for number in range(50):
        pipe = pl.Pipeline(mlp(), pl.gpipe(2, 2), loss_fn=F.cross_entropy, ranks=ranks)
        pipe.step(*batch(4))
        if number == 1:
            early = ranks.run(open_files)
            here = len(list(Path("/proc/self/fd").iterdir()))
    late = ranks.run(open_files)
    pipe.close()
    assert all(count <= 2 for count, _ in late)
    assert [files for _, files in late] == [files for _, files in early]
    assert len(list(Path("/proc/self/fd").iterdir())) == here


def test_pipeline_leaves_nothing_of_a_step_alive(ranks_of: RanksOf) -> None:
    """After a step the ranks hold weights, gradients and what the optimizer keeps, and no other tensor."""

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    ranks = ranks_of(2)
    with pl.Pipeline(mlp(), pl.one_f_one_b(2, 4), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks) as pipe:
        pipe.step(*batch(12))
        before = ranks.run(tensors)
        for seed in range(3):
            pipe.step(*batch(12, seed))
        pipe.evaluate(*batch(12))
        assert ranks.run(tensors) == before


def test_pipeline_takes_functions_and_classes_of_a_cell(ranks_of: RanksOf) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    scale = 0.5
    with pl.Pipeline(
        nn.Sequential(Scaled(8, 8), Scaled(8, 4)),
        pl.gpipe(2, 2),
        loss_fn=lambda output, target: F.cross_entropy(output * scale, target),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=scale),
        ranks=ranks_of(2),
    ) as pipe:
        assert pipe.step(*batch()).loss > 0


def test_pipeline_of_one_rank_sends_nothing(ranks_of: RanksOf) -> None:
    with pl.Pipeline(mlp(), pl.gpipe(1, 3), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(1)) as pipe:
        result = pipe.step(*batch())
    assert result.sent_bytes == (0,)
    assert result.trace.messages == ()
