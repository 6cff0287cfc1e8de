"""Ranks: calls, what travels, what is refused, and how each kind of failure comes back to the caller."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import pipelab as pl
from pipelab.ranks import controller, doing, failure, launch, local_state, pickling
from pipelab.ranks.pool import Pool

# As in a notebook: the ranks get these functions by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def ranks() -> Iterator[pl.Ranks]:
    with pl.Ranks(3, timeout=30) as ranks:
        yield ranks


def gone(pid: int, within_s: float = 3.0) -> bool:
    """Whether the process ends in time; one that only waits to be reaped has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


# ---- calls


def test_ranks_run_gives_results_in_rank_order(ranks: pl.Ranks) -> None:
    def where(power: int, *, timeout: int) -> tuple[int, int]:
        return dist.get_rank() ** power, timeout

    assert ranks.run(where, 2, timeout=7) == [(0, 7), (1, 7), (4, 7)]  # fn may have a keyword of any name


def test_ranks_run_each_sends_each_rank_its_own_arguments(ranks: pl.Ranks) -> None:
    assert ranks.run_each(lambda a, b: a - b, [(5, 1), (6, 4), (7, 7)], timeout=10) == [4, 2, 0]
    with pytest.raises(pl.SizeError, match="each of 3 ranks, got them for 2"):
        ranks.run_each(max, [(1, 2), (3, 4)])
    with pytest.raises(pl.SizeError, match="needs a tuple of arguments for rank 1, got int"):
        ranks.run_each(max, [(1, 2), 3, (4, 5)])  # type: ignore[list-item]


def test_ranks_are_a_process_group_of_single_threads_in_sessions_of_their_own(ranks: pl.Ranks) -> None:
    def look() -> tuple[object, ...]:
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        return total.item(), [os.environ[n] for n in names], torch.get_num_threads(), os.getsid(0) == os.getpid()

    assert ranks.run(look) == [(6.0, [str(r), str(r), "3"], 1, True) for r in range(3)]
    assert ranks.backend == "gloo"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_ranks_take_the_batch_policy(ranks: pl.Ranks) -> None:
    assert ranks.run(lambda: os.sched_getscheduler(0)) == [os.SCHED_BATCH] * 3


def test_ranks_see_the_directory_path_and_environment_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "module_beside_the_notebook.py").write_text("answer = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLOUR", "blue")

    def look() -> tuple[object, ...]:
        import module_beside_the_notebook

        return module_beside_the_notebook.answer, Path.cwd(), os.environ["COLOUR"]

    with pl.Ranks(1) as ranks:
        assert ranks.run(look) == [(42, tmp_path, "blue")]


def test_ranks_keep_state_until_they_start_again(ranks: pl.Ranks) -> None:
    def count() -> int:
        local_state()["calls"] = local_state().get("calls", 0) + 1
        return int(local_state()["calls"])

    assert [ranks.run(count), ranks.run(count)] == [[1, 1, 1], [2, 2, 2]]
    generation = ranks.generation
    ranks.restart()
    assert ranks.generation == generation + 1
    assert ranks.run(count) == [1, 1, 1]


def test_ranks_print_in_rank_order_with_the_rank_in_front(ranks: pl.Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        time.sleep(0.1 * (2 - dist.get_rank()))  # the last rank speaks first
        print("one", file=sys.stderr)
        os.write(1, b"from C\n")
        print("two without an end", end="")

    ranks.run(talk)
    texts = ("one", "from C", "two without an end")
    assert capfd.readouterr().out.splitlines() == [f"[{rank}] {text}" for rank in range(3) for text in texts]


def test_ranks_print_while_they_run_when_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    def talk(stop: str) -> None:
        print("begun")
        while not os.path.exists(stop):  # noqa: PTH110, the rank has no Path
            time.sleep(0.01)

    with pl.Ranks(1, live=True) as ranks, tempfile.TemporaryDirectory() as folder:
        seen = []

        def look_then_release() -> None:
            deadline = time.monotonic() + 10
            while not seen and time.monotonic() < deadline:
                seen.extend(capsys.readouterr().out.splitlines())
                time.sleep(0.02)
            Path(folder, "stop").touch()

        thread = threading.Thread(target=look_then_release)
        thread.start()
        ranks.run(talk, str(Path(folder, "stop")))
        thread.join()
    assert seen == ["[0] begun"]


def test_ranks_send_classes_and_functions_by_value(ranks: pl.Ranks) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self) -> Point:
            return Point(self.x + dist.get_rank())

    results = ranks.run(Point.moved, Point(10))
    assert all(type(point) is Point for point in results)
    assert [point.x for point in results] == [10, 11, 12]


