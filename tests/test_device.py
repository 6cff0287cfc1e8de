"""What differs on a GPU, as far as a machine without one can show it: on a stand-in, and in the order of messages.

The stand-in keeps tensors as copies and marks as objects, as a GPU does, so whatever bypasses the device shows. On a
real GPU run the checks in tests/gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipelab as pl
from pipelab.action import Action
from pipelab.engine import options
from pipelab.engine.device import CPU, Cuda, Device, _moved
from pipelab.engine.message import Value, unwrap, wrap
from pipelab.engine.scaling import LossScale

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)


class Elsewhere(Device):
    """Tensors that it was given are marked as its own; a moment is known only afterwards."""

    class Moment:
        def __init__(self, seconds: float) -> None:
            self.hidden = seconds

    def __init__(self) -> None:
        self.begun = 0

    def take_in(self, layers: nn.ModuleList) -> nn.ModuleList:
        for layer in layers.modules():
            layer.register_forward_pre_hook(_on_its_device)
        return layers

    def put(self, content: Any) -> Any:
        return _moved(content, _Own.of)

    def take_back(self, content: Any) -> Any:
        return _moved(content, _brought_back)

    def begin(self, *, paced: bool = False) -> None:
        self.begun += 1

    def mark(self) -> Any:
        return self.Moment(super().mark())

    def seconds(self, mark: Any) -> float:
        assert self.begun
        return float(mark.hidden)


class Occupied(Cuda):
    """The marks of a GPU, where a message that nobody has received yet occupies a stream beside that of the layers.

    So does one of gloo, which stays where it is until the receiver asks for it.
    """

    kind, where, block_bytes = CPU.kind, CPU.where, CPU.block_bytes
    take_in, put, take_back = Device.take_in, Device.put, Device.take_back
    new_stream, inside, hand_over = Device.new_stream, Device.inside, Device.hand_over
    seed, random_state_kept = Device.seed, Device.random_state_kept
    random_state, go_back_to = Device.random_state, Device.go_back_to

    def __init__(self) -> None:
        self._paced, self._zero = False, Mock()
        torch.cuda.synchronize = _Way.all_received  # type: ignore[assignment]
        torch.cuda.current_stream = Mock()


class _Way:
    """A group that remembers what was sent. To wait for a message is the work of a stream, so nobody waits here.

    Only the first one from a rank to another keeps its sender until it is received, because it connects the two.
    """

    sent: ClassVar[list[tuple[Any, ...]]] = []
    connected: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, group: Any) -> None:
        self._group, self._rank = group, dist.get_rank(group)

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        work = self._group.send(tensors, peer, tag)
        if (self._rank, peer) not in self.connected:
            work.wait()
            self.connected.add((self._rank, peer))
        else:
            self.sent.append((work, tensors))
        return Mock()

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        self.connected.add((peer, self._rank))
        return self._group.recv(tensors, peer, tag)

    @classmethod
    def all_received(cls, where: Any) -> None:
        while cls.sent:
            cls.sent.pop()[0].wait()


def _after_all_messages(collective: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **options: Any) -> Any:
        groups = pl.ranks.local_state()["pipelab.engine groups"].values()
        if _Way.sent and any(options.get("group") is each.replicas for each in groups if each.replicas):
            raise RuntimeError("a collective of the replicas was begun while messages were under way")
        return collective(*args, **options)

    return checked


class _Own(torch.Tensor):
    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        return cls._make_subclass(cls, tensor.clone())  # as_subclass() would make a view, which autograd treats apart


def _brought_back(tensor: torch.Tensor) -> torch.Tensor:
    back = tensor.as_subclass(torch.Tensor)
    back.on_host = True  # type: ignore[attr-defined]
    return back


def _on_its_device(layer: nn.Module, args: tuple[Any, ...]) -> None:
    if type(args[0]) is not _Own:
        raise RuntimeError(f"a {type(args[0]).__name__} reached a layer, which is on another device")


class Dice(Device):
    """Random numbers of its own: a layer draws other ones than it should unless they were begun anew with the CPU's."""

    begun_with = 0

    def take_in(self, layers: nn.ModuleList) -> nn.ModuleList:
        for layer in layers.modules():
            if isinstance(layer, nn.Dropout):
                layer.register_forward_pre_hook(self._together)
        return layers

    def seed(self) -> None:
        self.begun_with = torch.initial_seed()

    def random_state(self) -> Any:
        return super().random_state(), self.begun_with

    def go_back_to(self, random_state: Any) -> None:
        on_cpu, self.begun_with = random_state
        super().go_back_to(on_cpu)

    def _together(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self.begun_with != torch.initial_seed():
            raise RuntimeError("the device would draw other random numbers than its seed says")


@contextmanager
def ranks_with(device: type[Device], count: int) -> Iterator[pl.Ranks]:
    """Ranks that compute on a stand-in: `Elsewhere` gloo cannot reach, the others send as over NCCL, by gloo."""

    def settle() -> None:
        from pipelab.engine import groups, resident

        resident.device_of = lambda kind: device()  # type: ignore[assignment]
        if device is not Elsewhere:
            groups.Groups = _with_ways(groups.Groups, _Way if device is Occupied else lambda group: group)  # type: ignore[misc]
            if device is Occupied:
                pl.ranks.local_state()["connections"] = _Way.connected
                check_collectives(_after_all_messages)
            return
        check_collectives(_from_host)

    def check_collectives(checked: Callable[..., Any]) -> None:
        for name in ("all_reduce", "reduce", "broadcast"):
            setattr(dist, name, checked(getattr(dist, name)))

    with pl.Ranks(count, timeout=30) as ranks:
        ranks.run(settle)
        yield ranks


def _from_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    def checked(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.dtype is torch.float32 and not hasattr(tensor, "on_host"):
            raise RuntimeError("gloo was given a tensor of the device")
        return collective(tensor, *args, **options)

    return checked


def _with_ways(groups: type, way: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(mesh: pl.Mesh, kind: str) -> Any:
        made = groups(mesh, kind)
        pipelines = [list(ranks) for ranks in mesh.groups("pp")]
        made.ways = tuple(way(dist.new_subgroups_by_enumeration(pipelines)[0]) for _ in range(2))
        return made

    return make


@pytest.fixture
def elsewhere() -> Iterator[pl.Ranks]:
    """Two ranks that compute on the stand-in."""
    with ranks_with(Elsewhere, 2) as ranks:
        yield ranks


def test_device_all_that_layers_see_was_put_there(elsewhere: pl.Ranks, ranks_of: Callable[[int], pl.Ranks]) -> None:
    inputs, targets = torch.randn(12, 6), torch.randint(3, (12,))

    def train(ranks: pl.Ranks) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))
        pipe = pl.Pipeline(
            model,
            pl.one_f_one_b(2, 4),
            loss_fn=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
            ranks=ranks,
        )
        result = [pipe.step(inputs, targets) for _ in range(3)][-1]
        return result, pipe.state_dict(), pipe.predict(inputs), pipe.evaluate(inputs, targets)

    there, state, output, loss = train(elsewhere)
    here, expected, expected_output, expected_loss = train(ranks_of(2))
    assert there.loss == here.loss
    assert all(type(value) is torch.Tensor and torch.equal(value, expected[name]) for name, value in state.items())
    assert torch.equal(output, expected_output)
    assert loss == expected_loss
    starts = [span.start for span in there.trace.spans if span.rank == 0]
    assert starts == sorted(starts)
    assert all(message.sent <= message.arrived for message in there.trace.messages)


def test_device_gets_no_state_of_the_whole_model(elsewhere: pl.Ranks, tmp_path: Path) -> None:
    """A load copies into the parameters, wherever they are; and each rank is sent what it holds."""

    def note_what_comes() -> None:
        from pipelab.engine.resident import Resident

        def noting(method: str) -> None:
            real = getattr(Resident, method)

            def load(self: Any, state: Any) -> Any:
                tensors = state if method == "load_state" else state["optimizer"]["state"]
                found.append((sorted(tensors), any(_own(tensors))))
                return real(self, state)

            setattr(Resident, method, load)

        found = pl.ranks.local_state().setdefault("loaded", [])
        noting("load_state")
        noting("load_training_state")

    elsewhere.run(note_what_comes)
    parts: dict[str, Any] = {
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.Adam(parameters),
        "ranks": elsewhere,
    }
    pipe = pl.Pipeline(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), pl.gpipe(2, 2), **parts)
    pipe.step(torch.randn(8, 6), torch.randint(3, (8,)))
    pipe.save(tmp_path / "checkpoint.pt")
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    pl.Pipeline.load(tmp_path / "checkpoint.pt", model, pl.gpipe(2, 2), **parts)
    loaded = elsewhere.run(lambda: pl.ranks.local_state()["loaded"])
    assert loaded == [[([f"{stage}.bias", f"{stage}.weight"], False)] * 2 for stage in range(2)]


