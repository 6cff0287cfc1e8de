"""What the three axes send in a step, and how long that takes on their links. Nothing overlaps with computation.

    TP   inside a layer     all-reduce of its output, twice a layer and direction      tp neighbouring GPUs
    DP   once a step        all-reduce of a rank's gradients                           dp GPUs, tp apart
    PP   between stages     one tensor a micro-batch and direction                     pp GPUs, tp x dp apart

GPUs are numbered with TP fastest and PP slowest, the order of Megatron-LM: TP keeps to a node where it fits into one.
"""

from __future__ import annotations

from pipelab.costs import Link
from pipelab.planner.hardware import Hardware


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
