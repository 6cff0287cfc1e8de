"""One row for every builder: the sizes that it takes, one small plan written out by hand, and a size that it refuses.

A new builder is one row in each table here, and test_schedules.py does the rest.
"""

from hypothesis import strategies as st

import pipelab as pl

FLUSHED = tuple(name for name, build in pl.SCHEDULES.items() if not build(2, 4).has_updates)  # one update, after all

_counts = st.integers(1, 9)


@st.composite
def _any(draw):
    return {"num_ranks": draw(st.integers(1, 6)), "num_microbatches": draw(_counts)}


@st.composite
def _looped_any(draw):
    return {**draw(_any()), "stages_per_rank": draw(st.integers(1, 4))}


@st.composite
def _looped_in_groups(draw):
    sizes = draw(_looped_any())
    if sizes["stages_per_rank"] > 1:
        sizes["num_microbatches"] = sizes["num_ranks"] * draw(st.integers(1, 3))
    return sizes


@st.composite
def _two_a_rank(draw):
    p = draw(st.integers(1, 5))
    return {"num_ranks": p, "num_microbatches": draw(st.integers(2 * p, 3 * p + 1))}


@st.composite
def _in_updates(draw):
    p = draw(st.integers(1, 4))
    group = p + draw(st.integers(0, 2))
    return {"num_ranks": p, "num_microbatches": group * draw(st.integers(1, 3)), "microbatches_per_update": group}


SIZES = {
    "naive": _any(),
    "gpipe": _any(),
    "one_f_one_b": _any(),
    "interleaved": _looped_in_groups(),
    "breadth_first": _looped_any(),
    "zb_h1": _any(),
    "zb_h2": _any(),
    "zb_v": _any(),
    "v_half": _any(),
    "v_min": _any(),
    "dualpipe_v": _two_a_rank(),
    "pipedream": _any(),
    "pipedream_2bw": _in_updates(),
}

# by hand, from the sentence in each builder's docstring
GOLDEN = {
    "naive": (
        {"num_ranks": 2, "num_microbatches": 2},
        """
        naive: 2 ranks, 2 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0B0 0F1 0B1
        rank 1: 1F0 1B0 1F1 1B1
        """,
    ),
    "gpipe": (
        {"num_ranks": 2, "num_microbatches": 3},
        """
        gpipe: 2 ranks, 3 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
        """,
    ),
    "one_f_one_b": (
        {"num_ranks": 3, "num_microbatches": 4},
        """
        one_f_one_b: 3 ranks, 4 micro-batches, stages on ranks 0 1 2
        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
        """,
    ),
    "interleaved": (
        {"num_ranks": 2, "num_microbatches": 4, "stages_per_rank": 2},
        """
        interleaved: 2 ranks, 4 micro-batches, stages on ranks 0 1 0 1
        rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        """,
    ),
    "breadth_first": (
        {"num_ranks": 2, "num_microbatches": 3, "stages_per_rank": 2},
        """
        breadth_first: 2 ranks, 3 micro-batches, stages on ranks 0 1 0 1
        rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
        """,
    ),
    "zb_h1": (
        {"num_ranks": 3, "num_microbatches": 4},
        """
        zb_h1: 3 ranks, 4 micro-batches, stages on ranks 0 1 2
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """,
    ),
    "zb_h2": (
        {"num_ranks": 2, "num_microbatches": 4},
        """
        zb_h2: 2 ranks, 4 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
        """,
    ),
    "zb_v": (
        {"num_ranks": 2, "num_microbatches": 3},
        """
        zb_v: 2 ranks, 3 micro-batches, stages on ranks 0 1 1 0
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
        """,
    ),
    "v_half": (
        {"num_ranks": 2, "num_microbatches": 2},
        """
        v_half: 2 ranks, 2 micro-batches, stages on ranks 0 1 1 0
        rank 0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
        """,
    ),
    "v_min": (
        {"num_ranks": 2, "num_microbatches": 2},
        """
        v_min: 2 ranks, 2 micro-batches, stages on ranks 0 1 1 0
        rank 0: 0F0 0F1 3F0 3I0 3W0 0I0 3F1 3I1 0W0 3W1 0I1 0W1
        rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1
        """,
    ),
    "dualpipe_v": (
        {"num_ranks": 2, "num_microbatches": 4},
        """
        dualpipe_v: 2 ranks, 4 micro-batches, stages on ranks 0 1 1 0
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
        """,
    ),
    "pipedream": (
        {"num_ranks": 2, "num_microbatches": 3},
        """
        pipedream: 2 ranks, 3 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2
        rank 1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2
        """,
    ),
    "pipedream_2bw": (
        {"num_ranks": 2, "num_microbatches": 4},
        """
        pipedream_2bw: 2 ranks, 4 micro-batches, stages on ranks 0 1
        rank 0: 0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U3
        rank 1: 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3
        """,
    ),
}

# sizes that a builder refuses although each is a positive integer, and what it then says
REFUSED = {
    "dualpipe_v": [
        ({"num_ranks": 4, "num_microbatches": 5}, "two micro-batches a rank.*got 5 for 4 ranks; the nearest is 8"),
        ({"num_ranks": 1, "num_microbatches": 1}, "the nearest is 2"),
    ],
    "interleaved": [
        ({"num_ranks": 4, "num_microbatches": 9, "stages_per_rank": 2}, "a multiple of its 4 ranks.*the nearest is 8"),
        ({"num_ranks": 4, "num_microbatches": 11, "stages_per_rank": 3}, "got 11; the nearest is 12"),
        ({"num_ranks": 4, "num_microbatches": 1, "stages_per_rank": 2}, "got 1; the nearest is 4"),
    ],
    "pipedream_2bw": [
        (
            {"num_ranks": 4, "num_microbatches": 10},
            "a multiple of the 4 micro-batches of.*got 10; the nearest is 8",
        ),
        (
            {"num_ranks": 4, "num_microbatches": 6, "microbatches_per_update": 3},
            "at least as many .*: got 3 for 4 ranks",
        ),
    ],
}
