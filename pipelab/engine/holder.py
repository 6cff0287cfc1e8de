"""What of the model a rank holds: its layers, as the mesh cuts and repeats them, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pipelab.engine.data_parallel import Replicas
from pipelab.engine.device import Device
from pipelab.engine.groups import join
from pipelab.engine.recipe import Recipe
from pipelab.engine.tensor_parallel import Slices
from pipelab.engine.tying import Shared


class Holder:
    """The layers of one rank, and who else has their parameters: slices of them, copies, or further uses.

    Of what several ranks have, the first tells; whole tensors come out and go in.
    """

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._modules = device.take_in(nn.ModuleList(layers for _, layers in recipe.layers.values()))
        self._groups = groups = join(recipe.mesh, device.kind)
        self._slices = Slices(self._modules, recipe.styles, groups.slices, device)
        by_name = dict(self._named_parameters())
        self._shared = [Shared(by_name[names[groups.at.pp]], list(names), groups.pipeline) for names in recipe.ties]
        self._replicas = Replicas(
            list(self._modules.parameters()),
            groups,
            device,
            sharded=recipe.options.data_parallel == "shard",
            tied=[one.parameter for one in self._shared],
        )

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter that this rank answers for, by its name in the whole model."""
        found = {}
        for name, parameter in self._named_parameters():
            gradient = parameter.grad
            whole = None if gradient is None else self._slices.whole(parameter, gradient.detach())
            if self._slices.first and self._replicas.owns(parameter):
                found[name] = whole
        return found

    def state(self) -> dict[str, Any]:
        """The `state_dict` of this rank's layers, told by the first of all that have them."""
        parameters = dict(self._named_parameters())
        found = {}
        for layers in self._modules:
            for name, value in layers.state_dict().items():
                found[name] = self._slices.whole(parameters[name], value) if name in parameters else value
        return found if self._slices.first and self._replicas.first else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the values of `state`, which has at least this rank's names."""
        parameters = dict(self._named_parameters())
        for layers in self._modules:
            mine = {name: state[name] for name in layers.state_dict()}
            for name in mine.keys() & parameters.keys():
                mine[name] = self._slices.slice_of(parameters[name], mine[name])
            layers.load_state_dict(mine)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, under all their names in the whole model."""
        for layers in self._modules:
            yield from layers.named_parameters(remove_duplicate=False)
