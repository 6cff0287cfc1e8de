"""The command line, run as a person runs it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelab.cli import main
from pipelab.doctor import Finding, Report, doctor

pytestmark = pytest.mark.timeout(150)


def run(*arguments, cwd, launcher=()):
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *launcher, "-m", "pipelab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def test_run_trains_prints_and_saves(tmp_path):
    done = run("run", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8", "--pace", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("one_f_one_b: 4 ranks, 8 micro-batches")
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert losses[0] == pytest.approx(2.303, abs=0.05)  # ln 10: nothing is known yet
    assert losses[-1] < 0.6
    assert any("bubble 27.3% predicted" in line and "paced, of makespan x 4 ranks" in line for line in lines)
    assert "peak activations, in micro-batches of a whole rank, from rank 0: 4, 3, 2, 1" in lines  # min(m, p - r)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 64
    assert (tmp_path / "gantt.png").read_bytes()[:4] == b"\x89PNG"


def test_run_under_torchrun_uses_its_processes(tmp_path):
    options = ("run", "--schedule", "interleaved", "--stages-per-rank", "2", "--microbatches", "6", "--steps", "2")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    # torchrun takes -m itself
    done = run(*options, cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "interleaved: 3 ranks, 6 micro-batches, stages on ranks 0 1 2 0 1 2"
    assert (tmp_path / "gantt.png").exists()


def test_a_reader_who_has_seen_enough_ends_it_without_a_word(tmp_path):
    # `plan --list | head -1` ended in a traceback
    command = f"{sys.executable} -m pipelab plan --list | head -1"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.startswith("gpt3-175b")
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [["run", "--ranks", "1", "--out", "taken"], ["plan", "megatron-1.7b", "--top", "1", "--picture", "no/where.png"]],
)
def test_a_place_that_cannot_be_written_is_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file")
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert arguments[-1] in said.err
    assert "Traceback" not in said.err
    assert "step" not in said.out or arguments[0] == "plan"  # nothing was trained in vain


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch, capsys):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelab.plan_command.run", stop)
    assert main(["plan", "--list"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "SizeError: num_ranks must be at least 1, got 0"),
        (["--microbatches", "-1", "--ranks", "1"], "SizeError: num_microbatches must be at least 1, got -1"),
        (["--schedule", "gpipe", "--stages-per-rank", "2", "--ranks", "1"], "SizeError: gpipe has a fixed number"),
        (["--steps", "0", "--ranks", "1"], "SizeError: --steps must be at least 1, got 0"),
        (["--backend", "nccl", "--ranks", "99"], "EngineError: backend='nccl' needs a GPU for each of 99 ranks"),
        (["--pace", "-5", "--ranks", "1"], "CostError: F must be finite and not negative, got -0.005"),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments, message, tmp_path, capsys):
    assert main(["run", "--out", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert "Traceback" not in error


def test_unknown_schedule_lists_those_there_are(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--schedule", "zigzag"])
    assert "'1f1b', 'breadth_first'" in capsys.readouterr().err


def test_doctor_finds_two_ranks_that_talk():
    report = doctor()
    found = {finding.subject: finding for finding in report.findings}
    assert found["two ranks"].good
    assert "4 kB go one way in" in found["two ranks"].found
    assert found["backend"].found.startswith("gloo on the CPU")
    assert report.healthy
    assert str(report).endswith("This machine can run every chapter.")


def test_doctor_says_what_to_mend():
    report = Report((Finding("Python", "3.11"), Finding("torch", "not installed: pip install torch", good=False)))
    assert not report.healthy
    assert str(report).splitlines() == [
        "ok  Python  3.11",
        "NO  torch   not installed: pip install torch",
        "Mend the lines that begin with NO first.",
    ]
