"""The weight gradient of a Linear layer, put off: the backward takes one walk, split or not.

For y = x Wᵀ + b and the gradient g of y, the ordinary backward works out three products at once:

    I    g W      the input's gradient, on which the stage before waits           [1]
    W    gᵀ x     the weight's, on which nobody waits, and the sum of g, the bias's    [2]

Here I does the first and puts (x, g) aside, and the graph is free; what other layers' weights get in the same walk is
put aside too. W does the rest. Without this, W has to walk once more through the graph that I has walked.

It costs memory where little else is free after I. Between I and W a Linear keeps x and g; the graph would have kept x,
and what the layers between save for themselves. Behind a GELU that is as much as g; behind a ReLU, whose result is the
next x, it is nothing. So a segment weighs both, once, and defers only where that holds no more than the graph [3].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_SLACK = 1.05  # by how much more than the graph may be held


class Use(NamedTuple):
    """One use of a Linear layer in one micro-batch: its parameters, what it was given, its output's gradient."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    g: Tensor


class Able(partial[Tensor]):
    """The forward of a Linear layer that can put its weight gradient off."""


class Deferral:
    """The Linear layers of a rank, which can put their weight gradients off. Complex ones are left to torch."""

    def __init__(self, modules: nn.Module) -> None:
        self._able = False
        self._uses: list[Use] | None = None  # where they are put, while I runs
        for layer in modules.modules():
            if type(layer) is nn.Linear and "forward" not in vars(layer) and layer.weight.is_floating_point():
                layer.forward = Able(self._linear, layer)  # type: ignore[method-assign]

    @contextmanager
    def able(self) -> Iterator[None]:
        """Inside, a forward builds a graph whose backward can put weight gradients off.

        The same forward in a backward, as torch's checkpoint repeats one, must build the same: so that is inside, too.
        """
        before, self._able = self._able, True
        try:
            yield
        finally:
            self._able = before

    @contextmanager
    def collecting(self) -> Iterator[list[Use]]:
        """Inside, a backward puts the weight gradients of Linear layers into the list."""
        self._uses = []
        try:
            yield self._uses
        finally:
            self._uses = None

    def _linear(self, layer: nn.Linear, input: Tensor) -> Tensor:
        """As `nn.Linear.forward`; by torch's own function where that works out its gradients in another way."""
        usual = input.dim() >= 2 and input.is_contiguous() and layer.weight.is_leaf and torch.is_grad_enabled()
        other = torch.is_autocast_enabled(input.device.type) or torch._C._are_functorch_transforms_active()
        if self._able and usual and not other:
            return _Linear.apply(input, layer.weight, layer.bias, self)  # type: ignore[no-untyped-call,no-any-return]
        return F.linear(input, layer.weight, layer.bias)

    def take(self, use: Use) -> bool:
        """Whether the weight gradients of `use` are put off."""
        if self._uses is not None:
            self._uses.append(use)
        return self._uses is not None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.deferral = (weight, bias), deferral
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors  # with hooks on what is saved, a copy of the weight
        weight, bias = ctx.parameters
        use = Use(weight, bias, x, g)
        for_input = g @ matrix if ctx.needs_input_grad[0] else None  # [1]
        if ctx.deferral.take(use):
            return for_input, None, None, None
        found = products(use)
        return for_input, found.get(weight), found.get(bias), None


def products(use: Use) -> dict[Tensor | None, Tensor]:
    """The gradients of weight and bias from one use, of those that want one."""  # [2]
    g = use.g.reshape(-1, use.g.shape[-1])
    found: dict[Tensor | None, Tensor] = {}
    if use.weight.requires_grad:
        found[use.weight] = g.t() @ use.x.reshape(-1, use.x.shape[-1])
    if use.bias is not None and use.bias.requires_grad:
        found[use.bias] = g.sum(0)
    return found


@torch.no_grad()
def add_up(uses: list[Use], known: dict[Tensor, Tensor]) -> None:
    """W: add all gradients to `.grad`, those that I has put off and those that are `known`; empties both.

    A parameter that is used several times gets one sum, as in the ordinary backward, and lets go of each use.
    """
    last = {id(parameter): place for place, use in enumerate(uses) for parameter in (use.weight, use.bias)}
    uses.reverse()
    for place in range(len(uses)):
        for parameter, gradient in products(uses.pop()).items():
            assert parameter is not None
            total = gradient + known.pop(parameter) if parameter in known else gradient
            if last[id(parameter)] != place:
                known[parameter] = total
            elif parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad += total
    if known:
        torch.autograd.backward(list(known), list(known.values()))
        known.clear()


def hooked(weights: Sequence[Tensor]) -> bool:
    """Whether somebody wants to be told of a weight's gradient, which torch does in the walk that makes it."""
    return any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights)


class Scales:
    """Inside `with Scales(...) as scales:` a forward is weighed: what its graph holds, what Linears would."""  # [3]

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> None:
        self._linears = [module for module in modules if type(module) is nn.Linear]
        linear = {id(parameter) for layer in self._linears for parameter in layer.parameters()}
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._held = sum(weight.nbytes for weight in weights if id(weight) not in linear)
        self._hooked = hooked(weights)
        self._graph: dict[int, int] = {}
        self._inputs: dict[int, int] = {}
        self._exit = ExitStack()

    def __enter__(self) -> Scales:
        self._exit.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
        for layer in self._linears:
            self._exit.callback(layer.register_forward_hook(self._note, with_kwargs=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    @property
    def favour_deferral(self) -> bool:
        """Whether to defer. Not for weights with hooks of the user's own: torch has to call those."""
        held = self._held + sum(self._inputs.values())
        return bool(self._linears) and not self._hooked and held <= _SLACK * sum(self._graph.values())

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._graph[storage.data_ptr()] = storage.nbytes()
        return tensor

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if torch._C._are_functorch_transforms_active():  # not put off, and without a storage
            return
        storage = (args[0] if args else kwargs["input"]).untyped_storage()
        self._inputs[storage.data_ptr()] = storage.nbytes()
        self._held += output.nbytes  # its gradient
