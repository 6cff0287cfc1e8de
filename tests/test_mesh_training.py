"""Training on a mesh is training: data, pipeline and tensor parallelism together, against one process."""

from __future__ import annotations

import copy
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import plain_training
import pytest
import torch
import torch.nn.functional as F
from plain_training import largest_difference
from torch import Tensor, nn

import pipelab as pl
from pipelab import two_hosts
from pipelab.engine.deal import deal
from pipelab.errors import EngineError, SizeError
from pipelab.models import gpt, next_token_loss
from pipelab.ranks import local_state

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
RanksOf = Callable[[int], pl.Ranks]
VOCAB, CONTEXT = 23, 6
EQUAL = 1e-9  # in float64: the same numbers, added up in another order


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def model(**options: Any) -> nn.Sequential:
    """A GPT of six layers in float64, with biases and norms that are not at their first values."""
    small = gpt(VOCAB, width=8, heads=2, context=CONTEXT, **{"depth": 4, **options}).double()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    return small


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(VOCAB, (2, n, CONTEXT), generator=random)) for n in sizes]  # type: ignore[misc]


def gradients(plain: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


def check_training(
    schedule: pl.Schedule, shape: tuple[int, int, int], ranks_of: RanksOf, *, sizes: Any = (17, 20, 16), **options: Any
) -> None:
    """A step with Adam for each of `sizes`: loss, gradient norm, all gradients, and at last all parameters."""
    mesh, max_norm = pl.Mesh(*shape), options.get("max_norm")
    plain = model()
    optimizer = adam(plain.parameters())
    ranks = ranks_of(mesh.num_ranks)
    with pl.Pipeline(
        copy.deepcopy(plain), schedule, mesh=mesh, loss_fn=next_token_loss, optimizer=adam, ranks=ranks, **options
    ) as pipe:
        for inputs, targets in batches(*sizes):
            result = pipe.step(inputs, targets)
            optimizer.zero_grad()
            loss = next_token_loss(plain(inputs), targets)
            loss.backward()
            if max_norm is not None:
                norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
                assert norm > max_norm
                assert result.gradient_norm == pytest.approx(norm.item(), rel=EQUAL)
            optimizer.step()
            assert result.loss == pytest.approx(loss.item(), rel=EQUAL)
            assert largest_difference(pipe.gradients(), gradients(plain)) < EQUAL
        assert largest_difference(pipe.state_dict(), plain.state_dict()) < 1e-7  # Adam divides by small numbers


SHAPES = [(2, 2, 1), (1, 2, 2), (2, 2, 2)]
BUILDERS = {"gpipe": pl.gpipe, "1f1b": pl.one_f_one_b, "zb_h1": pl.zb_h1}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BUILDERS)
def test_mesh_trains_as_one_process_does(name: str, shape: tuple[int, int, int], ranks_of: RanksOf) -> None:
    """Batches that no replica and no micro-batch divides, and one norm of all gradients."""
    check_training(BUILDERS[name](2, 4), shape, ranks_of, max_norm=0.3)


SCRIPT = """
import sys
import torch
import pipelab as pl
from pipelab.models import gpt, next_token_loss

with pl.Ranks() as ranks:
    model, options, batches = torch.load(sys.argv[1])
    whole = gpt(**options).double()
    whole.load_state_dict(model)
    pipe = pl.Pipeline(
        whole,
        pl.zb_h1(2, 4),
        mesh=pl.Mesh(dp=2, pp=2, tp=2),
        loss_fn=next_token_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        ranks=ranks,
    )
    found = [(pipe.step(*batch).loss, pipe.gradients()) for batch in batches]
    torch.save((found, pipe.state_dict()), sys.argv[2])
"""


