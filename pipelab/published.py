"""Times and rates as a paper prints them: what chapters recompute, and where one column does not add up.

P. Qi, X. Wan, G. Huang, M. Lin, *Zero Bubble Pipeline Parallelism*, ICLR 2024, arXiv 2401.10241, tables 5 and 9.
"""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    """One line of the tables: `p` ranks, `m` micro-batches, times in ms of a rank's F, I and W and of one hop `c`.

    `one_f_one_b`, `zb_h1`, `zb_h2` and `interleaved` (a layer a stage) are bubble rates, (cost - m C) / cost with
    C = F + I + W. The cost of ZB-H2 is the longest time from first start to last end of one rank.
    """

    model: str
    layers: int
    p: int
    m: int
    F: float
    I: float  # noqa: E741
    W: float
    c: float
    one_f_one_b: float
    zb_h1: float
    zb_h2: float
    interleaved: float


ZERO_BUBBLE = (
    Setting("1.5B", 24, 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1055),
    Setting("1.5B", 24, 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0818),
    Setting("1.5B", 24, 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0443),
    Setting("6.2B", 32, 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.0808),
    Setting("6.2B", 32, 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.0628),
    Setting("6.2B", 32, 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0320),
    Setting("14.6B", 48, 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1104),
    Setting("14.6B", 48, 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.0852),
    Setting("14.6B", 48, 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0445),
)
