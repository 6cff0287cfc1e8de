"""What `to_chrome` writes is trace-event JSON, field by field, as its definition asks and as Perfetto reads it.

The definition: "Trace Event Format" (the Chromium project's document). What Perfetto adds: process 0 and thread 0 are
taken for the kernel's idle task (google/perfetto, issues 394 and 560), and an arrow hangs on slices at its two ends.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipelab.costs import Costs, Link
from pipelab.memory import memory_curve
from pipelab.schedules import SCHEDULES, interleaved, pipedream, zb_h1
from pipelab.simulate import simulate
from pipelab.trace import Trace

Event = dict[str, Any]
FIELDS = {  # phase: required fields
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "pid", "ts", "args"},
}
OPTIONAL = {"ph", "args", "tid"}
COSTS = Costs(F=0.01, I=0.013, W=0.007, comm=Link(0.001, 1e6), boundary_bytes=1000)
TRACES = {
    "split": simulate(zb_h1(4, 8), COSTS.split(1)),
    "recomputed": simulate(interleaved(2, 4, 2), COSTS.split(2), remat="early"),
    "updates": simulate(pipedream(3, 4), Costs(F=1, B=2, U=0)),
    "one rank": simulate(SCHEDULES["naive"](1, 1)),
}


def written(trace: Trace, folder: Path, **options: Any) -> list[Event]:
    trace.to_chrome(folder / "trace.json", **options)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    whole = json.loads((folder / "trace.json").read_text(), parse_constant=refuse)
    assert whole.keys() == {"displayTimeUnit", "traceEvents"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = whole["traceEvents"]
    return events


def counters(trace: Trace) -> dict[str, Any]:
    again = any(span.recompute for span in trace.spans)
    return {"bytes kept": memory_curve(trace, 100, boundary=10, remat=again).pairs()}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES.keys())
def test_perfetto_events_have_the_fields_of_their_phase(trace: Trace, tmp_path: Path) -> None:
    events = written(trace, tmp_path, counters=counters(trace))
    assert {event["ph"] for event in events} == set(FIELDS) - ({"s", "f"} if trace.num_ranks == 1 else set())
    for event in events:
        phase = event["ph"]
        assert FIELDS[phase] <= event.keys() <= FIELDS[phase] | OPTIONAL, event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert event["tid"] > 0
        assert all(math.isfinite(event[field]) and event[field] >= 0 for field in ("ts", "dur") if field in event)
        if phase == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if phase == "f":
            assert event["bp"] == "e"


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES.keys())
def test_perfetto_has_a_named_row_a_rank_in_order_and_slices_that_do_not_overlap(trace: Trace, tmp_path: Path) -> None:
    events = written(trace, tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    places = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(places, key=places.__getitem__)] == [
        f"rank {r}" for r in range(trace.num_ranks)
    ]
    (process,) = (e["args"]["name"] for e in events if e["name"] == "process_name")
    assert process == f"{trace.schedule.name} (simulated)"
    for tid, name in names.items():
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid)
        assert len(row) == len(trace.by_rank[int(name.removeprefix("rank "))])
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(row))


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES.keys())
def test_perfetto_has_an_arrow_a_message_between_the_slices_that_it_connects(trace: Trace, tmp_path: Path) -> None:
    events = written(trace, tmp_path)
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert len(starts) == len(ends) == len(trace.messages)
    for number, message in enumerate(trace.messages):
        start, end = starts[number], ends[number]
        assert (start["cat"], start["name"], start["pid"]) == (end["cat"], end["name"], end["pid"])
        assert start["ts"] <= end["ts"]
        for event, action in ((start, message.action), (end, message.reader)):
            around = slices[str(action)]
            assert event["tid"] == around["tid"]
            assert around["ts"] <= event["ts"] <= around["ts"] + around["dur"]


def test_perfetto_has_a_counter_a_rank_for_memory(tmp_path: Path) -> None:
    trace = TRACES["split"]
    events = [e for e in written(trace, tmp_path, counters=counters(trace)) if e["ph"] == "C"]
    assert {e["name"] for e in events} == {f"bytes kept, rank {rank}" for rank in range(4)}
    peaks = [max(e["args"]["bytes kept"] for e in events if e["name"].endswith(f"rank {r}")) for r in range(4)]
    # Qi et al. 2023: ZB-H1 keeps as much as 1F1B's first rank, p micro-batches of 100 bytes, on every rank
    assert peaks == [400] * 4
    assert max(e["ts"] for e in events) == pytest.approx(trace.makespan * 1e6)


def test_perfetto_counts_from_the_first_start(tmp_path: Path) -> None:
    trace = TRACES["one rank"]
    later = replace(trace, spans=tuple(s._replace(start=s.start + 1e5, end=s.end + 1e5) for s in trace.spans))
    assert [e["ts"] for e in written(later, tmp_path) if e["ph"] == "X"] == [0, 1e6]