def test_mesh_under_torchrun_trains_as_one_process_does(tmp_path: Path) -> None:
    """Two launchers with four ranks each, as on two hosts, each of which has one stage with its replicas and slices.

    Nearly all of its time is the import of torch, eight times on a few cores.
    """
    script, given, made = (tmp_path / name for name in ("script.py", "given.pt", "made.pt"))
    script.write_text(SCRIPT)
    plain = model()
    optimizer = adam(plain.parameters())
    options = {"vocab": VOCAB, "width": 8, "heads": 2, "depth": 4, "context": CONTEXT}
    torch.save((plain.state_dict(), options, batches(17, 20)), given)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with two_hosts.OneHost() as hosts:
        commands = [
            two_hosts.launcher(hosts.address, port, host, 4, str(script), str(given), str(made)) for host in (0, 1)
        ]
        started = [hosts.start(host, command, two_hosts.environment()) for host, command in enumerate(commands)]
        for process in started:
            assert process.wait(90) == 0, hosts.stderr(process)
    steps, state = torch.load(made)
    for (inputs, targets), (its_loss, its_gradients) in zip(batches(17, 20), steps, strict=True):
        optimizer.zero_grad()
        loss = next_token_loss(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        assert its_loss == pytest.approx(loss.item(), rel=EQUAL)
        assert largest_difference(its_gradients, gradients(plain)) < EQUAL
    assert largest_difference(state, plain.state_dict()) < 1e-7  # Adam divides by small numbers


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
@pytest.mark.parametrize("remat", ["none", "layer", "stage"])
@pytest.mark.parametrize("name", ["interleaved", "breadth_first", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_mesh_trains_with_every_schedule(
    name: str, shape: tuple[int, int, int], data_parallel: str, remat: str, ranks_of: RanksOf
) -> None:
    schedule = pl.SCHEDULES[name](2, 4)
    check_training(schedule, shape, ranks_of, data_parallel=data_parallel, remat=remat, sizes=(17, 20), max_norm=0.3)


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 2)])
def test_mesh_shards_the_optimizer_without_changing_the_training(
    shape: tuple[int, int, int], ranks_of: RanksOf
) -> None:
    """As with replicated optimizers, but of every parameter one replica alone has the state, half of all each."""
    check_training(pl.zb_h1(2, 4), shape, ranks_of, data_parallel="shard", max_norm=0.3)


def optimizer_numbers() -> int:
    """How many numbers of Adam's averages this rank keeps for its pipeline."""
    (resident,) = [value for key, value in local_state().items() if key[0] == "pipelab.engine"]
    optimizer = resident._update.optimizer
    return sum(state["exp_avg"].numel() for state in optimizer.state.values())


def test_mesh_shard_halves_what_optimizers_keep(ranks_of: RanksOf) -> None:
    kept, sent = {}, {}
    for data_parallel in ("replicate", "shard"):
        with pl.Pipeline(
            model(),
            pl.gpipe(2, 4),
            mesh=pl.Mesh(dp=2, pp=2),
            data_parallel=data_parallel,
            loss_fn=next_token_loss,
            optimizer=adam,
            ranks=ranks_of(4),
        ) as pipe:
            sent[data_parallel] = pipe.step(*batches(16)[0]).axis_bytes["dp"]
            kept[data_parallel] = pipe.ranks.run(optimizer_numbers)
    whole = sum(parameter.numel() for parameter in model().parameters())
    assert sum(kept["replicate"]) == 2 * whole
    assert sum(kept["shard"]) == whole
    assert max(kept["shard"]) < 0.6 * max(kept["replicate"])
    assert sent["shard"] == sent["replicate"]


