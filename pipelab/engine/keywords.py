"""Keyword inputs that any layer may take: `step(inputs, targets, kwargs={"mask": mask, "scale": 2.0})`.

A layer gets those keywords that its `forward` names, from its second parameter on: the first one is what the layer
before it has made. So a mask reaches every layer with a `mask` in its signature, on whatever rank, and no other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipelab.engine import batch
from pipelab.engine.message import Value, unwrap, wrap
from pipelab.errors import EngineError, SizeError

Keywords = Mapping[str, Any]


def taken_by(layer: nn.Module) -> frozenset[str]:
    """The keywords that `layer` takes."""
    parameters = list(inspect.signature(layer.forward).parameters.values())
    return frozenset(p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def split(kwargs: Keywords, parts: int, samples: int, known: frozenset[str]) -> list[Value]:
    """`kwargs` for each of `parts` micro-batches: tensors with a row a sample are cut, other values go to all.

    Raises EngineError for a keyword that no layer takes, SizeError for a tensor with another number of rows.
    """
    if not isinstance(kwargs, Mapping):
        raise EngineError(f"kwargs must be a dict of keywords and their values, got a {type(kwargs).__qualname__}")
    for name in kwargs:
        if name not in known:
            raise EngineError(
                f"no layer takes {name!r} as a keyword: its forward has to name it, after the parameter for what the "
                f"layer before it made; the model's layers take {', '.join(sorted(known)) or 'none'}"
            )
    whole = wrap(dict(kwargs))
    for name, value in kwargs.items():
        for tensor in wrap(value).tensors:
            if tensor.dim() and len(tensor) != samples:
                raise SizeError(
                    f"{name} has {len(tensor)} rows, but there are {samples} samples, and every one needs a row in it; "
                    "a tensor that all samples share belongs into a layer, as a buffer"
                )
    if any(tensor.dim() for tensor in whole.tensors):
        return batch.split(dict(kwargs), parts, "kwargs")
    return [whole] * parts


def for_layers(layers: Sequence[nn.Module], microbatches: Sequence[Value]) -> list[list[Keywords]]:
    """For each micro-batch, for each of `layers` the keywords that it takes."""
    taken = [taken_by(layer) for layer in layers]
    return [
        [{name: value for name, value in keywords.items() if name in names} for names in taken]
        for keywords in map(unwrap, microbatches)
    ]