def _own(content: Any) -> Iterator[bool]:
    values = content.values() if isinstance(content, dict) else [content]
    for value in values:
        yield from _own(value) if isinstance(value, dict) else [type(value) is _Own]


PAIR = {"0.0": "colwise", "0.3": "rowwise"}


def train_on_mesh(ranks: pl.Ranks, mesh: pl.Mesh, **options: Any) -> Any:
    torch.manual_seed(2)
    pair = [nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(0.3)]
    inputs, targets = torch.randn(48, 6), torch.randint(3, (48,))
    pipe = pl.Pipeline(
        nn.Sequential(nn.Sequential(*pair), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        pl.zb_h1(2, 4),
        mesh=mesh,
        loss_fn=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        max_norm=0.5,
        ranks=ranks,
        **options,
    )
    results = [pipe.step(inputs, targets) for _ in range(2)]
    return [(r.loss, r.gradient_norm) for r in results], pipe.gradients() | pipe.state_dict()


def trains_as_the_cpu(there: pl.Ranks, here: pl.Ranks, mesh: pl.Mesh, **options: Any) -> None:
    """To the bit: losses, norms, gradients and parameters."""
    losses, tensors = train_on_mesh(there, mesh, **options)
    expected_losses, expected = train_on_mesh(here, mesh, **options)
    assert losses == expected_losses
    assert all(torch.equal(value, expected[name]) for name, value in tensors.items())


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_device_replicas_that_share_one_meet_in_the_hosts_memory(
    data_parallel: str, ranks_of: Callable[[int], pl.Ranks]
) -> None:
    with ranks_with(Elsewhere, 4) as there:
        trains_as_the_cpu(there, ranks_of(4), pl.Mesh(dp=2, pp=2), data_parallel=data_parallel)


def test_device_slices_draw_as_on_the_cpu_and_send_within_their_pipeline(ranks_of: Callable[[int], pl.Ranks]) -> None:
    with ranks_with(Dice, 4) as there:
        trains_as_the_cpu(there, ranks_of(4), pl.Mesh(pp=2, tp=2), tensor_parallel=PAIR)


def test_device_paced_ranks_that_both_have_sent_do_not_wait_for_each_other() -> None:
    with ranks_with(Occupied, 2) as ranks:
        pipe = pl.Pipeline(
            nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)),
            pl.one_f_one_b(2, 4),
            loss_fn=nn.functional.cross_entropy,
            ranks=ranks,
            pace=pl.Costs(F=0.01, B=0.02),
        )
        result = pipe.step(torch.randn(8, 6), torch.randint(3, (8,)))
    assert len(result.trace.messages) == 8
    assert result.trace.source == "paced"


