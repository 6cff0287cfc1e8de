"""How long a reader waits for a picture: from a moved slider to new SVG text, and for the PNG that a notebook stores.

    python benchmarks/widgets.py

Goals on two quiet cores: a move of 8 ranks and 32 micro-batches under 20 ms in every mode, its SVG alone under 4 ms,
a frame of the player under 10 ms (30 a second leave 33 ms, of which the browser needs most), a move of the builder
under 20 ms. The comparison with all other schedules comes after the picture, and only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from statistics import median
from time import perf_counter

from goals import goal

from pipelab import one_f_one_b, simulate
from pipelab.gantt import gantt_png
from pipelab.widgets import build, explore, gantt_svg, play
from pipelab.widgets.explore_modes import MODES


def milliseconds(work: Callable[[int], object], rounds: int, at_most: float | None = None, what: str = "") -> str:
    times = []
    for number in range(rounds):
        start = perf_counter()
        work(number)
        times.append(1000 * (perf_counter() - start))
    line = f"median {median(times):7.1f} ms   min {min(times):7.1f} ms   max {max(times):7.1f} ms"
    return line if at_most is None else f"{line}\n{goal(what, times, at_most=at_most, unit='ms')}"


def main() -> None:
    trace = simulate(one_f_one_b(num_ranks=8, num_microbatches=32))
    bars = len(trace.spans)
    explorer = explore(num_ranks=8, num_microbatches=32)

    def move(number: int) -> None:
        explorer.controls["num_microbatches"].value = 31 - number % 2

    step = count(1)

    def move_somewhere_new(_: int) -> None:
        explorer.controls["F"].value = 1 + next(step) / 100

    player = play(trace)

    def frame(number: int) -> None:
        player.scrub.value = 10 * (number + 1)

    print(f"SVG text of {bars} bars            {milliseconds(lambda _: gantt_svg(trace), 30, 4, 'SVG text, 8 x 32')}")
    print(f"explore, a move back and forth   {milliseconds(move, 30, 20, 'explorer, a move, 8 x 32')}")
    for mode in MODES:
        explorer.mode.value = mode
        moved = milliseconds(move_somewhere_new, 20, 20, f"explorer, {mode}, a new value")
        print(f"explore {mode:<12} new value    {moved}")
    explorer.mode.value, explorer.compare.value = "performance", True
    print(f"explore, comparison, new value   {milliseconds(move_somewhere_new, 10)}")
    print(f"play, a frame                    {milliseconds(frame, 290, 10, 'player, a frame, 8 x 32')}")
    builder, moves = build(4, 8), [str(action) for action in one_f_one_b(4, 8).ranks[0][:4]]
    placed = milliseconds(lambda n: builder.place(moves[n]), 4, 20, "builder, a move, 4 x 8")
    print(f"build, a move on 4 ranks         {placed}")
    print(f"PNG of {bars} bars, for the file   {milliseconds(lambda _: gantt_png(trace), 5)}")


if __name__ == "__main__":
    main()
