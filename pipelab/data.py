"""Small real data: the handwritten digits that most chapters train on, a text of our own, and mini-batches of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from pipelab.errors import MissingPackageError, SizeError, positive_integer


@dataclass(frozen=True, eq=False, repr=False)
class Digits:
    """Handwritten digits 0 to 9, split in two: inputs float32 from 0 to 1, targets int64, one row a digit.

    Inputs are (n, 64), or (n, 1, 8, 8) where images were asked for; targets are (n,).
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    def __repr__(self) -> str:
        shape = tuple(self.train_inputs.shape[1:])
        return f"Digits({len(self.train_targets)} to train on, {len(self.test_targets)} to test on, inputs {shape})"


def digits(*, test_fraction: float = 0.2, seed: int = 0, images: bool = False) -> Digits:
    """The 1,797 handwritten digits that come with scikit-learn, scaled to [0, 1], split with each class shared alike.

    The split depends on `seed` alone; nothing is downloaded. Source: E. Alpaydin and C. Kaynak, Optical Recognition of
    Handwritten Digits, UCI Machine Learning Repository (its test set, 8x8 counts from 0 to 16).
    Raises MissingPackageError without scikit-learn, SizeError where `test_fraction` leaves a side without a class.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingPackageError(
            "the digits come with scikit-learn, which is not installed: run pip install scikit-learn, "
            "or make setup, which installs all that the book needs"
        ) from error
    pixels, classes = load_digits(return_X_y=True)
    if not 10 <= test_fraction * len(pixels) <= len(pixels) - 10:
        raise SizeError(
            f"test_fraction must leave at least 10 of the {len(pixels)} digits on either side, "
            f"so lie between 0.006 and 0.994; got {test_fraction!r}"
        )
    split = train_test_split(pixels / 16, classes, test_size=test_fraction, stratify=classes, random_state=seed)
    train_inputs, test_inputs = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    train_targets, test_targets = (torch.tensor(part, dtype=torch.int64) for part in split[2:])
    if images:
        train_inputs, test_inputs = train_inputs.view(-1, 1, 8, 8), test_inputs.view(-1, 1, 8, 8)
    return Digits(train_inputs, train_targets, test_inputs, test_targets)


def batches(
    inputs: Tensor, targets: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of mini-batches, shuffled: every row once, the last batch shorter where the rows do not divide.

    Yields pairs of `batch_size` rows of `inputs` and `targets`, in an order that depends on `seed` and `epoch` alone.
    Raises SizeError where the two differ in length.
    """
    size = positive_integer("batch_size", batch_size)
    if len(inputs) != len(targets):
        raise SizeError(f"inputs have {len(inputs)} rows, targets have {len(targets)}: every input needs one target")
    shuffle = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(len(inputs), generator=shuffle)
    return ((inputs[rows], targets[rows]) for rows in torch.split(order, size))


def text() -> str:
    """66,008 characters of plain English about pipelines: sentences of this book, frozen on 29 November 2026.

    One paragraph a line, without formulas, code or figures. It stays as it is when the chapters change.
    """
    return resources.files("pipelab").joinpath("prose.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False, repr=False)
class Characters:
    """A text as numbers: `vocabulary` has each of its characters once, sorted, and `tokens` (n,), int64, the places."""

    vocabulary: str
    tokens: Tensor

    def __repr__(self) -> str:
        return f"Characters({len(self.tokens)} characters, {len(self.vocabulary)} different)"

    def encode(self, text: str) -> Tensor:
        """The numbers of the characters of `text`, (len(text),) int64; raises SizeError for one that is not there."""
        places = {character: place for place, character in enumerate(self.vocabulary)}
        if unknown := sorted(set(text) - set(places)):
            raise SizeError(f"the vocabulary {self.vocabulary!r} has no {', '.join(map(repr, unknown))}")
        return torch.tensor([places[character] for character in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text whose numbers are `tokens`, (n,); raises SizeError for a number that no character has."""
        known = dict(enumerate(self.vocabulary))
        try:
            return "".join(known[token] for token in tokens.tolist())
        except KeyError as error:
            raise SizeError(f"the vocabulary has characters 0 to {len(known) - 1}, and none is {error}") from None

    def windows(self, steps: int, batch_size: int, length: int, *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """`steps` mini-batches of pieces of the text, each piece from a place that depends on `seed` alone.

        Yields pairs of inputs and targets, both (batch_size, length): the target of a character is the one after it.
        Raises SizeError where the text has no piece of `length` + 1 characters.
        """
        steps, size = positive_integer("steps", steps), positive_integer("batch_size", batch_size)
        places = len(self.tokens) - positive_integer("length", length)
        if places < 1:
            raise SizeError(f"a window of {length} needs {length + 1} characters, the text has {len(self.tokens)}")
        generator = torch.Generator().manual_seed(seed)
        starts = (torch.randint(places, (size, 1), generator=generator) for _ in range(steps))
        pieces = (self.tokens[start + torch.arange(length + 1)] for start in starts)
        return ((piece[:, :-1], piece[:, 1:]) for piece in pieces)


def characters(source: str | None = None) -> Characters:
    """The characters of `source`, or of the book's own `text()`, as numbers. Raises SizeError for an empty text."""
    source = text() if source is None else source
    if not source:
        raise SizeError("the text is empty, so it has no characters to number")
    vocabulary = "".join(sorted(set(source)))
    return Characters(vocabulary, torch.tensor([vocabulary.index(character) for character in source]))
