"""The digits are all there, scaled, shared out by class, and the same for the same seed; so are the characters."""

import math
import subprocess
import sys
from collections import Counter
from importlib import resources
from itertools import islice
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from pipelab.data import batches, characters, digits, text
from pipelab.errors import MissingPackageError, SizeError
from pipelab.models import gpt, next_token_loss, sample_tokens


def sorted_rows(inputs):
    return sorted(map(tuple, inputs.tolist()))


def test_digits_hold_every_digit_once_scaled_to_one():
    data = digits()
    together = torch.cat([data.train_inputs, data.test_inputs])
    original = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    assert sorted_rows(together) == sorted_rows(original)
    assert (together.min(), together.max()) == (0, 1)


def test_digits_have_the_shapes_and_types_that_models_take():
    data = digits()
    assert (data.train_inputs.shape, data.test_inputs.shape) == ((1437, 64), (360, 64))
    assert (data.train_inputs.dtype, data.train_targets.dtype) == (torch.float32, torch.int64)
    assert (len(data.train_targets), len(data.test_targets)) == (1437, 360)
    assert "1437 to train on, 360 to test on, inputs (64,)" in repr(data)


def test_digits_keep_each_picture_with_its_class():
    original = load_digits()
    classes = {tuple(pixels / 16): target for pixels, target in zip(original.data, original.target, strict=True)}
    data = digits(seed=3)
    assert [classes[tuple(row)] for row in data.test_inputs.tolist()] == data.test_targets.tolist()


def test_digits_as_images_are_the_same_pixels():
    flat, images = digits(), digits(images=True)
    assert images.train_inputs.shape == (1437, 1, 8, 8)
    assert torch.equal(images.test_inputs.flatten(1), flat.test_inputs)


@pytest.mark.parametrize("test_fraction", [0.1, 0.2, 0.5])
def test_digits_share_each_class_alike(test_fraction):
    data = digits(test_fraction=test_fraction)
    tested = data.test_targets.bincount(minlength=10)
    every = tested + data.train_targets.bincount(minlength=10)
    assert ((tested - test_fraction * every).abs() <= 1).all()


def test_digits_are_split_by_the_seed_alone():
    first = digits(seed=1)
    torch.manual_seed(99)
    again, other = digits(seed=1), digits(seed=2)
    assert torch.equal(first.test_inputs, again.test_inputs)
    assert not torch.equal(first.test_inputs, other.test_inputs)


@pytest.mark.parametrize("test_fraction", [0, 1, -0.2, 0.001, 0.999, float("nan"), 20])
def test_digits_refuse_a_fraction_that_empties_a_side(test_fraction):
    with pytest.raises(SizeError, match="test_fraction must leave at least 10"):
        digits(test_fraction=test_fraction)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingPackageError, match="pip install scikit-learn"):
        digits()


def test_batches_give_every_row_once_with_its_target():
    inputs = torch.arange(10.0).unsqueeze(1)
    pairs = list(batches(inputs, inputs.squeeze(1), 4))
    assert [len(rows) for rows, _ in pairs] == [4, 4, 2]
    assert all(torch.equal(rows.squeeze(1), targets) for rows, targets in pairs)
    assert sorted(torch.cat([targets for _, targets in pairs]).tolist()) == list(range(10))


def test_batches_are_shuffled_by_seed_and_epoch_alone():
    rows = torch.arange(50)

    def order(**key):
        return torch.cat([part for part, _ in batches(rows, rows, 8, **key)]).tolist()

    before = torch.get_rng_state()
    orders = [order(seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(found) for found in orders}) == 4
    assert order(seed=1, epoch=1) == orders[3]
    assert list(range(50)) not in orders
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_refuse_rows_without_a_target():
    with pytest.raises(SizeError, match="inputs have 3 rows, targets have 2"):
        batches(torch.zeros(3), torch.zeros(2), 1)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_batches_refuse_a_size_that_is_no_count(batch_size):
    with pytest.raises(SizeError, match="batch_size must be"):
        batches(torch.zeros(3), torch.zeros(3), batch_size)


def test_text_is_30_kb_of_plain_prose_inside_the_package():
    stored = resources.files("pipelab").joinpath("prose.txt").read_bytes()
    assert stored == text().encode("ascii")
    assert len(stored) == 66_008 > 30_000
    assert set(text()) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.;:?'-\n")
    lines = text().splitlines()
    assert len(set(lines)) == len(lines)
    assert all(line[-1] in ".?" for line in lines)


def test_text_goes_into_the_wheel():
    root = Path(__file__).parents[1]
    # The wheel takes every file under pipelab/ that git does not ignore.
    assert 'packages = ["pipelab"]' in (root / "pyproject.toml").read_text()
    ignored = subprocess.run(["git", "check-ignore", "-q", "pipelab/prose.txt"], cwd=root, check=False)
    assert ignored.returncode != 0


def test_characters_give_the_text_back():
    letters = characters()
    assert letters.decode(letters.tokens) == text()
    assert letters.tokens.dtype == torch.int64
    assert list(letters.vocabulary) == sorted(set(text()))
    assert repr(characters("abba")) == "Characters(4 characters, 2 different)"
    assert characters("abba").tokens.tolist() == [0, 1, 1, 0]


def test_characters_windows_pair_each_character_with_the_next():
    letters = characters("abcdefgh")
    pairs = list(letters.windows(3, 50, 4))
    assert [inputs.shape for inputs, _ in pairs] == [(50, 4)] * 3
    for inputs, targets in pairs:
        assert torch.equal(targets, inputs + 1)  # in this text the next character has the next number
        assert set(inputs[:, 0].tolist()) == {0, 1, 2, 3}  # every place, to the last


def test_characters_windows_depend_on_the_seed_alone():
    letters = characters()
    first = next(letters.windows(1, 4, 16, seed=1))[0]
    before = torch.get_rng_state()
    again, other = next(letters.windows(9, 4, 16, seed=1))[0], next(letters.windows(1, 4, 16, seed=2))[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: characters(""), "the text is empty"),
        (lambda: characters("ab").encode("abc!"), "has no '!', 'c'"),
        (lambda: characters("ab").decode(torch.tensor([0, 2])), "has characters 0 to 1, and none is 2"),
        (lambda: characters("ab").decode(torch.tensor([-1])), "has characters 0 to 1, and none is -1"),
        (lambda: characters("abc").windows(1, 1, 3), "a window of 3 needs 4 characters, the text has 3"),
        (lambda: characters("abc").windows(0, 1, 2), "steps must be"),
        (lambda: characters("abc").windows(1, 1.5, 2), "batch_size must be"),
    ],
)
def test_characters_refuse_what_they_cannot_give(build, message):
    with pytest.raises(SizeError, match=message):
        build()


def test_characters_teach_a_gpt_more_than_their_frequencies():
    counts = Counter(text())
    entropy = -sum(n / len(text()) * math.log(n / len(text())) for n in counts.values())
    letters = characters()
    model = gpt(len(letters.vocabulary), width=64, depth=2, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in letters.windows(40, 16, 24):
        optimizer.zero_grad()
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > entropy  # a start that knows nothing
    assert max(islice(reversed(losses), 5)) < entropy - 0.2
    written = sample_tokens(model, letters.encode("The "), 20, context=32)
    assert letters.decode(written[:4]) == "The "
    assert written.shape == (24,)
    assert torch.equal(written, sample_tokens(model, letters.encode("The "), 20, context=32))