def test_device_ranks_are_connected_both_ways_before_the_first_step() -> None:
    """In a ring, where ranks that each began with the next one would wait for each other."""
    with ranks_with(Occupied, 3) as ranks:
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
        pl.Pipeline(model, pl.interleaved(3, 3, stages_per_rank=2), loss_fn=nn.functional.mse_loss, ranks=ranks)
        connections = ranks.run(lambda: pl.ranks.local_state()["connections"])
    ring = {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}
    assert connections == [{pair for pair in ring if rank in pair} for rank in range(3)]


@pytest.mark.parametrize("batchnorm", ["microbatch", "minibatch"])
def test_device_replicas_meet_when_all_messages_are_through(batchnorm: str) -> None:
    with ranks_with(Occupied, 4) as ranks:
        train_on_mesh(ranks, pl.Mesh(dp=2, pp=2), batchnorm=batchnorm, pace=pl.Costs(F=0.01, B=0.02))


def test_device_moves_what_lies_in_nested_values() -> None:
    value = Value(b"structure", [torch.zeros(2)], (True,))
    moved = _moved({"a": (value, [torch.ones(1), "text", None])}, lambda tensor: tensor + 1)
    assert type(moved["a"][0]) is Value
    assert moved["a"][0].wants_gradient == (True,)
    assert moved["a"][0].tensors[0].tolist() == [1, 1]
    assert moved["a"][1][0].tolist() == [2]
    assert moved["a"][1][1:] == ["text", None]


