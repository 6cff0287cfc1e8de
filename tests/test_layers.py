"""Models of others as layers: the same function, the same names on the way back, the same training."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelab.engine import Pipeline
from pipelab.errors import EngineError, PartitionError
from pipelab.layers import as_layers
from pipelab.models import ResNet, next_token_loss, resnet
from pipelab.schedules import one_f_one_b

pytestmark = pytest.mark.timeout(120)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install -c constraints.txt -e '.[models]'",
)


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50, n_positions=16, **options)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config)


def residual() -> nn.Module:
    return resnet(norm=nn.BatchNorm2d)


def pictures() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)


def tokens() -> tuple[Tensor, Tensor]:
    text = torch.randint(50, (8, 13), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@needs_transformers
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_of_gpt2_compute_its_logits_and_gradients(attention: str) -> None:
    model = gpt2(attn_implementation=attention)
    inputs, targets = tokens()
    row = as_layers(model, example=inputs)
    assert len(row) == 3 + 2
    next_token_loss(model(inputs).logits, targets).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    next_token_loss(row(inputs), targets).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@needs_transformers
def test_layers_of_gpt2_trained_by_a_pipeline_equal_one_process(ranks_of: Callable[[int], Any]) -> None:
    model = gpt2()
    inputs, targets = tokens()
    alone = copy.deepcopy(model)
    row = as_layers(model)
    optimizer = _sgd(alone.parameters())
    with Pipeline(row, one_f_one_b(2, 4), loss_fn=next_token_loss, optimizer=_sgd, ranks=ranks_of(2)) as pipe:
        for _ in range(2):
            loss = next_token_loss(alone(inputs).logits, targets)
            assert pipe.step(inputs, targets).loss == pytest.approx(loss.item(), rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained = row.to_original(pipe.state_dict())
    assert trained.keys() == alone.state_dict().keys()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
    model.load_state_dict(trained)
    torch.testing.assert_close(model(inputs).logits, alone(inputs).logits, rtol=1e-4, atol=1e-5)


@needs_transformers
def test_layers_of_gpt2_name_every_parameter_of_it() -> None:
    model = gpt2()
    row = as_layers(model)
    assert row.original_names["1.block.ln_1.weight"] == "transformer.h.0.ln_1.weight"
    assert row.original_names["0.words.weight"] == "transformer.wte.weight"
    assert row.original_names["4.scores.weight"] == "lm_head.weight"  # one tensor with the words
    back = row.from_original(row.to_original(row.state_dict()))
    assert back.keys() == row.state_dict().keys()
    assert sorted(row.original_names.values()) == sorted(model.state_dict())


def test_layers_of_a_residual_network_compute_what_it_does() -> None:
    model = residual()
    inputs, targets = pictures()
    row = as_layers(model, example=inputs)
    assert len(row) == 1 + 8 + 1
    assert row.original_names["3.conv1.weight"] == "layer2.0.conv1.weight"
    copied = copy.deepcopy(model)
    F.cross_entropy(model(inputs), targets).backward()
    other = as_layers(copied)
    F.cross_entropy(other(inputs), targets).backward()
    for one, two in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    for one, two in zip(model.buffers(), copied.buffers(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("cut", [(1, 9), (5, 5), (9, 1)])
def test_layers_of_a_residual_network_trained_by_a_pipeline_equal_one_process(
    cut: tuple[int, int], ranks_of: Callable[[int], Any]
) -> None:
    model = residual()
    inputs, targets = pictures()
    row = as_layers(model)
    alone = copy.deepcopy(model)
    optimizer = _sgd(alone.parameters())
    schedule = one_f_one_b(2, 2)
    settings = {"loss_fn": F.cross_entropy, "optimizer": _sgd, "ranks": ranks_of(2), "partition": cut}
    with Pipeline(row, schedule, **settings) as pipe:
        pipe.step(inputs, targets)
        for part, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):  # BatchNorm sees micro-batches
            (F.cross_entropy(alone(part), wanted) / 2).backward()
        optimizer.step()
        trained = row.to_original(pipe.state_dict())
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


def test_layers_keep_the_mode_and_share_the_weights() -> None:
    model = residual().eval()
    row = as_layers(model)
    assert not row.training
    assert {id(p) for p in row.parameters()} == {id(p) for p in model.parameters()}


def test_layers_refuse_the_state_of_another_model() -> None:
    row, other = as_layers(residual()), {"weight": torch.zeros(2)}
    with pytest.raises(EngineError, match="these layers have no weight: is this the state of another model"):
        row.to_original(other)
    with pytest.raises(EngineError, match=r"the state has no .*, fc.weight, .*: is this the state of another model"):
        row.from_original(other)


def test_layers_say_what_to_do_with_an_unknown_model() -> None:
    with pytest.raises(PartitionError, match="and LSTM is neither: write its forward as an nn"):
        as_layers(nn.LSTM(2, 2))


def test_layers_notice_a_forward_of_its_own() -> None:
    class Doubled(ResNet):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(PartitionError, match="the layers of Doubled compute something else than its forward"):
        as_layers(Doubled((8, 8, 8, 8, 8), nn.BatchNorm2d), example=pictures()[0])
