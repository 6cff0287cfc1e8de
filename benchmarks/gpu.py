"""What the engine costs on one GPU, in bfloat16: an action's overhead, the split backward, rematerialization, memory.

    python benchmarks/gpu.py [--layers 16] [--width 2048] [--rows 4096]

Everything runs in this process, as a stage does on its rank, without messages: so one GPU is enough, and the numbers
are those of the layers and of the engine around them. Times are medians of CUDA events; each line has the plain torch
run beside it. Takes a minute or two. Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from goals import goal
from torch import nn

from pipelab.engine.deferred import Deferral
from pipelab.engine.device import Cuda
from pipelab.engine.live_bytes import LiveBytes
from pipelab.engine.message import copied, wrap
from pipelab.engine.stage import Stage

REPEATS = 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4096, help="rows of a micro-batch")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU here, so there is nothing to measure.")
        return
    device = Cuda()
    print(f"{torch.cuda.get_device_name(device.where)}, torch {torch.__version__}, bfloat16 by autocast")
    print(f"{options.layers} layers of Linear({options.width}) and ReLU, {options.rows} rows a micro-batch")
    model = layers(options.layers, options.width).to(device.where)
    rows = torch.randn(options.rows, options.width, device=device.where)
    plain_s = seconds(lambda: plain(model, rows))
    print(f"{'':<34}{'ms':>9}{'to plain':>10}")
    show("plain torch, F and B", plain_s, plain_s)
    for name, split, remat in (
        ("stage, F and B", False, "none"),
        ("stage, F, I and W", True, "none"),
        ("stage, F and B, remat by layer", False, "layer"),
        ("stage, F and B, remat by stage", False, "stage"),
    ):
        stage = Stage(list(model), remat=remat, device=device, precision="bf16")
        show(name, seconds(lambda stage=stage, split=split: run(stage, rows, split)), plain_s)
    deferring = Stage(list(model), device=device, deferral=Deferral(model))
    usual = Stage(list(model), device=device)
    fp32_s = seconds(lambda: run(usual, rows, split=True))
    print(
        f"I and W in float32, Linear layers putting W off: {seconds(lambda: run(deferring, rows, True)) / fp32_s:.2f} "
        "of the time of walking twice"
    )
    overhead(device)
    memory(model, rows, device)


def layers(count: int, width: int) -> nn.Sequential:
    """So many layers of one kind."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)])


def plain(model: nn.Module, rows: torch.Tensor) -> None:
    """F and B as torch does them."""
    model.zero_grad()
    inputs = rows.detach().clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        outputs = model(inputs)
    outputs.backward(torch.ones_like(outputs))


def run(stage: Stage, rows: torch.Tensor, split: bool) -> None:
    """F and B, or F, I and W, of one micro-batch."""
    for segment in stage.segments:
        for _, layer in segment.layers:
            layer.zero_grad()
    rows = rows.detach().requires_grad_()
    outputs = stage.forward(0, copied(wrap(rows)))
    gradients = [torch.ones_like(tensor) for tensor in outputs.tensors]
    if split:
        stage.backward_input(0, gradients)
        stage.backward_weight(0)
    else:
        stage.backward(0, gradients)


def seconds(action: Callable[[], None]) -> float:
    """Median seconds on the GPU, after a few runs that are not counted."""
    for _ in range(3):
        action()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def show(name: str, time_s: float, plain_s: float) -> None:
    """One line of the table."""
    print(f"{name:<34}{1000 * time_s:>9.2f}{time_s / plain_s:>10.3f}")


def overhead(device: Cuda) -> None:
    """What the engine adds to an action in microseconds of the host, on layers too small to matter."""
    model = layers(1, 8).to(device.where)
    rows = torch.randn(8, 8, device=device.where)
    stage = Stage(list(model), device=device, precision="bf16")

    def host_us(action: Callable[[], None]) -> float:
        for _ in range(20):
            action()
        device.wait()
        began = time.perf_counter()
        for _ in range(200):
            action()
        device.wait()
        return (time.perf_counter() - began) / 200 * 1e6

    ours, torchs = host_us(lambda: run(stage, rows, False)), host_us(lambda: plain(model, rows))
    print(f"overhead of F and B together: {ours:.0f} microseconds a micro-batch, plain torch {torchs:.0f}")


def memory(model: nn.Module, rows: torch.Tensor, device: Cuda) -> None:
    """The peak that LiveBytes counts, beside that of torch's allocator."""
    print(f"{'peak above parameters and batch':<34}{'MiB':>9}{'allocator':>11}{'ratio':>8}")
    for remat in ("none", "layer", "stage"):
        stage = Stage(list(model), remat=remat, device=device, precision="bf16")
        run(stage, rows, False)
        model.zero_grad()
        device.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with LiveBytes(device=device.where, round_to=device.block_bytes) as counted:
            run(stage, rows, False)
        device.wait()
        found = torch.cuda.max_memory_allocated() - before
        print(f"  remat={remat:<26}{counted.peak / 2**20:>9.1f}{found / 2**20:>11.1f}{counted.peak / found:>8.3f}")
        apart = abs(counted.peak / found - 1)
        print(goal(f"counted peak and the allocator's, apart by, remat={remat}", apart, at_most=0.02))


if __name__ == "__main__":
    main()
