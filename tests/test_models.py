"""The models have the shapes that they say, the same weights for the same seed, and they learn."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab.data import batches, digits
from pipelab.errors import CostError, SizeError
from pipelab.models import cnn, gpt, mlp, next_token_loss, resnet, sample_tokens

BUILDERS = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": lambda **key: gpt(11, width=8, depth=2, heads=2, context=6, **key),
}
ALL = {**BUILDERS, "resnet": resnet}
INPUTS = {"mlp": torch.rand(3, 64), "cnn": torch.rand(3, 1, 8, 8), "gpt": torch.arange(18).view(3, 6) % 11}


@pytest.mark.parametrize(
    ("name", "shape", "num_layers"), [("mlp", (3, 10), 7), ("cnn", (3, 10), 9), ("gpt", (3, 6, 11), 4)]
)
def test_models_are_rows_of_layers_with_the_stated_shapes(name, shape, num_layers):
    model = BUILDERS[name]()
    assert type(model) is nn.Sequential
    assert len(model) == num_layers
    assert model(INPUTS[name]).shape == shape


def test_models_resnet_scores_pictures():
    assert resnet()(INPUTS["cnn"]).shape == (3, 10)
    assert [type(module) for module in resnet(norm=nn.BatchNorm2d).modules()].count(nn.BatchNorm2d) == 1 + 8 * 2 + 3


@pytest.mark.parametrize("name", ALL)
def test_models_depend_on_the_seed_alone(name):
    first = ALL[name](seed=1).state_dict()
    torch.manual_seed(7)
    again, other = ALL[name](seed=1).state_dict(), ALL[name](seed=2).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ALL)
def test_models_leave_the_random_numbers_as_they_were(name):
    before = torch.get_rng_state()
    ALL[name](seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", BUILDERS)
def test_models_are_the_same_when_cut_and_run_stage_by_stage(name):
    model, value = BUILDERS[name]().eval(), INPUTS[name]
    for layer in range(len(model)):
        value = model[layer : layer + 1](value)
    assert torch.equal(value, model(INPUTS[name]))


@pytest.mark.parametrize(("build", "images"), [(mlp, False), (cnn, True)])
def test_models_read_over_95_percent_of_unseen_digits(build, images):
    model, data = build(), digits(images=images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(20):
        for inputs, targets in batches(data.train_inputs, data.train_targets, 32, epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    with torch.no_grad():
        right = model.eval()(data.test_inputs).argmax(1) == data.test_targets
    assert right.float().mean() > 0.95


def test_models_gpt_sees_no_token_of_the_future():
    model = BUILDERS["gpt"]()
    tokens = INPUTS["gpt"][:1]
    changed = tokens.clone()
    changed[0, 4:] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.allclose(before[0, 4:], after[0, 4:])


def test_models_gpt_tells_positions_apart():
    embedding = BUILDERS["gpt"]()[0]
    embedded = embedding(torch.zeros(1, 6, dtype=torch.int64))[0]
    torch.testing.assert_close(embedded, embedding.token.weight[0] + embedding.position.weight)


def test_models_gpt_attention_equals_the_formula():
    width, heads = 8, 2
    attention = gpt(11, width=width, depth=1, heads=heads)[1].attention
    stream = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    query, key, value = attention.query_key_value(stream).split(width, dim=-1)
    per_head = []
    for head in range(heads):
        part = slice(head * width // heads, (head + 1) * width // heads)
        scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(width // heads)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        per_head.append(scores.softmax(-1) @ value[..., part])
    torch.testing.assert_close(attention(stream), attention.output(torch.cat(per_head, -1)))


def test_models_gpt_has_12_squared_widths_a_block():
    vocab, width, depth, context = 65, 32, 3, 16
    model = gpt(vocab, width=width, depth=depth, heads=4, context=context)
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
    block = 12 * width**2 + 13 * width  # 4 + 8 squared in matrices; 9 widths of biases, 4 of the two norms
    assert counts == [(vocab + context) * width, *[block] * depth, vocab * width + 2 * width]


def test_models_gpt_starts_near_a_uniform_guess_with_scaled_projections():
    depth, vocab = 8, 65
    model = gpt(vocab, width=64, depth=depth, heads=4)
    tokens = torch.arange(128).view(2, 64) % vocab
    assert next_token_loss(model(tokens), tokens).item() == pytest.approx(math.log(vocab), abs=0.1)
    assert model[1].expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model[1].contract.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * depth), rel=0.05)


def test_models_gpt_drops_only_while_training():
    model = gpt(11, width=8, depth=2, heads=2, dropout=0.5)
    assert not torch.equal(model(INPUTS["gpt"]), model(INPUTS["gpt"]))
    model.eval()
    assert torch.equal(model(INPUTS["gpt"]), model(INPUTS["gpt"]))


def test_models_gpt_learns_to_count():
    model = gpt(11, width=32, depth=2, heads=2, context=12)
    tokens = (torch.arange(12) + torch.arange(11).unsqueeze(1)) % 11
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_models_next_token_loss_is_the_mean_over_all_tokens():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -sum(logits[n, t].log_softmax(-1)[targets[n, t]] for n in range(2) for t in range(3)) / 6
    torch.testing.assert_close(next_token_loss(logits, targets), by_hand)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mlp((64,)), "an input and an output width"),
        (lambda: mlp((64, 0, 10)), r"widths\[1\] must be at least 1"),
        (lambda: cnn((16, 1.5)), r"channels\[1\] must be a whole number"),
        (lambda: resnet((8, 8)), "needs five widths"),
        (lambda: gpt(11, width=10, heads=4), "width must be a multiple of heads: 10 is not one of 4"),
        (lambda: gpt(11, depth=0), "depth must be at least 1"),
        (lambda: gpt(11, context=4)(torch.zeros(1, 5, dtype=torch.int64)), "5 tokens is longer than .* context of 4"),
    ],
)
def test_models_refuse_sizes_that_make_no_model(build, message):
    with pytest.raises(SizeError, match=message):
        build()


def test_models_sample_tokens_by_the_logits_they_get():
    logits = torch.tensor([0.0, math.log(3.0)])  # chances 1/4 and 3/4; 1/10 and 9/10 at temperature 1/2
    seen = []

    def predict(tokens):
        seen.append(tokens)
        return logits.expand(1, tokens.shape[1], 2)

    for temperature, chance in ((1.0, 3 / 4), (0.5, 9 / 10)):
        drawn = sample_tokens(predict, torch.tensor([0, 0]), 2000, context=3, temperature=temperature)[2:]
        assert drawn.float().mean().item() == pytest.approx(chance, abs=0.03)
    assert {tokens.shape for tokens in seen} == {(1, 2), (1, 3)}
    with pytest.raises(SizeError, match="temperature must be above 0, got 0"):
        sample_tokens(predict, torch.tensor([0]), 1, temperature=0)
    with pytest.raises(SizeError, match="start must hold at least one token"):
        sample_tokens(predict, torch.tensor([], dtype=torch.int64), 1)


def test_models_refuse_a_dropout_that_is_no_share():
    with pytest.raises(CostError, match="dropout must be a number, got nan"):
        gpt(11, width=8, heads=2, dropout=math.nan)
