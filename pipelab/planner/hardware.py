"""The machine that a plan is for, and how long what the three axes send takes on its links.

    TP   inside a layer     all-reduce of its output, twice a layer and direction      tp neighbouring GPUs
    DP   once a step        all-reduce of a rank's gradients                           dp GPUs, tp apart
    PP   between stages     one tensor a micro-batch and direction                     pp GPUs, tp x dp apart

GPUs are numbered with TP fastest and PP slowest, the order of Megatron-LM: TP keeps to a node where it fits into one.
Nothing overlaps with computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelab.costs import Link
from pipelab.errors import CostError, amount, positive_integer

_NVLINK = Link(latency_s=5e-6, bytes_per_s=300e9)
_INFINIBAND = Link(latency_s=10e-6, bytes_per_s=25e9)


@dataclass(frozen=True)
class Hardware:
    """`gpus` GPUs in nodes of `gpus_per_node`, with a fast link `inside` a node and a slower one `between` nodes.

    memory_bytes      what a rank may use of a GPU's memory
    flops_per_s       the peak of one GPU in the precision that is trained in
    efficiency        the part of that peak which matrix products reach, an assumption that one measurement replaces
    inside, between   what one GPU sends to one other, in one direction

    The default is the cluster of Narayanan et al. 2021 (arXiv 2104.04473, section 5): A100s with 80 GB and a peak of
    312 TFLOP/s, NVLink at 300 GB/s in a direction, a 200 Gb/s InfiniBand card a GPU. Efficiency and latencies are
    assumed.
    Raises SizeError and CostError for what is no count, not positive, or not finite.
    """

    gpus: int
    gpus_per_node: int = 8
    memory_bytes: float = 80e9
    flops_per_s: float = 312e12
    efficiency: float = 0.5
    inside: Link = _NVLINK
    between: Link = _INFINIBAND

    def __post_init__(self) -> None:
        for count in ("gpus", "gpus_per_node"):
            object.__setattr__(self, count, positive_integer(count, getattr(self, count)))
        for name, most in (("memory_bytes", math.inf), ("flops_per_s", math.inf), ("efficiency", 1.0)):
            if not amount(name, getattr(self, name), most=most):
                raise CostError(f"{name} must be more than 0")
        for wire in ("inside", "between"):
            if not isinstance(getattr(self, wire), Link):
                raise CostError(f"{wire} must be a Link(latency_s, bytes_per_s), got {getattr(self, wire)!r}")

    def link(self, group: int) -> Link:
        """The link that decides within `group` GPUs with neighbouring numbers: the slowest that they cross."""
        one_node = self.gpus <= self.gpus_per_node or self.gpus_per_node % group == 0
        return self.inside if one_node else self.between


def all_reduce_s(size: float, group: int, link: Link) -> tuple[float, float]:
    """Seconds for the bytes, and for the latencies, of a ring all-reduce of `size` bytes: 2 (n - 1) steps."""
    steps = 2 * (group - 1)
    return steps / group * size / link.bytes_per_s, steps * link.latency_s


def hop(tp: int, dp: int, pp: int, hardware: Hardware) -> Link:
    """The link from a stage to the next one: inside a node only where the whole pipeline is in one."""
    return hardware.link(tp * dp * pp)


def gradients_s(parameters: float, bytes_each: float, dp: int, tp: int, hardware: Hardware) -> float:
    """Seconds in which the replicas add up the gradients of one rank.

    With ZeRO-1 the same bytes travel: a reduce-scatter of the gradients, then an all-gather of the weights.
    """
    return sum(all_reduce_s(parameters * bytes_each, dp, hardware.link(tp * dp)))


def gather_s(parameters: float, bytes_each: float, dp: int, tp: int, hardware: Hardware) -> float:
    """Seconds in which a fully sharded stage gathers its weights, or scatters its gradients: half an all-reduce."""
    return gradients_s(parameters, bytes_each, dp, tp, hardware) / 2