def test_groups_keep_waiting_as_long_as_that_of_all_ranks(ranks_of: Callable[[int], pl.Ranks]) -> None:
    """It is the notebook that keeps the time, not torch after half an hour."""

    def timeouts() -> list[Any]:
        from pipelab.engine.groups import join

        of = [join(pl.Mesh(dp=2, pp=2), "cpu"), join(pl.Mesh(pp=2, tp=2), "cpu")]
        found = [dist.group.WORLD, of[0].pipeline, of[0].replicas, of[1].slices.get_group()]  # type: ignore[union-attr]
        return [group._get_backend(torch.device("cpu")).options._timeout for group in found]

    for everyone, *parts in ranks_of(4).run(timeouts):
        assert parts == [everyone] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_refuses_a_gpu_that_is_not_there(ranks_of: Callable[[int], pl.Ranks]) -> None:
    with pytest.raises(pl.EngineError, match="device='cuda' was asked for, but torch finds no GPU here"):
        pl.Pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            pl.gpipe(2, 2),
            loss_fn=nn.functional.mse_loss,
            ranks=ranks_of(2),
            device="cuda",
        )


def exchange(order: list[int]) -> list[Any]:
    """Three messages from rank 0 to rank 1, one back between them; rank 1 takes them in `order`."""
    from pipelab.engine.nccl import NcclChannel

    group, *ways = (dist.new_group() for _ in range(3))
    channel = NcclChannel(8, group, tuple(ways), device=CPU)
    forward = [Action.from_text(f"0F{number}") for number in range(3)]
    back = Action.from_text("1B0")
    contents = [torch.full((100_000,), 1.0), {"mask": torch.tensor([True]), "n": 3}, (torch.empty(0, 4), None)]
    found: list[Any] = []
    for _ in range(2):
        if dist.get_rank() == 0:
            channel.post(back, 1)
            for action, content in zip(forward, contents, strict=True):
                channel.send(action, wrap(content), 1)
            found = [unwrap(channel.take(back).value), channel.take_sent_bytes()]
        else:
            for action in forward:
                channel.post(action, 0)
            channel.send(back, wrap(torch.ones(3, requires_grad=True)), 0)
            deliveries = {number: channel.take(forward[number]) for number in order}
            found = [unwrap(deliveries[number].value) for number in range(3)] + [deliveries[0].bytes]
        channel.finish()
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_nccl_messages_come_in_the_order_of_sending_and_are_taken_in_any(
    order: list[int], ranks_of: Callable[[int], pl.Ranks]
) -> None:
    (answer, sent), (large, small, empty, size) = ranks_of(2).run(exchange, order)
    assert answer.tolist() == [1, 1, 1]
    assert sent == 400_001
    assert torch.equal(large, torch.full((100_000,), 1.0))
    assert (small["mask"].tolist(), small["n"]) == ([True], 3)
    assert (empty[0].shape, empty[1]) == ((0, 4), None)
    assert size == 400_000


# --- float16 ----------------------------------------------------------------------------------------------------------


def test_scale_is_halved_by_an_overflow_and_doubled_after_good_steps() -> None:
    scale = LossScale(first=1024.0, grows_after=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale.judge(finite)
        seen.append(scale.value)
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024]


def test_fp16_is_refused_on_the_cpu(ranks_of: Callable[[int], pl.Ranks]) -> None:
    with pytest.raises(pl.EngineError, match="precision='fp16' is for GPUs"):
        fp16_pipeline(ranks_of(2))


def test_fp16_skips_what_overflows_on_all_ranks_and_then_trains(
    ranks_of: Callable[[int], pl.Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The CPU does float16 too, only slowly: so the scale can be tried without a GPU."""
    monkeypatch.setattr(options, "FP16_DEVICES", ("cpu", "cuda"))
    pipe = fp16_pipeline(ranks_of(2))
    inputs, targets = torch.randn(8, 6), torch.full((8, 3), 1000.0)
    before = pipe.state_dict()
    result = pipe.step(inputs, targets)
    assert result.skipped
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    steps = 1
    while (result := pipe.step(inputs, targets)).skipped:
        steps += 1
        assert steps < 20
    pipe.save(tmp_path / "checkpoint.pt")
    assert [part["scale"] for part in pipe._remote.call("training_state")] == [(2.0 ** (16 - steps), 1)] * 2
    # The gradient of the last layer's bias is known: that of the mean of (output - target) squared.
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain.load_state_dict(before)
    nn.functional.mse_loss(plain(inputs), targets).backward()
    for name, gradient in pipe.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=0.01, atol=0.5)
    again = pl.Pipeline.load(
        tmp_path / "checkpoint.pt",
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        pl.gpipe(2, 2),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        ranks=ranks_of(2),
        precision="fp16",
    )
    assert not again.step(inputs, targets).skipped


def fp16_pipeline(ranks: pl.Ranks) -> pl.Pipeline:
    return pl.Pipeline(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        pl.gpipe(2, 2),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        ranks=ranks,
        precision="fp16",
    )
