"""Checkpoints: training goes on as if it had never stopped, in any other split; what is no checkpoint is refused."""

from __future__ import annotations

import copy
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from plain_training import largest_difference, same_to_the_bit
from torch import Tensor, nn

import pipelab as pl
from pipelab.engine import checkpoint

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(90)
RanksOf = Callable[[int], pl.Ranks]


def model(seed: int = 0) -> nn.Sequential:
    """Whatever has a state: statistics, dropout, and a weight used by the first and the last layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Sequential(
            *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3)),
            *(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8)),
        )
    layers[-1].weight = layers[0].weight
    return layers.double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(15, 8, generator=random).double(), torch.randint(0, 8, (15,), generator=random)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not; on a rank either group may be empty."""
    parameters = list(parameters)
    return torch.optim.SGD(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 0.03},
        ],
        lr=0.1,
        momentum=0.9,
    )


def setting(optimizer: Any = adam, **more: Any) -> dict[str, Any]:
    return {"loss_fn": F.cross_entropy, "optimizer": optimizer, "batchnorm": "minibatch", "max_norm": 1.0, **more}


@pytest.fixture(scope="module")
def saved(ranks_of: RanksOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After three steps of zb_h1 on two ranks."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.pt"
    with pl.Pipeline(model(), pl.zb_h1(2, 4), ranks=ranks_of(2), **setting()) as pipe:
        for seed in range(3):
            pipe.step(*batch(seed))
        pipe.save(path)
    return path


@pytest.mark.parametrize("optimizer", [adam, grouped])
@pytest.mark.parametrize(
    "plan", [("zb_h1", 2), ("gpipe", 1), ("one_f_one_b", 3), ("interleaved", 2), ("breadth_first", 3), ("zb_v", 2)]
)
def test_checkpoint_goes_on_as_if_it_had_never_stopped(
    plan: tuple[str, int], optimizer: Any, tmp_path: Path, ranks_of: RanksOf
) -> None:
    """The next loss equal to the bit in any split, and what follows up to the order of sums."""
    name, p = plan
    steps = {}
    with pl.Pipeline(model(), pl.zb_h1(2, 6), ranks=ranks_of(2), **setting(optimizer)) as pipe:
        for seed in range(7):
            steps[seed] = pipe.step(*batch(seed)).loss
            if seed == 3:
                pipe.save(tmp_path / "model.pt")
        never_stopped = pipe.state_dict()
    torch.manual_seed(99)  # of another day
    with pl.Pipeline.load(
        tmp_path / "model.pt", model(seed=1), pl.SCHEDULES[name](p, 6), ranks=ranks_of(p), **setting(optimizer)
    ) as again:
        assert torch.initial_seed() == 99
        assert again.step(*batch(4)).loss == steps[4]
        for seed in (5, 6):
            assert again.step(*batch(seed)).loss == pytest.approx(steps[seed], rel=1e-12)
        state = again.state_dict()
    assert largest_difference(state, never_stopped) < 1e-9
    if name == "zb_h1":
        assert same_to_the_bit(state, never_stopped)


def test_checkpoint_has_the_names_of_the_model_and_every_tensor_once(saved: Path) -> None:
    content = torch.load(saved, weights_only=True)
    assert list(content["model"]) == list(model().state_dict())
    optimizer = content["training"]["optimizer"]
    assert set(optimizer["state"]) == {name for name, _ in model().named_parameters(remove_duplicate=False)}
    first, last = optimizer["state"]["0.weight"]["exp_avg"], optimizer["state"]["8.weight"]["exp_avg"]
    assert first.data_ptr() == last.data_ptr()
    assert content["model"]["0.weight"].data_ptr() == content["model"]["8.weight"].data_ptr()


class Counts(nn.Linear):
    """Has a state that is no tensor, by torch's own way for such."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_checkpoint_has_a_state_that_is_no_tensor(tmp_path: Path, ranks_of: RanksOf) -> None:
    counting = nn.Sequential(Counts(8, 8), nn.Tanh(), Counts(8, 8)).double()
    with pl.Pipeline(counting, pl.gpipe(2, 4), ranks=ranks_of(2), **setting()) as pipe:
        pipe.step(*batch(0))
        state = pipe.state_dict()
        assert list(state) == list(counting.state_dict())
        assert state["2._extra_state"] == 4
        pipe.load_state_dict({**state, "2._extra_state": 7})
        pipe.save(tmp_path / "model.pt")
    with pl.Pipeline.load(tmp_path / "model.pt", counting, pl.gpipe(1, 2), ranks=ranks_of(1), **setting()) as pipe:
        assert pipe.state_dict()["2._extra_state"] == 7


def test_checkpoint_without_an_optimizer_gives_the_values(saved: Path, tmp_path: Path, ranks_of: RanksOf) -> None:
    wanted = torch.load(saved, weights_only=True)["model"]
    with pl.Pipeline.load(saved, model(1), pl.gpipe(2, 2), ranks=ranks_of(2), loss_fn=F.cross_entropy) as pipe:
        assert same_to_the_bit(pipe.state_dict(), wanted)
        pipe.save(tmp_path / "values.pt")
    with pl.Pipeline.load(tmp_path / "values.pt", model(1), pl.gpipe(2, 2), ranks=ranks_of(2), **setting()) as pipe:
        assert same_to_the_bit(pipe.state_dict(), wanted)
        pipe.step(*batch(0))


def fast(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=10.0)


def test_checkpoint_has_the_learning_rate_too(saved: Path, ranks_of: RanksOf) -> None:
    """As load_state_dict of torch's optimizers: what was saved counts, not what the factory says now."""
    states = []
    for optimizer in (adam, fast):
        with pl.Pipeline.load(saved, model(1), pl.gpipe(2, 4), ranks=ranks_of(2), **setting(optimizer)) as pipe:
            pipe.step(*batch(3))
            states.append(pipe.state_dict())
    assert same_to_the_bit(*states)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif how == "one bit":  # in the middle of a tensor
        at = content.index(b"/data/0") + 200
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("dear diary")
    elif how == "a state_dict":
        torch.save(model().state_dict(), path)
    elif how == "code":
        path.write_bytes(checkpoint._sealed({"model": Bomb()}))
    elif how == "tomorrow's":
        path.write_bytes(content.replace(b"pipelab checkpoint 1", b"pipelab checkpoint 2"))
    elif how == "missing":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()


SPOILT = {
    "cut off": "is no checkpoint that Pipeline.save wrote, or only the beginning of one",
    "one bit": "is damaged: its bytes are not those that were written",
    "empty": "is no checkpoint that",
    "text": "is no checkpoint that",
    "a state_dict": "is no checkpoint that .*goes into a Pipeline by load_state_dict",
    "code": "holds more than tensors and plain values",
    "tomorrow's": "has version 2 of the format, and this pipelab reads 1",
    "missing": "cannot be read: .*No such file",
    "a folder": "cannot be read: .*directory",
}


@contextmanager
def nothing_changes(ranks_of: RanksOf) -> Iterator[None]:
    """A model, the random numbers and a pipeline that runs on the same ranks."""
    layers = model(1)
    before, random = copy.deepcopy(layers.state_dict()), torch.get_rng_state()
    with pl.Pipeline(layers, pl.gpipe(2, 2), ranks=ranks_of(2), **setting()) as pipe:
        yield
        assert same_to_the_bit(pipe.state_dict(), before)
        assert torch.equal(torch.get_rng_state(), random)
        pipe.step(*batch(0))


@pytest.mark.parametrize("how", SPOILT)
def test_checkpoint_refuses_a_damaged_or_foreign_file(
    how: str, saved: Path, tmp_path: Path, ranks_of: RanksOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    path.write_bytes(saved.read_bytes())
    spoil(path, how)
    with nothing_changes(ranks_of), pytest.raises(pl.CheckpointError, match=SPOILT[how]):
        pl.Pipeline.load(path, model(1), pl.gpipe(2, 2), ranks=ranks_of(2), **setting())
    assert not (tmp_path / "exploded").exists()


def test_checkpoint_shows_any_byte_that_changed(saved: Path, tmp_path: Path) -> None:
    """The checksums of the zip archive alone would miss some in its directory."""
    content, path = saved.read_bytes(), tmp_path / "model.pt"
    for at in [*range(0, len(content), len(content) // 200), *range(len(content) - 60, len(content))]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(pl.CheckpointError):
            checkpoint.read(path)


def without_bias() -> nn.Sequential:
    layers = model(1)
    layers[4].register_parameter("bias", None)
    return layers


def wider() -> nn.Sequential:
    layers = model(1)
    layers[4].weight = nn.Parameter(torch.zeros(9, 8))
    return layers


def one_group(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "fewer names": (without_bias, adam, "does not fit, and nothing was loaded:\n  4.bias is not in the model"),
    "other shapes": (wider, adam, r"4.weight is \(8, 8\), in the model \(9, 8\)"),
    "another optimizer": (model, one_group, "was saved with the optimizer AdamW, and this pipeline has SGD"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_checkpoint_refuses_another_model_or_optimizer(case: str, saved: Path, ranks_of: RanksOf) -> None:
    make, optimizer, message = OTHERS[case]
    with nothing_changes(ranks_of), pytest.raises(pl.CheckpointError, match=message):
        pl.Pipeline.load(saved, make(), pl.gpipe(2, 2), ranks=ranks_of(2), **setting(optimizer))


def test_checkpoint_refuses_groups_that_were_apart(tmp_path: Path, ranks_of: RanksOf) -> None:
    path = tmp_path / "model.pt"
    with pl.Pipeline(model(), pl.gpipe(2, 2), ranks=ranks_of(2), **setting(grouped)) as pipe:
        pipe.step(*batch(0))
        pipe.save(path)
    with nothing_changes(ranks_of), pytest.raises(pl.CheckpointError, match=r"one group .* had different options"):
        pl.Pipeline.load(path, model(), pl.gpipe(2, 2), ranks=ranks_of(2), **setting(one_group))


def test_checkpoint_refuses_an_optimizer_that_had_less_to_do(tmp_path: Path, ranks_of: RanksOf) -> None:
    path = tmp_path / "model.pt"
    vectors = setting(lambda parameters: adam([p for p in parameters if p.dim() == 1]))
    with pl.Pipeline(model(), pl.gpipe(2, 2), ranks=ranks_of(2), **vectors) as pipe:
        pipe.step(*batch(0))
        pipe.save(path)
    with nothing_changes(ranks_of), pytest.raises(pl.CheckpointError, match=r"has no optimizer state of 0.weight"):
        pl.Pipeline.load(path, model(), pl.gpipe(2, 2), ranks=ranks_of(2), **setting())


def test_checkpoint_waits_for_an_update(tmp_path: Path, ranks_of: RanksOf) -> None:
    with pl.Pipeline(model(), pl.gpipe(2, 2), ranks=ranks_of(2), **setting()) as pipe:
        pipe.step(*batch(0), update=False)
        with pytest.raises(pl.CheckpointError, match="wait for an update: save after that one"):
            pipe.save(tmp_path / "model.pt")
        assert list(tmp_path.iterdir()) == []
        pipe.step(*batch(1))
        pipe.save(tmp_path / "model.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_checkpoint_leaves_the_last_one_where_the_disk_is_full(tmp_path: Path, ranks_of: RanksOf) -> None:
    """The system refuses to write more than 2,000 bytes into any file."""
    path = tmp_path / "model.pt"
    with pl.Pipeline(model(), pl.gpipe(2, 2), ranks=ranks_of(2), **setting()) as pipe:
        pipe.step(*batch(0))
        pipe.save(path)
        before = path.read_bytes()
        pipe.step(*batch(1))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            with pytest.raises(pl.CheckpointError, match=r"no checkpoint was written to .*, which is as it was"):
                pipe.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
        pipe.save(path)
        assert path.read_bytes() != before


def test_checkpoint_needs_a_folder_that_is_there(tmp_path: Path, ranks_of: RanksOf) -> None:
    with (
        pl.Pipeline(model(), pl.gpipe(2, 2), ranks=ranks_of(2), **setting()) as pipe,
        pytest.raises(pl.CheckpointError, match=r"no checkpoint was written to .*No such file or directory"),
    ):
        pipe.save(tmp_path / "nowhere" / "model.pt")
