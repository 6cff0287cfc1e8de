"""What travels from stage to stage: any value, as bytes that say themselves what they are.

    ┌──────┬─────────────┬──────────┬──────────┐
    │ head │ description │ tensor 0 │ tensor 1 │     one block of bytes, one message
    └──────┴─────────────┴──────────┴──────────┘

The description holds the value with a hole for every tensor, and dtype, shape and "wants a gradient" of each tensor.
So a tuple, a dict, a mask or None arrives as it left, and the shapes may be others in every message.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from ctypes import memmove, string_at
from functools import lru_cache
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from pipelab.errors import EngineError

_ALIGN = 64  # as torch aligns its own tensors, so that arithmetic on a received one takes the same path, to the bit


class Value(NamedTuple):
    """A value taken apart: its structure as bytes, with a numbered hole for every tensor, and what fills the holes."""

    structure: bytes
    tensors: Sequence[Tensor]
    wants_gradient: Sequence[bool]  # for each tensor, whether its maker wants a gradient back


class _Wrapper(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles anything, a class of a notebook cell too, but sets the tensors aside."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unwrapper(pickle.Unpickler):
    def __init__(self, value: Value) -> None:
        super().__init__(io.BytesIO(value.structure))
        self.tensors = value.tensors

    def persistent_load(self, number: int) -> Tensor:
        return self.tensors[number]


# The structures of what travels all the time: a tensor going forward, a list of gradients coming back.
_TENSOR, _TENSORS = b"tensor", b"tensors"


def wrap(content: Any) -> Value:
    """Take anything apart. Raises EngineError where it holds something that cannot be pickled."""
    if isinstance(content, Tensor):
        return Value(_TENSOR, [content], (content.requires_grad,))
    if type(content) is list and all(isinstance(item, Tensor) for item in content):
        return Value(_TENSORS, content, tuple([tensor.requires_grad for tensor in content]))
    stream = io.BytesIO()
    wrapper = _Wrapper(stream)
    try:
        wrapper.dump(content)
    except Exception as error:
        raise EngineError(
            f"a value of type {type(content).__qualname__} cannot travel between stages: {error}. "
            "Tensors, numbers, None, and tuples, lists and dicts of them can"
        ) from error
    return Value(stream.getvalue(), wrapper.tensors, tuple(tensor.requires_grad for tensor in wrapper.tensors))


def unwrap(value: Value) -> Any:
    """The content again, with the value's tensors in the holes."""
    if value.structure == _TENSOR:
        return value.tensors[0]
    if value.structure == _TENSORS:
        return list(value.tensors)
    return _Unwrapper(value).load()


def copied(value: Value) -> Value:
    """The same value in memory of its own, and outside any graph."""
    return value._replace(tensors=[tensor.detach().clone() for tensor in value.tensors])


def payload_bytes(value: Value) -> int:
    """Bytes of the tensors alone."""
    return sum([tensor.nbytes for tensor in value.tensors])


# --- bytes ----------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """The first bytes of every message."""

    tag: int  # which action's value it is
    step: int
    description: int  # bytes of the description
    size: int  # bytes of the whole message, this head included
    acknowledged: int  # messages that the sender has had from the receiver
    stamp: float  # when the value may be used, on the clock of emulated accelerators; 0 without one
    sent: float  # when it was sent, in seconds of the ranks' common clock


Kinds = tuple[tuple[torch.dtype, torch.Size], ...]  # of the tensors

_HEAD = struct.Struct("<4sIIIQQdd")
_MARK = b"lab\x01"
HEAD_BYTES = _HEAD.size


def pack(value: Value, tag: int, step: int, acknowledged: int, stamp: float, sent: float) -> Tensor:
    """Head, description and tensors in one block of bytes, a uint8 tensor."""
    kinds = tuple([(tensor.dtype, tensor.shape) for tensor in value.tensors])
    description, offsets, size = _describe(value.structure, kinds, tuple(value.wants_gradient))
    block = torch.empty(size, dtype=torch.uint8)
    start = block.data_ptr()
    head = _HEAD.pack(_MARK, tag, step, len(description), size, acknowledged, stamp, sent) + description
    memmove(start, head, len(head))
    for tensor, (dtype, shape), offset in zip(value.tensors, kinds, offsets, strict=True):
        if tensor.layout is not torch.strided:
            raise EngineError(f"only dense tensors travel between stages, found one of layout {tensor.layout}")
        if _lies_as_it_reads(tensor):
            memmove(start + offset, tensor.data_ptr(), tensor.nbytes)
        else:
            _window(block, offset, dtype, shape).copy_(tensor.detach())
    return block


def read_head(block: Tensor) -> Head:
    """The head of a message. Raises EngineError where the bytes are none of ours."""
    mark, *fields = _HEAD.unpack(string_at(block.data_ptr(), HEAD_BYTES))
    if mark != _MARK:
        raise EngineError(f"received {block.numel()} bytes that are no message of a pipeline: they begin with {mark!r}")
    return Head(*fields)


def unpack(block: Tensor, head: Head) -> Value:
    """The value of a message. Its tensors lie in the block itself; nothing is copied."""
    description = string_at(block.data_ptr() + HEAD_BYTES, head.description)
    structure, kinds, wants, offsets = _understand(description)
    tensors = [_window(block, at, dtype, shape) for (dtype, shape), at in zip(kinds, offsets, strict=True)]
    return Value(structure, tensors, wants)


# Messages repeat from step to step, so both ends keep what they worked out for one.


@lru_cache(maxsize=4096)
def _describe(structure: bytes, kinds: Kinds, wants: tuple[bool, ...]) -> tuple[bytes, list[int], int]:
    """The description, where each tensor begins behind it, and where the message ends."""
    plain = [(dtype, tuple(shape)) for dtype, shape in kinds]
    description = pickle.dumps((structure, plain, wants), protocol=5)
    offsets, end = _lay_out(kinds, HEAD_BYTES + len(description))
    return description, offsets, end


@lru_cache(maxsize=4096)
def _understand(description: bytes) -> tuple[bytes, Kinds, tuple[bool, ...], list[int]]:
    structure, plain, wants = pickle.loads(description)
    kinds = tuple((dtype, torch.Size(shape)) for dtype, shape in plain)
    return structure, kinds, wants, _lay_out(kinds, HEAD_BYTES + len(description))[0]


def _lay_out(kinds: Kinds, start: int) -> tuple[list[int], int]:
    """Where each tensor begins, and where the last one ends."""
    offsets = []
    for dtype, shape in kinds:
        start = -(-start // _ALIGN) * _ALIGN
        offsets.append(start)
        start += shape.numel() * dtype.itemsize
    return offsets, start


def _lies_as_it_reads(tensor: Tensor) -> bool:
    """Whether its memory, byte for byte, is its content: copying that takes less than half as long as `copy_`."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()
    return plain and not (tensor.is_neg() or tensor.is_conj())


def _window(block: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor that lies in the block, yet is no view of it: autograd lets a layer write into it in place."""
    window: Any = torch.empty(0, dtype=dtype)
    return window.set_(block.untyped_storage(), offset // dtype.itemsize, shape)  # type: ignore[no-any-return]
