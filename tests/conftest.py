"""What every test shares."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import matplotlib
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from pipelab.ranks import Ranks

# A busy machine must not fail a property: time limits are pytest's (pyproject.toml), not one for every example.
settings.register_profile("pipelab", deadline=None)
settings.load_profile("pipelab")
matplotlib.use("Agg")  # also where there is a screen


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """`ranks_of(4)`: four ranks, started once and shared by all tests that ask for four."""
    from pipelab.ranks import Ranks

    started: dict[int, Ranks] = {}

    def get(count: int) -> Ranks:
        if count not in started:
            started[count] = Ranks(count, timeout=30)
        return started[count]

    yield get
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session", autouse="COVERAGE_PROCESS_CONFIG" in os.environ)
def coverage_of_ranks() -> Iterator[None]:
    """Under `make coverage` a rank may save what it has counted before it is killed; where it is stuck, it does not."""
    from pipelab.ranks import pool

    kill = pool._kill

    def end(process: Any) -> None:
        if process.exitcode is None and process.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGTERM)
                process.join(0.3)
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        kill(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_kill", end)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums of one thread, as on a rank: with more they may be taken in another order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
