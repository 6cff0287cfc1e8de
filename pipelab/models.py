"""The models of the book, each an `nn.Sequential`: a row of layers, so that any contiguous slice of it can be a stage.

`resnet` alone is none: it stands for the models of others, which `pipelab.layers.as_layers` turns into such a row.
The weights depend on `seed` alone, and building a model leaves torch's own random numbers as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelab.errors import SizeError, amount, positive_integer


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, modules are made on the CPU from random numbers of their own."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also reseeds every GPU
        yield


def mlp(widths: Sequence[int] = (64, 96, 96, 96, 10), *, seed: int = 0) -> nn.Sequential:
    """Linear layers from each width to the next with a ReLU between them: (n, widths[0]) to (n, widths[-1]).

    The default reads the 64 pixels of a digit and scores 10 classes in 7 layers, 4 of them Linear.
    Raises SizeError for fewer than two widths.
    """
    sizes = [positive_integer(f"widths[{place}]", width) for place, width in enumerate(widths)]
    if len(sizes) < 2:
        raise SizeError(f"an MLP needs an input and an output width, got widths {tuple(sizes)}")
    with _seeded(seed):
        layers = [module for inside, outside in pairwise(sizes) for module in (nn.Linear(inside, outside), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(channels: Sequence[int] = (16, 32), *, classes: int = 10, seed: int = 0) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU for each entry of `channels`, then one pooling and one Linear layer.

    Pictures (n, 1, 8, 8) to scores (n, classes). Its batch statistics make it the model that tells whether training
    with micro-batches is still the same training.
    """
    sizes = [1, *(positive_integer(f"channels[{place}]", count) for place, count in enumerate(channels))]
    classes = positive_integer("classes", classes)
    with _seeded(seed):
        layers: list[nn.Module] = []
        for inside, outside in pairwise(sizes):
            layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4 * sizes[-1], classes)]
    return nn.Sequential(*layers)


def resnet(
    widths: Sequence[int] = (8, 8, 12, 12, 16),
    *,
    norm: Callable[[int], nn.Module] | None = None,
    seed: int = 0,
) -> ResNet:
    """A residual network with torchvision's names, small enough for digits: (n, 1, 8, 8) to scores (n, 10).

    `widths` are the channels behind the stem and behind each of its four parts. `norm` makes a norm for so many
    channels: torchvision's is `nn.BatchNorm2d`, which sees micro-batches; the default is a GroupNorm of 4 groups, which
    sees one picture.
    Raises SizeError where `widths` are not five.
    """
    sizes = [positive_integer(f"widths[{place}]", width) for place, width in enumerate(widths)]
    if len(sizes) != 5:
        raise SizeError(f"a residual network needs five widths, of its stem and four parts, got {tuple(sizes)}")
    with _seeded(seed):
        return ResNet(sizes, norm or partial(nn.GroupNorm, 4))


def gpt(
    vocab: int,
    *,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    context: int = 64,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    """A decoder-only transformer of `depth + 2` layers: embedding, `depth` blocks, head.

    Token numbers (n, tokens), int64, to logits (n, tokens, vocab), with at most `context` tokens. Between layers flows
    one tensor (n, tokens, width), so every cut sends the same. Embedding and head do not share a matrix.
    Weights start as in GPT-2 (Radford et al. 2019, section 2.3): normal with deviation 0.02, and the two projections of
    a block that write to the residual stream divided by sqrt(2 * depth).
    Raises SizeError where `heads` does not divide `width`, CostError for a `dropout` that is no share; the model raises
    SizeError for a sequence beyond its context.
    """
    sizes = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "context": context}
    vocab, width, depth, heads, context = (positive_integer(name, size) for name, size in sizes.items())
    amount("dropout", dropout, most=1)
    if width % heads:
        raise SizeError(f"width must be a multiple of heads: {width} is not one of {heads}")
    with _seeded(seed):
        blocks = [Block(width, heads, dropout) for _ in range(depth)]
        model = nn.Sequential(Embedding(vocab, width, context, dropout), *blocks, Head(width, vocab))
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in blocks:
            for projection in (block.attention.output, block.contract):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * depth))
    return model


class ResNet(nn.Module):
    """Stem, four parts of two blocks each, pooling, scores; the third part halves the picture."""

    def __init__(self, widths: Sequence[int], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, widths[0], 3, 1, 1, bias=False)
        self.bn1 = norm(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 1, 1)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(ResidualBlock(inside, outside, stride, norm), ResidualBlock(outside, outside, 1, norm))
            for (inside, outside), stride in zip(pairwise(widths), (1, 1, 2, 1), strict=True)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return scores


class ResidualBlock(nn.Module):
    """Two convolutions added to what came in, or to a projection of it where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), norm(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), norm(outside)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inside == outside
        self.downsample = None if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride), norm(outside))

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        inner: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu(inner + around)
        return out


class Embedding(nn.Module):
    """Token plus position: (n, tokens) int64 to (n, tokens, width)."""

    def __init__(self, vocab: int, width: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[-1], self.position.num_embeddings
        if length > context:
            raise SizeError(f"a sequence of {length} tokens is longer than the model's context of {context}")
        embedded: Tensor = self.dropout(self.token(tokens) + self.position.weight[:length])
        return embedded


class Attention(nn.Module):
    """Causal self-attention: a token sees itself and those before it; (n, tokens, width) to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, stream: Tensor) -> Tensor:
        each = self.query_key_value.in_features // self.heads
        split = self.query_key_value(stream).unflatten(-1, (3, -1, each))  # (n, tokens, 3, heads, width / heads), where
        # a tensor-parallel rank has some of the heads only
        query, key, value = split.transpose(1, 3).unbind(2)  # each (n, heads, tokens, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """Attention, then two Linear layers four times as wide, each on a normalised copy and added; shape kept."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.expand_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attention(self.attention_norm(stream)))
        hidden: Tensor = F.gelu(self.expand(self.expand_norm(stream)))
        written: Tensor = self.dropout(self.contract(hidden))
        return stream + written


class Head(nn.Module):
    """Final norm and one score a word: (n, tokens, width) to (n, tokens, vocab)."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, vocab, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.score(self.norm(stream))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over all tokens: logits (n, tokens, vocab), targets (n, tokens) int64."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def sample_tokens(
    predict: Callable[[Tensor], Tensor],
    start: Tensor,
    count: int,
    *,
    context: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """`start`, (n,) int64, and `count` tokens more, each drawn by the probabilities that `predict` gives it.

    `predict` takes tokens (1, n) to logits (1, n, vocab): a model, or the `predict` of a pipeline. It sees the last
    `context` tokens. Logits are divided by `temperature`: below 1, likely tokens become likelier. The draws depend on
    `seed` alone. Raises SizeError for an empty start, and for a temperature that is not positive.
    """
    if not amount("temperature", temperature):
        raise SizeError(f"temperature must be above 0, got {temperature!r}")
    if not len(start):
        raise SizeError("start must hold at least one token, for the next is drawn by what came before it")
    count, context = positive_integer("count", count), positive_integer("context", context)
    draws, tokens = torch.Generator().manual_seed(seed), start
    for _ in range(count):
        with torch.no_grad():
            chances = (predict(tokens[None, -context:])[0, -1] / temperature).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draws)])
    return tokens
