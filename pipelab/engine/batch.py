"""A batch, cut into micro-batches: sizes as `torch.tensor_split` has them, so they differ by one at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipelab.engine.message import Value, unwrap, wrap
from pipelab.errors import EngineError, SizeError


def split(content: Any, parts: int, what: str) -> list[Value]:
    """`content`, cut into `parts` along dimension 0 of all its tensors; what is no tensor goes into every part.

    Raises EngineError where it holds no tensor, SizeError where its tensors differ in length.
    """
    whole = wrap(content)
    rows(whole, what)
    pieces = [
        torch.tensor_split(tensor.detach(), parts) if tensor.dim() else (tensor.detach(),) * parts
        for tensor in whole.tensors
    ]
    wants = [False] * len(pieces)
    return [Value(whole.structure, [piece[part] for piece in pieces], wants) for part in range(parts)]


def rows(value: Value, what: str) -> int:
    """The samples in `value`: the length of its tensors' dimension 0."""
    lengths = sorted({len(tensor) for tensor in value.tensors if tensor.dim()})
    if not lengths:
        raise EngineError(f"{what} hold no tensor with a row a sample; lists and arrays have to become tensors first")
    if len(lengths) > 1:
        raise SizeError(
            f"the tensors of {what} have {' and '.join(map(str, lengths))} rows: every sample needs one row in each"
        )
    return lengths[0]


def join(parts: Sequence[Value]) -> Any:
    """The opposite of `split`: one value whose tensors are those of the parts, one under the other."""
    tensors = [torch.cat(pieces) for pieces in zip(*(part.tensors for part in parts), strict=True)]
    return unwrap(Value(parts[0].structure, tensors, parts[0].wants_gradient))