def test_mesh_counts_what_every_axis_sends(ranks_of: RanksOf) -> None:
    """By formula: 17 sequences of float64 tokens; a ring sends (n - 1)/n of a tensor twice for an all-reduce.

    A block has two all-reduces of its stream in the forward and two in the backward (Shoeybi et al. 2019, section 3).
    """
    schedule, ranks = pl.one_f_one_b(2, 4), ranks_of(8)
    plain = model()
    stream = 16 * CONTEXT * 8 * 8  # bytes of a replica's activations between two blocks, twice a replica's 8 sequences
    with pl.Pipeline(
        model(), schedule, mesh=pl.Mesh(2, 2, 2), loss_fn=next_token_loss, ranks=ranks, partition=[3, 3]
    ) as pipe:
        sent = pipe.step(*batches(16)[0]).axis_bytes
    of_block = [p.numel() for name, p in plain[1].named_parameters() if "norm" in name or name.endswith("output.bias")]
    of_block += [plain[1].contract.bias.numel()]
    split = sum(p.numel() for p in plain[1].parameters()) - sum(of_block)
    first = sum(p.numel() for p in plain[0].parameters()) + 2 * (sum(of_block) + split // 2)
    assert sent["pp"] == (stream // 2,) * 8  # every rank sends its replica's stream once, forward or backward
    assert sent["tp"] == (2 * 4 * stream // 2,) * 8  # two blocks, 2 · (1/2) · 4 streams each
    assert sent["dp"][:4] == (first * 8,) * 4  # 2 · (1/2) of the gradients that the first stage's ranks have


def test_mesh_sums_and_counts_make_the_mean_over_all_that_counts(ranks_of: RanksOf) -> None:
    """The replicas have 3 and 60 tokens that count, so a mean of their means would be far off; and gradients add up."""

    def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        flat = targets.flatten()
        loss = F.cross_entropy(logits.flatten(0, -2), flat, ignore_index=0, reduction="sum")
        return loss, int((flat != 0).sum())

    inputs, targets = batches(17)[0]
    targets = targets.clamp(min=1)
    targets[:9] = 0
    targets[0, :3] = 5
    plain = model()
    loss = F.cross_entropy(plain(inputs).flatten(0, -2), targets.flatten(), ignore_index=0)
    loss.backward()
    once = gradients(plain)
    with pl.Pipeline(model(), pl.zb_h1(2, 4), mesh=pl.Mesh(dp=2, pp=2), loss_fn=counted, ranks=ranks_of(4)) as pipe:
        assert pipe.step(inputs, targets, update=False).loss == pytest.approx(loss.item(), rel=EQUAL)
        assert largest_difference(pipe.gradients(), once) < EQUAL
        assert pipe.evaluate(inputs, targets) == pytest.approx(loss.item(), rel=EQUAL)
        pipe.step(inputs, targets)
        assert largest_difference(pipe.gradients(), {name: 2 * grad for name, grad in once.items()}) < EQUAL


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_mesh_adds_to_gradients_that_wait(data_parallel: str, ranks_of: RanksOf) -> None:
    """Three batches, one update: what the replicas have added up already is not added up again."""
    plain = model()
    with pl.Pipeline(
        model(),
        pl.zb_h1(2, 4),
        mesh=pl.Mesh(dp=2, pp=2),
        data_parallel=data_parallel,
        loss_fn=next_token_loss,
        ranks=ranks_of(4),
    ) as pipe:
        for inputs, targets in batches(16, 17, 19):
            next_token_loss(plain(inputs), targets).backward()
            pipe.step(inputs, targets, update=False)
            assert largest_difference(pipe.gradients(), gradients(plain)) < EQUAL


@pytest.mark.parametrize("samples", [1, 3, 17])
def test_mesh_predicts_and_evaluates_any_number_of_samples(samples: int, ranks_of: RanksOf) -> None:
    plain = model()
    inputs, targets = batches(samples)[0]
    with pl.Pipeline(
        model(), pl.one_f_one_b(2, 4), mesh=pl.Mesh(2, 2, 2), loss_fn=next_token_loss, ranks=ranks_of(8)
    ) as pipe:
        wanted = plain(inputs)
        assert torch.allclose(pipe.predict(inputs), wanted, rtol=EQUAL)
        loss = next_token_loss(wanted, targets).item()
        assert pipe.evaluate(inputs, targets) == pytest.approx(loss, rel=EQUAL)


def test_mesh_checkpoint_goes_on_in_another_mesh(tmp_path: Path, ranks_of: RanksOf) -> None:
    """Saved from 2 x 2 x 2 with a sharded optimizer, read by the unsplit model, gone on with in 1 x 2 x 2 and 2 x 2."""
    first, *later = batches(16, 17, 19)
    plain, path = model(), tmp_path / "run.ckpt"
    optimizer = adam(plain.parameters())

    def plain_step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        next_token_loss(plain(inputs), targets).backward()
        optimizer.step()

    def options(dp: int, tp: int) -> dict[str, Any]:
        mesh = pl.Mesh(dp=dp, pp=2, tp=tp)
        return {"mesh": mesh, "ranks": ranks_of(mesh.num_ranks), "loss_fn": next_token_loss, "optimizer": adam}

    with pl.Pipeline(model(), pl.gpipe(2, 4), data_parallel="shard", **options(2, 2)) as pipe:
        pipe.step(*first)
        pipe.save(path)
    plain_step(*first)
    unsplit = model()
    unsplit.load_state_dict(torch.load(path, weights_only=True)["model"])
    assert largest_difference(unsplit.state_dict(), plain.state_dict()) < 1e-7
    for inputs, targets in later:
        plain_step(inputs, targets)
    for dp, tp in ((1, 2), (2, 1)):
        with pl.Pipeline.load(path, model(), pl.zb_h1(2, 4), **options(dp, tp)) as pipe:
            for inputs, targets in later:
                pipe.step(inputs, targets)
            assert largest_difference(pipe.state_dict(), plain.state_dict()) < 1e-7


def test_mesh_dropout_is_that_of_all_micro_batches_in_a_row(ranks_of: RanksOf) -> None:
    """Two replicas of four micro-batches drop what one process drops in eight, and so not the same as each other."""
    torch.manual_seed(11)
    plain = model(dropout=0.3)
    inputs, targets = batches(16)[0]
    plain_training.step(plain, inputs, targets, next_token_loss, pl.naive(1, 8), dropout=(torch.initial_seed(), 0))
    with pl.Pipeline(
        model(dropout=0.3), pl.zb_h1(2, 4), mesh=pl.Mesh(dp=2, pp=2), loss_fn=next_token_loss, ranks=ranks_of(4)
    ) as pipe:
        pipe.step(inputs, targets)
        assert largest_difference(pipe.gradients(), gradients(plain)) < EQUAL


class Wide(nn.Module):
    """Adds a hidden layer whose features are dropped: between the two matrices, and behind them."""

    def __init__(self, inside: float, behind: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.inside, self.behind = nn.Dropout(inside), nn.Dropout(behind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.behind(self.down(self.inside(self.up(x).relu())))


WIDE = {"*.up": "colwise", "*.down": "rowwise"}


def wide(inside: float = 0.0, behind: float = 0.0) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Wide(inside, behind), Wide(inside, behind)).double()


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_mesh_takes_a_plan_for_any_model_and_drops_the_same_behind_it(remat: str, ranks_of: RanksOf) -> None:
    """Where all ranks of a tp group have the same values, they drop the same ones: those of the unsplit model."""
    plain, split = wide(behind=0.4), wide(behind=0.4)
    torch.manual_seed(12)
    inputs, targets = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    plain_training.step(plain, inputs, targets, F.mse_loss, pl.naive(1, 4), dropout=(torch.initial_seed(), 0))
    with pl.Pipeline(
        split,
        pl.zb_h1(2, 4),
        mesh=pl.Mesh(pp=2, tp=2),
        tensor_parallel=WIDE,
        remat=remat,
        loss_fn=F.mse_loss,
        ranks=ranks_of(4),
    ) as pipe:
        pipe.step(inputs, targets)
        assert largest_difference(pipe.gradients(), gradients(plain)) < EQUAL


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("partition", [[2, 4], [3, 3]])
def test_mesh_drops_the_same_behind_a_pair_of_two_layers(partition: list[int], remat: str, ranks_of: RanksOf) -> None:
    """The colwise half of a pair is a layer of the model, and the rowwise half with its dropout another one.

    What the first half had put aside, the common random numbers, came back in the second one: its forward dropped by
    the first layer's numbers, its recomputation, where it runs alone, by its own, and gradients were off by a tenth.
    """
    torch.manual_seed(14)
    half = [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.4))]
    plain = nn.Sequential(nn.Linear(6, 6), *copy.deepcopy(half), *copy.deepcopy(half), nn.Linear(6, 6)).double()
    inputs, targets = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    split = copy.deepcopy(plain)
    plain_training.step(plain, inputs, targets, F.mse_loss, pl.naive(1, 4), dropout=(torch.initial_seed(), 0))
    with pl.Pipeline(
        split,
        pl.one_f_one_b(2, 4),
        mesh=pl.Mesh(pp=2, tp=2),
        tensor_parallel={"[13].0": "colwise", "[24].0": "rowwise"},
        partition=partition,
        remat=remat,
        loss_fn=F.mse_loss,
        ranks=ranks_of(4),
    ) as pipe:
        pipe.step(inputs, targets)
        assert largest_difference(pipe.gradients(), gradients(plain)) < EQUAL


def test_mesh_slices_of_a_layer_drop_features_of_their_own(ranks_of: RanksOf) -> None:
    """One sample, half of 8 hidden features dropped; `down.weight`'s gradient is 0 in the columns of those.

    Where both ranks used the same random numbers, the halves would always be equal.
    """
    torch.manual_seed(13)
    model = wide(inside=0.5)
    with torch.no_grad():
        for layer in model:
            layer.up.bias.fill_(9.0)  # so that ReLU passes everything
    halves = []
    with pl.Pipeline(
        model,
        pl.gpipe(2, 1),
        mesh=pl.Mesh(pp=2, tp=2),
        tensor_parallel=WIDE,
        loss_fn=lambda output, target: (output - target).sum(),
        ranks=ranks_of(4),
    ) as pipe:
        for _ in range(4):
            pipe.step(torch.ones(1, 6).double(), torch.ones(1, 6).double())
            found = pipe.gradients()
            kept = [found[f"{layer}.down.weight"].abs().sum(0) > 0 for layer in (0, 1)]
            halves += [part.tolist() for mask in kept for part in mask.chunk(2)]
    same = [first == second for first, second in zip(halves[::2], halves[1::2], strict=True)]
    assert len(same) == 8
    assert sum(same) <= 3  # each is equal with probability 1/16


def test_mesh_in_bfloat16_is_near_float32(ranks_of: RanksOf) -> None:
    inputs, targets = batches(16)[0]
    found = {}
    for precision in ("fp32", "bf16"):
        with pl.Pipeline(
            model().float(),
            pl.zb_h1(2, 4),
            mesh=pl.Mesh(2, 2, 2),
            precision=precision,
            loss_fn=next_token_loss,
            ranks=ranks_of(8),
        ) as pipe:
            found[precision] = pipe.step(inputs, targets).loss, pipe.gradients()
    assert found["bf16"][0] == pytest.approx(found["fp32"][0], rel=0.02)
    assert found["bf16"][0] != found["fp32"][0]
    assert largest_difference(found["bf16"][1], found["fp32"][1]) < 0.1


def test_mesh_keeps_tied_weights_tied(ranks_of: RanksOf) -> None:
    """Embedding and head are one matrix, on the first and the last rank of two pipelines.

    With one block on one rank and two on the other the fair share would give its copies to different replicas.
    """

    def tied() -> nn.Sequential:
        whole = model(depth=3)
        whole[-1].score.weight = whole[0].token.weight
        return whole

    plain = tied()
    optimizer = adam(plain.parameters())
    with pl.Pipeline(
        tied(),
        pl.one_f_one_b(2, 4),
        mesh=pl.Mesh(2, 2, 2),
        data_parallel="shard",
        loss_fn=next_token_loss,
        optimizer=adam,
        max_norm=0.5,
        ranks=ranks_of(8),
    ) as pipe:
        for inputs, targets in batches(17, 16):
            result = pipe.step(inputs, targets)
            optimizer.zero_grad()
            next_token_loss(plain(inputs), targets).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            assert result.gradient_norm == pytest.approx(norm.item(), rel=EQUAL)
        assert largest_difference(pipe.state_dict(), plain.state_dict()) < 1e-7


def test_mesh_has_the_running_statistics_of_one_replica_everywhere(ranks_of: RanksOf) -> None:
    def buffers() -> list[Tensor]:
        (resident,) = [value for key, value in local_state().items() if key[0] == "pipelab.engine"]
        return [buffer.clone() for buffer in resident._modules.buffers()]

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    with pl.Pipeline(
        layers, pl.gpipe(2, 2), mesh=pl.Mesh(dp=2, pp=2), loss_fn=F.mse_loss, ranks=ranks_of(4), partition=[2, 2]
    ) as pipe:
        pipe.step(torch.randn(16, 6), torch.randn(16, 6))
        first, second, *_ = pipe.ranks.run(buffers)
        state = pipe.state_dict()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(first[0], state["1.running_mean"])
    assert first[0].abs().max() > 0


def test_mesh_has_the_statistics_of_the_whole_batch(ranks_of: RanksOf) -> None:
    """With batchnorm="minibatch", of a batch that no replica divides; every micro-batch has its own in the forward."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    inputs, targets = torch.randn(2, 33, 6).double()
    with pl.Pipeline(
        copy.deepcopy(plain),
        pl.gpipe(2, 4),
        mesh=pl.Mesh(dp=2, pp=2),
        batchnorm="minibatch",
        loss_fn=F.mse_loss,
        ranks=ranks_of(4),
        partition=[2, 2],
    ) as pipe:
        pipe.step(inputs, targets)
        plain_training.step(plain, inputs, targets, F.mse_loss, pl.naive(1, 8), batchnorm="minibatch")
        assert largest_difference(pipe.gradients(), gradients(plain)) < EQUAL
        assert largest_difference(pipe.state_dict(), plain.state_dict()) < EQUAL


def two_buffered(num_ranks: int, num_microbatches: int) -> pl.Schedule:
    return pl.pipedream_2bw(num_ranks, num_microbatches, 2)


def in_two_updates(num_ranks: int, num_microbatches: int) -> pl.Schedule:
    return pl.with_updates(pl.one_f_one_b(num_ranks, num_microbatches // 2), 2)


def check_asynchronous(
    schedule: pl.Schedule, rule: str, shape: tuple[int, int, int], ranks_of: RanksOf, **options: Any
) -> None:
    """Against a replay in one process, whose micro-batch k is that of all replicas."""
    mesh, count = pl.Mesh(*shape), schedule.num_microbatches

    def dealt(rows: Tensor) -> Tensor:
        parts = [replica.tensor_split(count) for replica in rows.tensor_split(mesh.dp)]
        return torch.cat([replica[k] for k in range(count) for replica in parts])

    plain, stream = model(), batches(17, 16)
    with pl.Pipeline(
        model(),
        schedule,
        mesh=mesh,
        weights=rule,
        loss_fn=next_token_loss,
        optimizer=adam,
        ranks=ranks_of(mesh.num_ranks),
        **options,
    ) as pipe:
        results = [pipe.step(*batch) for batch in stream]
        state = pipe.state_dict()
    replayed = [(dealt(inputs), dealt(targets)) for inputs, targets in stream]
    losses = pl.replay(plain, schedule, replayed, loss_fn=next_token_loss, optimizer=adam, rule=rule)
    assert [result.loss for result in results] == pytest.approx(losses, rel=EQUAL)
    assert largest_difference(state, plain.state_dict()) < 1e-7
    assert all(result.versions == pl.weight_versions(schedule, rule) for result in results)


ASYNCHRONOUS = {
    "stashing": (pl.pipedream, "stashing"),
    "vertical sync": (pl.pipedream, "vertical_sync"),
    "no stashing": (pl.pipedream, "latest"),
    "2BW": (two_buffered, "two_buffered"),
    "a stream": (in_two_updates, "stashing"),
}


@pytest.mark.parametrize(
    ("run", "shape", "data_parallel"),
    [
        ("stashing", (2, 2, 2), "replicate"),
        ("vertical sync", (2, 2, 1), "shard"),
        ("no stashing", (1, 2, 2), "replicate"),
        ("2BW", (2, 2, 1), "replicate"),
        ("a stream", (2, 2, 1), "shard"),
    ],
)
def test_mesh_updates_on_the_way(run: str, shape: tuple[int, int, int], data_parallel: str, ranks_of: RanksOf) -> None:
    build, rule = ASYNCHRONOUS[run]
    check_asynchronous(build(2, 4), rule, shape, ranks_of, data_parallel=data_parallel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
@pytest.mark.parametrize("remat", ["none", "layer", "stage"])
@pytest.mark.parametrize("run", [run for run in ASYNCHRONOUS if run != "no stashing"])
def test_mesh_updates_on_the_way_by_every_rule(
    run: str, shape: tuple[int, int, int], data_parallel: str, remat: str, ranks_of: RanksOf
) -> None:
    build, rule = ASYNCHRONOUS[run]
    check_asynchronous(build(2, 4), rule, shape, ranks_of, data_parallel=data_parallel, remat=remat)


def test_mesh_keeps_a_trace_of_every_pipeline(ranks_of: RanksOf) -> None:
    with pl.Pipeline(
        model(), pl.zb_h1(2, 4), mesh=pl.Mesh(2, 2, 2), loss_fn=next_token_loss, ranks=ranks_of(8)
    ) as pipe:
        result = pipe.step(*batches(16)[0])
    assert sorted(result.traces) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert result.trace is result.traces[0, 0]
    for trace in result.traces.values():
        assert [[span.action for span in row] for row in trace.by_rank] == [
            list(order) for order in pl.zb_h1(2, 4).ranks
        ]


def test_mesh_ends_with_the_error_of_one_rank_and_starts_again(ranks_of: RanksOf) -> None:
    """Replica 1 alone fails; its neighbours wait for it in sums and messages, and must not wait for ever."""

    def picky(logits: Tensor, targets: Tensor) -> Tensor:
        if (targets == 7).all():
            raise ValueError("seven")
        return next_token_loss(logits, targets)

    def build() -> pl.Pipeline:
        mesh = pl.Mesh(2, 2, 2)
        return pl.Pipeline(model(), pl.zb_h1(2, 4), mesh=mesh, loss_fn=picky, ranks=ranks_of(8))

    inputs, targets = batches(16)[0]
    bad = targets.clone()
    bad[-2:] = 7  # the last micro-batch
    with pytest.raises(pl.RankError, match=r"rank 6 raised ValueError in 1F3: seven"):
        build().step(inputs, bad)
    with build() as pipe:
        assert repr(pipe) == "<Pipeline of 2 stages on 8 ranks (dp 2 × pp 2 × tp 2), zb_h1: ready>"
        assert pipe.step(inputs, targets).loss > 0


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a mesh of another pipeline": (
        {"mesh": pl.Mesh(dp=2, pp=4)},
        SizeError,
        "'gpipe' is for 2 ranks, but each pipeline of the mesh dp 2 × pp 4 × tp 1 has 4",
    ),
    "a mesh of other ranks": ({"mesh": pl.Mesh(dp=4, pp=2)}, SizeError, "has 8 ranks, but there are 4"),
    "no mesh": ({"mesh": (2, 2, 1)}, EngineError, r"mesh must be a Mesh, as in Mesh\(dp=2, pp=2, tp=2\)"),
    "ranks for a mesh that is not given": ({"mesh": None}, SizeError, "is for 2 ranks, but there are 4"),
    "an unknown way of data parallelism": (
        {"data_parallel": "ddp"},
        EngineError,
        "data_parallel must be 'replicate' or 'shard', got 'ddp'",
    ),
    "a plan for nothing": (
        {"tensor_parallel": {"*.qkv": "colwise"}},
        EngineError,
        r"'\*.qkv' fits no Linear layer; the model's are 1.attention.query_key_value, 1.attention.output",
    ),
    "an unknown style": ({"tensor_parallel": {"*.expand": "col"}}, EngineError, "must be 'colwise', 'rowwise' or"),
    "a layer named twice": (
        {"tensor_parallel": {"*.expand": "colwise", "1.*": "rowwise"}},
        EngineError,
        "1.expand is named twice, the second time by '1.*'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mesh_refuses_before_anything_starts(case: str, ranks_of: RanksOf) -> None:
    options, kind, message = REFUSED[case]
    ranks = ranks_of(4)
    generation = ranks.generation
    with pytest.raises(kind, match=message):
        pl.Pipeline(
            model(),
            pl.gpipe(2, 4),
            loss_fn=next_token_loss,
            ranks=ranks,
            **{"mesh": pl.Mesh(pp=2, tp=2), **options},
        )
    assert ranks.generation == generation
    assert ranks.alive


def test_mesh_refuses_sizes_that_ranks_cannot_share(ranks_of: RanksOf) -> None:
    def build(whole: nn.Sequential, tp: int, **options: Any) -> None:
        mesh = pl.Mesh(pp=8 // tp, tp=tp)
        pl.Pipeline(whole, pl.gpipe(mesh.pp, 2), loss_fn=F.mse_loss, ranks=ranks_of(8), mesh=mesh, **options)

    with pytest.raises(SizeError, match=r"1.attention has 2 heads, which 4 ranks cannot share: tp must divide them"):
        build(model(), 4)
    with pytest.raises(SizeError, match=r"0.down has 6 outputs, which 4 ranks cannot share: tp must divide"):
        build(wide(), 4, tensor_parallel={"*.up": "colwise", "*.down": "colwise"})
    with pytest.raises(EngineError, match=r"which\? Only the blocks of pipelab.models.gpt are known"):
        build(wide(), 4)
    tied = wide()
    tied[1].up.weight = tied[0].up.weight
    with pytest.raises(EngineError, match=r"0.up.weight and 1.up.weight are one parameter, which tensor_parallel"):
        build(tied, 4, tensor_parallel=WIDE)


def test_mesh_refuses_fewer_samples_than_micro_batches(ranks_of: RanksOf) -> None:
    with (
        pl.Pipeline(
            model(), pl.gpipe(2, 4), mesh=pl.Mesh(dp=2, pp=2), loss_fn=next_token_loss, ranks=ranks_of(4)
        ) as pipe,
        pytest.raises(SizeError, match=r"7 samples cannot fill 4 micro-batches on each of 2 replicas: .* at most 3"),
    ):
        pipe.step(*batches(7)[0])


def test_mesh_asks_for_a_larger_batch_where_no_schedule_is_small_enough() -> None:
    with pytest.raises(SizeError, match=r"1 samples cannot fill 4 micro-batches on each of 2 replicas: take a larger"):
        deal(torch.ones(1, 3), torch.ones(1), replicas=2, microbatches=4)
