"""The answer to a "run it" button: a real run of the schedule that is shown, below its prediction."""

from __future__ import annotations

from html import escape

from pipelab.captions import counted
from pipelab.costs import Costs
from pipelab.errors import PipelabError
from pipelab.schedule import Schedule
from pipelab.widgets.svg import WORDS_WRAP, compare_svg

RUNNING = '<p role="status">It runs. A few seconds.</p>'


def run_it(
    schedule: Schedule,
    costs: Costs,
    *,
    remat: bool = False,
    paced: bool = True,
    pattern: str = "pl-run",
    **model: int,
) -> str:
    """Run one real step of `schedule`, paced by `costs` or not, and return pictures and sentences as HTML.

    What cannot run, or fails, is told in a sentence. `pattern` as in `gantt_svg`, `model` as in `trial`.
    """
    from pipelab.engine.trial import trial  # torch takes seconds to import, and only a run needs it

    try:
        tried = trial(schedule, costs, remat=remat, paced=paced, **model)
    except PipelabError as error:
        return f'<p role="status">It did not run: {escape(" ".join(str(error).split()).rstrip("."))}.</p>'
    result, processes = tried.result, counted(schedule.num_ranks, "process", "es")
    equal = "every gradient equals plain training's"
    if not tried.gradients_equal:
        equal = f"gradients differ from plain training's, by up to {tried.largest_difference:.2g} of the largest entry"
    how = "that emulate accelerators" if paced else "as fast as this machine can"
    sentences = [f"One step ran on {processes} {how}: {equal}."]
    if not paced:
        sentences.append("The prediction above it is made from the times of its own actions.")
    if result.too_busy:
        sentences.append("The machine was too busy to keep time: some action was late by more than its own time.")
    sentences.append(f"Tensors sent, all ranks together: {sum(result.sent_bytes):,} bytes.")
    words = f'<p role="status" style="line-height: 1.6">{escape(" ".join(sentences))}</p>'
    return WORDS_WRAP + words + compare_svg(tried.predicted, result.trace, pattern=pattern)
