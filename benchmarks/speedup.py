"""What two cores gain: two ranks beside one process with one thread that computes the same micro-batches.

    python benchmarks/speedup.py [--rounds 5]      about half a minute

Both compute the same model and the same eight micro-batches in turns, so a busy machine is busy for both. More than
2m / (m + 1), here 1.78, is not possible with two ranks; less than that is what messages, the loss and a shared memory
take. It needs two cores that nobody else uses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipelab as pl


class Block(nn.Module):
    """Two wide Linear layers on a normalised copy: what a transformer block does besides attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inside = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.layers = nn.Sequential(*inside)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def main(m: int = 8, width: int = 256) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ideal = 2 * m / (m + 1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; times as fast as one process, ideal {ideal:.2f}")
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block(width) for _ in range(8)))
    x, y = torch.randn(16 * m, 32, width), torch.randn(16 * m, 32, width)

    def alone() -> float:
        began = time.perf_counter()
        model.zero_grad()
        for xs, ys in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            (F.mse_loss(model(xs), ys) / m).backward()
        return time.perf_counter() - began

    with pl.Ranks(2) as ranks:
        for name in ("gpipe", "one_f_one_b"):
            with pl.Pipeline(model, pl.SCHEDULES[name](2, m), loss_fn=F.mse_loss, ranks=ranks) as pipe:
                found = [alone() / pipe.step(x, y).trace.makespan for _ in range(rounds + 1)][1:]
            print(f"{name:14}{statistics.median(found):8.2f}   (from {min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
