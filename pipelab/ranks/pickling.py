"""What travels between notebook and ranks: cloudpickle that keeps the source of cells and sends tensors as bytes."""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from pipelab.errors import RankError

# How IPython names the file of a cell: a temporary path since version 8, "<ipython-input-3-...>" before.
CELL_FILE = re.compile(r"[^\"\n]*ipykernel_\d+[/\\]\d+\.py|<ipython-input-[^>\"\n]*>")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the file names of code kept, the source of cells collected, and tensors without their storage.

    cloudpickle hides file names, so that a traceback on a rank would show no line of the cell. torch pickles the whole
    storage of a view: ten rows of a data set would carry all of its rows.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return self._reduce_code(obj)
        if isinstance(obj, types.ModuleType):  # cloudpickle misses a module of a class of its own, as pipelab is
            return cloudpickle.Pickler.dispatch_table[types.ModuleType](obj)
        if _is_plain_tensor(obj):
            return _reduce_tensor(obj)
        return super().reducer_override(obj)

    def _reduce_code(self, code: types.CodeType) -> Any:
        if CELL_FILE.fullmatch(code.co_filename):
            self.sources[code.co_filename] = linecache.getlines(code.co_filename)
        make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        return make, tuple(code.co_filename if a == "<dynamic-code>" else a for a in arguments)


def dumps(value: object) -> memoryview:
    """`value` as bytes: one pickle of it, then one of the sources of the cells whose code it carries."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    pickle.dump(pickler.sources, stream)
    return stream.getbuffer()


def loads(data: bytes | memoryview) -> Any:
    """The value that `dumps` made, after its cells' source has been made known to this process's tracebacks."""
    stream = io.BytesIO(data)
    value = pickle.load(stream)
    for name, lines in pickle.load(stream).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return value


def dump_call(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> memoryview:
    """A call as bytes. Raises `RankError` that names the argument, or the function's variable, that is in the way."""
    try:
        return dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        culprit = next((what for what, value in _parts(fn, args, kwargs) if not _travels(value)), "it")
        raise RankError(
            f"{name_of(fn)} cannot be sent to the ranks, because {culprit} cannot be pickled: {error}. "
            "Make that value inside the function, or pass what it is made from."
        ) from None


def _parts(fn: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for position, value in enumerate(args):
        yield f"argument {position}, of type {type(value).__qualname__},", value
    for name, value in kwargs.items():
        yield f"argument {name!r}, of type {type(value).__qualname__},", value
    if inspect.isfunction(fn):
        used = inspect.getclosurevars(fn)
        for name, value in {**used.globals, **used.nonlocals}.items():
            yield f"the variable {name!r} that it uses, of type {type(value).__qualname__},", value


def _travels(value: object) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def name_of(fn: object) -> str:
    """What the user calls `fn`, for an error."""
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _is_plain_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")  # a tensor can only be there when torch is
    return (
        torch is not None
        and type(obj) is torch.Tensor
        and obj.device.type == "cpu"
        and obj.layout is torch.strided
        and not (obj.is_quantized or obj.is_complex() or obj.is_neg() or obj.__dict__ or obj._backward_hooks)
    )


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    dense = tensor.detach()
    if not dense.is_contiguous():
        dense = dense.clone(memory_format=torch.preserve_format)
    flat = dense.as_strided((dense.numel(),), (1,))
    data = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    return _rebuild_tensor, (data, dense.dtype, tuple(dense.shape), dense.stride(), tensor.requires_grad)


def _rebuild_tensor(data: bytearray, dtype: Any, shape: Sequence[int], stride: Sequence[int], grad: bool) -> Any:
    import torch

    # The copy owns its memory as every other tensor does: aligned, and free to grow.
    flat = torch.frombuffer(data, dtype=dtype).clone() if len(data) else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride).requires_grad_(grad)