# ---- what travels


def back_and_forth(value: object) -> object:
    return pickling.loads(bytes(pickling.dumps(value)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12).view(3, 4).t(),
        torch.arange(12)[::3],
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 5),
        torch.ones(3).expand(4, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j]),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_ranks_tensors_arrive_as_they_left(tensor: torch.Tensor) -> None:
    other = back_and_forth(tensor)
    assert isinstance(other, torch.Tensor)
    assert (type(other), other.dtype, other.requires_grad) == (type(tensor), tensor.dtype, tensor.requires_grad)
    assert torch.equal(other, tensor)


def test_ranks_tensors_keep_their_layout_in_memory() -> None:
    for tensor in (torch.arange(12).view(3, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        other = back_and_forth(tensor)
        assert isinstance(other, torch.Tensor)
        assert other.stride() == tensor.stride()


def test_ranks_a_view_travels_without_the_rest_of_its_storage() -> None:
    whole = torch.zeros(1_000_000)
    assert len(pickling.dumps(whole[10:20])) < 1000


def test_ranks_a_shared_tensor_stays_shared() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copy = back_and_forth(model)
    assert copy[1].weight is copy[0].weight


def test_ranks_name_what_cannot_be_sent(ranks: pl.Ranks) -> None:
    lock = threading.Lock()
    for call, culprit in [
        (lambda: ranks.run(max, 1, lock), "argument 1, of type lock, cannot be pickled"),
        (lambda: ranks.run(sorted, [2, 1], key=lock), "argument 'key', of type lock, cannot be pickled"),
        (lambda: ranks.run(lambda: lock.locked()), "the variable 'lock' that it uses, of type lock, cannot be pickled"),
        (lambda: ranks.run(lambda: ranks.alive), "the variable 'ranks' that it uses, of type Ranks, cannot be pickled"),
    ]:
        generation = ranks.generation
        with pytest.raises(pl.RankError, match=culprit):
            call()
        assert ranks.alive
        assert ranks.generation == generation  # nothing was sent, so nothing is lost


def test_ranks_name_a_result_that_cannot_come_back(ranks: pl.Ranks) -> None:
    def counter() -> object:
        return (n for n in range(3))

    with pytest.raises(
        pl.RankError, match=r"could not send back what .*counter returned, of type generator: TypeError"
    ):
        ranks.run(counter)


def test_ranks_name_a_result_that_cannot_be_loaded_here(ranks: pl.Ranks) -> None:
    class OnlyThere:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    with pytest.raises(pl.RankError, match="what rank 0 returned cannot be loaded here: ValueError: invalid") as caught:
        ranks.run(OnlyThere)
    assert (caught.value.rank, caught.value.exception_type) == (0, "ValueError")


# ---- what is refused before any process starts


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"num_ranks": 0}, pl.SizeError, "num_ranks must be at least 1, got 0"),
        ({"num_ranks": -2}, pl.SizeError, "num_ranks must be at least 1, got -2"),
        ({"num_ranks": 2.5}, pl.SizeError, "num_ranks must be a whole number, got 2.5"),
        ({"num_ranks": True}, pl.SizeError, "num_ranks must be a whole number, got True"),
        ({"num_ranks": "two"}, pl.SizeError, "num_ranks must be a whole number, got 'two'"),
        ({}, pl.SizeError, r"num_ranks is missing: Ranks\(4\) starts four"),
        ({"num_ranks": 2, "backend": "mpi"}, pl.EngineError, "backend must be 'gloo' or 'nccl', got 'mpi'"),
        ({"num_ranks": 2, "start_method": "fork"}, pl.EngineError, "start_method must be one of .*spawn.*, got 'fork'"),
        ({"num_ranks": 2, "timeout": 0}, pl.EngineError, "timeout must be a positive number of seconds"),
        ({"num_ranks": 2, "timeout": math.nan}, pl.EngineError, "timeout must be a positive number of seconds"),
        ({"num_ranks": 2, "timeout": "soon"}, pl.EngineError, "timeout must be a positive number.*got 'soon'"),
        (
            {"num_ranks": torch.cuda.device_count() + 1, "backend": "nccl"},
            pl.EngineError,
            "backend='nccl' needs a GPU for each of .* ranks, and torch finds .*: take fewer ranks, or backend='gloo'",
        ),
    ],
)
def test_ranks_refuse_before_a_process_starts(
    asked: dict[str, object], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(controller.launch, "prepare", started.append)
    monkeypatch.setattr(controller, "Pool", lambda *args, **kwargs: started.append(args))
    with pytest.raises(error, match=message):
        pl.Ranks(**asked)  # type: ignore[arg-type]
    assert started == []


def test_ranks_are_not_made_inside_a_rank(ranks: pl.Ranks) -> None:
    def nested() -> str:
        try:
            pl.Ranks(2)
        except pl.EngineError as error:
            return str(error)
        return "made"

    assert ranks.run(nested) == ["Ranks were asked for inside a rank; start them from the notebook or the script"] * 3


def test_ranks_do_one_call_at_a_time(ranks: pl.Ranks) -> None:
    thread = threading.Thread(target=ranks.run, args=(time.sleep, 0.5))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(pl.EngineError, match="at work on another call"):
        ranks.run(abs, 1)
    thread.join()
    assert ranks.run(abs, -1) == [1, 1, 1]


# ---- failures: an error that names the cause, and a next call that works


def fail_on_rank_1(how: str) -> None:
    """Rank 1 fails in some way; ranks 0 and 2 wait for it, directly and not."""
    doing("1F2")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("planted fault")
        if how == "sys.exit":
            sys.exit(3)
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "abort":
            os.abort()
        time.sleep(1000)
    dist.recv(torch.zeros(1), src=1 if dist.get_rank() == 0 else 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "raise",
            "rank 1 raised ValueError in 1F2: planted fault\n.ranks 0 and 2 did not finish; the next call starts all",
        ),
        ("sys.exit", "rank 1 raised SystemExit in 1F2: 3"),
        ("exit", r"rank 1 died in 1F2 \(exit code 7\)"),
        ("kill", r"rank 1 was killed in 1F2 \(SIGKILL, perhaps for want of memory\)"),
        ("abort", r"rank 1 was killed in 1F2 \(SIGABRT\)"),
    ],
)
def test_ranks_a_failure_names_rank_and_action_and_the_next_call_works(
    ranks: pl.Ranks, how: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pids = ranks.run(os.getpid)
    generation = ranks.generation
    start = time.monotonic()
    with pytest.raises(pl.RankError, match=message) as caught:
        ranks.run(fail_on_rank_1, how)
    assert time.monotonic() - start < 2
    assert caught.value.rank == 1
    assert not ranks.alive
    assert all(gone(pid) for pid in pids)
    start = time.monotonic()
    assert ranks.run(dist.get_rank) == [0, 1, 2]
    assert time.monotonic() - start < 2
    assert ranks.generation == generation + 1


def test_ranks_that_cannot_start_say_why_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = launch.choose_method(None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(pl.RankError, match=r"could not join the process group: .*: .*no such backend"):
        Pool(2, "no such backend", method, live=False)
    assert not list(tmp_path.glob("pipelab-*"))


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [(None, "closed its connection in 1F2"), (0, "died in 1F2 (exit code 0)"), (-63, "was killed in 1F2 (signal 63)")],
)
def test_ranks_say_how_a_process_ended(exit_code: int | None, text: str) -> None:
    assert failure.how_it_died(exit_code, "1F2") == text


def test_ranks_a_failure_carries_the_traceback_once(ranks: pl.Ranks) -> None:
    with pytest.raises(pl.RankError) as caught:
        ranks.run(fail_on_rank_1, "raise")
    error = caught.value
    assert error.exception_type == "ValueError"
    assert 'raise ValueError("planted fault")' in error.remote_traceback
    assert "pipelab/ranks" not in error.remote_traceback  # only the frames of the function that was sent
    assert str(error.__cause__).strip() == error.remote_traceback
    assert "Traceback" not in str(error)


def test_ranks_a_crash_leaves_its_stack(ranks: pl.Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pl.RankError, match="SIGABRT") as caught:
        ranks.run(fail_on_rank_1, "abort")
    assert caught.value.remote_traceback.splitlines()[-1] == "    os.abort()"
    assert caught.value.remote_traceback in str(caught.value.__cause__)
    assert capfd.readouterr().out == ""


def test_ranks_an_action_and_notes_of_the_exception_are_kept(ranks: pl.Ranks) -> None:
    def fail() -> None:
        doing("what was noted")
        error = ValueError("planted fault")
        error.action = "2B5"  # type: ignore[attr-defined]
        error.__notes__ = ["the loss was NaN"]
        raise error

    with pytest.raises(pl.RankError, match="raised ValueError in 2B5: planted fault\nthe loss was NaN"):
        ranks.run(fail)


def test_ranks_an_exception_that_cannot_be_printed_is_reported(ranks: pl.Ranks) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fail() -> None:
        raise MuteError

    with pytest.raises(pl.RankError, match=r"raised .*MuteError: \(its message could not be made: RuntimeError\)"):
        ranks.run(fail)


def test_ranks_an_exception_with_a_long_message_comes_at_once(ranks: pl.Ranks) -> None:
    """Its search for names of cells once took a time that grew with the square of a line: a list in it, and a hang."""

    def fail() -> None:
        raise ValueError(list(range(100_000)))

    with pytest.raises(pl.RankError, match=r"raised ValueError: .*99999"):
        ranks.run_each(fail, [()] * 3, timeout=5)


def test_ranks_the_first_of_several_exceptions_is_the_cause(ranks: pl.Ranks) -> None:
    def fail() -> None:
        time.sleep({0: 0.2, 1: 0.1, 2: 0.0}[dist.get_rank()])
        raise ValueError(f"of {dist.get_rank()}")

    def fail_alike() -> None:
        raise ValueError("of all")

    with pytest.raises(pl.RankError, match="rank 2 raised ValueError: of 2"):
        ranks.run(fail)
    with pytest.raises(pl.RankError, match="rank 0 raised ValueError: of all"):
        ranks.run(fail_alike)


def test_ranks_a_death_outranks_the_broken_connections_that_it_causes(ranks: pl.Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 2:
            time.sleep(0.1)
            os._exit(7)
        dist.recv(torch.zeros(1), src=2)  # raises "connection closed by peer" as soon as rank 2 is gone

    for _ in range(3):
        with pytest.raises(pl.RankError, match=r"^rank 2 died \(exit code 7\)"):
            ranks.run(fail)


def test_ranks_a_hang_ends_at_the_limit_with_the_stack_of_each_rank(ranks: pl.Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(pl.RankError) as caught:
        ranks.run_each(fail_on_rank_1, [("hang",)] * 3, timeout=1.5)
    assert 1.5 < time.monotonic() - start < 4
    text = str(caught.value)
    assert "ranks 0, 1 and 2 gave no answer within 1.5 s" in text
    assert text.count("dist.recv(torch.zeros(1), src=1 if") == 2
    assert text.count("time.sleep(1000)") == 1
    assert text.count("in 1F2:") == 3
    assert ranks.run(dist.get_rank) == [0, 1, 2]


def test_ranks_a_rank_that_reads_nothing_does_not_keep_the_caller(ranks: pl.Ranks) -> None:
    pids = ranks.run(os.getpid)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(pl.RankError, match="ranks 1 and 2 gave no answer within 1 s") as caught:
        ranks.run_each(len, [(bytes(5_000_000),)] * 3, timeout=1)
    assert "rank 1, in:\n  (it did not answer with its stack)" in str(caught.value)
    assert "rank 2, in:\n  (it waits for its call)" in str(caught.value)
    assert all(gone(pid) for pid in pids)


def test_ranks_a_death_between_calls_starts_them_again(ranks: pl.Ranks) -> None:
    pids, generation = ranks.run(os.getpid), ranks.generation
    os.kill(pids[0], signal.SIGKILL)
    assert gone(pids[0])
    deadline = time.monotonic() + 3  # its threads go one by one; a call before the last has gone is told of the death
    while ranks.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks.run(dist.get_rank) == [0, 1, 2]
    assert ranks.generation == generation + 1


# ---- nothing is left


def test_ranks_close_leaves_no_process_no_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptors, pids = [], []
    for count in range(50):
        with pl.Ranks(2) as ranks:
            pids += ranks.run(os.getpid)
            folder, *others = tmp_path.glob("pipelab-*")
            assert (others, folder.stat().st_mode & 0o777) == ([], 0o700)
        if count >= 2:  # the first ones start multiprocessing's own helpers
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
    assert len(set(descriptors)) == 1
    assert len(set(pids)) == 100
    assert all(gone(pid) for pid in pids)
    assert list(tmp_path.glob("pipelab-*")) == []


def test_ranks_that_are_closed_say_so(ranks: pl.Ranks) -> None:
    other = pl.Ranks(1)
    other.close()
    other.close()
    with pytest.raises(pl.EngineError, match=r"these Ranks are closed; make new ones: Ranks\(1\)"):
        other.run(abs, 1)


def test_ranks_that_are_forgotten_end() -> None:
    pids = pl.Ranks(2).run(os.getpid)
    gc.collect()
    assert all(gone(pid) for pid in pids)


def test_ranks_outlive_a_fork_of_their_owner(ranks: pl.Ranks) -> None:
    child = os.fork()
    if child == 0:
        try:
            ranks.close()  # in the child: must leave the ranks of its parent alone
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert ranks.run(dist.get_rank) == [0, 1, 2]


def test_ranks_take_what_they_started_with_them() -> None:
    with pl.Ranks(1) as ranks:
        [pid] = ranks.run(lambda: subprocess.Popen(["sleep", "1000"]).pid)
    assert gone(pid)


def test_ranks_listen_on_the_loopback_only(ranks: pl.Ranks) -> None:
    ranks.run(lambda: dist.all_reduce(torch.ones(1)))
    links = [str(link.readlink()) for pid in ranks.run(os.getpid) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert listening  # gloo does listen, or this proves nothing
    # Where the host's name is one of the loopback, as here and there, gloo would not need to be told.
    assert ranks.run(lambda: os.environ["GLOO_SOCKET_IFNAME"]) == ["lo"] * 3
    assert listening <= loopback


# ---- other ways to start


def test_ranks_spawn_without_running_the_script_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import pipelab as pl

            print("the script runs")

            def work():
                import torch, torch.distributed as dist
                total = torch.ones(1)
                dist.all_reduce(total)
                return total.item(), os.getppid()

            with pl.Ranks(2) as ranks:   # no guard of __name__: it stands in a script as in a cell
                print(ranks.run(work) == [(2.0, os.getpid())] * 2)
                try:
                    ranks.run(lambda: os._exit(7))
                except pl.RankError as error:
                    print(error)
                print(ranks.run(abs, -1))
            """
        )
    )
    environment = {**os.environ, "PIPELAB_START_METHOD": "spawn", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=50)
    assert done.stderr == ""
    runs, spawned, error, again = done.stdout.splitlines()
    assert (runs, spawned, again) == ("the script runs", "True", "[1, 1]")
    assert "died (exit code 7)" in error
