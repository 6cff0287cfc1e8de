"""From what happened on the ranks to the one error that the cell sees: who is the cause, what it did, and where."""

from __future__ import annotations

import linecache
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelab.errors import RankError
from pipelab.ranks.pickling import CELL_FILE

_CELL = re.compile(f'File "(?:{CELL_FILE.pattern})"')  # a place in a traceback: searching all of it would take for ever


@dataclass(frozen=True)
class Raised:
    """An exception on a rank, as text, because an exception object may not survive the way to another process."""

    headline: str  # "raised ValueError"
    type_name: str
    message: str
    doing: str
    traceback: str
    at_s: float  # one clock for all processes of a machine

    @classmethod
    def describe(cls, error: BaseException, doing: str, headline: str) -> Raised:
        """What `error` says, with its notes; an attribute `action` of the error goes before the rank's own note."""
        try:
            message = str(error)
        except Exception as other:
            message = f"(its message could not be made: {type(other).__name__})"
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        return cls(
            headline=f"{headline} {type(error).__qualname__}",
            type_name=type(error).__qualname__,
            message="\n".join([message, *notes]),
            doing=str(getattr(error, "action", None) or doing),
            traceback=_format(error),
            at_s=time.monotonic(),
        )


class RemoteTraceback(Exception):  # noqa: N818, it is no error but shows where one was
    """Stands as the cause of a `RankError` and shows the traceback as the rank saw it."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def first_cause(raised: Mapping[int, Raised]) -> int:
    """The rank that raised first; of several that raised the same, the lowest, so that the same run says the same."""
    first = min(raised.values(), key=lambda one: one.at_s)
    return min(rank for rank, one in raised.items() if (one.type_name, one.message) == (first.type_name, first.message))


def raised_error(rank: int, raised: Raised, stopped: Iterable[int] = ()) -> RankError:
    """The error for a rank that raised, with its traceback as the cause."""
    where = f" in {raised.doing}" if raised.doing else ""
    text = f"rank {rank} {raised.headline}{where}: {raised.message}{_after(stopped)}"
    error = RankError(text, rank=rank, exception_type=raised.type_name, remote_traceback=raised.traceback)
    error.__cause__ = RemoteTraceback(raised.traceback)
    return error


def died_error(died: Mapping[int, str], stack: str = "", stopped: Iterable[int] = ()) -> RankError:
    """The error for ranks whose process ended: how each did, the first to go first, with its stack if it left one."""
    text = "; ".join(f"rank {rank} {how}" for rank, how in died.items())
    error = RankError(f"{text}{_after(stopped)}", rank=next(iter(died)), remote_traceback=stack)
    if stack:
        error.__cause__ = RemoteTraceback(f"Where rank {error.rank} was:\n{stack}")
    return error


def hung_error(stacks: Mapping[int, str], timeout_s: float, num_ranks: int) -> RankError:
    """The error for ranks that gave no answer in time, with the stack of each."""
    finished = [rank for rank in range(num_ranks) if rank not in stacks]
    lines = [f"{_name(stacks)} gave no answer within {timeout_s:g} s and all ranks were stopped. Where they were:"]
    lines += [f"rank {rank}, {stack}" for rank, stack in stacks.items()]
    lines += [f"{_name(finished)} had finished"] if finished else []
    return RankError("\n".join(lines), rank=next(iter(stacks)) if len(stacks) == 1 else None)


def how_it_died(exit_code: int | None, doing: str) -> str:
    """A process's end in words: "died in 1F2 (exit code 7)"."""
    where = f" in {doing}" if doing else ""
    if exit_code is None:
        return f"closed its connection{where}"
    if exit_code >= 0:
        return f"died{where} (exit code {exit_code})"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"was killed{where} ({name}{hint})"


def readable_stack(dump: str) -> str:
    """faulthandler's dump of one thread, oldest call first and with source lines, as a traceback reads."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', dump)
    ours = [i for i, (name, _, _) in enumerate(frames) if Path(name).parts[-2:] == ("ranks", "process.py")]
    if ours and frames[ours[0]][2] == "main":
        return "  (it waits for its call)"
    lines = []
    for name, number, function in reversed(frames[: ours[0]] if ours else frames):
        lines.append(f'  File "{CELL_FILE.sub("<notebook cell>", name)}", line {number}, in {function}')
        source = linecache.getline(name, int(number)).strip()
        lines += [f"    {source}"] if source else []
    return "\n".join(lines)


def _format(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:  # the frame of the rank's own loop says nothing to the reader
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    if sys.version_info < (3, 11):
        lines += [f"{note}\n" for note in getattr(error, "__notes__", ())]
    return _CELL.sub('File "<notebook cell>"', "".join(lines)).rstrip()


def _name(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _after(stopped: Iterable[int]) -> str:
    ranks = sorted(stopped)
    if not ranks:
        return ""
    return f"\n({_name(ranks)} did not finish; the next call starts all ranks anew)"
