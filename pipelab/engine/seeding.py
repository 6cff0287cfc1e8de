"""Random numbers that belong to a place in the training, and not to the order in which ranks compute.

Before every layer the generator begins anew, with a seed of (pipeline's seed, step, layer, micro-batch). So dropout is
the same in every schedule and split, and in the second run of a forward. Layers that surely draw nothing are spared
that: it takes as long as a third of a small layer.
"""

from __future__ import annotations

import struct
import zlib

import torch
from torch import nn

from pipelab.engine.deferred import Able

_DRAWS_NOTHING = {nn.Linear, nn.ReLU, nn.GELU, nn.Tanh, nn.LayerNorm, nn.Embedding, nn.Flatten, nn.Conv2d}


def draws_nothing(layer: nn.Module) -> bool:
    """Whether it surely draws no random numbers: a layer of torch's own, as torch made it, without hooks."""
    if type(layer) not in _DRAWS_NOTHING or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return isinstance(vars(layer).get("forward"), Able | type(None))


def seed(*numbers: int) -> None:
    """Set torch's random numbers to those that belong to `numbers`."""
    torch.default_generator.manual_seed(zlib.crc32(struct.pack(f"{len(numbers)}q", *numbers)))
