"""What torch ran inside a step: torch.profiler on every rank, on the clock of our traces.

    with operations(ranks) as found:
        result = pipe.step(x, y)
    to_chrome("both.json", result, found)  # for Perfetto: the actions, and each rank's operations below them

torch.profiler has a clock of its own. A mark that is made on both when it starts ties it to that of the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelab.ranks import local_state, now

if TYPE_CHECKING:
    from pipelab.engine import StepResult
    from pipelab.ranks import Ranks

_MARK = "pipelab: mark"


class Operation(NamedTuple):
    """`name` is torch.profiler's ("aten::mm"), `start` and `end` are seconds of the ranks' clock.

    Operations of one `thread` lie side by side or inside each other; a message that waits has a thread of its own.
    """

    name: str
    start: float
    end: float
    thread: int


@contextmanager
def operations(ranks: Ranks) -> Iterator[list[tuple[Operation, ...]]]:
    """Profile the CPU on every rank inside the block. The list is filled when the block ends: a row a rank, by start.

    A profiled step is slower, the more so the smaller its operations are. Nothing is found where the ranks have failed.
    """
    found: list[tuple[Operation, ...]] = []
    ranks.run(_start)
    try:
        yield found
    finally:
        if ranks.alive:
            found += ranks.run(_stop)


def to_chrome(path: str | Path, result: StepResult, found: list[tuple[Operation, ...]]) -> None:
    """Write the trace of a step and its operations as one file for Perfetto: a process for all actions, one a rank."""
    result.trace.to_chrome(path)
    whole: dict[str, Any] = json.loads(Path(path).read_text())
    for rank, row in enumerate(found):
        process = {"pid": rank + 2, "tid": 1}  # the trace itself is process 1
        whole["traceEvents"].append(
            {"ph": "M", "name": "process_name", **process, "args": {"name": f"rank {rank}: torch"}}
        )
        whole["traceEvents"] += [
            {
                "ph": "X",
                "cat": "torch",
                "name": one.name,
                "pid": rank + 2,
                "tid": one.thread,
                "ts": 1e6 * (one.start - result.began_s),
                "dur": 1e6 * (one.end - one.start),
            }
            for one in row
        ]
    Path(path).write_text(json.dumps(whole))


def _start() -> None:
    import torch

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    for _ in range(2):  # the first one is slow
        marked = now()
        with torch.profiler.record_function(_MARK):
            pass
    local_state()[_MARK] = profiler, marked


def _stop() -> tuple[Operation, ...]:
    profiler, marked = local_state().pop(_MARK)
    profiler.stop()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    (zero,) = [event.time_range.start for event in events if event.name == _MARK][1:]
    return tuple(
        Operation(
            event.name,
            marked + 1e-6 * (event.time_range.start - zero),
            marked + 1e-6 * (event.time_range.end - zero),
            event.thread,
        )
        for event in events
        if event.name != _MARK
    )
