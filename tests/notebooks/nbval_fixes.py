"""A pytest plugin that mends nbval where it would hang, complain of nothing, or pass over something.

nbval runs each cell of a notebook and compares what comes out with what is stored. Four things are added here:

[1] a kernel that dies is named at once, with its exit code, and the rest of the notebook is skipped;
    nbval waits its whole time limit and then speaks of a timeout
[2] a trailing `;` hides a value, as in Jupyter;
    nbval runs cells outside the history, where IPython does not look for it (nbval issue 194)
[3] a kernel runs in the environment that the outputs were stored in;
    else what child processes print would be missing
[4] a notebook without stored outputs fails;
    nbval compares a cell only if it was ever executed, so an empty notebook passes
"""

from __future__ import annotations

import queue
import subprocess
import time
from collections.abc import Iterator

import nbval.kernel
import nbval.plugin
import pytest

from tools.book import kernel_environment


class WatchedKernel(nbval.kernel.RunningKernel):
    """nbval's kernel, which notices its own death."""

    def __init__(self, kernel_name: str, cwd: str | None = None, startup_timeout: float = 60) -> None:
        self.km, self.kc = nbval.kernel.start_new_kernel(
            startup_timeout=startup_timeout,
            kernel_name=kernel_name,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env=kernel_environment(),  # [3]
        )
        self._ensure_iopub_up()

    def execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> str:
        return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)  # [2]

    def await_reply(self, msg_id: str, timeout: float | None = None) -> None:
        """Wait for the reply to `msg_id`; after `timeout` seconds raise queue.Empty, nbval's sign of a hang."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            try:
                message = self.get_message("shell", timeout=min(0.5, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                if not self.is_alive():  # [1]
                    exit_code = self.km.provisioner.process.poll()
                    pytest.fail(f"the kernel died while this cell ran (exit code {exit_code})", pytrace=False)
                if time.monotonic() >= deadline:
                    raise
            else:
                if message["parent_header"].get("msg_id") == msg_id:
                    return


class StoredOutputs(pytest.Item):
    """The first test of a notebook: every code cell was executed, from top to bottom, and something was stored.

    An assignment may store nothing.
    """

    def runtest(self) -> None:
        code = [cell for cell in self.parent.nb.cells if cell.cell_type == "code" and cell.source.strip()]
        counts = {cell.id: cell.execution_count for cell in code}
        wrong = [
            f"  cell {cell_id!r}: execution count {found}, expected {expected}"
            for expected, (cell_id, found) in enumerate(counts.items(), start=1)
            if found != expected
        ]
        marked = any("nbgrader" in cell.metadata for cell in code)  # an assignment's checks are silent when they pass
        if not marked and not any(cell.outputs for cell in code):
            wrong.append("  no cell has a stored output")
        if wrong:
            remedy = f"run make book NB={self.nodeid.partition('::')[0]}"
            pytest.fail("\n".join(["nothing to compare with:", *wrong, remedy]), pytrace=False)


def pytest_configure() -> None:
    nbval.plugin.RunningKernel = WatchedKernel  # where nbval looks it up for each notebook


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if isinstance(collector, nbval.plugin.IPyNbFile) and report.passed:
        handed_out_without_outputs = collector.path.is_relative_to(collector.config.rootpath / "exercises")
        if not handed_out_without_outputs:
            report.result.insert(0, StoredOutputs.from_parent(collector, name="stored outputs"))  # [4]
    return report


@pytest.hookimpl(trylast=True)  # after the set-up that starts the kernel for a notebook's first cell
def pytest_runtest_setup(item: pytest.Item) -> None:
    if isinstance(item, nbval.plugin.IPyNbCell) and not item.parent.kernel.is_alive():
        pytest.skip("the kernel died in an earlier cell")  # [1]
