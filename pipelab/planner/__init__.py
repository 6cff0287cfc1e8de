"""The planner: constraints in, configurations out.

    pl.plan("gpt3-175b", 1536, batch=1536, memory=80e9)

model.py, presets.py and hardware.py hold the numbers; question.py what is asked; candidate.py one configuration;
stages.py, footprint.py and duration.py what it costs; rejected.py and relaxations.py why it is none and what would
help; choice.py, plan.py and result.py put that together.
"""

from pipelab.planner.candidate import Candidate
from pipelab.planner.choice import Choice
from pipelab.planner.hardware import Hardware
from pipelab.planner.model import Measured, Transformer
from pipelab.planner.plan import plan
from pipelab.planner.presets import PRESETS
from pipelab.planner.rejected import Rejected
from pipelab.planner.result import Plan

__all__ = ["PRESETS", "Candidate", "Choice", "Hardware", "Measured", "Plan", "Rejected", "Transformer", "plan"]
