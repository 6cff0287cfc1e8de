"""F, B, I and W of layers that run one after the other, for one micro-batch at a time.

    F    value ────► layers ────► value        the graph is kept until B, or until W               [1]
    B    gradient ◄─ layers ◄─ gradient        and the weights' gradients are added up             [2]
    I    the same, but only along the paths that lead to the input                                 [3]
    W    the same, but only along the paths that lead to the weights                               [4]

I and W work for any layers, because autograd finds the paths. W walks again where I has walked, which takes time:
where it costs no memory, Linear layers put aside what W needs instead (see `pipelab.engine.deferred`).
Under rematerialization F keeps nothing but its input, and runs again before B or I [5].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pipelab.engine.deferred import Deferral, Scales, Use, add_up, hooked
from pipelab.engine.device import CPU, Device
from pipelab.engine.keywords import Keywords
from pipelab.engine.message import Value, copied, unwrap, wrap
from pipelab.engine.seeding import draws_nothing, seed
from pipelab.errors import EngineError

Gradients = Sequence[Tensor | None]
Buffers = dict[tuple[nn.Module, str], Tensor | None]

_NOTHING = nullcontext()
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Through(torch.autograd.Function):
    """Makes `tensor` itself a result of autograd, that is, no leaf, and gives its gradient to `door`."""

    @staticmethod
    def forward(ctx: Any, reach: Tensor, tensor: Tensor, door: Door) -> Tensor:
        ctx.door = door
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, ...]:
        ctx.door.grad = gradient[0]
        return None, None, None


class Door:
    """Where a tensor enters a graph whose first layer writes into it, which autograd forbids for a leaf."""

    def __init__(self, tensor: Tensor) -> None:
        self.reach = torch.empty(0, requires_grad=True)  # the paths that lead here are those that lead to the tensor
        self.grad: Tensor | None = None
        _Through.apply(self.reach, tensor, self)  # type: ignore[no-untyped-call]


class Graph(NamedTuple):
    """What F leaves: edges in place of the outputs, whose memory is free once they are sent, and the inputs' ends."""

    outputs: list[GradientEdge]
    inputs: Sequence[Tensor | Door]
    deferral: Deferral | None = None  # where Linear layers can put their weight gradients off

    def take_input_gradients(self) -> list[Tensor | None]:
        """What has come out at the inputs: one gradient for each tensor that wants one, None where nothing came."""
        gradients = [end.grad for end in self.inputs]
        for end in self.inputs:
            end.grad = None  # the graph may stay for W, its gradient need not
        return gradients


