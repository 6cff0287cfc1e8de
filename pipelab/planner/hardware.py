"""The machine that a plan is for: how many GPUs, how they are wired, what each holds and computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelab.costs import Link
from pipelab.errors import CostError, positive_integer

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
        positive_integer("gpus", self.gpus)
        positive_integer("gpus_per_node", self.gpus_per_node)
        for name in ("memory_bytes", "flops_per_s", "efficiency"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise CostError(f"{name} must be a positive number, got {value!r}")
        if self.efficiency > 1:
            raise CostError(f"efficiency is a part of the peak, at most 1, got {self.efficiency}")

    def link(self, group: int) -> Link:
        """The link that decides within `group` GPUs with neighbouring numbers: the slowest that they cross."""
        one_node = self.gpus <= self.gpus_per_node or self.gpus_per_node % group == 0
        return self.inside if one_node else self.between
