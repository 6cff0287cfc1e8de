"""A checkpoint: one file with all that training goes on from, under the names of the model before it was split.

    rank 0: stages 0, 2 ──┐                             ┌──► rank 0: stage 0
    rank 1: stages 1, 3 ──┴─► {name: value}, one file ──┼──► rank 1: stage 1        any other split
                                                        └──► rank 2: stage 2

An optimizer counts its parameters from 0, on every rank; here its state has the parameters' names instead [1]. The file
is written beside the old one, read back, and only then takes its place [2]: at any moment there is a whole one.
It is a file of `torch.save`, that is, a zip archive, with a seal as its comment: a hash of all that comes before [3].
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.engine.tensor_parallel import Slices
from pipelab.errors import CheckpointError

_MARK, _VERSION = b"pipelab checkpoint ", b"1"
_SEAL_BYTES = len(_MARK + _VERSION) + hashlib.sha256().digest_size
State = dict[str, Any]
Shapes = Mapping[str, torch.Size | None]  # by name; None for any value, which `get_extra_state` tells


def write(path: str | os.PathLike[str], content: State) -> None:
    """Write `content` so that `path` is the old file or the whole new one, whatever happens.

    Raises CheckpointError where it cannot be written, and leaves what was there.
    """
    target = Path(path)
    written = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            written = Path(file.name)
            file.write(_sealed(content))
            file.flush()
            os.fsync(file.fileno())
        read(written)
        written.chmod(_usual_mode())
        written.replace(target)  # [2]
        _sync(target.parent)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"no checkpoint was written to {target}, which is as it was: {error}") from error
    finally:
        if written is not None:
            written.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> State:
    """What `write` has written. Raises CheckpointError for a damaged or a foreign file; runs no code from it."""
    try:
        block = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    seal = block[-_SEAL_BYTES:]
    if not seal.startswith(_MARK):
        raise CheckpointError(
            f"{path} is no checkpoint that Pipeline.save wrote, or only the beginning of one; "
            "a state_dict of the model goes into a Pipeline by load_state_dict"
        )
    if not seal.startswith(_MARK + _VERSION):
        version = seal[len(_MARK) : len(_MARK + _VERSION)].decode(errors="replace")
        raise CheckpointError(f"{path} has version {version} of the format, and this pipelab reads {_VERSION.decode()}")
    if seal != _seal(block[:-_SEAL_BYTES]):
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
    try:
        content: State = torch.load(io.BytesIO(block), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} holds more than tensors and plain values: {error}") from error
    return content


def _sealed(content: State) -> bytes:
    """The bytes of `torch.save`, with the seal as the comment that a zip archive may have at its end."""  # [3]
    stream = io.BytesIO()
    torch.save(content, stream)
    body = stream.getvalue()[:-2] + _SEAL_BYTES.to_bytes(2, "little")  # the archive ends with its comment's length: 0
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return _MARK + _VERSION + hashlib.sha256(body).digest()


def check_state(state: object, shapes: Shapes) -> list[str]:
    """Why `state` is none of a model with these names and shapes; nothing where it is."""
    if not isinstance(state, Mapping):
        return [f"it is a {type(state).__qualname__}, and not a dict of tensors by name"]
    missing = [f"{name} is missing" for name in shapes if name not in state]
    unknown = [f"{name} is not in the model" for name in state if name not in shapes]
    wrong = [
        f"{name} is {_shape_or_kind(state[name])}, in the model {tuple(shape)}"
        for name, shape in shapes.items()
        if shape is not None and name in state
        if not (isinstance(state[name], Tensor) and state[name].shape == shape)
    ]
    return missing + unknown + wrong


def _shape_or_kind(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__qualname__}"


def merge(parts: Sequence[State], ties: Iterable[Sequence[str]]) -> State:
    """The training states of all ranks as one; of a tied parameter's names all get the same tensors."""
    kept = [part["optimizer"] for part in parts if part["optimizer"] is not None]
    optimizer = None
    if kept:
        state = {name: values for part in kept for name, values in part["state"].items()}
        for names in ties:
            if names[0] in state:
                state |= dict.fromkeys(names, state[names[0]])
        options = {name: values for part in kept for name, values in part["options"].items()}
        optimizer = {"kind": kept[0]["kind"], "state": state, "options": options}
    scheduler = next((part["scheduler"] for part in parts if part["scheduler"]), None)
    return {
        "seed": parts[0]["seed"],
        "steps": parts[0]["steps"],
        "scheduler": scheduler,
        "scale": parts[0]["scale"],
        "optimizer": optimizer,
    }


def part_of(training: State, names: Collection[str]) -> State:
    """What a rank with the parameters `names` needs of what `merge` put together."""
    if training["optimizer"] is None:
        return training
    optimizer = dict(training["optimizer"])
    for kept in ("state", "options"):
        optimizer[kept] = {name: value for name, value in optimizer[kept].items() if name in names}
    return {**training, "optimizer": optimizer}


# --- an optimizer, on its rank --------------------------------------------------------------------------------------


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], slices: Slices) -> State:
    """State and options of every parameter, by all its names; `names` are those of the rank's parameters.

    Of a parameter that is split over several ranks the state is put together; all of them must call it.
    """  # [1]
    state, options = {}, {}
    for name, parameter in names.items():
        for group in optimizer.param_groups:
            if any(parameter is other for other in group["params"]):
                options[name] = {option: value for option, value in group.items() if option != "params"}
                state[name] = {
                    key: slices.whole(parameter, value) if isinstance(value, Tensor) else value
                    for key, value in optimizer.state.get(parameter, {}).items()
                }
    return {"kind": type(optimizer).__qualname__, "state": state, "options": options}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], saved: State, slices: Slices
) -> list[str]:
    """Take over what `optimizer_state` told, maybe from other ranks; the reasons why not, and then nothing changes."""
    kind = type(optimizer).__qualname__
    if kind != saved["kind"]:
        return [f"it was saved with the optimizer {saved['kind']}, and this pipeline has {kind}"]
    name_of = {parameter: name for name, parameter in names.items()}
    groups: list[State] = []
    state: dict[int, State] = {}
    reasons: list[str] = []
    number = 0
    for group in optimizer.param_groups:
        members = [name_of[parameter] for parameter in group["params"]]
        unknown = [name for name in members if name not in saved["options"]]
        if unknown:
            reasons.append(f"it has no optimizer state of {', '.join(unknown)}")
            continue
        options = [saved["options"][name] for name in members] or [group]
        if any(other != options[0] for other in options):
            reasons.append(f"{', '.join(members)} are one group of the optimizer here, but had different options")
        groups.append({**options[0], "params": list(range(number, number + len(members)))})
        for place, name in enumerate(members):
            if saved["state"][name]:
                state[number + place] = {
                    key: slices.slice_of(names[name], value) if isinstance(value, Tensor) else value
                    for key, value in saved["state"][name].items()
                }
        number += len(members)
    if not reasons:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return reasons


def _usual_mode() -> int:
    """The mode of a new file; a temporary one is for its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync(folder: Path) -> None:
    """Make the folder's new entry last, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