class Segment:
    """Layers that run one after the other, and under rematerialization run again together.

    `layers` are (number in the whole model, layer). `finish` is applied to what the last of them makes: at the end of
    the model it is the loss. The random numbers of a layer, and of the loss, are those of (`seed`, step, layer,
    micro-batch), so dropout is the same in every schedule and split, and in the second run of a forward.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, nn.Module]],
        *,
        remat: bool = False,
        seed: int = 0,
        finish: Callable[[Any, int], Any] | None = None,
        deferral: Deferral | None = None,
        precision: str = "fp32",
        device: Device = CPU,
        microbatches_before: int = 0,
    ) -> None:
        self.layers = layers
        self.remat = remat
        self.seed = seed
        self.precision = precision
        self._device = device
        self._before = microbatches_before  # those of other replicas
        self.step = 0
        self.keywords: Sequence[Sequence[Keywords]] = ()  # by micro-batch and layer, where there are any
        self._finish = finish
        self._writes: bool | None = None  # whether the first layer writes into its input: the first forward shows it
        self._modules = [module for _, layer in layers for module in layer.modules()]
        self._weights = [w for w in nn.ModuleList(layer for _, layer in layers).parameters() if w.requires_grad]
        self._deferral = deferral
        self._defers = None if deferral else False  # whether that pays: the first forward shows it
        self._inputs: dict[int, tuple[Value, Buffers]] = {}  # by micro-batch: from F to its second run,
        self._graphs: dict[int, Graph] = {}  # from F to B or I,
        self._halves: dict[int, tuple[Graph, Gradients]] = {}  # and from I to W
        self._deferred: dict[int, tuple[list[Use], dict[Tensor, Tensor]]] = {}  # in place of it, what W needs alone

    def forward(self, microbatch: int, value: Value) -> Value:
        """F."""
        if not self.remat:
            self._graphs[microbatch], made = self._build(microbatch, value)  # [1]
            return made
        kept = copied(value)  # a layer may write into its input
        before = {place: None if buffer is None else buffer.clone() for place, buffer in self._buffers().items()}
        with saved_tensors_hooks(lambda tensor: None, _missing):  # [5]
            _, made = self._build(microbatch, value)
        after = self._buffers()  # a layer may have written into its buffers, or put others in their place
        changed = {place: old for place, old in before.items() if not _equal(old, after[place])}
        self._inputs[microbatch] = kept, changed
        return made

    def recompute(self, microbatch: int) -> None:
        """F once more, with the input, buffers and random numbers of the first time; buffers end up as after that."""
        if microbatch in self._inputs:
            value, buffers = self._inputs.pop(microbatch)
            with self._with_buffers(buffers):
                self._graphs[microbatch], _ = self._build(microbatch, value)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """B: gradients of the output's tensors in, of the input's tensors out; None where there is none."""
        self.recompute(microbatch)
        graph = self._graphs.pop(microbatch)
        _walk(graph, gradients)  # [2]
        return graph.take_input_gradients()

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        """I: as B, but leaves the weights to W, for which it keeps the graph or what Linear layers put aside."""
        self.recompute(microbatch)
        graph = self._graphs.pop(microbatch)
        ends = [end.reach if isinstance(end, Door) else end for end in graph.inputs]
        if ends and graph.deferral and not hooked(self._weights):
            with graph.deferral.collecting() as uses:
                found = _walk(graph, gradients, [*ends, *self._weights], add=False)
            for end, gradient in zip(graph.inputs, found, strict=False):
                if isinstance(end, Tensor):
                    end.grad = gradient
            known = zip(self._weights, found[len(ends) :], strict=True)
            self._deferred[microbatch] = uses, {weight: g for weight, g in known if g is not None}
        else:
            if ends:
                _walk(graph, gradients, ends, keep=True)  # [3]
            self._halves[microbatch] = graph, gradients
        return graph.take_input_gradients()

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        if microbatch in self._deferred:
            add_up(*self._deferred.pop(microbatch))
            return
        graph, gradients = self._halves.pop(microbatch)
        if self._weights:
            _walk(graph, gradients, self._weights)  # [4]

    def predict(self, microbatch: int, content: Any) -> Any:
        """The layers alone, in the mode they are in, without loss and graph."""
        with computing_in(self.precision, self._device):
            for place, (_, layer) in enumerate(self.layers):
                content = self._apply(layer, content, microbatch, place)
        return content

    def _apply(self, layer: nn.Module, content: Any, microbatch: int, place: int) -> Any:
        return layer(content, **self.keywords[microbatch][place]) if self.keywords else layer(content)

    @property
    def empty(self) -> bool:
        """Whether nothing of any micro-batch is kept: so it must be after a step."""
        return not (self._inputs or self._graphs or self._halves or self._deferred)

    def _build(self, microbatch: int, value: Value) -> tuple[Graph, Value]:
        wanting = [tensor for tensor, wants in zip(value.tensors, value.wants_gradient, strict=True) if wants]
        inputs = [tensor.requires_grad_() if self._writes is False else Door(tensor) for tensor in wanting]
        versions = [tensor._version for tensor in wanting] if self._writes is None else []
        content = unwrap(value)
        deferral = self._deferral if self._defers else None
        with computing_in(self.precision, self._device):
            with self._weighed() if self._defers is None else deferral.able() if deferral else _NOTHING:
                for place, (number, layer) in enumerate(self.layers):
                    if not draws_nothing(layer):
                        self._draw_anew(number, microbatch)
                    content = self._apply(layer, content, microbatch, place)
            if self._writes is None and wanting:
                self._writes = versions != [tensor._version for tensor in wanting]
            if self._finish is not None:
                self._draw_anew(number + 1, microbatch)
                content = self._finish(content, microbatch)
            made = wrap(content)
        outputs = [_edge(t) for t, wants in zip(made.tensors, made.wants_gradient, strict=True) if wants]
        outside = Value(made.structure, [tensor.detach() for tensor in made.tensors], made.wants_gradient)
        return Graph(outputs, inputs, deferral), outside

    def _draw_anew(self, number: int, microbatch: int) -> None:
        seed(self.seed, self.step, number, self._before + microbatch)
        self._device.seed()

    @contextmanager
    def _weighed(self) -> Iterator[None]:
        """Around the first forward: whether it pays to defer."""
        with Scales(self._modules, self._weights) as scales:
            yield
        self._defers = scales.favour_deferral

    def _buffers(self) -> Buffers:
        return {(module, name): buffer for module in self._modules for name, buffer in module._buffers.items()}

    @contextmanager
    def _with_buffers(self, changed: Buffers) -> Iterator[None]:
        """Inside, the buffers are copies: of what they were before the first run, where that changed them."""
        kept = self._buffers()
        for (module, name), buffer in kept.items():
            first = changed.get((module, name), buffer)
            module._buffers[name] = None if first is None else first.clone()
        try:
            yield
        finally:
            for (module, name), buffer in kept.items():
                module._buffers[name] = buffer


def _equal(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return old is new
    return old.dtype == new.dtype and torch.equal(old, new)


def _missing(nothing: None) -> Tensor:
    raise EngineError(
        "a layer works out gradients in its forward, which under rematerialization keeps nothing the first time: "
        "take remat='none'"
    )


def _walk(
    graph: Graph, gradients: Gradients, to: Sequence[Tensor] = (), *, keep: bool = False, add: bool = True
) -> Gradients:
    """Backward from those outputs that have a gradient, along all paths or those that lead `to` these leaves.

    Their gradients are added to `.grad`, or returned where `add` is False.
    It is what `torch.autograd.backward` does after it has checked shapes, which here takes as long as a small layer.
    """
    pairs = [(edge, g) for edge, g in zip(graph.outputs, gradients, strict=True) if g is not None]
    if not pairs:
        return [None] * len(to)
    edges, known = zip(*pairs, strict=True)
    engine = torch.autograd.Variable._execution_engine
    with graph.deferral.able() if graph.deferral else _NOTHING:
        found: Gradients = engine.run_backward(
            edges, known, keep, False, tuple(to), allow_unreachable=True, accumulate_grad=add
        )
    return found


def _edge(tensor: Tensor) -> GradientEdge:
    """As `get_gradient_edge`, which is slow, but for nodes that are written in Python it alone keeps them alive."""
    node = tensor.grad_fn
    if node is None or issubclass(type(node), BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def computing_in(precision: str, device: Device) -> AbstractContextManager[Any]:
    """Around a forward: torch's autocast computes products in bfloat16 or float16, from weights in float32."""
    return _NOTHING if precision == "fp32" else device.autocast(_AUTOCAST[precision])
