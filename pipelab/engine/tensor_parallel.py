"""A layer split over several ranks: torch's DTensor cuts its matrices, a plan says which and how.

    x ──► colwise ──► slice of the features ──► rowwise ──► sum over the ranks ──► y       forward: one all-reduce
    │     rows of W     heads, or hidden units    columns of W                              backward: one more, of x's
    the same on all                                                   the same on all      gradient

"colwise" gives each rank some outputs of a Linear layer, "rowwise" some inputs, so what lies between the two stays
split and is never sent (Megatron-LM, Shoeybi et al. 2019, section 3). The names are theirs and torch's: they think of W
transposed. Where one matrix holds several side by side, as a GPT's query, key and value, ("colwise", 3) splits each of
them [1].

A backward in halves walks the graph for I and again for W, so then the all-reduces of the backward come twice, where
there is an input gradient to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipelab.engine.device import Device
from pipelab.errors import EngineError, SizeError
from pipelab.models import Attention, Block

SplitPlan = Mapping[str, str | tuple[str, int]]  # by pattern of a layer's name


class Style(NamedTuple):
    """How a Linear layer is split: by its outputs ("colwise") or inputs ("rowwise"), in each of so many parts."""

    kind: str
    parts: int = 1


def resolve(model: nn.Module, plan: SplitPlan | None, tp: int) -> dict[str, Style]:
    """For each layer of `model` that `plan` splits, by its name, how; without a plan, for the blocks of our GPT.

    Raises EngineError where a pattern fits no Linear layer, or two fit one; SizeError where `tp` does not divide.
    """
    if tp == 1 and plan is None:
        return {}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    patterns = _of_gpt(model, tp) if plan is None else plan
    found: dict[str, Style] = {}
    for pattern, style in patterns.items():
        named = [name for name in linear if fnmatchcase(name, pattern)]
        if not named:
            raise EngineError(
                f"tensor_parallel: {pattern!r} fits no Linear layer; the model's are {', '.join(linear) or 'none'}"
            )
        for name in named:
            if name in found:
                raise EngineError(f"tensor_parallel: {name} is named twice, the second time by {pattern!r}")
            found[name] = _style(pattern, style)
            _check_sizes(name, linear[name], found[name], tp)
    return found


def _of_gpt(model: nn.Module, tp: int) -> SplitPlan:
    plan: dict[str, str | tuple[str, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.heads % tp:
            raise SizeError(f"{name} has {module.heads} heads, which {tp} ranks cannot share: tp must divide them")
        if isinstance(module, Block):
            plan[f"{name}.attention.query_key_value"] = "colwise", 3
            plan[f"{name}.attention.output"] = "rowwise"
            plan[f"{name}.expand"] = "colwise"
            plan[f"{name}.contract"] = "rowwise"
    if not plan:
        raise EngineError(
            f"the mesh splits layers over {tp} ranks, but which? Only the blocks of pipelab.models.gpt are known; for "
            "another model say tensor_parallel={pattern: 'colwise' or 'rowwise'}, as in "
            "{'*.up': 'colwise', '*.down': 'rowwise'}"
        )
    return plan


def _style(pattern: str, asked: Any) -> Style:
    kind, parts = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, 1)
    if asked != "rowwise" and not (kind == "colwise" and isinstance(parts, int) and parts >= 1):
        raise EngineError(
            f"tensor_parallel: {pattern!r} must be 'colwise', 'rowwise' or ('colwise', parts), got {asked!r}"
        )
    return Style(kind, parts)


def _check_sizes(name: str, layer: nn.Linear, style: Style, tp: int) -> None:
    what, size = ("outputs", layer.out_features) if style.kind == "colwise" else ("inputs", layer.in_features)
    if size % (style.parts * tp):
        each = f" in each of {style.parts} parts" if style.parts > 1 else ""
        raise SizeError(f"{name} has {size} {what}, which {tp} ranks cannot share{each}: tp must divide them")


class Slices:
    """The parameters of a rank's stages, of which those of the plan are split over `mesh`, this rank's tp group.

    Has to be made before anything holds the parameters: split ones are new objects.
    """

    def __init__(
        self, stages: Iterable[nn.Module], styles: Mapping[str, Style], mesh: DeviceMesh | None, device: Device
    ) -> None:
        self._device = device
        self._order: dict[nn.Parameter, Tensor] = {}  # of the rows, where a matrix holds several
        self.several = mesh is not None
        self._place = 0 if mesh is None else mesh.get_local_rank()
        self._common: Any = None  # random numbers of all ranks, while this one draws its own
        if mesh is None:
            return
        for stage in stages:
            for name, layer in list(stage.named_modules()):
                if name in styles and isinstance(layer, nn.Linear):
                    self._split(layer, styles[name], mesh)
            for layer in stage.children():
                layer.register_forward_pre_hook(self._draw_anew)

    @property
    def first(self) -> bool:
        """Whether this rank tells of what all ranks of its group have."""
        return self._place == 0

    def _split(self, layer: nn.Linear, style: Style, mesh: DeviceMesh) -> None:
        if style.kind == "rowwise":
            layer.register_forward_pre_hook(self._draw_together)
            parallelize_module(layer, mesh, RowwiseParallel(), src_data_rank=None)
            return
        order = _dealt(layer.out_features, style.parts, mesh.size())
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(parameter.detach()[order], parameter.requires_grad))
        parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=None)
        layer.register_forward_hook(self._draw_apart)
        self._order |= dict.fromkeys(layer.parameters(), order)

    def _draw_apart(self, layer: nn.Module, args: Sequence[Any], output: Any) -> None:
        """Behind a colwise layer every rank has features of its own, and drops others of them than its neighbour."""
        if layer.training and self._common is None:
            self._common = self._device.random_state()
            torch.default_generator.manual_seed(int(torch.randint(2**62, ())) + self._place)
            self._device.seed()

    def _draw_anew(self, layer: nn.Module, args: Sequence[Any]) -> None:
        """Every layer of the whole model begins with random numbers of its own, the same on all ranks of the group."""
        self._common = None

    def _draw_together(self, layer: nn.Module, args: Sequence[Any]) -> None:
        """Behind the rowwise layer all have the same features again, and must drop the same ones."""
        if self._common is not None:
            self._device.go_back_to(self._common)
            self._common = None

    def speaks_for(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one of its tp group that counts `parameter`, or its own slice of it."""
        return self.first or is_slice(parameter)

    def whole(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """`tensor`, laid out like `parameter`, in one piece, in the model's order; if split, in the host's memory.

        All ranks of the group must ask.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        mine: Tensor = self._device.take_back(tensor.to_local()).contiguous()  # to the host, where it is wanted
        (placement,) = tensor.placements
        if not isinstance(placement, Shard):
            return mine
        parts = [torch.empty_like(mine) for _ in range(tensor.device_mesh.size())]
        dist.all_gather(parts, mine, group=tensor.device_mesh.get_group())
        full = torch.cat(parts, placement.dim)
        order = self._order.get(parameter)
        return full if order is None else torch.empty_like(full).index_copy_(0, order, full)

    def slice_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """The opposite: `whole` laid out like `parameter`; as it is where they have not the same shape."""
        layout: Any = parameter
        if not isinstance(layout, DTensor) or whole.shape != layout.shape:
            return whole
        order = self._order.get(parameter)
        ordered = whole if order is None else whole[order]  # [1]
        return distribute_tensor(ordered, layout.device_mesh, layout.placements, src_data_rank=None)


def is_slice(tensor: Any) -> bool:
    """Whether other ranks of the tp group hold other parts of `tensor`."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that lies on this rank, as a plain tensor over the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dealt(rows: int, parts: int, tp: int) -> Tensor:
    """The order of rows in which each rank's slice is one piece: its share of part 0, of part 1, ..."""
    return torch.arange(rows).view(parts, tp, -1).transpose(0, 1).reshape(-1)
