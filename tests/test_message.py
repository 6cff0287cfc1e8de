"""Messages: any value arrives as it left."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipelab.engine import message
from pipelab.engine.message import pack, read_head, unpack, unwrap, wrap
from pipelab.errors import EngineError

Point = namedtuple("Point", "x y")
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@dataclass
class Skip:
    value: Tensor
    mask: Tensor | None


def sent_and_received(content: Any) -> Any:
    block = pack(wrap(content), tag=1, step=2, acknowledged=3, stamp=0.5, sent=7.25)
    return unwrap(unpack(block, read_head(block)))


def same(a: Any, b: Any) -> bool:
    """Equal in structure, type, dtype, shape and every bit."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Skip):
        return isinstance(b, Skip) and same(vars(a), vars(b))
    return type(a) is type(b) and a == b


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "content",
    [
        torch.arange(6.0).reshape(2, 3),
        (torch.ones(2), torch.zeros(3, dtype=torch.int64)),
        {
            "x": torch.ones(2, 2),
            "mask": torch.tensor([True, False]),
            "length": 7,
            "scale": 0.5,
            "name": "a",
            "none": None,
        },
        [torch.ones(1), [torch.zeros(2), ()], {"deep": (torch.ones(3), None)}],
        Point(torch.ones(2), True),
        Skip(torch.ones(2), None),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::3],
        torch.ones(1).expand(5),
        torch.nn.Parameter(torch.ones(3)),
        None,
        (),
        17,
    ],
    ids=lambda content: type(content).__name__,
)
def test_message_brings_any_value_as_it_left(content: Any) -> None:
    received = sent_and_received(content)
    assert same(torch.Tensor(content.detach()) if isinstance(content, torch.nn.Parameter) else content, received)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=5))
def test_message_keeps_dtype_shape_and_bits_of_every_tensor(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randint(-100, 100, shape).to(dtype) for dtype, shape in kinds]
    assert same(tensors, sent_and_received(tensors))


def test_message_says_which_tensors_want_a_gradient() -> None:
    content = {"learnt": torch.ones(2, requires_grad=True), "given": torch.ones(2), "index": torch.ones(2).long()}
    block = pack(wrap(content), 0, 0, 0, 0.0, 0.0)
    assert unpack(block, read_head(block)).wants_gradient == (True, False, False)


def test_message_head_tells_what_the_sender_said() -> None:
    block = pack(wrap(torch.ones(3)), tag=1, step=2, acknowledged=3, stamp=0.5, sent=7.25)
    head = read_head(block)
    assert (head.tag, head.step, head.acknowledged, head.stamp, head.sent) == (1, 2, 3, 0.5, 7.25)
    assert head.size == block.numel()


def test_message_tensors_lie_where_torch_would_put_them() -> None:
    """Received tensors are aligned as torch aligns its own, so arithmetic on them is the same to the bit."""
    block = pack(wrap([torch.ones(3, dtype=torch.int8), torch.ones(5), torch.ones(7)]), 0, 0, 0, 0.0, 0.0)
    received = unpack(block, read_head(block))
    assert [tensor.data_ptr() % 64 for tensor in received.tensors] == [block.data_ptr() % 64] * 3
    assert block.data_ptr() % 64 == 0


def test_message_may_be_written_into_by_a_layer() -> None:
    """A received tensor is no view of the block, or a layer that works in place could not read it."""
    block = pack(wrap((torch.ones(3), torch.zeros(3))), 0, 0, 0, 0.0, 0.0)
    first, second = unpack(block, read_head(block)).tensors
    before = second._version
    first.mul_(5)
    assert second.tolist() == [0, 0, 0]
    assert second._version == before  # autograd would take a change for one of the second, and refuse its backward
    assert not first._is_view()


def test_message_refuses_foreign_bytes() -> None:
    with pytest.raises(EngineError, match=r"are no message of a pipeline: they begin with b'wxyz'"):
        read_head(torch.tensor(list(b"wxyz"), dtype=torch.uint8).repeat(message.HEAD_BYTES))


def test_message_refuses_what_cannot_travel() -> None:
    with pytest.raises(EngineError, match=r"type generator cannot travel between stages.*Tensors, numbers, None"):
        wrap(i for i in range(3))
    with pytest.raises(
        EngineError, match=r"only dense tensors travel between stages, found one of layout torch\.sparse_coo"
    ):
        pack(wrap(torch.eye(3).to_sparse()), 0, 0, 0, 0.0, 0.0)
