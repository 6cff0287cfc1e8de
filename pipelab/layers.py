"""Models of others as a row of layers: what `as_layers` cuts, a pipeline can train.

    GPT2LMHeadModel    embedding │ block 0 │ ... │ block n-1 │ head
    ResNet             stem │ every block of layer1 to layer4 │ head

The layers are made of the model's own modules, so both share their weights. Only names differ: the model's
`transformer.h.0.ln_1.weight` is `1.block.ln_1.weight` of the row, and `original_names` says which is which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.errors import EngineError, PartitionError

_RESNET = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc")


class Layers(nn.Sequential):
    """A model as a row of layers; `original_names[name in the row]` is the name in the model that it came from."""

    original_names: Mapping[str, str] = {}

    def to_original(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state_dict of these layers, under the model's own names: what `model.load_state_dict` takes.

        Raises EngineError for a name that these layers do not have.
        """
        _refuse("these layers have no", set(state) - set(self.original_names))
        return {self.original_names[name]: value for name, value in state.items()}

    def from_original(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state_dict of the model, under the names of these layers: what `pipe.load_state_dict` takes.

        Raises EngineError where one is missing.
        """
        _refuse("the state has no", set(self.original_names.values()) - set(state))
        return {name: state[original] for name, original in self.original_names.items()}


def _refuse(lack: str, names: set[str]) -> None:
    if names:
        raise EngineError(f"{lack} {', '.join(sorted(names))}: is this the state of another model?")


def as_layers(model: nn.Module, example: Tensor | None = None) -> Layers:
    """The layers of `model` in a row that a Pipeline can cut, and that computes what the model computes.

    Known are GPT2LMHeadModel of Hugging Face's transformers (token numbers (n, tokens) to logits, without a cache or a
    padding mask) and residual networks with the attributes of torchvision's ResNet (pictures to scores). With `example`
    both run on it in eval mode, to be sure.
    Raises PartitionError for any other model, and where the outputs for `example` differ.
    """
    name = type(model).__name__
    if name == "GPT2LMHeadModel":
        row = Layers(*_gpt2(model))
    elif all(hasattr(model, part) for part in _RESNET):
        row = Layers(*_resnet(model))
    else:
        raise PartitionError(
            f"as_layers knows GPT2LMHeadModel of transformers and residual networks with the attributes of "
            f"torchvision's ResNet, and {name} is neither: write its forward as an nn.Sequential in which each layer "
            "takes what the one before gave (pipelab.models.gpt is one), and load its state_dict into that"
        )
    row.original_names = _names(row, model)
    row.train(model.training)
    if example is not None:
        _compare(model, row, example)
    return row


# --- GPT-2 ----------------------------------------------------------------------------------------------------------


class _Embedding(nn.Module):
    """Words plus positions, then dropout."""

    def __init__(self, words: nn.Module, positions: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.words, self.positions, self.dropout = words, positions, dropout

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.words(tokens) + self.positions(torch.arange(tokens.shape[-1], device=tokens.device))
        hidden: Tensor = self.dropout(embedded)
        return hidden


class _Block(nn.Module):
    """One block, under the causal mask that the model would have made for all of them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[-2]
        future = torch.full((length, length), torch.finfo(hidden.dtype).min, device=hidden.device, dtype=hidden.dtype)
        result = self.block(hidden, attention_mask=future.triu(1)[None, None])
        stream: Tensor = result[0] if isinstance(result, tuple) else result  # a tuple before transformers 5
        return stream


class _Head(nn.Module):
    """The last norm and the scores."""

    def __init__(self, norm: nn.Module, scores: nn.Module) -> None:
        super().__init__()
        self.norm, self.scores = norm, scores

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.scores(self.norm(hidden))
        return logits


def _gpt2(model: Any) -> Iterable[nn.Module]:
    body = model.transformer
    yield _Embedding(body.wte, body.wpe, body.drop)
    yield from map(_Block, body.h)
    yield _Head(body.ln_f, model.lm_head)


# --- residual networks ----------------------------------------------------------------------------------------------


def _resnet(model: Any) -> Iterable[nn.Module]:
    # relu works in place, on what its own layer made and not on what another rank sent
    yield nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    for part in (model.layer1, model.layer2, model.layer3, model.layer4):
        yield from part
    yield nn.Sequential(model.avgpool, nn.Flatten(), model.fc)


# --- names ----------------------------------------------------------------------------------------------------------


def _names(row: nn.Module, model: nn.Module) -> dict[str, str]:
    """By the tensors themselves; the names of a shared one are paired in order."""
    originals: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        originals[id(tensor)].append(name)
    return {name: originals[id(tensor)].pop(0) for name, tensor in row.state_dict(keep_vars=True).items()}


def _compare(model: nn.Module, row: nn.Module, example: Tensor) -> None:
    was_training = model.training
    try:
        model.eval(), row.eval()
        with torch.no_grad():
            expected, found = model(example), row(example)
    finally:
        model.train(was_training), row.train(was_training)
    expected = getattr(expected, "logits", expected)
    if not torch.allclose(expected, found, rtol=1e-4, atol=1e-5):
        worst = (expected - found).abs().max().item()
        raise PartitionError(
            f"the layers of {type(model).__name__} compute something else than its forward: outputs differ by up to "
            f"{worst:.3g}; it seems to have a forward of its own, so write it as an nn.Sequential yourself"
        )
